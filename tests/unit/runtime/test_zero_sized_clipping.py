# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Zero-sized gradients have no part in the norm that gradients are clipped by."""

from math import inf

import pytest
import torch
from torch import nn

from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.accelerator import get_accelerator
from unit.runtime.zero.zero_sized import SHAPES, ZeroSizedTest


def parameters(sized, zero_sized, seed=0):
    """Parameters with gradients: the zero-sized ones, then the others, which depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.zeros(SHAPES[index % len(SHAPES)]) for index in range(zero_sized)]
    values += [torch.randn(3, 5, generator=generator) for _ in range(sized)]
    result = [nn.Parameter(value.to(get_accelerator().current_device_name())) for value in values]
    for parameter in result:
        parameter.grad = parameter.detach().clone()
    return result


@pytest.mark.parametrize("norm_type", [2, 3, inf])
class TestNormOfZeroSizedGradients(ZeroSizedTest):
    world_size = [1, 2]

    def test_is_not_counted(self, norm_type):
        # Whether a sum rounds differently in another order depends on the numbers.
        for seed in range(8):
            self.compare(norm_type, seed)

    def compare(self, norm_type, seed):
        expected = parameters(37, 0, seed)
        norm = clip_grad_norm_(expected, 1.0, norm_type)
        assert norm > 1, "nothing was clipped, so nothing was compared"
        for count in range(1, 20):
            clipped = parameters(37, count, seed)
            assert torch.equal(clip_grad_norm_(clipped, 1.0, norm_type), norm)
            assert all(torch.equal(a.grad, b.grad) for a, b in zip(clipped[count:], expected))


class TestNoGradientWithElements(ZeroSizedTest):
    world_size = [1, 2]

    def test_has_norm_zero(self):
        without_gradient = nn.Parameter(torch.ones(3, device=get_accelerator().current_device_name()))
        assert clip_grad_norm_([without_gradient], 1.0) == 0
        assert clip_grad_norm_([without_gradient] + parameters(sized=0, zero_sized=4), 1.0) == 0
