# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Universal checkpoints of models with zero-sized parameters, from one world size and stage to another."""

import os
from types import SimpleNamespace

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.checkpoint.ds_to_universal import main as convert
from deepspeed.utils import safe_get_full_optimizer_state
from unit.checkpoint.zero_sized_checkpoints import tied, weights_of
from unit.runtime.zero.zero_sized import SHAPES, Placeholders, ZeroSizedTest, batch, config, engine_of, network, step


def untied():
    return network(Placeholders(*SHAPES), Placeholders((0, 3), trainable=False))


def state_of(engine):
    """The weights that the optimizer owns, as it has them, and its states of them."""
    weights = weights_of(engine)
    state = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and weights[name].numel() > 0:
            moments = [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
            state[name] = [weights[name]] + [moment.cpu().clone() for moment in moments]
    return state


@pytest.mark.parametrize("build", [untied, tied])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestUniversal(ZeroSizedTest):
    world_size = [2, 1, 3]  # the first saves what each of them loads

    def test_universal(self, tmpdir, build, dtype):
        for stage, others in (1, [1, 2]), (2, [1, 2]), (3, [3]):
            folder = os.path.join(tmpdir, str(stage))
            if dist.get_world_size() == self.world_size[0]:
                self.save(build, dtype, stage, folder)
            expected = torch.load(os.path.join(folder, "expected"))
            for other in others:
                options = config(dtype, stage=other)
                options["checkpoint"] = {"load_universal": True}
                engine = engine_of(build, options)
                engine.load_checkpoint(folder)
                state = state_of(engine)
                assert set(state) == set(expected)
                for name in expected:
                    for tensor, saved in zip(state[name], expected[name]):
                        assert torch.equal(tensor, saved), f"{name}, from stage {stage} to stage {other}"
                step(engine, batch(dtype))
                shapes = {name: parameter.shape for name, parameter in build().named_parameters()}
                assert {name: weights_of(engine)[name].shape for name in shapes} == shapes
                engine.destroy()

    def save(self, build, dtype, stage, folder):
        engine = engine_of(build, config(dtype, stage=stage))
        for _ in range(2):
            step(engine, batch(dtype))
        engine.save_checkpoint(folder, tag="saved", client_state={UNIVERSAL_CHECKPOINT_INFO: {}})
        state = state_of(engine)
        engine.destroy()
        if dist.get_rank() == 0:
            torch.save(state, os.path.join(folder, "expected"))
            convert(
                SimpleNamespace(input_folder=os.path.join(folder, "saved"),
                                output_folder=os.path.join(folder, "universal"),
                                num_extract_workers=1,
                                num_merge_workers=1,
                                keep_temp_folder=False,
                                strict=True,
                                inject_missing_state=False))
        dist.barrier()
