# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3 dequantizes the weights of one bucket with the groups that each was quantized in."""

import pytest
import torch
from torch import nn

from unit.runtime.zero.quantized import gather_each
from unit.runtime.zero.zero_sized import DTYPES, WIDTH, ZeroSizedTest, batch, config, engine_of, wide_network

LONG = 2001


def frozen_layers():
    """Frozen layers whose weight and bias differ in size, and in the number of their groups, before a trained one."""
    layers = nn.Sequential(nn.Linear(WIDTH, LONG), nn.Linear(LONG, WIDTH), nn.Linear(WIDTH, WIDTH))
    layers[1].register_parameter("placeholder", nn.Parameter(torch.zeros(4, 0)))
    return layers[:2].requires_grad_(False) and layers


def assert_forward_is_with_gathered_weights(engine, dtype):
    expected = frozen_layers().to(dtype)
    expected.load_state_dict(gather_each(dict(engine.module.named_parameters())))
    x = batch(dtype)
    with torch.no_grad():
        torch.testing.assert_close(engine(x).cpu(), expected(x.cpu()))


class TestQuantizedBucket(ZeroSizedTest):
    world_size = [2, 3]

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_forward(self, dtype):
        engine = engine_of(frozen_layers, config(dtype, zero_quantized_nontrainable_weights=True))
        assert_forward_is_with_gathered_weights(engine, dtype)
        engine.destroy()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_members_without_elements(self, dtype):
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


class TestQuantizedBucketOfSecondaryPartitions(ZeroSizedTest):
    world_size = 2
    reuse_dist_env = False  # its groups of ranks are there for good

    @pytest.mark.parametrize("dtype", [torch.bfloat16])
    def test_forward(self, dtype):
        options = config(dtype, zero_quantized_nontrainable_weights=True, zero_hpz_partition_size=2)
        engine = engine_of(frozen_layers, options)
        assert_forward_is_with_gathered_weights(engine, dtype)
        engine.destroy()
