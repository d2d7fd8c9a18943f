# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What DeepSpeed can do with a model, feature by feature, and how zero-sized parameters are to take it: unnoticed."""

import tempfile
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.utils import set_z3_leaf_module, set_z3_leaf_modules
from unit.runtime.zero.zero_sized import (SHAPES, WIDTH, EmptyHead, LinearWithPlaceholders, Placeholders,
                                          RankZeroAdapter, batch, config, skip_without_precision, step)

STEPS = 4
SWAP = "where tensors are swapped to"  # stands for a temporary folder


class Block(nn.Module):
    """A module of modules, whose forward may be checkpointed or compiled, and may change its order."""

    def __init__(self, zero_sized, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.first = LinearWithPlaceholders(*SHAPES if zero_sized else ())
        self.middle = nn.ModuleList([Placeholders(*SHAPES), EmptyHead(), RankZeroAdapter()] if zero_sized else [])
        self.last = nn.Linear(WIDTH, WIDTH)

    def layers(self):
        return [self.first, *self.middle, self.last]

    def run(self, x):
        for layer in self.layers():
            x = layer(x)
        return x

    def forward(self, x):
        if self.reentrant is None:
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=self.reentrant)


class Changing(Block):
    """Runs its modules in another order in every other forward."""
    forwards = 0

    def layers(self):
        self.forwards += 1
        return super().layers()[::-1 if self.forwards % 2 else 1]


class Unused(Block):
    """Has parameters that no loss depends on."""

    def __init__(self, zero_sized):
        super().__init__(zero_sized)
        self.unused = Block(zero_sized)


class Shared(Block):
    """Owns parameters that its submodules own too, sized or not, and that one of its modules borrows."""

    def __init__(self, zero_sized):
        super().__init__(zero_sized)
        self.last.weight = self.first.weight
        if zero_sized:
            adapter = RankZeroAdapter()
            adapter.down.weight = self.middle[2].down.weight
            adapter.up.weight = self.middle[2].up.weight
            self.middle.append(adapter)


class Borrowing(Block):
    """Uses parameters of its submodules in its own forward."""

    def __init__(self, zero_sized):
        super().__init__(zero_sized)
        self.borrowed = [self.first.weight, *self.middle.parameters()]
        for parameter in self.borrowed:
            deepspeed.zero.register_external_parameter(self, parameter)

    def run(self, x):
        return super().run(x) + sum(parameter.sum() for parameter in self.borrowed)


def model(zero_sized, block=Block, **how):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block(zero_sized, **how), nn.Linear(WIDTH, WIDTH))


def is_zero_sized(parameter):
    return getattr(parameter, "ds_numel", parameter.numel()) == 0


def all_parameters(model):
    return {"model_parameters": list(model.parameters())}


def groups(*order):
    """Arguments that put the sized parameters in one group and the others in another, if there are any."""

    def arguments(model):
        members = {False: [], True: []}
        for parameter in model.parameters():
            members[is_zero_sized(parameter)].append(parameter)
        return {
            "model_parameters": [{
                "params": members[zero_sized],
                "lr": 2e-2 if zero_sized else 1e-2
            } for zero_sized in order if members[zero_sized]]
        }

    return arguments


def client(optimizer, **how):
    return lambda model: {"optimizer": optimizer(model.parameters(), lr=1e-2, **how)}


def client_muon(model):
    groups = {True: [], False: []}
    for parameter in model.parameters():
        parameter.use_muon = len(getattr(parameter, "ds_shape", parameter.shape)) > 1
        groups[parameter.use_muon].append(parameter)
    groups = [{"params": members, "use_muon": use_muon, "lr": 1e-2} for use_muon, members in groups.items()]
    return {"optimizer": MuonWithAuxAdam(groups)}


def optimizer(kind, **parameters):
    return {"optimizer": {"type": kind, "params": {"lr": 1e-2, **parameters}}}


def zero(**options):
    return {"zero_optimization": options}


def offload(device, what, **options):
    path = {"nvme_path": SWAP} if device == "nvme" else {}
    return zero(**{f"offload_{what}": {"device": device, "pin_memory": False, **path, **options}})


