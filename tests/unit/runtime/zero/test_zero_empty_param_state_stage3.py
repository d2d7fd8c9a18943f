# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The state of zero-sized parameters under ZeRO-3."""

import pytest
import torch

from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.utils import (safe_get_local_fp32_param, safe_get_local_grad, safe_get_local_optimizer_state,
                             safe_set_local_fp32_param, safe_set_local_grad, safe_set_local_optimizer_state)
from unit.runtime.zero.zero_sized import ZeroSizedTest, config
from unit.runtime.zero.zero_sized_state import (SHAPE, assert_reads_alike_throughout, assert_updates_gradients,
                                                assert_writes_alike_throughout, start)

READ_LOCAL = {
    "parameter": safe_get_local_fp32_param,
    "gradient": safe_get_local_grad,
    "exp_avg": lambda parameter: safe_get_local_optimizer_state(parameter, "exp_avg"),
    "no state of Adam": lambda parameter: safe_get_local_optimizer_state(parameter, "momentum"),
}
WRITE_LOCAL = {
    "parameter": safe_set_local_fp32_param,
    "gradient": safe_set_local_grad,
    "exp_avg": lambda parameter, value: safe_set_local_optimizer_state(parameter, value, "exp_avg"),
    "no state of Adam": lambda parameter, value: safe_set_local_optimizer_state(parameter, value, "momentum"),
}


def offloaded(device, **options):
    """A configuration that offloads the optimizer and the parameters to the device."""
    offload = {"device": device, **options}
    # The buffers that parameters are swapped to would take 2 GB if they were as large as they are by default.
    configuration = config(offload_optimizer=offload, offload_param={**offload, "buffer_size": 4096})
    # The swapper brings the state of DeepSpeed's own CPU Adam in and out.
    configuration["optimizer"]["params"]["torch_adam"] = False
    return configuration


CONFIGS = {
    "fp32": config(),
    "fp16": config(torch.float16),
    "bf16": config(torch.bfloat16),
    "offloaded to CPU": offloaded("cpu"),
}


@pytest.fixture(params=[*CONFIGS, "offloaded to NVMe"])
def options(request, tmp_path):
    if request.param in CONFIGS:
        return CONFIGS[request.param]
    if not AsyncIOBuilder().is_compatible():
        pytest.skip("the async_io op, which NVMe offload needs, cannot be built here: it needs libaio")
    return offloaded("nvme", nvme_path=str(tmp_path))


class TestStateOfZeroSized(ZeroSizedTest):

    def test_reads(self, options):
        assert_reads_alike_throughout(options)

    def test_writes(self, options):
        assert_writes_alike_throughout(options)

    def test_reads_partitions(self, options):
        assert_reads_alike_throughout(options, READ_LOCAL, flat=True)

    def test_writes_partitions(self, options):
        assert_writes_alike_throughout(options, READ_LOCAL, WRITE_LOCAL, shapes=((0, ), SHAPE))

    def test_device(self, options):
        engine, model = start(options)
        assert engine.optimizer.get_hp_param_device(model.empty) == engine.optimizer.get_hp_param_device(model.wide)
        engine.destroy()


class TestGradientsOfZeroSized(ZeroSizedTest):
    world_size = [1, 2]

    def test_updates_a_list(self, options):
        assert_updates_gradients(options)
