# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3 fetches and prefetches submodules whose parameters have no elements."""

import pytest
import torch
from torch import nn

from unit.runtime.zero.zero_sized import (DTYPES, SHAPES, WIDTH, EmptyHead, Placeholders, RankZeroAdapter,
                                          ZeroSizedTest, assert_trains_as_without, batch, config, engine_of, network)
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus


def assert_shapes(weights, shapes):
    assert [tuple(weight.shape) for weight in weights.values() if weight.numel() == 0] == shapes


@pytest.mark.parametrize("dtype", DTYPES)
class TestSubmoduleWithoutElements(ZeroSizedTest):

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_one_parameter(self, dtype, shape):
        weights = assert_trains_as_without(lambda: network(Placeholders(shape)), network, config(dtype), dtype)
        assert_shapes(weights, [shape])

    def test_several_parameters(self, dtype):
        weights = assert_trains_as_without(lambda: network(Placeholders(*SHAPES)), network, config(dtype), dtype)
        assert_shapes(weights, SHAPES)

    def test_empty_head(self, dtype):
        weights = assert_trains_as_without(lambda: network(EmptyHead()), network, config(dtype), dtype)
        assert_shapes(weights, [(0, 8), (0, )])

    def test_rank_zero_adapter(self, dtype):
        weights = assert_trains_as_without(lambda: network(RankZeroAdapter()), network, config(dtype), dtype)
        assert_shapes(weights, [(0, 8), (8, 0)])


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
class TestPlaceAndTrainability(ZeroSizedTest):

    @pytest.mark.parametrize("place", ["first", "between", "last"])
    def test(self, place, trainable):
        assert_trains_as_without(
            lambda: network(Placeholders((8, 0), trainable=trainable), RankZeroAdapter(trainable), place=place),
            lambda: network(place=place), config())


@pytest.mark.parametrize("threshold", [0, 10_000], ids=["partitioned", "persistent"])
@pytest.mark.parametrize("prefetch", [0, 10_000], ids=["no_prefetch", "prefetch"])
class TestFetchPolicies(ZeroSizedTest):

    def test(self, threshold, prefetch):
        options = config(stage3_param_persistence_threshold=threshold,
                         stage3_prefetch_bucket_size=prefetch,
                         stage3_max_reuse_distance=0)
        assert_trains_as_without(lambda: network(Placeholders(*SHAPES), RankZeroAdapter()), network, options)

    def test_zero_init(self, threshold, prefetch):
        options = config(stage3_param_persistence_threshold=threshold, stage3_prefetch_bucket_size=prefetch)
        assert_trains_as_without(lambda: network(Placeholders(*SHAPES), RankZeroAdapter()),
                                 network,
                                 options,
                                 zero_init=True)


class TestGradientAccumulation(ZeroSizedTest):

    def test(self):
        # A step of the optimizer gathers zero-sized parameters for the next forward. Here there is none in between.
        options = {**config(), "gradient_accumulation_steps": 3}
        assert_trains_as_without(lambda: network(Placeholders(*SHAPES), RankZeroAdapter()), network, options, steps=6)


class TestPrefetch(ZeroSizedTest):

    @pytest.mark.parametrize("shapes", [[(8, 0)], SHAPES], ids=["one", "several"])
    def test_set_without_elements_is_submitted(self, shapes):
        # With a bucket this small, only the linear weight is prefetched before the linear layer is fetched. Then the
        # placeholders are all there is to prefetch.
        engine = engine_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Placeholders(*shapes)),
                           config(stage3_prefetch_bucket_size=1))
        placeholders = list(engine.module[1].parameters())
        before_their_fetch = []
        engine.module[0].register_forward_hook(
            lambda *_: before_their_fetch.append({parameter.ds_status
                                                  for parameter in placeholders}))
        engine.eval()
        for _ in range(3):
            engine(batch(torch.float32))
        engine.destroy()
        not_available = [ZeroParamStatus.NOT_AVAILABLE in statuses for statuses in before_their_fetch]
        assert not_available == [True, False, False], "the first forward records the trace, the others prefetch"