def zenflow(**options):
    return zero(zenflow={
        "topk_ratio": 0.25,
        "select_strategy": "step",
        "select_interval": 2,
        "update_interval": 2,
        **options
    })


def precision(name, **options):
    return {name: {"enabled": True, **options}}


ADAM = optimizer("Adam")  # DeepSpeedCPUAdam, where the optimizer is offloaded
CLIENT = {"optimizer": None, "zero_force_ds_cpu_optimizer": False}  # the client passes its own
OFFLOAD = offload("cpu", "optimizer")
NVME = [offload("nvme", "optimizer"), offload("nvme", "param", buffer_size=1000)]
SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}}}

# The optimizer's states can be offloaded only where its class is FusedAdam.
OFFLOADED = [
    OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer
]


def step_and_offload(engine, x):
    loss = step(engine, x)
    engine.offload_states(include=OFFLOADED)
    engine.reload_states()
    return loss


def step_and_evaluate(engine, x):
    loss = step(engine, x)
    engine.eval()
    infer(engine, x)
    engine.train()
    return loss


def infer(engine, x):
    with torch.no_grad():
        return engine(x).sum().item()


def step_in_autocast(engine, x):
    with torch.autocast(get_accelerator().device_name(), torch.bfloat16):
        loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def step_without_sync(engine, x):
    with engine.no_sync():
        engine.backward(engine(x).float().square().mean())
    return step(engine, x)


def gather(choose=list, modifier_rank=None, nested=False):
    """A step that gathers some of the parameters and, as the modifier, changes those that have elements."""

    def gather_and_step(engine, x):
        parameters = choose(engine.module.parameters())
        parameters, others = (parameters[::2], parameters[1::2]) if nested else (parameters, [])
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank):
            assert all(parameter.shape == parameter.ds_shape for parameter in parameters)
            with deepspeed.zero.GatheredParameters(others, modifier_rank=modifier_rank, enabled=nested):
                assert all(parameter.shape == parameter.ds_shape for parameter in others)
            if modifier_rank == dist.get_rank():
                for parameter in parameters:
                    parameter.data.mul_(0.9)
        return step(engine, x)

    return gather_and_step


def only_zero_sized(parameters):
    return [parameter for parameter in parameters if is_zero_sized(parameter)]


def register_late_parameters(model):
    """Registers parameters after the modules were made."""
    model[1].last.register_parameter("late", nn.Parameter(torch.ones(WIDTH)))
    if len(model[1].middle):
        model[1].last.register_parameter("late_placeholder", nn.Parameter(torch.zeros(0, 3)))
    model[1].last.register_forward_hook(lambda module, _, output: output * module.late + sum(
        parameter.sum() for name, parameter in module.named_parameters() if name == "late_placeholder"))


@dataclass(frozen=True)
class Feature:
    """A feature, and how to train a model with it."""
    name: str
    stages: tuple = (0, 1, 2, 3)
    options: list = ()  # what is special in the configuration
    arguments: Callable = all_parameters  # gives arguments of deepspeed.initialize for a model
    broken: tuple = (3, )  # the stages at which DeepSpeed without these patches fails
    build: Callable = model  # makes the model, with or without zero-sized parameters
    zero_init: dict = None  # the options of zero.Init, if the model is made in it
    prepare: Callable = None  # is called with the model before the engine is made
    start: Callable = None  # is called with the engine before it trains
    step: Callable = step  # trains a step and gives the loss
    dtype: torch.dtype = torch.float32
    learns: bool = True
    reference: list = None  # other options for the model without zero-sized parameters
    refused: str = None  # what the engine says instead of training
    only_cuda: bool = False
    op: str = None  # the op that it needs, which may not be compatible with the machine


