// The codecs of mpitrain/compression on the device: the same bits.
#include "stride.h"

// bf16 and fp16: a word a value ---------------------------------------------------------------------------------------

template <class C> __device__ void encode_cast(const float *values, C *words, float *error, i64 count) {
    auto many = [=](i64 i) {
        Vector<float, 4> value = load<4>(values + i), missing;
        Vector<C, 4> word;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            word.at[k] = Cast<C>::from(value.at[k]);
            missing.at[k] = left_out(value.at[k], to_float(word.at[k]));
        }
        store(words + i, word);
        if (error) store(error + i, missing);
    };
    auto one = [=](i64 i) {
        float value = values[i];
        C word = words[i] = Cast<C>::from(value);
        if (error) error[i] = left_out(value, to_float(word));
    };
    for_each<4>(count, common_head<4>(count, values, words, error), grid_thread(), grid_threads(), many, one);
}

// ADDED: onto what is there, or in its place.
template <class C, bool ADDED> __device__ void decode_cast(const C *words, float *values, i64 count) {
    auto one = [=](i64 i) {
        float value = to_float(words[i]);
        values[i] = ADDED ? add(values[i], value) : value;
    };
    auto many = [=](i64 i) {
        Vector<C, 4> word = load<4>(words + i);
        Vector<float, 4> value;
        if (ADDED) value = load<4>(values + i);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float decoded = to_float(word.at[k]);
            value.at[k] = ADDED ? add(value.at[k], decoded) : decoded;
        }
        store(values + i, value);
    };
    for_each<4>(count, common_head<4>(count, values, words), grid_thread(), grid_threads(), many, one);
}

#define CAST(name)                                                                                                     \
    KERNEL encode_##name(const float *values, name *words, float *error, i64 count) {                                  \
        encode_cast(values, words, error, count);                                                                      \
    }                                                                                                                  \
    KERNEL decode_##name(const name *words, float *values, i64 count) {                                                \
        decode_cast<name, false>(words, values, count);                                                                \
    }                                                                                                                  \
    KERNEL add_decoded_##name(const name *words, float *total, i64 count) {                                            \
        decode_cast<name, true>(words, total, count);                                                                  \
    }
CAST(bf16)
CAST(fp16)

// int8 and int4: blocks with a scale each, then the codes ---------------------------------------------------------------
//
// LANES neighbouring threads of a warp work on one block, four values at a time: 32 on the 256 values of int8, 16 on
// the 64 of int4.

struct Int8 {
    enum { BLOCK = 256, LANES = 32, STEPS = 127 };
    typedef u32 Four;  // four codes
    static __device__ i64 place(i64 i) { return i; }
    static __device__ int code(Four four, int k) { return (i8)(four >> 8 * k & 255u); }
    static __device__ Four shifted(int code, int k) { return (u32)(code & 255) << 8 * k; }
    static __device__ i64 num_bytes(i64 values) { return values; }
};

struct Int4 {
    enum { BLOCK = 64, LANES = 16, STEPS = 7 };
    typedef u16 Four;
    static __device__ i64 place(i64 i) { return i / 2; }
    static __device__ int code(Four four, int k) {
        u32 byte = (u32)four >> 8 * (k / 2);
        return k % 2 ? high_nibble(byte) : low_nibble(byte);
    }
    static __device__ Four shifted(int code, int k) { return (u16)((u32)(code & 15) << 4 * k); }
    static __device__ i64 num_bytes(i64 values) { return (values + 1) / 2; }
};

