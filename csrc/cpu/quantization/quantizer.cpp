// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#include "group_quantizer.h"

#include <ATen/Parallel.h>
#include <torch/extension.h>
#include <memory>
#include <vector>

using cpu_quantizer::Half;
using cpu_quantizer::Type;

namespace {

template <Type type>
using TypeConstant = std::integral_constant<Type, type>;

template <int num_bits>
using BitsConstant = std::integral_constant<int, num_bits>;

// Calls `kernel` with the type and the number of bits as compile-time constants.
template <typename Kernel>
void dispatch(Type type, int64_t num_bits, const Kernel& kernel)
{
    if (type == Type::Symmetric) {
        if (num_bits == 8) {
            kernel(TypeConstant<Type::Symmetric>(), BitsConstant<8>());
        } else {
            kernel(TypeConstant<Type::Symmetric>(), BitsConstant<4>());
        }
    } else {
        if (num_bits == 8) {
            kernel(TypeConstant<Type::Asymmetric>(), BitsConstant<8>());
        } else {
            kernel(TypeConstant<Type::Asymmetric>(), BitsConstant<4>());
        }
    }
}

// Calls `kernel` for each group, from several threads if there is work for them.
template <typename Kernel>
void for_each_group(int64_t groups, int64_t elems_per_group, const Kernel& kernel)
{
    const int64_t elems = std::max<int64_t>(elems_per_group, 1);
    at::parallel_for(
        0, groups, at::divup(at::internal::GRAIN_SIZE, elems), [&](int64_t begin, int64_t end) {
            for (int64_t group = begin; group < end; ++group) { kernel(group); }
        });
}

void check_tensor(const at::Tensor& tensor, const char* name, at::ScalarType dtype)
{
    TORCH_CHECK(tensor.device().is_cpu(), name, " must be on the CPU, but is on ", tensor.device());
    TORCH_CHECK(
        tensor.scalar_type() == dtype, name, " must be ", dtype, ", but is ", tensor.scalar_type());
    TORCH_CHECK(tensor.dim() > 0, name, " must have at least one dimension");
    TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

void check_num_bits(int64_t num_bits)
{
    TORCH_CHECK(num_bits == 8 || num_bits == 4, "num_bits must be 8 or 4, but is ", num_bits);
}

// The elements of each group, of which a whole number of bytes is left.
int64_t check_groups(int64_t elems, const char* name, int64_t groups, int64_t num_bits)
{
    TORCH_CHECK(groups > 0, name, " must be positive, but is ", groups);
    TORCH_CHECK(elems % groups == 0,
                elems,
                " elements do not divide into ",
                groups,
                " groups (",
                name,
                ")");
    const int64_t elems_per_group = elems / groups;
    TORCH_CHECK(elems_per_group * num_bits % 8 == 0,
                "with 4 bits a group must have an even number of elements, but ",
                elems,
                " elements in ",
                groups,
                " groups (",
                name,
                ") have ",
                elems_per_group,
                " each");
    return elems_per_group;
}

int64_t params_per_group(Type type) { return type == Type::Symmetric ? 1 : 2; }

void check_params(const at::Tensor& params, const char* name, int64_t groups, Type type)
{
    check_tensor(params, name, at::kFloat);
    TORCH_CHECK(params.numel() == groups * params_per_group(type),
                name,
                " must have ",
                groups * params_per_group(type),
                " elements for ",
                groups,
                " groups, but has ",
                params.numel());
}

at::Tensor empty_params(int64_t groups, Type type)
{
    return at::empty({groups, params_per_group(type)}, at::dtype(at::kFloat));
}

std::vector<at::Tensor> quantize(const at::Tensor& input_vals,
                                 int64_t groups,
                                 int64_t num_bits,
                                 Type quant_type)
{
    check_tensor(input_vals, "input_vals", at::kHalf);
    check_num_bits(num_bits);
    const int64_t elems_per_group = check_groups(input_vals.numel(), "groups", groups, num_bits);
    auto sizes = input_vals.sizes().vec();
    TORCH_CHECK(sizes.back() * num_bits % 8 == 0,
                "with 4 bits the last dimension of input_vals must be even, but is ",
                sizes.back());
    sizes.back() = sizes.back() * num_bits / 8;

    auto output = at::empty(sizes, at::dtype(at::kChar));
    auto params = empty_params(groups, quant_type);
    const auto* input_data = input_vals.const_data_ptr<Half>();
    auto* output_data = output.mutable_data_ptr<int8_t>();
    auto* params_data = params.mutable_data_ptr<float>();
    dispatch(quant_type, num_bits, [&](auto type_constant, auto bits_constant) {
        constexpr Type type = decltype(type_constant)::value;
        constexpr int bits = decltype(bits_constant)::value;
        for_each_group(groups, elems_per_group, [&](int64_t group) {
            const int64_t begin = group * elems_per_group;
            cpu_quantizer::quantize_group<type, bits>(input_data + begin,
                                                      output_data + begin * bits / 8,
                                                      params_data,
                                                      group,
                                                      elems_per_group);
        });
    });
    return {output, params};
}

template <typename T>
at::Tensor dequantize(const at::Tensor& quantized_data,
                      const at::Tensor& params,
                      int64_t groups,
                      int64_t num_bits,
                      Type quant_type)
{
    check_tensor(quantized_data, "quantized_data", at::kChar);
    check_num_bits(num_bits);
    auto sizes = quantized_data.sizes().vec();
    sizes.back() = sizes.back() * 8 / num_bits;
    auto output = at::empty(sizes, at::dtype(c10::CppTypeToScalarType<T>::value));
    const int64_t elems_per_group = check_groups(output.numel(), "groups", groups, num_bits);
    check_params(params, "params", groups, quant_type);

    const auto* input_data = quantized_data.const_data_ptr<int8_t>();
    const auto* params_data = params.const_data_ptr<float>();
    auto* output_data = output.template mutable_data_ptr<T>();
    dispatch(quant_type, num_bits, [&](auto type_constant, auto bits_constant) {
        constexpr Type type = decltype(type_constant)::value;
        constexpr int bits = decltype(bits_constant)::value;
        for_each_group(groups, elems_per_group, [&](int64_t group) {
            const int64_t begin = group * elems_per_group;
            cpu_quantizer::dequantize_run<type, bits>(input_data + begin * bits / 8,
                                                      output_data + begin,
                                                      params_data,
                                                      group,
                                                      elems_per_group);
        });
    });
    return output;
}

// Quantizes like quantize(), and orders the groups for an all-to-all inside a node followed by one
// between nodes. A tensor is a partition for each device of each node, and a partition is split
// into `pipeline_size` slices. Written are the first slices of all partitions, then the second
// ones, and so on; and among the slices those of the same local device are next to each other, in
// the order of the nodes.
std::vector<at::Tensor> swizzle_quant(const at::Tensor& input_vals,
                                      int64_t groups,
                                      int64_t num_bits,
                                      Type quant_type,
                                      int64_t pipeline_size,
                                      int64_t nodes,
                                      int64_t devices_per_node)
{
    check_tensor(input_vals, "input_vals", at::kHalf);
    check_num_bits(num_bits);
    const int64_t elems_per_group = check_groups(input_vals.numel(), "groups", groups, num_bits);
    TORCH_CHECK(pipeline_size > 0 && nodes > 0 && devices_per_node > 0,
                "pipeline_size, nodes and devices_per_node must be positive, but are ",
                pipeline_size,
                ", ",
                nodes,
                " and ",
                devices_per_node);
    const int64_t partitions = nodes * devices_per_node;
    TORCH_CHECK(groups % (partitions * pipeline_size) == 0,
                groups,
                " groups do not divide into ",
                pipeline_size,
                " slices (pipeline_size) of ",
                partitions,
                " partitions (nodes * devices_per_node)");
    const int64_t groups_per_slice = groups / (partitions * pipeline_size);

    auto output = at::empty({input_vals.numel() * num_bits / 8}, at::dtype(at::kChar));
    auto scales = empty_params(groups, quant_type);
    const auto* input_data = input_vals.const_data_ptr<Half>();
    auto* output_data = output.mutable_data_ptr<int8_t>();
    auto* scales_data = scales.mutable_data_ptr<float>();
    dispatch(quant_type, num_bits, [&](auto type_constant, auto bits_constant) {
        constexpr Type type = decltype(type_constant)::value;
        constexpr int bits = decltype(bits_constant)::value;
        for_each_group(groups, elems_per_group, [&](int64_t group) {
            const int64_t slice = group / groups_per_slice % pipeline_size;
            const int64_t partition = group / groups_per_slice / pipeline_size;
            const int64_t node = partition / devices_per_node;
            const int64_t device = partition % devices_per_node;
            const int64_t out_slice = (slice * devices_per_node + device) * nodes + node;
            const int64_t out_group = out_slice * groups_per_slice + group % groups_per_slice;
            cpu_quantizer::quantize_group<type, bits>(
                input_data + group * elems_per_group,
                output_data + out_group * elems_per_group * bits / 8,
                scales_data,
                out_group,
                elems_per_group);
        });
    });
    return {output, scales};
}

// Adds up the tensors of `devices_per_node` devices, which follow each other in `input_vals`, and
// quantizes the sum.
std::vector<at::Tensor> quantized_reduction(const at::Tensor& input_vals,
                                            const at::Tensor& input_scales,
                                            int64_t in_groups,
                                            int64_t out_groups,
                                            int64_t num_bits,
                                            Type quant_type,
                                            int64_t devices_per_node)
{
    check_tensor(input_vals, "input_vals", at::kChar);
    check_num_bits(num_bits);
    TORCH_CHECK(
        devices_per_node > 0, "devices_per_node must be positive, but is ", devices_per_node);
    auto sizes = input_vals.sizes().vec();
    TORCH_CHECK(sizes.back() % devices_per_node == 0,
                "the last dimension of input_vals, ",
                sizes.back(),
                ", does not divide by ",
                devices_per_node,
                " devices (devices_per_node)");
    TORCH_CHECK(in_groups % devices_per_node == 0,
                in_groups,
                " groups (in_groups) do not divide by ",
                devices_per_node,
                " devices (devices_per_node)");
    sizes.back() /= devices_per_node;
    const int64_t elems = input_vals.numel() / devices_per_node * 8 / num_bits;
    const int64_t in_groups_per_tensor = in_groups / devices_per_node;
    const int64_t elems_per_in_group =
        check_groups(elems, "in_groups", in_groups_per_tensor, num_bits);
    const int64_t elems_per_out_group = check_groups(elems, "out_groups", out_groups, num_bits);
    check_params(input_scales, "input_scales", in_groups, quant_type);

    auto output = at::empty(sizes, at::dtype(at::kChar));
    auto scales = empty_params(out_groups, quant_type);
    const auto* input_data = input_vals.const_data_ptr<int8_t>();
    const auto* input_scales_data = input_scales.const_data_ptr<float>();
    auto* output_data = output.mutable_data_ptr<int8_t>();
    auto* scales_data = scales.mutable_data_ptr<float>();
    dispatch(quant_type, num_bits, [&](auto type_constant, auto bits_constant) {
        constexpr Type type = decltype(type_constant)::value;
        constexpr int bits = decltype(bits_constant)::value;
        // The sum of what a group holds of each device, in the precision of the tensors that were
        // quantized.
        const auto add_group = [&](int64_t device, int64_t begin, int64_t end, Half* sum) {
            const int8_t* device_data = input_data + device * elems * bits / 8;
            const float* device_scales =
                input_scales_data + device * in_groups_per_tensor * params_per_group(type);
            while (begin < end) {
                const int64_t in_group = begin / elems_per_in_group;
                const int64_t size = std::min(end, (in_group + 1) * elems_per_in_group) - begin;
                cpu_quantizer::dequantize_run<type, bits, true>(
                    device_data + begin * bits / 8, sum, device_scales, in_group, size);
                begin += size;
                sum += size;
            }
        };
        for_each_group(out_groups, elems_per_out_group, [&](int64_t group) {
            const int64_t begin = group * elems_per_out_group;
            const auto sum = std::make_unique<Half[]>(elems_per_out_group);
            for (int64_t device = 0; device < devices_per_node; ++device) {
                add_group(device, begin, begin + elems_per_out_group, sum.get());
            }
            cpu_quantizer::quantize_group<type, bits>(
                sum.get(), output_data + begin * bits / 8, scales_data, group, elems_per_out_group);
        });
    });
    return {output, scales};
}

// The format of deepspeed.inference.quantization: unsigned levels, value = level / scale + min_val.
at::Tensor dequantize_to_half(const at::Tensor& levels,
                              const at::Tensor& scale_buffer,
                              const at::Tensor& min_val_buffer,
                              int64_t num_group,
                              int64_t group_size)
{
    check_tensor(scale_buffer, "scale_buffer", at::kHalf);
    check_tensor(min_val_buffer, "min_val_buffer", at::kHalf);
    TORCH_CHECK(num_group > 0 && levels.numel() == num_group * group_size,
                "data_in has ",
                levels.numel(),
                " values, but ",
                num_group,
                " groups (num_group) of ",
                group_size,
                " (group_size) are expected");
    TORCH_CHECK(scale_buffer.numel() == num_group && min_val_buffer.numel() == num_group,
                "scale_buffer and min_val_buffer must have ",
                num_group,
                " elements, but have ",
                scale_buffer.numel(),
                " and ",
                min_val_buffer.numel());
    return levels.view({num_group, group_size})
        .to(at::kHalf)
        .div_(scale_buffer.view({num_group, 1}))
        .add_(min_val_buffer.view({num_group, 1}));
}

at::Tensor dequantize_int8_to_half(const at::Tensor& data_in,
                                   const at::Tensor& scale_buffer,
                                   const at::Tensor& min_val_buffer,
                                   int64_t num_group,
                                   int64_t group_size)
{
    check_tensor(data_in, "data_in", at::kByte);
    return dequantize_to_half(data_in, scale_buffer, min_val_buffer, num_group, group_size);
}

at::Tensor dequantize_int4_to_half(const at::Tensor& data_in,
                                   const at::Tensor& scale_buffer,
                                   const at::Tensor& min_val_buffer,
                                   int64_t num_group,
                                   int64_t group_size)
{
    check_tensor(data_in, "data_in", at::kByte);
    const auto levels = at::stack({data_in.bitwise_right_shift(4), data_in.bitwise_and(0xf)}, -1);
    return dequantize_to_half(levels, scale_buffer, min_val_buffer, num_group, group_size);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    pybind11::enum_<Type>(m, "QuantizationType")
        .value("Symmetric", Type::Symmetric)
        .value("Asymmetric", Type::Asymmetric)
        .export_values();
    m.def("quantize", &quantize);
    m.def("dequantize", &dequantize<Half>);
    m.def("dequantize_fp32", &dequantize<float>);
    m.def("dequantize_int4_to_half_experimental", &dequantize_int4_to_half);
    m.def("dequantize_int8_to_half_experimental", &dequantize_int8_to_half);
    m.def("swizzle_quant", &swizzle_quant);
    m.def("quantized_reduction", &quantized_reduction);
}