def configuration(feature, stage, swap, zero_sized):
    options = config(stage=stage, reduce_bucket_size=500, stage3_prefetch_bucket_size=50, allgather_bucket_size=100)
    special = feature.options if zero_sized or feature.reference is None else feature.reference
    for part in deepcopy(list(special)):
        options["zero_optimization"].update(part.pop("zero_optimization", {}))
        options.update(part)
    if options["optimizer"] is None:
        del options["optimizer"]
    for part in options["zero_optimization"].values():
        if isinstance(part, dict) and part.get("nvme_path") == SWAP:
            part["nvme_path"] = swap
    return options


def run(feature, stage, zero_sized):
    """The losses of a training, and the final weights that have elements."""
    with tempfile.TemporaryDirectory() as swap:
        options = configuration(feature, stage, swap, zero_sized)
        skip_without_precision(options)
        torch.manual_seed(7)
        init = {key: swap if value == SWAP else value for key, value in (feature.zero_init or {}).items()}
        with deepspeed.zero.Init(config_dict_or_path=options, enabled=feature.zero_init is not None, **init):
            model = feature.build(zero_sized)
        if feature.prepare:
            feature.prepare(model)
        assert any(map(is_zero_sized, model.parameters())) == zero_sized
        engine, *_ = deepspeed.initialize(model=model, config=options, **feature.arguments(model))
        if feature.start:
            feature.start(engine)
        losses = [feature.step(engine, batch(feature.dtype)) for _ in range(STEPS)]
        weights = []
        for parameter in engine.module.parameters():
            with deepspeed.zero.GatheredParameters(parameter):
                weights.append(parameter.detach().cpu().clone())
        engine.destroy()
        return losses, [weight for weight in weights if weight.numel() > 0]


def check(name, stage):
    """The feature works at this stage, and the same with zero-sized parameters as without."""
    feature = FEATURES[name]
    accelerator = get_accelerator()
    if feature.only_cuda and accelerator.device_name() != "cuda":
        pytest.skip("DeepSpeed has it for CUDA only")
    if feature.op and not accelerator.create_op_builder(feature.op).is_compatible():
        pytest.skip(f"the op {feature.op} is not compatible with this machine")
    if feature.refused:
        with pytest.raises(ValueError, match=feature.refused):
            run(feature, stage, zero_sized=True)
        return
    expected_losses, expected_weights = run(feature, stage, zero_sized=False)
    losses, weights = run(feature, stage, zero_sized=True)
    assert losses == expected_losses
    if feature.learns:
        assert losses[-1] < losses[0], "nothing was learned, so nothing was compared"
    assert len(weights) == len(expected_weights)
    for weight, expected in zip(weights, expected_weights):
        assert torch.equal(weight, expected)


