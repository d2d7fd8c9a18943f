# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3 quantizes partitions that have no elements."""

import pytest
import torch
from torch import nn

from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer
from unit.runtime.zero.zero_sized import (DTYPES, SHAPES, Placeholders, ZeroSizedTest, assert_trains_as_without,
                                          config, wide_network)


class TestEmptyPartition(ZeroSizedTest):

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_quantizer(self, dtype):
        empty = torch.empty(0, dtype=dtype)
        quantized, scales = CUDAQuantizer().quantize(empty)
        assert (quantized.shape, quantized.dtype) == ((0, ), torch.int8)
        assert (scales.shape, scales.dtype) == ((0, ), torch.float32)
        assert CUDAQuantizer().dequantize(quantized, scales, dtype=dtype).dtype == dtype
        rows = CUDAQuantizer().dequantize(quantized.view(2, 0), scales)
        assert (rows.shape, rows.dtype) == ((0, ), torch.half)


class TestQuantizedWeights(ZeroSizedTest):
    world_size = [1, 2]

    @pytest.mark.parametrize("shapes", [[(8, 0)], SHAPES], ids=["one", "several"])
    @pytest.mark.parametrize("sequential", [False, True], ids=["coalesced", "sequential"])
    def test_submodule_without_elements(self, shapes, sequential):
        options = config(zero_quantized_weights=True, stage3_allgather_sequential=sequential)
        # A step of the optimizer gathers zero-sized parameters in another way. Here there is none in between.
        options["gradient_accumulation_steps"] = 2
        assert_trains_as_without(lambda: nn.Sequential(*wide_network(), Placeholders(*shapes)), wide_network, options)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_bucket_with_sized(self, dtype):
        # The placeholders have no part in the result, but are gathered with the weight and the bias beside them.
        assert_trains_as_without(lambda: wide_network((0, ), (4, 0, 3)), wide_network,
                                 config(dtype, zero_quantized_weights=True), dtype)
