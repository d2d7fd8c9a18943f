# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Parameters gathered from quantized partitions, and how far from the original they may be."""

import math

import torch

import deepspeed
import deepspeed.comm as dist


def assert_close_to(value, original):
    """A gathered value is within half a quantization step of the original, and rounded to its dtype.

    A step is 1/128 of the largest magnitude in a group of up to 8000 elements. The levels go from -128 to 127: a value
    less than half a step below the magnitude of its group is off by up to a whole one. There are few of them.
    """
    assert (value.shape, value.dtype) == (original.shape, original.dtype)
    if original.numel() == 0:
        return
    step = original.abs().max().item() / 128
    rounding = original.abs().float() * (torch.finfo(torch.half).eps + torch.finfo(original.dtype).eps / 2)
    error = (value.float() - original.float()).abs() - rounding
    assert error.max() <= step
    groups = dist.get_world_size() * math.ceil(original.numel() / dist.get_world_size() / 8000)
    assert (error > step / 2).sum() <= groups + original.numel() // 200


def gather_each(parameters):
    """Copies of parameters by name, gathered one by one."""
    values = {}
    for name, parameter in parameters.items():
        with deepspeed.zero.GatheredParameters(parameter):
            values[name] = parameter.detach().cpu().clone()
    return values


def gather_together(parameters):
    """Copies of parameters by name, gathered at once."""
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}
