# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Checkpoints hold the values of the frozen weights that ZeRO-3 stores quantized."""

import pytest
import torch

import deepspeed
import deepspeed.comm as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from unit.runtime.zero.quantized import gather_each
from unit.runtime.zero.test_zero_quantized_frozen import OFFLOADED, model_with
from unit.runtime.zero.zero_sized import WIDE, ZeroSizedTest, batch, config, engine_of, step

SHAPES = [(0, 3), (WIDE, WIDE), (33, WIDE), (WIDE, 33)]


class TestCheckpointOfQuantizedFrozenWeights(ZeroSizedTest):

    @pytest.mark.parametrize("dtype, place", [(torch.bfloat16, {}), (torch.float16, OFFLOADED)],
                             ids=["bf16", "fp16-offloaded"])
    def test(self, dtype, place, tmpdir):
        folder = str(tmpdir.join(str(dist.get_world_size())))
        options = config(dtype, zero_quantized_nontrainable_weights=True, **place)
        engine = engine_of(lambda: model_with(*SHAPES), options)
        step(engine, batch(dtype))
        frozen = gather_each(dict(engine.module[1].named_parameters()))
        engine.save_checkpoint(folder)
        losses = [step(engine, batch(dtype)) for _ in range(3)]
        engine.destroy()

        if dist.get_rank() == 0:
            state_dict = get_fp32_state_dict_from_zero_checkpoint(folder)
            for name, values in frozen.items():
                torch.testing.assert_close(state_dict[f"1.{name}"], values, rtol=0, atol=0, check_dtype=False)

        other = engine_of(lambda: model_with(*SHAPES), options)
        parameters = dict(other.module[1].named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values()), modifier_rank=0):
            for parameter in parameters.values():
                parameter.data.fill_(3)
        other.load_checkpoint(folder)
        loaded = gather_each(parameters)
        assert all(torch.equal(loaded[name], values) for name, values in frozen.items())
        assert [step(other, batch(dtype)) for _ in range(3)] == losses
        other.destroy()
