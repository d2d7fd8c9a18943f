# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The engine names the zero-sized parameters of its model when it starts."""

import logging

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.utils import logger
from unit.runtime.zero.zero_sized import Placeholders, ZeroSizedTest, config, engine_of, network


def notices_of(build, options, zero_init=False):
    """The lines about zero-sized parameters that this rank logs while an engine starts."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        engine_of(build, options, zero_init).destroy()
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if "zero-sized" in line]


def assert_said_once_by_rank_0(lines, *parts):
    if dist.get_rank() > 0:
        assert lines == []
        return
    line, = lines
    for part in parts:
        assert part in line


class TestNotice(ZeroSizedTest):

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_names_and_count(self, stage):
        lines = notices_of(lambda: network(Placeholders((0, ), (8, 0))), config(stage=stage))
        assert_said_once_by_rank_0(lines, "2 zero-sized", "1.placeholder_0, 1.placeholder_1")
        assert not any("..." in line for line in lines)

    def test_first_five_names(self):
        lines = notices_of(lambda: network(Placeholders(*[(0, )] * 7)), config())
        assert_said_once_by_rank_0(lines, "7 zero-sized", "1.placeholder_4, ...")
        assert not any("placeholder_5" in line for line in lines)

    def test_zero_init(self):
        lines = notices_of(lambda: network(Placeholders((0, 3))), config(), zero_init=True)
        assert_said_once_by_rank_0(lines, "1 zero-sized", "1.placeholder_0")

    def test_parameter_that_lost_its_elements(self):

        def build():
            model = network()
            model[0].bias.data = torch.empty(0)
            return model

        assert_said_once_by_rank_0(notices_of(build, config()), "1 zero-sized", "0.bias")

    @pytest.mark.parametrize("zero_init", [False, True])
    def test_silent_without_zero_sized_parameters(self, zero_init):
        # The line above goes with one zero-sized parameter, and only with one: partitioned is not zero-sized.
        with_one = notices_of(lambda: network(Placeholders((0, ))), config(), zero_init)
        assert_said_once_by_rank_0(with_one, "1 zero-sized")
        assert notices_of(network, config(), zero_init) == []
