// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

// Grouped quantization to 8 or 4 bits. A group of values has one scale, and an offset if it is
// asymmetric:
//
//     level = round((value - offset) * scale)    clamped to the levels of a signed integer
//     value = level * (1 / scale) + offset       1 / scale is what is stored
//
// The scale maps the range of the group on all levels. A tie rounds to the even level, a NaN has no
// part in the range and becomes level 0, and the values of a group with an infinity are NaN once
// they are dequantized. Two 4-bit levels share a byte, the first of them in the upper half.

// Before ATen's vectors are included: they are as wide as the target that the compiler was given.
// Without one of these they are portable C++, or NEON on AArch64.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define CPU_CAPABILITY_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define CPU_CAPABILITY_AVX2
#endif

#include <ATen/cpu/vec/vec.h>
#include <c10/util/Half.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>

namespace cpu_quantizer {

using c10::Half;
using Floats = at::vec::Vectorized<float>;
using Float16s = at::vec::Vectorized<Half>;
using Ints = at::vec::Vectorized<int32_t>;
using Shorts = at::vec::Vectorized<int16_t>;

enum class Type { Symmetric, Asymmetric };

// Levels pass from one step to the next through a buffer of this size. It is even, and it stays in
// the L1 cache.
constexpr int64_t kTile = 256;

// How far ahead of a tile memory is requested, in elements: the hardware's prefetcher stops at the
// end of a page.
constexpr int64_t kAhead = 4096;

constexpr int64_t kCacheLine = 64;

template <typename T>
inline void prefetch(const T* data, int64_t size)
{
#if defined(__GNUC__)
    for (int64_t i = 0; i < size; i += kCacheLine / sizeof(T)) { __builtin_prefetch(data + i); }
#endif
}

template <typename T>
inline void prefetch_to_write(const T* data, int64_t size)
{
#if defined(__GNUC__)
    for (int64_t i = 0; i < size; i += kCacheLine / sizeof(T)) { __builtin_prefetch(data + i, 1); }
#endif
}

struct Range {
    float low;
    float high;
    bool finite;
};

// The range of any group, one value after the other.
template <Type type>
inline Range scalar_range(const Half* values, int64_t size)
{
    constexpr float infinity = std::numeric_limits<float>::infinity();
    Range range{infinity, -infinity, false};
    for (int64_t i = 0; i < size; ++i) {
        const float value = values[i];
        if (std::isnan(value)) { continue; }
        range.low = std::min(range.low, value);
        range.high = std::max(range.high, type == Type::Symmetric ? std::abs(value) : value);
    }
    if (type == Type::Symmetric) { range.low = -range.high; }
    return range;
}

template <typename Op>
inline int16_t reduce(Shorts vector, Op op)
{
    int16_t lanes[Shorts::size()];
    vector.store(lanes);
    int16_t result = lanes[0];
    for (const int16_t lane : lanes) { result = op(result, lane); }
    return result;
}

// The bits of half-precision numbers of one sign are ordered as the numbers are, so that the range
// of a group is found in them without a conversion. Infinities and NaNs are above all numbers:
// scalar_range() sorts them out.
template <Type type>
inline Range group_range(const Half* values, int64_t size)
{
    constexpr int16_t infinity = 0x7c00;
    constexpr int16_t sign = std::numeric_limits<int16_t>::min();
    constexpr int16_t magnitude = std::numeric_limits<int16_t>::max();
    const auto larger = [](int16_t a, int16_t b) { return std::max(a, b); };
    const auto smaller = [](int16_t a, int16_t b) { return std::min(a, b); };
    const auto value = [](int16_t bits) { return float(Half(bits, Half::from_bits())); };

    if (size == 0) { return {0, 0, true}; }
    int64_t i = 0;
    if constexpr (type == Type::Symmetric) {
        Shorts highest_of_lanes(0);
        for (; i + Shorts::size() <= size; i += Shorts::size()) {
            const auto bits = Shorts::loadu(values + i) & Shorts(magnitude);
            highest_of_lanes = at::vec::maximum(highest_of_lanes, bits);
        }
        int16_t highest = reduce(highest_of_lanes, larger);
        for (; i < size; ++i) { highest = std::max<int16_t>(highest, values[i].x & magnitude); }
        if (highest < infinity) { return {-value(highest), value(highest), true}; }
    } else {
        Shorts highest_of_lanes(sign), smallest_of_lanes(magnitude), lowest_of_lanes(sign);
        for (; i + Shorts::size() <= size; i += Shorts::size()) {
            const auto bits = Shorts::loadu(values + i);
            highest_of_lanes = at::vec::maximum(highest_of_lanes, bits);
            smallest_of_lanes = at::vec::minimum(smallest_of_lanes, bits);
            lowest_of_lanes = at::vec::maximum(lowest_of_lanes, bits ^ Shorts(sign));
        }
        int16_t highest = reduce(highest_of_lanes, larger);
        int16_t smallest = reduce(smallest_of_lanes, smaller);
        int16_t lowest = reduce(lowest_of_lanes, larger);
        for (; i < size; ++i) {
            const int16_t bits = values[i].x;
            highest = std::max(highest, bits);
            smallest = std::min(smallest, bits);
            lowest = std::max<int16_t>(lowest, bits ^ sign);
        }
        if (highest < infinity && lowest < infinity) {
            // Below zero is what has the other sign: then no value was positive, or none negative.
            return {value(lowest < 0 ? smallest : lowest ^ sign),
                    value(highest < 0 ? smallest : highest),
                    true};
        }
    }
    return scalar_range<type>(values, size);
}

template <Type type, int num_bits>
struct GroupParams {
    float scale;
    float offset;

