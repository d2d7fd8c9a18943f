# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Modules with zero-sized parameters, and a comparison with the same model without them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from unit.common import DistributedTest

WIDTH = 8
WIDE = 64  # the quantizer takes partitions whose size is a multiple of 8
SHAPES = [(0, ), (0, WIDTH), (WIDTH, 0), (4, 0, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class ZeroSizedTest(DistributedTest):
    """Runs over gloo and NCCL, on one rank, on two, and on three, which divide no partition evenly."""
    world_size = [1, 2, 3]
    reuse_dist_env = True

    @pytest.fixture(name="backend", autouse=True, params=["gloo", "nccl"])
    def _backend(self, request):
        # A harness that does not choose the backend runs the accelerator's own.
        offered = getattr(DistributedTest, "backends", (get_accelerator().communication_backend_name(), ))
        if request.param not in offered:
            pytest.skip(f"{request.param} is not the backend of the {get_accelerator().device_name()} accelerator")
        return request.param


class Placeholders(nn.Module):
    """Owns only parameters without elements. Their empty sums take part in the result."""

    def __init__(self, *shapes, trainable=True):
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"placeholder_{index}", nn.Parameter(torch.zeros(shape), requires_grad=trainable))

    def forward(self, x):
        for parameter in self.parameters():
            x = x + parameter.sum()
        return x


class EmptyHead(nn.Module):
    """A classification head without labels: its logits have no elements."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 0)

    def forward(self, x):
        return x + self.head(x).sum()


class RankZeroAdapter(nn.Module):
    """A low-rank adapter of rank 0, whose product is a matrix of zeros."""

    def __init__(self, trainable=True):
        super().__init__()
        self.down = nn.Linear(WIDTH, 0, bias=False)
        self.up = nn.Linear(0, WIDTH, bias=False)
        self.requires_grad_(trainable)

    def forward(self, x):
        return x + self.up(self.down(x))


class LinearWithPlaceholders(nn.Module):
    """Owns a weight and a bias, and zero-sized parameters before, between or after them."""

    def __init__(self, *shapes, place="last", trainable=True):
        super().__init__()
        sized = {"weight": nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), "bias": nn.Parameter(torch.randn(WIDTH))}
        names = list(sized)
        for index, shape in enumerate(shapes):
            name = f"placeholder_{index}"
            names.insert({"first": 0, "between": 1, "last": len(names)}[place], name)
            sized[name] = nn.Parameter(torch.zeros(shape), requires_grad=trainable)
        for name in names:
            self.register_parameter(name, sized[name])

    def forward(self, x):
        x = F.linear(x, self.weight, self.bias)
        for name, parameter in self.named_parameters():
            if name not in ("weight", "bias"):
                x = x + parameter.sum()
        return x


def network(*middle, place="between"):
    """Two linear layers, with the modules ``middle`` before, between or after them."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    at = {"first": 0, "between": 1, "last": 2}[place]
    return nn.Sequential(*layers[:at], *middle, *layers[at:])


def wide_network(*shapes, frozen=False):
    """Linear layers of sizes that can be quantized.

    The middle one, which may be frozen, owns zero-sized parameters of the given shapes too.
    """
    model = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE))
    for index, shape in enumerate(shapes):
        model[1].register_parameter(f"placeholder_{index}", nn.Parameter(torch.zeros(shape)))
    model[1].requires_grad_(not frozen)
    return model


def config(dtype=torch.float32, **zero_options):
    """A ZeRO-3 configuration that fetches, releases and prefetches: no parameter of a size is persistent."""
    options = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {
            "type": "Adam",
            "params": {
                "lr": 1e-2,
                "torch_adam": True
            }
        },
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            **zero_options
        },
    }
    if dtype is torch.bfloat16:
        options["bf16"] = {"enabled": True}
    if dtype is torch.float16:
        options["fp16"] = {"enabled": True, "initial_scale_power": 8}
    return options


def skip_without_precision(options):
    """Skip a test in fp16 where DeepSpeed takes no fp16: on CPUs without AVX512-FP16 or its like."""
    if options.get("fp16", {}).get("enabled") and not get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed takes no fp16 on this device, which has no instructions for it")


def engine_of(build, options, zero_init=False):
    """An engine for the model that ``build`` makes from a fixed seed, inside ``zero.Init`` if asked to."""
    skip_without_precision(options)
    options = copy.deepcopy(options)  # older engines take out of it what they have read
    torch.manual_seed(7)
    with deepspeed.zero.Init(config_dict_or_path=options, enabled=zero_init):
        model = build()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options)
    return engine


def batch(dtype):
    """A different input on each rank, of (batch, sequence, features), the same on every call."""
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    return x.to(get_accelerator().current_device_name(), dtype)


def step(engine, x):
    """One forward, backward and optimizer step; returns the loss."""
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def train(build, options, dtype=torch.float32, zero_init=False, steps=4):
    """The losses, and the final weights by name, of a training that records its trace and then follows it."""
    engine = engine_of(build, options, zero_init)
    losses = [step(engine, batch(dtype)) for _ in range(steps)]
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            weights[name] = parameter.detach().cpu().clone()
    engine.destroy()
    return losses, weights


def assert_trains_as_without(build, without, options, dtype=torch.float32, **how):
    """``build`` and ``without``, its model without zero-sized parameters, train bitwise alike.

    The modules that only ``build`` has own no elements, so the weights that have elements pair up in order.
    """
    losses, weights = train(build, options, dtype, **how)
    expected_losses, expected_weights = train(without, options, dtype, **how)
    assert any(weight.numel() == 0 for weight in weights.values()), "this model has no zero-sized parameter"
    assert losses == expected_losses
    assert losses[-1] < losses[0], "nothing was learned, so nothing was compared"
    sized = [weight for weight in weights.values() if weight.numel() > 0]
    assert len(sized) == len(expected_weights)
    for weight, expected in zip(sized, expected_weights.values()):
        assert torch.equal(weight, expected)
    return weights
