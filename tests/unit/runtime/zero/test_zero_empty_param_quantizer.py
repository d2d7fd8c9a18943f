# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3 quantizes partitions that have no elements."""

import pytest
import torch
from torch import nn

from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer
from unit.runtime.zero.zero_sized import (DTYPES, SHAPES, Placeholders, ZeroSizedTest, assert_trains_as_without, batch,
                                          config, engine_of, wide_network)


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


class TestQuantizedFrozenWeights(ZeroSizedTest):
    world_size = 2

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_zero_sized_in_one_bucket_with_sized(self, dtype):
        engine = engine_of(lambda: wide_network((0, ), (4, 0, 3), frozen=True),
                           config(dtype, zero_quantized_nontrainable_weights=True))
        layer = engine.module[1]
        for parameter in layer.parameters():
            assert parameter.ds_tensor.dtype == torch.int8
            assert parameter.ds_tensor.ds_quant_scale.dtype == torch.float32
        assert engine(batch(dtype)).dtype == dtype
        for name, parameter in layer.named_parameters():
            parameter.all_gather([parameter])
            assert (parameter.shape, parameter.dtype) == (parameter.ds_shape, dtype), name
        engine.destroy()
