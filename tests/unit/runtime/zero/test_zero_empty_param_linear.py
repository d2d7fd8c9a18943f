# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3's memory-efficient linear computes with zero-sized weights what torch's linear does."""

import pytest
import torch
import torch.nn.functional as F

from deepspeed.runtime.zero.linear import zero3_linear_wrap


def gradients(linear, leading, in_features, out_features, bias):
    """The output of a linear function, and the gradients of its input, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*leading, in_features), (out_features, in_features), (out_features, )]
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes[:2 + bias]]
    output = linear(*tensors)
    output.square().sum().backward()
    return [output] + [tensor.grad for tensor in tensors]


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("in_features, out_features", [(8, 0), (0, 8), (0, 0)])
@pytest.mark.parametrize("leading", [(2, 3), (2, 3, 4), (0, 3)], ids=str)
def test_same_as_torch(leading, in_features, out_features, bias):
    got = gradients(zero3_linear_wrap, leading, in_features, out_features, bias)
    expected = gradients(F.linear, leading, in_features, out_features, bias)
    for tensor, reference in zip(got, expected):
        assert tensor.shape == reference.shape
        assert torch.equal(tensor, reference)