ALL, ZERO, STAGE_3 = (0, 1, 2, 3), (1, 2, 3), (3, )
ROWS = [
    Feature("nothing special"),
    # Optimizers
    Feature("client's torch.optim.AdamW", ALL, [CLIENT], arguments=client(torch.optim.AdamW)),
    Feature("client's DeepSpeedCPUAdam", ZERO, [CLIENT, OFFLOAD], client(DeepSpeedCPUAdam), op="CPUAdamBuilder"),
    Feature("client's DeepSpeedCPUAdagrad",
            ZERO, [CLIENT, OFFLOAD],
            client(DeepSpeedCPUAdagrad),
            op="CPUAdagradBuilder"),
    Feature("client's DeepSpeedCPULion", ZERO, [CLIENT, OFFLOAD], client(DeepSpeedCPULion), op="CPULionBuilder"),
    Feature("client's MuonWithAuxAdam", ZERO, [CLIENT, zero(reduce_scatter=False)], client_muon),
    Feature("configured AdamW", ALL, [optimizer("AdamW", torch_adam=True)]),
    Feature("configured Adagrad", ALL, [optimizer("Adagrad")]),
    Feature("configured Lion", ZERO, [optimizer("Lion"), OFFLOAD], op="CPULionBuilder"),
    Feature("configured Muon", ZERO,
            [optimizer("Muon", torch_adam=True), zero(reduce_scatter=False)]),
    Feature("configured SGD of torch", ALL, [optimizer("SGD"), {
        "zero_allow_untested_optimizer": True
    }]),
    Feature("group of only zero-sized parameters, last", ALL, arguments=groups(False, True), broken=ZERO),
    Feature("group of only zero-sized parameters, first", ALL, arguments=groups(True, False), broken=ZERO),
    Feature("group of only zero-sized parameters, offloaded",
            ZERO, [ADAM, OFFLOAD],
            groups(True, False),
            broken=ZERO,
            op="CPUAdamBuilder"),
    Feature("group of only zero-sized parameters, scheduled", ALL, [SCHEDULER], groups(False, True), broken=ZERO),
    # Offload
    Feature("optimizer offload to CPU", ZERO, [ADAM, OFFLOAD], op="CPUAdamBuilder"),
    Feature("optimizer offload to CPU, partial",
            STAGE_3,
            [ADAM, zero(sub_group_size=20), offload("cpu", "optimizer", ratio=0.5)],
            op="CPUAdamBuilder"),
    Feature("optimizer offload to NVMe", STAGE_3, [ADAM, offload("nvme", "optimizer")], op="AsyncIOBuilder"),
    Feature("optimizer offload to NVMe, pipelined",
            STAGE_3, [ADAM, offload("nvme", "optimizer", pipeline_read=True, pipeline_write=True)],
            op="AsyncIOBuilder"),
    Feature("parameter offload to CPU", STAGE_3, [offload("cpu", "param")]),
    Feature("parameter offload to NVMe", STAGE_3, [offload("nvme", "param", buffer_size=1000)], op="AsyncIOBuilder"),
    Feature("parameter and optimizer offload to CPU",
            STAGE_3, [ADAM, OFFLOAD, offload("cpu", "param")],
            op="CPUAdamBuilder"),
    Feature("parameter and optimizer offload to NVMe", STAGE_3, [ADAM, *NVME], op="AsyncIOBuilder"),
    Feature("offload_states and reload_states", ZERO, step=step_and_offload),
    Feature("SuperOffload", STAGE_3, [ADAM, offload("cpu", "optimizer", super_offload=True)], only_cuda=True),
    Feature("ZenFlow", ZERO, [optimizer("AdamW"), OFFLOAD, zenflow()], only_cuda=True),
    Feature("ZenFlow, overlapped", ZERO,
            [optimizer("AdamW"), OFFLOAD, zenflow(overlap_step=True)], only_cuda=True),
    # Partitions, buckets and collectives
    Feature("sub_group_size 1", STAGE_3, [zero(sub_group_size=1)]),
    Feature("sub_group_size 30", STAGE_3, [zero(sub_group_size=30)]),
    Feature("reduce_bucket_size 1", ZERO, [zero(reduce_bucket_size=1)]),
    Feature("reduce_bucket_size 1, overlapped", ZERO, [zero(reduce_bucket_size=1, overlap_comm=True)]),
    Feature("no contiguous gradients", ZERO, [zero(contiguous_gradients=False)]),
    Feature("no reduce-scatter", ZERO, [zero(reduce_scatter=False)]),
    Feature("round-robin gradients", (1, 2), [zero(round_robin_gradients=True)]),
    Feature("all-gather by broadcast", (1, 2), [zero(allgather_partitions=False)]),
    Feature("all-reduce fetch", STAGE_3, [zero(stage3_use_all_reduce_for_fetch_params=True)]),
    Feature("sequential all-gather", STAGE_3, [zero(stage3_allgather_sequential=True)]),
    # A process can make hpZ's groups only once, so the model without zero-sized parameters trains without hpZ.
    Feature("hpZ", STAGE_3, [zero(zero_hpz_partition_size=2)], reference=[]),
    Feature("persistent parameters", STAGE_3, [zero(stage3_param_persistence_threshold=10_000)]),
    Feature("no prefetch", STAGE_3, [zero(stage3_prefetch_bucket_size=0)]),
    Feature("no reuse", STAGE_3, [zero(stage3_max_reuse_distance=0, stage3_max_live_parameters=0)]),
    Feature("no memory-efficient linear", STAGE_3, [zero(memory_efficient_linear=False)]),
    Feature("gradient accumulation", ALL, [{
        "gradient_accumulation_steps": 2
    }]),
    Feature("gradient clipping", ALL, [{
        "gradient_clipping": 0.1
    }]),
    Feature("no_sync", (0, 1), step=step_without_sync),
    Feature("sanity checks", STAGE_3, [zero(enable_sanity_checks=True)]),
    # Precision
    Feature("bf16", ALL, [precision("bf16")], dtype=torch.bfloat16),
    Feature("bf16, gradients in fp32",
            ZERO, [precision("bf16"), {
                "data_types": {
                    "grad_accum_dtype": "fp32"
                }
            }],
            dtype=torch.bfloat16),
    Feature("bf16, master weights too",
            ZERO, [ADAM, OFFLOAD,
                   precision("bf16", bf16_master_weights_and_grads=True, bf16_optimizer_states=True)],
            dtype=torch.bfloat16,
            op="CPUAdamBuilder"),
    Feature("fp16, dynamic loss scale",
            ALL, [precision("fp16", initial_scale_power=17, hysteresis=1)],
            dtype=torch.float16),
    Feature("torch.autocast", ALL, step=step_in_autocast),
    Feature("torch_autocast", ALL, [{
        "torch_autocast": {
            "enabled": True,
            "dtype": "bfloat16"
        }
    }]),
    # Modules
    Feature("leaf modules by class", STAGE_3, prepare=lambda model: set_z3_leaf_modules(model, [Block])),
    Feature("leaf module by instance", STAGE_3, prepare=lambda model: set_z3_leaf_module(model[1], True)),
    Feature("leaf modules by size", STAGE_3, [zero(stage3_module_granularity_threshold=10_000)]),
    Feature("activation checkpointing", ALL, build=partial(model, reentrant=False)),
    Feature("activation checkpointing, reentrant", ALL, build=partial(model, reentrant=True)),
    Feature("evaluation between steps", ALL, step=step_and_evaluate),
    Feature("inference only", (0, 3), [CLIENT], arguments=lambda model: {}, step=infer, learns=False),
    Feature("torch.compile", ALL, start=lambda engine: engine.compile(backend="aot_eager")),
    Feature("DeepCompile",
            ZERO, [{
                "compile": {
                    "deepcompile": True
                }
            }],
            start=lambda engine: engine.compile(),
            only_cuda=True),
    Feature("GatheredParameters, one", STAGE_3, step=gather(lambda parameters: list(parameters)[-3:-2])),
    Feature("GatheredParameters, many", STAGE_3, step=gather()),
    Feature("GatheredParameters, many, modified", STAGE_3, step=gather(modifier_rank=0)),
    Feature("GatheredParameters, only zero-sized", STAGE_3, step=gather(only_zero_sized)),
    Feature("GatheredParameters, only zero-sized, modified", STAGE_3, step=gather(only_zero_sized, modifier_rank=0)),
    Feature("GatheredParameters, nested", STAGE_3, step=gather(nested=True)),
    Feature("external parameters", ALL, build=partial(model, block=Borrowing)),
    Feature("tied parameters", ALL, build=partial(model, block=Shared)),
    Feature("register_parameter after zero.Init", STAGE_3, zero_init={}, prepare=register_late_parameters),
    Feature("zero.Init", STAGE_3, zero_init={}),
    Feature("zero.Init, remote_device cpu",
            STAGE_3, [ADAM, OFFLOAD, offload("cpu", "param")],
            zero_init={"remote_device": "cpu"},
            op="CPUAdamBuilder"),
    Feature("zero.Init, remote_device nvme",
            STAGE_3, [ADAM, *NVME],
            zero_init={"remote_device": "nvme"},
            op="AsyncIOBuilder"),
    Feature("gradients that are None", ALL, build=partial(model, block=Unused)),
    Feature("modules in a changing order", ALL, build=partial(model, block=Changing)),
    Feature("only zero-sized parameters",
            ZERO,
            build=lambda zero_sized: Placeholders(*SHAPES),
            refused="There is nothing to optimize",
            broken=ZERO),
]
FEATURES = {feature.name: feature for feature in ROWS}