    explicit GroupParams(const Range& range)
        : scale(range.high == range.low ? 1.0f : (1 << num_bits) / (range.high - range.low)),
          offset(type == Type::Symmetric ? 0.0f : (range.high + range.low) / 2)
    {
    }

    void store(float* params, int64_t group) const
    {
        if constexpr (type == Type::Symmetric) {
            params[group] = 1 / scale;
        } else {
            params[2 * group] = 1 / scale;
            params[2 * group + 1] = offset;
        }
    }
};

// Levels in the low bits of an integer: 8-bit bytes, or pairs of 4 bits.
template <int num_bits>
inline void pack(const uint32_t* levels, int8_t* packed, int64_t size)
{
    if constexpr (num_bits == 8) {
        for (int64_t i = 0; i < size; ++i) { packed[i] = static_cast<int8_t>(levels[i]); }
    } else {
        for (int64_t i = 0; i < size / 2; ++i) {
            packed[i] = static_cast<int8_t>(levels[2 * i] << 4 | (levels[2 * i + 1] & 0xf));
        }
    }
}

template <int num_bits>
inline void unpack(const int8_t* packed, int32_t* levels, int64_t size)
{
    if constexpr (num_bits == 8) {
        for (int64_t i = 0; i < size; ++i) { levels[i] = packed[i]; }
    } else {
        for (int64_t i = 0; i < size / 2; ++i) {
            levels[2 * i] = packed[i] >> 4;
            levels[2 * i + 1] = static_cast<int8_t>(packed[i] << 4) >> 4;
        }
    }
}

// Quantizes a group, and stores its parameters.
template <Type type, int num_bits>
inline void quantize_group(const Half* values,
                           int8_t* packed,
                           float* params,
                           int64_t group,
                           int64_t size)
{
    constexpr float min_level = -(1 << (num_bits - 1));
    constexpr float max_level = (1 << (num_bits - 1)) - 1;
    // The sum of this and a level is a float whose low bits are the level, rounded as the addition
    // rounds.
    constexpr float to_bits = 3 << 22;

    const Range range = group_range<type>(values, size);
    const GroupParams<type, num_bits> group_params(range);
    group_params.store(params, group);
    const float scale = group_params.scale;
    const float offset = group_params.offset;

    const auto vector_levels = [&](Floats vector) {
        if constexpr (type == Type::Asymmetric) { vector = vector - Floats(offset); }
        // The lowest value of the group is at the lowest level, the highest is one above the
        // highest level.
        return at::vec::clamp_max(vector * Floats(scale), Floats(max_level)) + Floats(to_bits);
    };
    const auto scalar_level = [&](float value) {
        const float level = (value - offset) * scale;
        if (std::isnan(level)) { return 0; }
        return static_cast<int>(std::nearbyint(std::min(std::max(level, min_level), max_level)));
    };

    for (int64_t begin = 0; begin < size; begin += kTile) {
        const int64_t count = std::min(kTile, size - begin);
        const Half* tile = values + begin;
        int8_t* packed_tile = packed + begin * num_bits / 8;
        prefetch(tile + kAhead, count);
        prefetch_to_write(packed_tile + kAhead * num_bits / 8, count * num_bits / 8);

        alignas(kCacheLine) uint32_t levels[kTile];
        int64_t i = 0;
        for (; range.finite && i + Float16s::size() <= count; i += Float16s::size()) {
            const auto [first, second] = at::vec::convert_half_float(Float16s::loadu(tile + i));
            vector_levels(first).store(levels + i);
            vector_levels(second).store(levels + i + Floats::size());
        }
        for (; i < count; ++i) { levels[i] = scalar_level(tile[i]); }
        pack<num_bits>(levels, packed_tile, count);
    }
}

// Dequantizes a run of values of one group: into `values`, or as a sum with what is there, in the
// precision of T.
template <Type type, int num_bits, bool accumulate = false, typename T>
inline void dequantize_run(const int8_t* packed,
                           T* values,
                           const float* params,
                           int64_t group,
                           int64_t size)
{
    const float scale = type == Type::Symmetric ? params[group] : params[2 * group];
    const float offset = type == Type::Symmetric ? 0.0f : params[2 * group + 1];
    using Vector = at::vec::Vectorized<T>;

    const auto vector_values = [&](const int32_t* levels) {
        const auto vector = at::vec::convert<float>(Ints::loadu(levels)) * Floats(scale);
        if constexpr (type == Type::Symmetric) {
            return vector;
        } else {
            return vector + Floats(offset);
        }
    };
    const auto scalar_value = [&](int32_t level) -> float {
        const float value = level * scale;
        return type == Type::Symmetric ? value : value + offset;
    };

    for (int64_t begin = 0; begin < size; begin += kTile) {
        const int64_t count = std::min(kTile, size - begin);
        const int8_t* packed_tile = packed + begin * num_bits / 8;
        T* tile = values + begin;
        prefetch(packed_tile + kAhead * num_bits / 8, count * num_bits / 8);
        prefetch_to_write(tile + kAhead, count);

        alignas(kCacheLine) int32_t levels[kTile];
        unpack<num_bits>(packed_tile, levels, count);
        int64_t i = 0;
        for (; i + Vector::size() <= count; i += Vector::size()) {
            Vector vector;
            if constexpr (std::is_same_v<T, float>) {
                vector = vector_values(levels + i);
            } else {
                vector = at::vec::convert_float_half(vector_values(levels + i),
                                                     vector_values(levels + i + Floats::size()));
            }
            if constexpr (accumulate) { vector = Vector::loadu(tile + i) + vector; }
            vector.store(tile + i);
        }
        for (; i < count; ++i) {
            const T value = static_cast<T>(scalar_value(levels[i]));
            tile[i] = accumulate ? tile[i] + value : value;
        }
    }
}

}  // namespace cpu_quantizer
