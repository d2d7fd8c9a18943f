# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A model with zero-sized parameters goes on from its checkpoint as if there had been no break."""

import os

import pytest
import torch
from torch import nn

import deepspeed.comm as dist
from unit.checkpoint.zero_sized_checkpoints import assert_same, folder_in, mixed, save, tied, weights_of
from unit.runtime.zero.zero_sized import DTYPES, WIDTH, ZeroSizedTest, batch, config, engine_of, network, step


def trained(engine, dtype):
    """The losses of some steps, and the weights after them."""
    losses = [step(engine, batch(dtype)) for _ in range(3)]
    return losses, weights_of(engine)


@pytest.mark.parametrize("build", [mixed, tied])
@pytest.mark.parametrize("dtype", DTYPES)
class TestResume(ZeroSizedTest):
    """Every stage: the lower ones, which have no need to gather, are the control of stage 3."""

    def test_bitwise(self, tmpdir, build, dtype):
        for stage in range(4):
            options, folder = config(dtype, stage=stage), os.path.join(folder_in(tmpdir), str(stage))
            engine = engine_of(build, options)
            trained(engine, dtype)
            engine.save_checkpoint(folder)
            expected = trained(engine, dtype)
            engine.destroy()

            engine = engine_of(build, options)
            engine.load_checkpoint(folder)
            losses, weights = trained(engine, dtype)
            engine.destroy()
            assert losses == expected[0], f"stage {stage}"
            assert_same(weights, expected[1])


def frozen_between():
    return network(nn.Linear(WIDTH, WIDTH).requires_grad_(False))


class TestAnotherWorldSize(ZeroSizedTest):
    """Without the optimizer's states, a checkpoint loads on fewer ranks than it was saved on."""
    world_size = [3, 2, 1]  # the first saves what each of them loads

    @pytest.mark.parametrize("build", [frozen_between, mixed, tied])
    def test_weights(self, tmpdir, build):
        for stage in 1, 2, 3:
            options, folder = config(stage=stage), os.path.join(tmpdir, str(stage))
            if dist.get_world_size() == self.world_size[0]:
                expected = save(build, options, folder)
                if dist.get_rank() == 0:
                    torch.save(expected, os.path.join(folder, "expected"))
                dist.barrier()
            engine = engine_of(build, options)
            engine.load_checkpoint(folder, load_optimizer_states=False)
            assert_same(weights_of(engine), torch.load(os.path.join(folder, "expected")))
            engine.destroy()
