# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import math
import os
import struct
import subprocess
import sys

import pytest
import torch

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.inference.quantization.utils import DeQuantizer, Quantizer
from deepspeed.ops.op_builder import QuantizerBuilder
from deepspeed.ops.op_builder.all_ops import ALL_OPS

if get_accelerator().device_name() != "cpu":
    pytest.skip("the accelerator is not the CPU", allow_module_level=True)
INF = math.inf
NAN = math.nan


@pytest.fixture(scope="module")
def op():
    return QuantizerBuilder().load()


def float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def divide(numerator, denominator):
    """Division of floats, also by zero."""
    if denominator == 0:
        return math.copysign(INF, numerator) * math.copysign(1, denominator)
    return float32(numerator / denominator)


def scalar_params(values, bits, symmetric):
    """What the values of a group are multiplied with, after an offset was subtracted."""
    numbers = [abs(value) if symmetric else value for value in values if not math.isnan(value)]
    high = max(numbers, default=-INF)
    low = -high if symmetric else min(numbers, default=INF)
    scale = 1.0 if high == low else divide(2.0**bits, float32(high - low))
    offset = 0.0 if symmetric else float32(high + low) / 2
    return scale, offset


def scalar_level(value, scale, offset, bits):
    level = float32(float32(value - offset) * scale)
    if math.isnan(level):
        return 0
    return round(min(max(level, -2**(bits - 1)), 2**(bits - 1) - 1))


def pack(levels, bits):
    if bits == 4:
        levels = [(first & 15) << 4 | second & 15 for first, second in zip(levels[::2], levels[1::2])]
    return torch.tensor(levels, dtype=torch.int32).to(torch.int8)


def unpack(packed, bits):
    levels = packed.flatten().tolist()
    if bits == 4:
        levels = [level for pair in levels for level in (pair >> 4, (pair + 8) % 16 - 8)]
    return levels


def scalar_quantize(tensor, groups, bits, symmetric):
    """One value after the other, in Python's floats, rounded to single precision after each operation."""
    values = tensor.flatten().tolist()
    size = len(values) // groups
    levels, params = [], []
    for begin in range(0, len(values), size):
        group = values[begin:begin + size]
        scale, offset = scalar_params(group, bits, symmetric)
        levels += [scalar_level(value, scale, offset, bits) for value in group]
        params.append([divide(1, scale)] if symmetric else [divide(1, scale), offset])
    return pack(levels, bits), torch.tensor(params)


def scalar_dequantize(packed, params, groups, bits, dtype):
    levels = unpack(packed, bits)
    size = len(levels) // groups
    values = []
    for index, level in enumerate(levels):
        group = params[index // size].tolist()
        value = float32(level * group[0])
        values.append(value if len(group) == 1 else float32(value + group[1]))
    return torch.tensor(values, dtype=torch.float32).to(dtype)


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def quantization_type(op, symmetric):
    return op.Symmetric if symmetric else op.Asymmetric


def check_quantize(op, tensor, groups, bits, symmetric):
    packed, params = op.quantize(tensor, groups, bits, quantization_type(op, symmetric))
    expected_packed, expected_params = scalar_quantize(tensor, groups, bits, symmetric)
    assert_same(packed, expected_packed.view(packed.shape))
    assert_same(params, expected_params)


def unaligned(tensor, offset):
    """A copy whose first element has the given offset in its storage."""
    storage = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype)
    storage[offset:] = tensor.flatten()
    return storage[offset:].view(tensor.shape)


def sizes(bits):
    """Around the sizes of vectors and of the op's tiles, and all of the smallest."""
    around = [size + more for size in (64, 128, 256, 512) for more in range(-3, 4)]
    return [size for size in [*range(1, 40), *around, 1000] if size * bits % 8 == 0]


each_type = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
each_bits = pytest.mark.parametrize("bits", [8, 4])
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])


def dequantize(op, dtype):
    return op.dequantize if dtype == torch.float16 else op.dequantize_fp32


def test_builder():
    assert type(get_accelerator().create_op_builder("QuantizerBuilder")) is QuantizerBuilder
    assert QuantizerBuilder.NAME in ALL_OPS
    assert QuantizerBuilder.NAME == "quantizer"


