# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Persistent parameters have arrived on every rank when a step returns, also those gathered before the last one."""

import pytest
import torch
from packaging.version import Version
from torch import nn

import deepspeed
from unit.runtime.zero.zero_sized import ZeroSizedTest, config, engine_of

LARGE = 8 * 2**20  # takes its time


class LargeFirst(nn.Module):

    def __init__(self, last):
        super().__init__()
        self.large = nn.Parameter(torch.zeros(LARGE))
        self.last = nn.Parameter(torch.zeros(last))

    def forward(self, x):
        return x * (self.large.sum() + self.last.sum())


@pytest.mark.skipif(Version(deepspeed.__version__) >= Version("0.19.8"),
                    reason="DeepSpeed waits for every gather since 0.19.8, with no patch of ours")
@pytest.mark.parametrize("last", [(8, ), (0, )], ids=["sized", "zero-sized"])
class TestPersistentParameters(ZeroSizedTest):
    world_size = 2

    def test_have_arrived_after_a_step(self, last):
        options = config(stage3_param_persistence_threshold=LARGE, stage3_model_persistence_threshold=2 * LARGE)
        engine = engine_of(lambda: LargeFirst(last), options)
        for number in range(1, 4):
            loss = engine(torch.ones((), device=engine.device))
            engine.backward(loss)
            engine.step()
            # Adam's step is as long as the learning rate, if the gradient stays the same.
            values = engine.module.large.detach().clone()
            assert torch.allclose(values, torch.full_like(values, -0.01 * number), rtol=1e-3)
        engine.destroy()
