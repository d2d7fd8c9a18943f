# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Models of which zero_to_fp32 has to find every parameter, and checkpoints of them."""

import os

import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from unit.runtime.zero.zero_sized import SHAPES, WIDTH, Placeholders, batch, engine_of, network, step


def mixed():
    """Trainable and frozen parameters, with and without elements."""
    trainable, frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return network(Placeholders(*SHAPES), trainable, frozen, Placeholders(*reversed(SHAPES), trainable=False))


def tied():
    """Two modules each share a trainable weight, a frozen one, and trainable and frozen zero-sized parameters."""
    pairs = []
    for shape, trainable in ((WIDTH, 0), True), ((3, 0), False):
        first, second = Placeholders(shape, (0, ), trainable=trainable), Placeholders(shape, trainable=trainable)
        second.placeholder_0 = first.placeholder_0
        pairs += [first, second]
    frozen = [nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(2)]
    frozen[1].weight = frozen[0].weight
    model = network(*pairs, *frozen)
    model[-1].weight = model[0].weight
    return model


def folder_in(tmpdir):
    """A folder for this world size: a test that runs at several gets one ``tmpdir``."""
    return os.path.join(tmpdir, str(dist.get_world_size()))


def save(build, options, folder, dtype=torch.float32, **how):
    """Save a checkpoint of a model that has trained a little; returns its weights, as the optimizer has them."""
    engine = engine_of(build, options)
    for _ in range(2):
        step(engine, batch(dtype))
    engine.save_checkpoint(folder, **how)
    weights = weights_of(engine)
    engine.destroy()
    return weights


def weights_of(engine):
    """The whole parameters by all of their names: the optimizer's where it has them, otherwise the module's."""
    weights = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters(parameter):
            weight = parameter.detach()
            if engine.zero_optimization() and parameter.requires_grad and parameter.numel() > 0:
                weight = safe_get_full_fp32_param(parameter)
            weights[name] = weight.detach().cpu().clone()
    return weights


def assert_converts_to(build, expected, folder, **how):
    """``zero_to_fp32`` gives exactly these parameters, with their shapes and values, and a model loads them."""
    state_dict = get_fp32_state_dict_from_zero_checkpoint(folder, **how)
    assert_same(state_dict, expected)
    build().load_state_dict({**build().state_dict(), **state_dict}, strict=True)
    return state_dict


def assert_same(state_dict, expected):
    assert {name: weight.shape for name, weight in state_dict.items()} == \
        {name: weight.shape for name, weight in expected.items()}
    for name, weight in expected.items():
        assert torch.equal(state_dict[name].to(weight.dtype), weight), name
