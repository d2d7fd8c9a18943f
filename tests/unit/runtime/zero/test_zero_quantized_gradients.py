# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO++ reduces quantized gradients of every dtype, and of every shape that divides among the ranks."""

import os
from logging.handlers import BufferingHandler
from unittest import mock

import pytest
import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from unit.runtime.zero.zero_sized import (DTYPES, SHAPES, WIDTH, Placeholders, ZeroSizedTest, config, network, train,
                                          wide_network)


def odd_network():
    """Neither the 30 rows of the second gradient divide among four ranks, nor the third into 8 elements for each."""
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, 30), nn.Linear(30, 4))


def with_zero_sized():
    return nn.Sequential(*wide_network((8, 0), (4, 0, 3)), Placeholders(*SHAPES))


def train_across_nodes(build, dtype=torch.float32):
    """Train with quantized gradients on nodes of one rank each, or of two."""
    with mock.patch.dict(os.environ, LOCAL_SIZE=str(get_accelerator().device_count() // 2)):
        return train(build, config(dtype, zero_quantized_gradients=True), dtype)


class TestQuantizedGradients(ZeroSizedTest):
    world_size = [2, 4]

    @pytest.fixture(autouse=True)
    def _across_nodes(self, backend):
        if backend != "gloo":
            pytest.skip("gradients are quantized between nodes, which only CPU ranks can be told to be")

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("build", [network, odd_network, with_zero_sized])
    def test_training(self, dtype, build):
        losses, _ = train_across_nodes(build, dtype)
        expected, _ = train(build, config(dtype), dtype)
        assert losses[-1] < losses[0]
        assert losses != expected, "nothing was quantized"
        assert losses == pytest.approx(expected, abs=0.1 * expected[0])

    def test_names_once_what_is_not_quantized(self):
        log = BufferingHandler(1000)
        logger.addHandler(log)
        train_across_nodes(lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 4)))
        logger.removeHandler(log)
        said = [record.getMessage() for record in log.buffer if "qgZ falls back" in record.getMessage()]
        assert sorted(message.partition(" elements")[0].split()[-1] for message in said) == ["20", "40"]
