# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""zero_to_fp32 finds every parameter, also those of stage 1 that the optimizer does not own."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import deepspeed.comm as dist
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from unit.checkpoint.zero_sized_checkpoints import assert_converts_to, assert_same, folder_in, mixed, save, tied
from unit.runtime.zero.zero_sized import ZeroSizedTest, config


class TestStage1(ZeroSizedTest):

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_all_parameters(self, tmpdir, dtype):
        expected = save(mixed, config(dtype, stage=1), folder_in(tmpdir), dtype)
        assert_converts_to(mixed, expected, folder_in(tmpdir))

    @pytest.mark.world_size([1, 2])
    def test_shared(self, tmpdir):
        """The module's state has a shared weight in both names, but only the optimizer has it in fp32."""
        expected = save(tied, config(torch.bfloat16, stage=1), folder_in(tmpdir), torch.bfloat16)
        state_dict = assert_converts_to(tied, expected, folder_in(tmpdir))
        assert state_dict["0.weight"].dtype == torch.float32
        assert state_dict["0.weight"] is state_dict[f"{len(tied()) - 1}.weight"]


@pytest.mark.parametrize("stage", [1, 2, 3])
class TestFiles(ZeroSizedTest):
    """The files that the function and the checkpoint's own script write, as one shard and as several."""
    world_size = 2

    def test_function(self, tmpdir, stage):
        expected = save(mixed, config(stage=stage), folder_in(tmpdir))
        if dist.get_rank() == 0:
            for safe, load in (False, torch.load), (True, load_file):
                output = os.path.join(tmpdir, f"output_{safe}")
                convert_zero_checkpoint_to_fp32_state_dict(folder_in(tmpdir), output, safe_serialization=safe)
                file, = os.listdir(output)
                assert_same(load(os.path.join(output, file)), expected)
        dist.barrier()

    def test_script(self, tmpdir, stage):
        expected = save(mixed, config(stage=stage), folder_in(tmpdir))
        if dist.get_rank() == 0:
            output = os.path.join(tmpdir, "output")
            script = os.path.join(folder_in(tmpdir), "zero_to_fp32.py")
            command = [sys.executable, script, folder_in(tmpdir), output]
            subprocess.run(command + ["--safe_serialization", "--max_shard_size", "1KB"], check=True)
            files = [name for name in os.listdir(output) if name.endswith(".safetensors")]
            assert len(files) > 1
            state_dict = {}
            for file in files:
                state_dict.update(load_file(os.path.join(output, file)))
            assert_same(state_dict, expected)
        dist.barrier()
