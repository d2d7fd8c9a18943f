# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3 quantizes partitions whose size is no multiple of anything."""

import pytest
import torch
from torch import nn

from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer
from unit.common import DistributedTest
from unit.runtime.zero.zero_sized import DTYPES, WIDTH, ZeroSizedTest, batch, config, engine_of, train


def ten_labels(bias=True):
    """A classifier whose last layer has partitions of 5, and 40 or 15, elements on two ranks."""
    return nn.Sequential(nn.Linear(WIDTH, 3, bias=bias), nn.Linear(3, 10, bias=bias))


class TestQuantizedWeightsOfAnySize(ZeroSizedTest):
    world_size = [2, 3]

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("bias", [True, False], ids=["coalesced", "alone"])
    def test_training(self, dtype, bias):
        losses, weights = train(lambda: ten_labels(bias), config(dtype, zero_quantized_weights=True), dtype)
        expected, _ = train(lambda: ten_labels(bias), config(dtype), dtype)
        assert losses[-1] < losses[0]
        assert losses != expected, "nothing was quantized"
        assert losses == pytest.approx(expected, rel=0.05)
        assert weights["1.weight"].shape == (10, 3)

    @pytest.mark.parametrize("sequential", [True, False])
    def test_large_and_small_in_one_gather(self, sequential):
        options = config(torch.bfloat16, zero_quantized_weights=True, stage3_allgather_sequential=sequential)
        sizes = [(WIDTH, 4001), (4001, 3)]  # partitions of 16004 and 6002 elements on two ranks, with their biases
        engine = engine_of(lambda: nn.Sequential(*[nn.Linear(*size) for size in sizes]), options)
        torch.manual_seed(7)
        original = nn.Sequential(*[nn.Linear(*size) for size in sizes])
        x = batch(torch.bfloat16)
        with torch.no_grad():
            expected = original(x.float().cpu())
            output = engine(x).float().cpu()
        assert (output - expected).abs().max() < 0.02 * expected.abs().max()
        engine.destroy()


class TestQuantizer(DistributedTest):
    world_size = 1
    reuse_dist_env = True

    @pytest.mark.parametrize("numel", [1, 4, 7, 9, 8001, 15992, 16001, 3 * 2**20 + 1, 10**7 + 19])
    def test_rows(self, numel):
        rows = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel)).half()
        quantized, scales = zip(*[CUDAQuantizer().quantize(row) for row in rows])
        assert all(row.shape == (numel, ) for row in quantized)
        assert scales[0].numel() == -(-numel // 8000)
        values = CUDAQuantizer().dequantize(torch.stack(quantized), torch.cat(scales), dtype=torch.half)
        step = rows.abs().max() / 128
        assert (values.view(2, numel).cpu() - rows).abs().max() <= 1.1 * step  # the last level is one step below

    def test_keeps_no_table_of_sizes(self):
        for numel in 8, 16, 24:
            CUDAQuantizer().quantize(torch.ones(numel).half())
        assert not any(isinstance(value, dict) for value in vars(CUDAQuantizer).values())
