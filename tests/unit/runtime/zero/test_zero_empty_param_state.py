# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The state of zero-sized parameters under ZeRO-1, ZeRO-2 and BF16_Optimizer."""

import pytest
import torch

from deepspeed.utils import safe_get_full_fp32_param
from unit.runtime.zero.zero_sized import ZeroSizedTest, config
from unit.runtime.zero.zero_sized_state import (SHAPE, assert_reads_alike_throughout, assert_updates_gradients,
                                                assert_writes_alike_throughout)


def bf16_optimizer(immediately):
    options = config(torch.bfloat16, stage=1)
    options["bf16"]["immediate_grad_update"] = immediately
    options["data_types"] = {"grad_accum_dtype": "fp32"}
    return options


def offloaded():
    options = config(torch.bfloat16, stage=2, offload_optimizer={"device": "cpu"})
    options["zero_force_ds_cpu_optimizer"] = False
    return options


CONFIGS = {
    "stage 1": config(stage=1),
    "stage 2": config(stage=2),
    "stage 2, fp16": config(torch.float16, stage=2),
    "stage 2, optimizer on CPU": offloaded(),
    "BF16_Optimizer": bf16_optimizer(immediately=True),
    "BF16_Optimizer, gradients updated later": bf16_optimizer(immediately=False),
}


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
class TestStateOfZeroSized(ZeroSizedTest):

    def test_reads(self, options):
        model = assert_reads_alike_throughout(options)
        # What is read of a destroyed engine's parameter has the parameter's shape still.
        assert safe_get_full_fp32_param(model.empty).shape == SHAPE

    def test_writes(self, options):
        assert_writes_alike_throughout(options)


# BF16_Optimizer that updates gradients later gives the others' gradients in bf16, out of param.grad.
@pytest.mark.parametrize("options", list(CONFIGS.values())[:-1], ids=list(CONFIGS)[:-1])
class TestGradientsOfZeroSized(ZeroSizedTest):
    world_size = [1, 2]

    def test_updates_a_list(self, options):
        assert_updates_gradients(options)