@pytest.mark.parametrize("package, beside", [
    ("deepspeed.ops.op_builder", {}),
    ("op_builder", {
        "op_builder": "ops/op_builder",
        "accelerator": "accelerator"
    }),
])
def test_builder_is_found_in_an_installation_and_to_install(package, beside, tmp_path):
    """setup.py finds the builders in op_builder, which stands beside deepspeed in a checkout, and nowhere else."""
    for name, folder in {"deepspeed": ".", **beside}.items():
        os.symlink(os.path.join(os.path.dirname(deepspeed.__file__), folder), tmp_path / name)
    show = f"from {package}.all_ops import ALL_OPS; print(type(ALL_OPS['quantizer']).__module__)"
    output = subprocess.run([sys.executable, "-c", show],
                            cwd=tmp_path,
                            env=dict(os.environ, PYTHONPATH=str(tmp_path), DS_ACCELERATOR="cpu"),
                            stdout=subprocess.PIPE,
                            check=True,
                            text=True).stdout
    assert output.splitlines()[-1] == f"{package}.cpu.quantizer"


@each_bits
@each_type
def test_quantize(op, bits, symmetric):
    torch.manual_seed(0)
    for size in sizes(bits):
        for groups in (1, 3):
            tensor = unaligned(torch.randn(groups, size).half(), offset=size % 4)
            check_quantize(op, tensor, groups, bits, symmetric)


