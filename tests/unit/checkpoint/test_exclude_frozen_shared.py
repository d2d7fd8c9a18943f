# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""exclude_frozen_parameters drops a shared frozen parameter under all of its names."""

import os

import pytest
import torch

import deepspeed.comm as dist
from unit.checkpoint.zero_sized_checkpoints import folder_in, tied
from unit.runtime.zero.zero_sized import ZeroSizedTest, config, engine_of


@pytest.mark.parametrize("stage", [0, 1, 2])
class TestSharedFrozenParameters(ZeroSizedTest):
    world_size = [1, 2]

    def test_save_16bit_model(self, tmpdir, stage):
        engine = engine_of(tied, config(stage=stage))
        engine.save_16bit_model(folder_in(tmpdir), exclude_frozen_parameters=True)
        parameters = list(engine.module.named_parameters(remove_duplicate=False))
        engine.destroy()
        dist.barrier()
        saved = torch.load(os.path.join(folder_in(tmpdir), "pytorch_model.bin"))
        assert set(saved) == {name for name, parameter in parameters if parameter.requires_grad}
