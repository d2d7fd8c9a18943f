# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3 launches no collective for parameters without elements."""

from inspect import getsource

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.partition_parameters import AllReduceCoalescedHandle
from unit.runtime.zero.zero_sized import (DTYPES, SHAPES, Placeholders, RankZeroAdapter, ZeroSizedTest, batch, config,
                                          engine_of, network, step)

# Older releases do not have the first, and fail with the second whether or not there are zero-sized parameters.
SEQUENTIAL = pytest.param({"stage3_allgather_sequential": True},
                          marks=pytest.mark.skipif("allgather_sequential" not in DeepSpeedZeroConfig.model_fields,
                                                   reason="new in DeepSpeed 0.18.5"))
ALL_REDUCE = pytest.param({"stage3_use_all_reduce_for_fetch_params": True},
                          marks=pytest.mark.skipif("def wait(self)" in getsource(AllReduceCoalescedHandle),
                                                   reason="fails before DeepSpeed 0.17.3 with sized parameters too"))


def zero_sized_modules(count):
    kinds = [lambda: Placeholders((8, 0)), lambda: Placeholders(*SHAPES), RankZeroAdapter]
    return [kinds[index % len(kinds)]() for index in range(count)]


def collectives_of(work):
    """How many collectives torch runs, on any process group and of any kind, while ``work`` does."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    return sum(event.count for event in profiler.key_averages() if event.key.startswith("c10d::"))


def collectives_per_step(modules, options, dtype=torch.float32, steps=4):
    """The number of collectives of each step: the first records the trace, the last ones follow it."""
    engine = engine_of(lambda: network(*zero_sized_modules(modules)), options)
    counts = [collectives_of(lambda: step(engine, batch(dtype))) for _ in range(steps)]
    engine.destroy()
    return counts


class TestCollectivesPerStep(ZeroSizedTest):

    @pytest.mark.parametrize("options", [
        {},
        {
            "stage3_prefetch_bucket_size": 0
        },
        {
            "stage3_param_persistence_threshold": 10_000
        },
        SEQUENTIAL,
        ALL_REDUCE,
    ],
                             ids=lambda options: next(iter(options), "default"))
    def test_do_not_depend_on_zero_sized_submodules(self, options):
        expected = collectives_per_step(0, config(**options))
        assert dist.get_world_size() == 1 or min(expected) > 0, "no collective was seen"
        assert collectives_per_step(50, config(**options)) == expected

    @pytest.mark.parametrize("dtype", DTYPES[1:])
    def test_in_half_precision(self, dtype):
        assert collectives_per_step(50, config(dtype), dtype) == collectives_per_step(0, config(dtype), dtype)


class TestCollectivesOfGatheredParameters(ZeroSizedTest):

    @pytest.mark.parametrize("options", [{}, SEQUENTIAL], ids=["coalesced", "sequential"])
    def test_do_not_depend_on_zero_sized_parameters(self, options):
        engine = engine_of(lambda: network(*zero_sized_modules(6)), config(**options))
        parameters = list(engine.module.parameters())
        sized = [parameter for parameter in parameters if parameter.ds_numel > 0]

        def gather(parameters):
            with deepspeed.zero.GatheredParameters(parameters):
                assert all(parameter.shape == parameter.ds_shape for parameter in parameters)

        assert collectives_of(lambda: gather(parameters)) == collectives_of(lambda: gather(sized))
        engine.destroy()

    def test_of_one_zero_sized_parameter(self):
        engine = engine_of(lambda: network(Placeholders((4, 0, 3))), config())
        placeholder = engine.module[1].placeholder_0

        def gather():
            with deepspeed.zero.GatheredParameters(placeholder):
                assert placeholder.shape == (4, 0, 3)

        assert collectives_of(gather) == 0
        assert collectives_of(lambda: placeholder.all_gather(async_op=True)) == 0
        assert placeholder.shape == (4, 0, 3)
        engine.destroy()
