# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""zero_to_fp32 takes parameters for shared if they are, not if they both have no elements."""

import glob
import os

import pytest
import torch

import deepspeed.comm as dist
from unit.checkpoint.zero_sized_checkpoints import assert_converts_to, folder_in, mixed, save, tied
from unit.runtime.zero.zero_sized import ZeroSizedTest, config


@pytest.mark.parametrize("stage", [2, 3])
class TestSharedParameters(ZeroSizedTest):

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_own_shapes(self, tmpdir, stage, dtype):
        expected = save(mixed, config(dtype, stage=stage), folder_in(tmpdir), dtype)
        assert_converts_to(mixed, expected, folder_in(tmpdir))

    @pytest.mark.world_size([1, 2])
    def test_shared(self, tmpdir, stage):
        expected = save(tied, config(stage=stage), folder_in(tmpdir))
        state_dict = assert_converts_to(tied, expected, folder_in(tmpdir))
        names = {}
        for name, parameter in tied().named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        pairs = [pair for pair in names.values() if len(pair) > 1]
        assert len(pairs) == 4
        for first, second in pairs:
            assert state_dict[first] is state_dict[second]

    @pytest.mark.world_size(2)
    def test_older_checkpoint(self, tmpdir, stage):
        """A checkpoint that lists all zero-sized parameters as shared has their shapes all the same."""
        expected = save(mixed, config(stage=stage), folder_in(tmpdir))
        if dist.get_rank() == 0:
            zero_sized = [name for name, weight in expected.items() if weight.numel() == 0]
            for file in glob.glob(os.path.join(folder_in(tmpdir), "*", "*_model_states.pt")):
                state = torch.load(file, weights_only=False)
                state["shared_params"] = {name: zero_sized[0] for name in zero_sized[1:]}
                torch.save(state, file)
            assert_converts_to(mixed, expected, folder_in(tmpdir))
        dist.barrier()
