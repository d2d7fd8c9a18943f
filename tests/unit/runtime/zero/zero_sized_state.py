# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A model, and what has to hold for the state of its zero-sized parameters under every configuration."""

import re

import pytest
import torch
from torch import nn

from deepspeed.utils import (safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state,
                             safe_set_full_fp32_param, safe_set_full_grad, safe_set_full_optimizer_state)
from deepspeed.utils.tensor_fragment import safe_update_full_grad_vectorized
from unit.runtime.zero.zero_sized import WIDE, WIDTH, batch, engine_of

SHAPE = (4, 0, 3)
READ = {
    "parameter": safe_get_full_fp32_param,
    "gradient": safe_get_full_grad,
    "exp_avg": lambda parameter: safe_get_full_optimizer_state(parameter, "exp_avg"),
    "no state of Adam": lambda parameter: safe_get_full_optimizer_state(parameter, "momentum"),
}
WRITE = {
    "parameter": safe_set_full_fp32_param,
    "gradient": safe_set_full_grad,
    "exp_avg": lambda parameter, value: safe_set_full_optimizer_state(parameter, value, "exp_avg"),
    "no state of Adam": lambda parameter, value: safe_set_full_optimizer_state(parameter, value, "momentum"),
}


class Network(nn.Module):
    """Has a zero-sized parameter that takes part, one that does not, and frozen ones. Each rank has some of `wide`."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(0, 5))
        self.empty = nn.Parameter(torch.zeros(SHAPE))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.frozen_empty = nn.Parameter(torch.zeros(0, 2), requires_grad=False)
        self.wide = nn.Parameter(torch.randn(WIDTH, WIDE) / 8)
        self.bias = nn.Parameter(torch.randn(WIDE) / 8)

    def forward(self, x):
        x = x * self.frozen + self.frozen_empty.sum() + self.empty.sum()
        return x @ self.wide + self.bias


def start(options):
    engine = engine_of(Network, options)
    return engine, engine.module


def backward(engine):
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else torch.float32
    engine.backward(engine(batch(dtype)).float().square().mean())


def outcome(call, *arguments):
    """The tensor that a call gives, or what it gives or raises instead."""
    try:
        result = call(*arguments)
    except Exception as error:
        return type(error), str(error)
    return result


def assert_reads_alike(model, read=READ, flat=False):
    """The zero-sized parameters are read where the others are, and fail, or are None, where the others do."""
    for what, call in read.items():
        expected = outcome(call, model.wide)
        for parameter, shape in (model.empty, SHAPE), (model.unused, (0, 5)):
            result = outcome(call, parameter)
            if torch.is_tensor(expected):
                assert torch.is_tensor(result), f"{what}: {result}"
                assert result.shape == ((0, ) if flat else shape), what
                assert (result.dtype, result.device) == (torch.float32, expected.device), what
            else:
                assert result == expected, what
        assert outcome(call, model.frozen_empty) is None and outcome(call, model.frozen) is None, what


def assert_reads_alike_throughout(options, read=READ, flat=False):
    engine, model = start(options)
    assert_reads_alike(model, read, flat)
    for _ in range(2):
        backward(engine)
        # The engine took the gradient, so it is in no parameter, or else it would still be there after the step.
        assert model.empty.grad is None
        assert_reads_alike(model, read, flat)
        engine.step()
        assert_reads_alike(model, read, flat)
    engine.destroy()
    return model


def assert_writes_alike_throughout(options, read=READ, write=WRITE, shapes=(SHAPE, )):
    """A value without elements is written where another parameter's is read, but none of another shape."""
    engine, model = start(options)

    def assert_writes_alike():
        for what, call in write.items():
            before = outcome(read[what], model.wide)
            expected = None if torch.is_tensor(before) else before
            for shape in shapes:
                assert outcome(call, model.empty, torch.zeros(shape)) == expected, what
            for shape in (7, ), (0, 2), (1, ), (4, 0, 1):
                with pytest.raises(ValueError, match=re.escape(f"{shape} does not fit a parameter of shape {SHAPE}")):
                    call(model.empty, torch.zeros(shape))
                assert outcome(call, model.frozen_empty, torch.zeros(shape)) is None
            after = outcome(read[what], model.wide)
            assert torch.equal(after, before) if torch.is_tensor(before) else after == before, what

    assert_writes_alike()
    backward(engine)
    assert_writes_alike()
    engine.step()
    assert_writes_alike()
    engine.destroy()


def assert_updates_gradients(options):
    """The gradients of a list of parameters are updated, though its first has no elements and takes no part."""
    engine, model = start(options)
    backward(engine)
    before = safe_get_full_grad(model.bias).clone()
    assert before.any()
    seen = []

    def double(gradient, parameter):
        seen.append((tuple(gradient.shape), gradient.dtype))
        return gradient * 2

    safe_update_full_grad_vectorized([model.unused, model.empty, model.frozen_empty, model.bias], double)
    assert seen == [((0, 5), torch.float32), (SHAPE, torch.float32), ((WIDE, ), torch.float32)]
    assert torch.equal(safe_get_full_grad(model.bias), before * 2)
    with pytest.raises(ValueError, match="does not fit a parameter of shape"):
        safe_update_full_grad_vectorized([model.empty], lambda gradient, parameter: gradient.flatten())
    engine.destroy()
