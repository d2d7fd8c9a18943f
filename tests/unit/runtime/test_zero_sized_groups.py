# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""An optimizer group in which there is nothing to optimize is no obstacle, unless it is the only one."""

import pytest
import torch
from torch import nn

import deepspeed
from unit.runtime.zero.zero_sized import (SHAPES, WIDTH, Placeholders, ZeroSizedTest, batch, config, network,
                                          skip_without_precision, step)

NOTHING = "There is nothing to optimize: all parameters of the optimizer are frozen or zero-sized."
PRECISIONS = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {
        "bf16": {
            "enabled": True
        }
    }),
    "bf16, fp32 gradients": (torch.bfloat16, {
        "bf16": {
            "enabled": True
        },
        "data_types": {
            "grad_accum_dtype": "fp32"
        }
    }),
    "fp16": (torch.float16, {
        "fp16": {
            "enabled": True,
            "initial_scale_power": 8
        }
    }),
}


def options(stage, precision):
    chosen = {**config(stage=stage), **PRECISIONS[precision][1]}
    skip_without_precision(chosen)
    return chosen


def train(groups_of, stage, precision):
    """The losses of a training whose optimizer has the groups that ``groups_of`` gives for the model."""
    torch.manual_seed(7)
    model = nn.Sequential(network(), Placeholders(*SHAPES))
    groups = groups_of(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=options(stage, precision))
    losses = [step(engine, batch(PRECISIONS[precision][0])) for _ in range(4)]
    engine.destroy()
    return losses


def one_group(model):
    return [{"params": list(model[0].parameters())}]


class TestGroupWithNothingToOptimize(ZeroSizedTest):
    world_size = [1, 2]

    @pytest.mark.parametrize("stage, precision", [(1, "fp32"), (2, "fp32"), (1, "bf16"), (2, "bf16"),
                                                  (1, "bf16, fp32 gradients"), (2, "fp16")])
    def test_zero_sized(self, stage, precision):

        def zero_sized(model):
            return [{"params": list(model[1].parameters()), "lr": 1}]

        losses = train(one_group, stage, precision)
        assert losses[-1] < losses[0]
        assert losses == train(lambda model: one_group(model) + zero_sized(model), stage, precision)
        assert losses == train(lambda model: zero_sized(model) + one_group(model), stage, precision)

    @pytest.mark.parametrize("stage", [1, 2])
    def test_frozen(self, stage):

        def groups(model):
            model.append(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
            return [{"params": list(model[2].parameters())}] + one_group(model)

        def without_the_frozen(model):
            groups(model)
            return one_group(model)

        losses = train(groups, stage, "fp32")
        assert losses == train(without_the_frozen, stage, "fp32")
        assert losses[-1] < losses[0]


class TestNothingToOptimize(ZeroSizedTest):
    world_size = [1, 2]

    @pytest.mark.parametrize("stage, precision", [(1, "fp32"), (1, "bf16, fp32 gradients"), (2, "fp32"), (3, "fp32"),
                                                  (3, "fp16")])
    def test_is_said(self, stage, precision):
        model = Placeholders(*SHAPES)
        with pytest.raises(ValueError, match=NOTHING):
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options(stage, precision))
