# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer, Init, ZeroParamStatus
from unit.common import DistributedTest

SHAPES = [(200, 160), (100, 160), (500, 128)]  # partitions of 2, 1 and 4 groups, all of 8000 elements


def config(**zero_optimization):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {
            "type": "Adam",
            "params": {
                "lr": 1e-3,
                "torch_adam": True
            }
        },
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "zero_quantized_weights": True,
            **zero_optimization
        },
    }


def partitioned_parameters(dtype, **zero_optimization):
    """Partitioned parameters, and each as it is when the ranks gather what they have quantized."""
    torch.manual_seed(0)
    values = [torch.randn(shape).to(dtype) for shape in SHAPES]
    module = torch.nn.ParameterList([torch.nn.Parameter(value.clone()) for value in values])
    Init(module=module, dtype=dtype, config_dict_or_path=config(**zero_optimization))
    quantizer = CUDAQuantizer()
    gathered = []
    for value in values:
        partitions = [quantizer.dequantize(*quantizer.quantize(part)) for part in value.view(-1).chunk(2)]
        gathered.append(torch.cat(partitions).view(value.shape).to(dtype))
        step = value.abs().max().item() / 128
        torch.testing.assert_close(gathered[-1], value, rtol=2**-7, atol=1.01 * step)
    return list(module), gathered


def quantize_partition(param):
    """What quantize_nontrainable_params() of the ZeRO-3 optimizer does with large parameters."""
    partition = param.ds_tensor
    quantized, quantized.ds_quant_scale = CUDAQuantizer().quantize(partition)
    for name in ("ds_numel", "status", "final_location"):
        setattr(quantized, name, getattr(partition, name))
    param.ds_tensor = quantized
    param.requires_grad = False


def assert_gathered(params, gathered):
    for param, expected in zip(params, gathered):
        assert param.ds_status == ZeroParamStatus.AVAILABLE
        torch.testing.assert_close(param.data, expected, rtol=0, atol=0)


class TestQuantizedGather(DistributedTest):
    world_size = 2
    backend = "gloo"
    reuse_dist_env = True

    @pytest.mark.parametrize("sequential", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_coalesced(self, dtype, sequential):
        params, gathered = partitioned_parameters(dtype, stage3_allgather_sequential=sequential)
        params[0].all_gather_coalesced(params, quantize=True).wait()
        assert_gathered(params, gathered)

    def test_quantized_before(self):
        params, gathered = partitioned_parameters(torch.float16, stage3_allgather_sequential=True)
        for param in params:
            quantize_partition(param)
        params[0].all_gather_coalesced(params, quantize=True).wait()
        assert_gathered(params, gathered)

    @pytest.mark.parametrize("into_tensor", [True, False])
    @pytest.mark.parametrize("coalesced", [True, False])
    def test_blocking(self, coalesced, into_tensor):
        with mock.patch("deepspeed.comm.has_all_gather_into_tensor", return_value=into_tensor):
            params, gathered = partitioned_parameters(torch.float16)
        for param in params:
            quantize_partition(param)
        # A gather of one parameter is sequential
        for params_of_call in [params] if coalesced else [[param] for param in params]:
            params[0].all_gather(param_list=params_of_call)
        assert_gathered(params, gathered)

    def test_training(self):
        torch.manual_seed(0)
        sizes = [(64, 512), (512, 512), (512, 16)]
        model = torch.nn.Sequential(*[torch.nn.Linear(*size, bias=False) for size in sizes])
        inputs = torch.randn(8, 64)
        with torch.no_grad():
            expected = model(inputs)
        engine, *_ = deepspeed.initialize(model=model, config=config())
        losses = []
        for step in range(5):
            output = engine(inputs)
            if step == 0:
                error = (output - expected).abs().max() / expected.abs().max()
                assert 0 < error < 0.05  # the weights have been quantized
            loss = (output - 1).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2
