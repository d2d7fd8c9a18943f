# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO++ reduces quantized gradients of every dtype, and of every shape that divides among the ranks."""

import os
from unittest import mock

import pytest
from torch import nn

from deepspeed.accelerator import get_accelerator
from unit.runtime.zero.zero_sized import (DTYPES, SHAPES, WIDTH, Placeholders, ZeroSizedTest, config, network, train,
                                          wide_network)


def odd_network():
    """Neither the 30 rows of the second gradient nor the 90 elements of the third divide among four ranks."""
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, 30), nn.Linear(30, 3))


def with_zero_sized():
    return nn.Sequential(*wide_network((8, 0), (4, 0, 3)), Placeholders(*SHAPES))


class TestQuantizedGradients(ZeroSizedTest):
    world_size = [2, 4]

    @pytest.fixture(autouse=True)
    def _across_nodes(self, backend):
        if backend != "gloo":
            pytest.skip("gradients are quantized between nodes, which only CPU ranks can be told to be")

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("build", [network, odd_network, with_zero_sized])
    def test_training(self, dtype, build):
        # Ranks on nodes of one rank each, and of two
        with mock.patch.dict(os.environ, LOCAL_SIZE=str(get_accelerator().device_count() // 2)):
            losses, _ = train(build, config(dtype, zero_quantized_gradients=True), dtype)
        expected, _ = train(build, config(dtype), dtype)
        assert losses[-1] < losses[0]
        assert losses != expected, "nothing was quantized"
        assert losses == pytest.approx(expected, abs=0.1 * expected[0])