@each_bits
@each_type
@pytest.mark.parametrize("shape, groups", [((48, ), 6), ((4, 6, 8), 3), ((3, 16), 12)])
def test_quantize_shapes(op, bits, symmetric, shape, groups):
    tensor = torch.randn(shape).half()
    packed, params = op.quantize(tensor, groups, bits, quantization_type(op, symmetric))
    assert packed.shape == (*shape[:-1], shape[-1] * bits // 8) and packed.dtype == torch.int8
    assert params.shape == (groups, 1 if symmetric else 2) and params.dtype == torch.float32
    check_quantize(op, tensor, groups, bits, symmetric)
    assert op.dequantize(packed, params, groups, bits, quantization_type(op, symmetric)).shape == shape


@each_bits
@each_type
@pytest.mark.parametrize(
    "kinds",
    [
        [0.0],
        [-0.0],
        [0.0, -0.0],
        [0.25],
        [-0.25],
        [5, 5.5, 6],
        [-5, -5.5, -6],
        [-0.0, 5],
        [0.0, -5],
        [2**-24, -2**-24, 0],
        [2**-24],
        [65504, -65504, 1],
        [INF, 1, -1],
        [-INF, 1, -1],
        [INF, -INF, 0],
        [INF],
        [-INF],
        [NAN, 1, -1],
        [NAN, 2, 3],
        [NAN, -2, -3],
        [NAN],
        [NAN, INF, 1],
        [NAN, -INF, 1],
        [NAN, 0],
    ],
)
def test_quantize_special_values(op, bits, symmetric, kinds):
    for size in (8, 70, 300):
        for position in (0, size // 2, size - 1):
            # The first of them alone, in a vector or after the last whole one, between groups of other values.
            tensor = torch.ones(3, size).half()
            tensor[1] = torch.tensor(kinds[1:] or kinds).repeat(size)[:size]
            tensor[1, position] = kinds[0]
            check_quantize(op, tensor, 3, bits, symmetric)


@each_bits
def test_quantize_rounds_ties_to_even(op, bits):
    top = 2**(bits - 1) - 1
    ties = [level + 0.5 for level in range(-top - 1, top)]
    tensor = torch.tensor([*ties, -top - 1] + [0] * (len(ties) % 2 + 1)).half()[:len(ties) + 1]
    packed, params = op.quantize(tensor, 1, bits, op.Symmetric)
    assert params.item() == 1  # or there are no ties
    assert unpack(packed, bits)[:len(ties)] == [round(tie) for tie in ties]
    assert {level % 2 for level in unpack(packed, bits)[:len(ties) - 1]} == {0}


@each_bits
@each_type
@each_dtype
def test_dequantize(op, bits, symmetric, dtype):
    torch.manual_seed(0)
    for size in sizes(bits):
        for groups in (1, 3):
            packed = torch.randint(-128, 128, (groups * size * bits // 8, ), dtype=torch.int8)
            packed = unaligned(packed, offset=size % 4)
            params = torch.randn(groups, 1 if symmetric else 2)
            values = dequantize(op, dtype)(packed, params, groups, bits, quantization_type(op, symmetric))
            assert_same(values, scalar_dequantize(packed, params, groups, bits, dtype))


@each_bits
@each_type
@each_dtype
@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 2.0**-24, 1e4, 3e38, INF, -INF, NAN])
def test_dequantize_special_params(op, bits, symmetric, dtype, scale):
    packed = torch.arange(-128, 128).to(torch.int8)
    params = torch.tensor([[scale] if symmetric else [scale, 1.5]])
    values = dequantize(op, dtype)(packed, params, 1, bits, quantization_type(op, symmetric))
    levels = torch.tensor(unpack(packed, bits), dtype=torch.float32)
    expected = levels * params[0, 0]
    assert_same(values, (expected if symmetric else expected + 1.5).to(dtype))


@each_bits
@each_type
def test_dequantize_takes_flat_params(op, bits, symmetric):
    tensor = torch.randn(6, 32).half()
    kind = quantization_type(op, symmetric)
    packed, params = op.quantize(tensor, 6, bits, kind)
    assert_same(op.dequantize(packed, params.view(-1), 6, bits, kind), op.dequantize(packed, params, 6, bits, kind))


@each_bits
@each_type
@each_dtype
def test_round_trip(op, bits, symmetric, dtype):
    torch.manual_seed(0)
    tensor = torch.randn(16, 500).half() * torch.logspace(-3, 3, 16).view(16, 1).half()
    tensor[3] = 0
    tensor[4] = 0.125
    kind = quantization_type(op, symmetric)
    packed, params = op.quantize(tensor, 16, bits, kind)
    error = (dequantize(op, dtype)(packed, params, 16, bits, kind).float() - tensor.float()).abs()

    step = params[:, :1]
    # There is one level less above zero than below it: what is above the highest is off by up to a step.
    offset = 0 if symmetric else params[:, 1:]
    clamped = tensor.float() - offset > (2**(bits - 1) - 1.5) * step
    rounding = tensor.float().abs().amax(dim=1, keepdim=True) * 2**-(10 if dtype == torch.float16 else 20)
    assert clamped.sum() < tensor.numel() / 10
    assert torch.all(error <= torch.where(clamped, step, step / 2) + rounding)
    assert error[3].eq(0).all()
    if not symmetric:  # the offset is its value
        assert error[4].eq(0).all()


@each_bits
@each_type
def test_a_group_with_an_infinity_becomes_nan(op, bits, symmetric):
    tensor = torch.ones(3, 64).half()
    tensor[1, 7] = INF
    kind = quantization_type(op, symmetric)
    packed, params = op.quantize(tensor, 3, bits, kind)
    values = op.dequantize(packed, params, 3, bits, kind)
    assert values[1].isnan().all()
    assert values[[0, 2]].isfinite().all()


@each_bits
@each_type
def test_no_elements(op, bits, symmetric):
    kind = quantization_type(op, symmetric)
    packed, params = op.quantize(torch.empty(0).half(), 3, bits, kind)
    assert packed.shape == (0, )
    assert_same(params, torch.tensor([[1.0] if symmetric else [1.0, 0.0]] * 3))
    assert op.dequantize(packed, params, 3, bits, kind).shape == (0, )


@each_bits
@each_type
def test_groups_do_not_depend_on_each_other_or_on_threads(op, bits, symmetric):
    torch.manual_seed(0)
    kind = quantization_type(op, symmetric)
    tensor = torch.randn(60, 8000).half()
    packed, params = op.quantize(tensor, 60, bits, kind)
    values = op.dequantize(packed, params, 60, bits, kind)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert_same(op.quantize(tensor, 60, bits, kind), [packed, params])
        assert_same(op.dequantize(packed, params, 60, bits, kind), values)
    finally:
        torch.set_num_threads(threads)
    for group in (0, 1, 31, 59):
        group_packed, group_params = op.quantize(tensor[group], 1, bits, kind)
        assert_same(packed[group], group_packed)
        assert_same(params[group], group_params[0])
        assert_same(values[group], op.dequantize(group_packed, group_params, 1, bits, kind))
    check_quantize(op, tensor[31], 1, bits, symmetric)


@each_bits
@each_type
@pytest.mark.parametrize("pipeline, nodes, devices, per_slice", [(1, 1, 1, 5), (1, 2, 4, 1), (1, 2, 4, 3),
                                                                 (2, 3, 2, 1), (3, 2, 3, 2), (2, 1, 4, 2)])
def test_swizzle_quant(op, bits, symmetric, pipeline, nodes, devices, per_slice):
    torch.manual_seed(0)
    kind = quantization_type(op, symmetric)
    tensor = torch.randn(nodes, devices, pipeline, per_slice, 38).half()
    groups = tensor.numel() // 38
    packed, scales = op.swizzle_quant(tensor.view(groups, 38), groups, bits, kind, pipeline, nodes, devices)
    expected_packed, expected_scales = op.quantize(
        tensor.permute(2, 1, 0, 3, 4).contiguous().view(-1), groups, bits, kind)
    assert_same(packed, expected_packed)
    assert_same(scales, expected_scales)


def test_swizzle_quant_of_the_documented_example(op):
    """2 nodes of 4 devices: partition 0 is followed by partition 4."""
    tensor = torch.arange(1, 9).view(8, 1).expand(8, 16).contiguous().half()
    _, scales = op.swizzle_quant(tensor, 8, 8, op.Symmetric, 1, 2, 4)
    assert (scales.flatten() * 128).round().tolist() == [1, 5, 2, 6, 3, 7, 4, 8]


@each_bits
@each_type
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("in_groups, out_groups", [(6, 6), (12, 3), (3, 12), (4, 6), (1, 1)])
def test_quantized_reduction(op, bits, symmetric, devices, in_groups, out_groups):
    torch.manual_seed(0)
    kind = quantization_type(op, symmetric)
    tensors = torch.randn(devices, 12 * 46).half() * 1000
    tensors[0, 3] = INF if devices == 3 else 0
    packed, scales = op.quantize(tensors, devices * in_groups, bits, kind)
    result, result_scales = op.quantized_reduction(packed.view(-1), scales, devices * in_groups, out_groups, bits,
                                                   kind, devices)

    total = torch.zeros(12 * 46).half()
    for values in op.dequantize(packed, scales, devices * in_groups, bits, kind):
        total = total + values  # in half precision, one device after the other
    expected, expected_scales = op.quantize(total, out_groups, bits, kind)
    assert_same(result, expected)
    assert_same(result_scales, expected_scales)
    assert total.isnan().any() == (devices == 3)


def test_quantized_reduction_overflows_to_infinity(op):
    packed, scales = op.quantize(torch.full((2, 32), 60000.0).half(), 2, 8, op.Asymmetric)
    result, result_scales = op.quantized_reduction(packed.view(-1), scales, 2, 1, 8, op.Asymmetric, 2)
    assert op.dequantize(result, result_scales, 1, 8, op.Asymmetric).eq(INF).all()


def half(*shape):
    return torch.ones(shape).half()


def int8(*shape):
    return torch.ones(shape).to(torch.int8)


def quantize_arguments(tensor=None, groups=4, bits=8):
    return half(4, 16) if tensor is None else tensor, groups, bits


@pytest.mark.parametrize("arguments, message", [
    (quantize_arguments(half(4, 16).to("meta")), "input_vals must be on the CPU, but is on meta"),
    (quantize_arguments(torch.ones(4, 16)), "input_vals must be Half, but is Float"),
    (quantize_arguments(half(4, 16).bfloat16()), "input_vals must be Half, but is BFloat16"),
    (quantize_arguments(half(16, 4).t()), "input_vals must be contiguous"),
    (quantize_arguments(half()), "input_vals must have at least one dimension"),
    (quantize_arguments(groups=0), "groups must be positive, but is 0"),
    (quantize_arguments(groups=-1), "groups must be positive, but is -1"),
    (quantize_arguments(half(0), groups=0), "groups must be positive, but is 0"),
    (quantize_arguments(groups=7), "64 elements do not divide into 7 groups"),
    (quantize_arguments(half(6), groups=2, bits=4), "a group must have an even number of elements"),
    (quantize_arguments(half(4, 5), groups=1, bits=4), "the last dimension of input_vals must be even, but is 5"),
    (quantize_arguments(bits=2), "num_bits must be 8 or 4, but is 2"),
])
def test_quantize_errors(op, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        op.quantize(*arguments, op.Symmetric)


@each_dtype
@pytest.mark.parametrize("packed, params, groups, bits, message", [
    (int8(4, 16).to("meta"), torch.ones(4, 1), 4, 8, "quantized_data must be on the CPU"),
    (half(4, 16), torch.ones(4, 1), 4, 8, "quantized_data must be Char, but is Half"),
    (int8(16, 4).t(), torch.ones(4, 1), 4, 8, "quantized_data must be contiguous"),
    (int8(4, 16), torch.ones(4, 1).half(), 4, 8, "params must be Float, but is Half"),
    (int8(4, 16), torch.ones(8, 1)[::2], 4, 8, "params must be contiguous"),
    (int8(4, 16), torch.ones(4, 1).to("meta"), 4, 8, "params must be on the CPU"),
    (int8(4, 16), torch.ones(4, 2), 4, 8, "params must have 4 elements for 4 groups, but has 8"),
    (int8(4, 16), torch.ones(7, 1), 7, 8, "64 elements do not divide into 7 groups"),
    (int8(4, 16), torch.ones(0, 1), 0, 8, "groups must be positive, but is 0"),
    (int8(3), torch.ones(2, 1), 2, 4, "a group must have an even number of elements"),
    (int8(4, 16), torch.ones(4, 1), 4, 3, "num_bits must be 8 or 4, but is 3"),
])
def test_dequantize_errors(op, dtype, packed, params, groups, bits, message):
    with pytest.raises(RuntimeError, match=message):
        dequantize(op, dtype)(packed, params, groups, bits, op.Symmetric)


@pytest.mark.parametrize("tensor, groups, layout, message", [
    (half(8, 16).float(), 8, (1, 2, 4), "input_vals must be Half, but is Float"),
    (half(8, 16), 0, (1, 2, 4), "groups must be positive, but is 0"),
    (half(8, 16), 8, (1, 0, 4), "must be positive, but are 1, 0 and 4"),
    (half(8, 16), 4, (1, 2, 4), "4 groups do not divide into 1 slices .* of 8 partitions"),
    (half(8, 16), 8, (2, 2, 4), "8 groups do not divide into 2 slices .* of 8 partitions"),
    (half(8, 3), 8, (1, 2, 4), "a group must have an even number of elements"),
])
def test_swizzle_quant_errors(op, tensor, groups, layout, message):
    with pytest.raises(RuntimeError, match=message):
        op.swizzle_quant(tensor, groups, 4, op.Symmetric, *layout)


@pytest.mark.parametrize("packed, scales, groups, devices, message", [
    (half(64), torch.ones(4, 1), (4, 2), 2, "input_vals must be Char, but is Half"),
    (int8(64), torch.ones(4, 1), (4, 2), 0, "devices_per_node must be positive, but is 0"),
    (int8(63), torch.ones(4, 1), (4, 2), 2, "last dimension of input_vals, 63, does not divide by 2 devices"),
    (int8(64), torch.ones(3, 1), (3, 2), 2, "3 groups .in_groups. do not divide by 2 devices"),
    (int8(64), torch.ones(0, 1), (0, 2), 2, "in_groups must be positive, but is 0"),
    (int8(64), torch.ones(4, 1), (4, 0), 2, "out_groups must be positive, but is 0"),
    (int8(64), torch.ones(4, 1), (4, 5), 2, "64 elements do not divide into 5 groups .out_groups."),
    (int8(64), torch.ones(2, 1), (4, 2), 2, "input_scales must have 4 elements for 4 groups, but has 2"),
    (int8(64), torch.ones(4, 1).double(), (4, 2), 2, "input_scales must be Float, but is Double"),
])
def test_quantized_reduction_errors(op, packed, scales, groups, devices, message):
    with pytest.raises(RuntimeError, match=message):
        op.quantized_reduction(packed, scales, *groups, 4, op.Symmetric, devices)


@each_bits
def test_dequantize_of_inference(bits):
    """Dequantization in half precision uses the op, in single precision it doesn't."""
    torch.manual_seed(0)
    config = {"num_bits": bits, "symmetric": False, "group_size": 32, "group_dim": 1, "q_type": "int"}
    quantized, scale, low = Quantizer(config).quantize(torch.randn(6, 128).half())
    values = DeQuantizer(config, torch.float16).dequantize(quantized, scale, low)
    expected = DeQuantizer(config, torch.float32).dequantize(quantized, scale, low)
    assert values.dtype == torch.float16
    torch.testing.assert_close(values.float(), expected, rtol=2**-9, atol=2**-8)


@pytest.mark.parametrize("name, levels", [
    ("dequantize_int8_to_half_experimental", [0, 1, 127, 128, 254, 255]),
    ("dequantize_int4_to_half_experimental", [0, 0, 0, 1, 7, 15, 8, 0, 15, 14, 15, 15]),
])
def test_experimental_dequantize(op, name, levels):
    data = torch.tensor([[0, 1, 127], [128, 254, 255]], dtype=torch.uint8)
    scale = torch.tensor([[3.0], [0.7]]).half()
    low = torch.tensor([[-1.5], [2.25]]).half()
    values = getattr(op, name)(data, scale, low, 2, len(levels) // 2)
    assert_same(values, torch.tensor(levels).half().view(2, -1) / scale + low)
    with pytest.raises(RuntimeError, match="data_in has .* values, but 3 groups"):
        getattr(op, name)(data, scale, low, 3, len(levels) // 2)
    with pytest.raises(RuntimeError, match="scale_buffer must be Half, but is Float"):
        getattr(op, name)(data, scale.float(), low, 2, len(levels) // 2)
