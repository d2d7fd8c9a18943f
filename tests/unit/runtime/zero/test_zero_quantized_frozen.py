# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3 keeps the values of the frozen weights that it stores quantized."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer
from unit.runtime.zero.quantized import assert_close_to, gather_each, gather_together
from unit.runtime.zero.zero_sized import WIDE, WIDTH, ZeroSizedTest, batch, config, engine_of, step

OFFLOADED = {"offload_param": {"device": "cpu", "pin_memory": True}}
DTYPES_AND_PLACES = [(torch.float32, {}), (torch.bfloat16, {}), (torch.float16, {}), (torch.bfloat16, OFFLOADED)]
PLACE_IDS = ["fp32", "bf16", "fp16", "bf16-offloaded"]


class Frozen(nn.Module):
    """Owns parameters of the given shapes, frozen from the start. The matrix among them is applied to the input."""

    def __init__(self, *shapes):
        super().__init__()
        for index, shape in enumerate(shapes):
            values = torch.randn(shape) / WIDTH
            self.register_parameter(f"frozen_{index}", nn.Parameter(values, requires_grad=False))

    def forward(self, x):
        for parameter in self.parameters():
            x = F.linear(x, parameter) if parameter.numel() else x + parameter.sum()
        return x


def model_with(*shapes):
    """Trained layers around a frozen one of the given shapes."""
    return nn.Sequential(nn.Linear(WIDTH, WIDE), Frozen(*shapes), nn.Linear(WIDE, WIDTH))


def frozen_in(engine):
    return dict(engine.module[1].named_parameters())


def original(shapes, dtype):
    """What the frozen parameters of engine_of(lambda: model_with(*shapes), ...) were made of."""
    torch.manual_seed(7)
    return {name: parameter.detach().to(dtype) for name, parameter in model_with(*shapes)[1].named_parameters()}


def assert_quantizes_nothing_else(options):
    """Nothing but the values of the frozen weights is quantized, not the memory that is allocated for them."""
    with mock.patch.object(CUDAQuantizer, "quantize", autospec=True, side_effect=CUDAQuantizer.quantize) as quantize:
        engine = engine_of(lambda: model_with((WIDE, WIDE)), options)
    assert frozen_in(engine)["frozen_0"].ds_tensor.dtype == torch.int8
    assert not quantize.called
    engine.destroy()


class TestFrozenWeights(ZeroSizedTest):

    @pytest.mark.parametrize("shapes", [[(WIDE, WIDE)], [(0, 3), (WIDE, WIDE), (WIDE, WIDE), (0, )]],
                             ids=["alone", "between-zero-sized"])
    @pytest.mark.parametrize("dtype, options", DTYPES_AND_PLACES, ids=PLACE_IDS)
    @pytest.mark.parametrize("zero_init", [True, False], ids=["zero.Init", "initialize"])
    def test_values(self, shapes, dtype, options, zero_init):
        engine = engine_of(lambda: model_with(*shapes),
                           config(dtype, zero_quantized_nontrainable_weights=True, **options), zero_init)
        expected = original(shapes, dtype)
        first = gather_each(frozen_in(engine))
        for name, parameter in frozen_in(engine).items():
            assert parameter.ds_tensor.dtype == torch.int8
            assert_close_to(first[name], expected[name])
        losses = [step(engine, batch(dtype)) for _ in range(3)]
        assert losses[-1] < losses[0]
        for values in gather_each(frozen_in(engine)), gather_together(frozen_in(engine)):
            assert all(torch.equal(values[name], first[name]) for name in expected)
        engine.destroy()

    def test_are_quantized_only_with_their_values(self):
        assert_quantizes_nothing_else(config(zero_quantized_nontrainable_weights=True))

    @pytest.mark.parametrize("dtype, options", DTYPES_AND_PLACES, ids=PLACE_IDS)
    def test_modification(self, dtype, options):
        shapes = [(WIDE, WIDE), (0, 3), (33, WIDE), (WIDE, 33)]
        engine = engine_of(lambda: model_with(*shapes),
                           config(dtype, zero_quantized_nontrainable_weights=True, **options))
        frozen = frozen_in(engine)
        step(engine, batch(dtype))
        expected = {name: 3 - 5 * values for name, values in original(shapes, dtype).items()}
        for _ in range(2):  # a second time what is already quantized
            with deepspeed.zero.GatheredParameters(list(frozen.values()), modifier_rank=0):
                if dist.get_rank() == 0:
                    for name, parameter in frozen.items():
                        parameter.data.copy_(expected[name])
            modified = gather_each(frozen)
            for name in expected:
                assert_close_to(modified[name], expected[name])
            step(engine, batch(dtype))
            with deepspeed.zero.GatheredParameters(list(frozen.values()), modifier_rank=0):
                pass  # what is not modified stays as it is
            values = gather_together(frozen)
            assert all(torch.equal(values[name], modified[name]) for name in expected)
        engine.destroy()


class TestFrozenWeightsWithSecondaryPartition(ZeroSizedTest):
    world_size = [2, 3, 4]
    reuse_dist_env = False  # its groups of ranks are there for good

    def test_are_quantized_only_with_their_values(self):
        assert_quantizes_nothing_else(
            config(zero_quantized_nontrainable_weights=True, zero_hpz_partition_size=dist.get_world_size()))

    @pytest.mark.parametrize("dtype, options", DTYPES_AND_PLACES[1:], ids=PLACE_IDS[1:])
    def test_forward(self, dtype, options):
        shapes = [(WIDE, WIDE)]
        group_size = {2: 2, 3: 3, 4: 2}[dist.get_world_size()]
        options = config(dtype,
                         zero_quantized_nontrainable_weights=True,
                         zero_hpz_partition_size=group_size,
                         **options)
        engine = engine_of(lambda: model_with(*shapes), options)
        weight, = frozen_in(engine).values()
        expected, = original(shapes, dtype).values()
        for factor in 1, 3:
            with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
                weight.data.copy_(factor * expected)
            assert weight.ds_secondary_tensor.dtype == torch.int8
            # What a forward fetches comes from the secondary partitions.
            x = torch.eye(WIDE, device=weight.device, dtype=dtype)
            with torch.no_grad():
                fetched = engine.module[1](x).t()
            assert_close_to(fetched.cpu(), factor * expected)
            weight.partition()
            step(engine, batch(dtype))
        engine.destroy()