// A wire begins at a multiple of 4 bytes, and its scales take 4 bytes each, so codes can be read and written by fours.
template <class I>
__device__ void encode_blocks(const float *values, float *scales, u8 *codes, float *error, i64 count) {
    const int QUADS = I::BLOCK / I::LANES / 4, PER_WARP = 32 / I::LANES;
    i64 blocks = (count + I::BLOCK - 1) / I::BLOCK;
    int lane = threadIdx.x % I::LANES;
    bool aligned = is_aligned<4>(values), error_aligned = error && is_aligned<4>(error);
    i64 first = grid_thread() / 32 * PER_WARP, step = grid_threads() / 32 * PER_WARP;
    for (; first < blocks; first += step) {  // the same for all threads of a warp
        i64 block = first + threadIdx.x % 32 / I::LANES;
        i64 end = (block + 1) * I::BLOCK < count ? (block + 1) * I::BLOCK : count;
        Vector<float, 4> quads[QUADS];
        u32 largest = 0;
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            i64 start = block * I::BLOCK + (q * I::LANES + lane) * 4;
            if (aligned && start + 4 <= end) {
                quads[q] = load<4>(values + start);
            } else {
                for (int k = 0; k < 4; k++) quads[q].at[k] = start + k < end ? values[start + k] : 0.0f;
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 magnitude = bits_of(quads[q].at[k]) & MAGNITUDE;
                largest = magnitude > largest ? magnitude : largest;
            }
        }
#pragma unroll
        for (int distance = I::LANES / 2; distance > 0; distance /= 2) {
            u32 other = __shfl_xor_sync(0xFFFFFFFFu, largest, distance);
            largest = other > largest ? other : largest;
        }
        if (block >= blocks) continue;
        Scale scale = scale_of<I::STEPS>(largest);
        if (lane == 0) scales[block] = scale.scale;
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            i64 start = block * I::BLOCK + (q * I::LANES + lane) * 4;
            typename I::Four four = 0;
            Vector<float, 4> missing;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int code = code_of(quads[q].at[k], scale);
                four |= I::shifted(code, k);
                missing.at[k] = left_out(quads[q].at[k], code, scale);
            }
            u8 *to = codes + I::place(start);
            if (start + 4 <= end) {
                *reinterpret_cast<typename I::Four *>(to) = four;
            } else if (start < end) {
                for (int k = 0; k < I::num_bytes(end - start); k++) to[k] = (u8)(four >> 8 * k);
            }
            if (error_aligned && start + 4 <= end) {
                store(error + start, missing);
            } else if (error) {
#pragma unroll
                for (int k = 0; k < 4; k++)
                    if (start + k < end) error[start + k] = missing.at[k];
            }
        }
    }
}

template <class I, bool ADDED>
__device__ void decode_blocks(const float *scales, const u8 *codes, float *values, i64 count) {
    auto many = [=](i64 i) {
        float scale = scales[i / I::BLOCK];
        typename I::Four four = *reinterpret_cast<const typename I::Four *>(codes + I::place(i));
        Vector<float, 4> value;
        if (ADDED) value = load<4>(values + i);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float part = decoded(I::code(four, k), scale);
            value.at[k] = ADDED ? add(value.at[k], part) : part;
        }
        store(values + i, value);
    };
    auto one = [=](i64 i) {
        u32 byte = codes[I::place(i)];
        int code = I::BLOCK == 256 ? (i8)byte : i % 2 ? high_nibble(byte) : low_nibble(byte);
        float part = decoded(code, scales[i / I::BLOCK]);
        values[i] = ADDED ? add(values[i], part) : part;
    };
    // Codes are aligned for fours that begin at a multiple of 4 alone.
    i64 head = is_aligned<4>(values) ? 0 : count;
    for_each<4>(count, head, grid_thread(), grid_threads(), many, one);
}

#define BLOCKWISE(name, I)                                                                                             \
    KERNEL encode_##name(const float *values, float *scales, u8 *codes, float *error, i64 count) {                     \
        encode_blocks<I>(values, scales, codes, error, count);                                                         \
    }                                                                                                                  \
    KERNEL decode_##name(const float *scales, const u8 *codes, float *values, i64 count) {                             \
        decode_blocks<I, false>(scales, codes, values, count);                                                         \
    }                                                                                                                  \
    KERNEL add_decoded_##name(const float *scales, const u8 *codes, float *total, i64 count) {                         \
        decode_blocks<I, true>(scales, codes, total, count);                                                           \
    }
BLOCKWISE(int8, Int8)
BLOCKWISE(int4, Int4)
