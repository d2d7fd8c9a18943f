# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.runtime.zero.partition_parameters import Init
from unit.common import DistributedTest


class TestQuantizedGatherOfPadded(DistributedTest):
    world_size = 2
    backend = "gloo"
    reuse_dist_env = True

    @pytest.mark.parametrize("numel", [15, 31999])  # partitions of 1 and 2 groups, the last has one element of padding
    @pytest.mark.parametrize("count", [1, 2])  # gathered alone, and coalesced
    def test(self, numel, count):
        torch.manual_seed(0)
        values = [torch.randn(numel) for _ in range(count)]
        module = torch.nn.ParameterList([torch.nn.Parameter(value.clone()) for value in values])
        Init(module=module,
             dtype=torch.float32,
             config_dict_or_path={
                 "train_micro_batch_size_per_gpu": 1,
                 "zero_optimization": {
                     "stage": 3,
                     "zero_quantized_weights": True
                 }
             })
        params = list(module)
        params[0].all_gather_coalesced(params, quantize=True).wait()
        for param, value in zip(params, values):
            step = value.abs().max().item() / 128
            torch.testing.assert_close(param.data, value, rtol=2**-10, atol=1.01 * step)

    def test_padding_is_zeros(self):
        torch.use_deterministic_algorithms(True)  # memory that nobody has written to is then NaNs
        parameter = torch.nn.Parameter(torch.ones(15))
        Init(module=torch.nn.ParameterList([parameter]), dtype=torch.float32)
        torch.use_deterministic_algorithms(False)
        start = dist.get_rank() * parameter.ds_tensor.ds_numel
        expected = torch.ones(16)[start:start + parameter.ds_tensor.ds_numel]
        expected[15 - start:] = 0
        assert torch.equal(parameter.ds_tensor, expected)
