# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Parameters gathered from quantized partitions, and how far from the original they may be."""

import torch

import deepspeed


def assert_close_to(value, original):
    """A gathered value is within half a quantization step, 1/127 of the largest magnitude, and rounding."""
    assert (value.shape, value.dtype) == (original.shape, original.dtype)
    if original.numel() > 0:
        step = original.abs().max().item() / 127
        rounding = original.abs().float() * (torch.finfo(torch.half).eps + torch.finfo(original.dtype).eps / 2)
        assert ((value.float() - original.float()).abs() <= step / 2 + rounding).all()


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
