// The codecs sign and top_k of mpitrain/compression on the device: the same bits.
#include "chosen.h"

// sign: blocks of 256 with a scale each, then a bit for each value ----------------------------------------------------
//
// A warp works on one block. Thread `lane` has the values (q * 32 + lane) * 4 + k, so that the sum by halves is made of
// its own values (128 apart), of those of other threads (64 to 4 apart), and of its own again.

enum { SIGN_BLOCK = 256, QUADS = 2 };
const u32 SIGN = 0x80000000u;

KERNEL encode_sign(const float *values, float *scales, u8 *signs, float *error, i64 count) {
    i64 blocks = (count + SIGN_BLOCK - 1) / SIGN_BLOCK;
    int lane = threadIdx.x % 32;
    bool aligned = is_aligned<4>(values), error_aligned = error && is_aligned<4>(error);
    for (i64 block = grid_thread() / 32; block < blocks; block += grid_threads() / 32) {  // the same for all of a warp
        i64 end = (block + 1) * SIGN_BLOCK < count ? (block + 1) * SIGN_BLOCK : count;
        i64 start = block * SIGN_BLOCK + lane * 4;
        Vector<float, 4> value[QUADS];
        double half[4] = {0, 0, 0, 0};
        bool finite = true;
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            i64 first = start + q * 128;
            if (aligned && first + 4 <= end) {
                value[q] = load<4>(values + first);
            } else {
                for (int k = 0; k < 4; k++) value[q].at[k] = first + k < end ? values[first + k] : 0.0f;
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                finite = finite && is_finite(value[q].at[k]);
                half[k] = add(half[k], to_double(float_from(bits_of(value[q].at[k]) & MAGNITUDE)));
            }
        }
        finite = __all_sync(0xFFFFFFFFu, finite);
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
            for (int k = 0; k < 4; k++) half[k] = add(half[k], __shfl_xor_sync(0xFFFFFFFFu, half[k], distance));
        }
        double sum = add(add(half[0], half[2]), add(half[1], half[3]));
        float scale = finite ? rounded(divide(sum, (double)(end - block * SIGN_BLOCK))) : float_from(NAN_BITS);
        if (lane == 0) scales[block] = scale;
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            i64 first = start + q * 128;
            u32 four = 0;
            Vector<float, 4> missing;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 bits = bits_of(value[q].at[k]);
                if (finite && first + k < end) four |= bits >> 31 << k;
                float decoded = float_from((bits & SIGN) | bits_of(scale));
                missing.at[k] = finite ? subtract(value[q].at[k], decoded) : 0.0f;
            }
            if (error_aligned && first + 4 <= end) {
                store(error + first, missing);
            } else if (error) {
#pragma unroll
                for (int k = 0; k < 4; k++)
                    if (first + k < end) error[first + k] = missing.at[k];
            }
            u32 other = __shfl_xor_sync(0xFFFFFFFFu, four, 1);
            if (lane % 2 == 0 && first < end) signs[first / 8] = (u8)(four | other << 4);
        }
    }
}

template <bool ADDED> __device__ void decode_signs(const float *scales, const u8 *signs, float *values, i64 count) {
    auto one = [=](i64 i) {
        u32 bit = (u32)signs[i / 8] >> i % 8 & 1u;
        float part = float_from(bits_of(scales[i / SIGN_BLOCK]) | bit << 31);
        values[i] = ADDED ? added(values[i], part) : part;
    };
    auto many = [=](i64 i) {  // i is a multiple of 4, so the four are of one byte and one block
        u32 four = (u32)signs[i / 8] >> i % 8, scale = bits_of(scales[i / SIGN_BLOCK]);
        Vector<float, 4> value;
        if (ADDED) value = load<4>(values + i);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float part = float_from(scale | (four >> k & 1u) << 31);
            value.at[k] = ADDED ? added(value.at[k], part) : part;
        }
        store(values + i, value);
    };
    i64 head = is_aligned<4>(values) ? 0 : count;
    for_each<4>(count, head, grid_thread(), grid_threads(), many, one);
}

KERNEL decode_sign(const float *scales, const u8 *signs, float *values, i64 count) {
    decode_signs<false>(scales, signs, values, count);
}
KERNEL add_decoded_sign(const float *scales, const u8 *signs, float *total, i64 count) {
    decode_signs<true>(scales, signs, total, count);
}

// top_k: blocks of 4096, with the kept values and their places ---------------------------------------------------------

// A block keeps `most` values, a short one `last`.
KERNEL encode_top_k(const float *values, float *kept, u16 *places, float *error, i64 count, i64 most, i64 last) {
    __shared__ Chosen chosen;
    const int t = threadIdx.x;
    i64 blocks = (count + TOP_BLOCK - 1) / TOP_BLOCK;
    for (i64 block = blockIdx.x; block < blocks; block += gridDim.x) {
        i64 start = block * TOP_BLOCK;
        int size = count - start < TOP_BLOCK ? (int)(count - start) : TOP_BLOCK;
        u32 wanted = (u32)(size == TOP_BLOCK ? most : last);
        take_in(chosen, values + start, size, wanted);
        if (chosen.infinite) {
#pragma unroll 1
            for (u32 j = t; j < wanted; j += THREADS) {
                kept[block * most + j] = float_from(NAN_BITS);
                places[block * most + j] = (u16)j;
            }
            if (error) fill(error + start, size, 0.0f);
            continue;
        }
        choose(chosen, size, [&](u32 number, int i) {
            kept[block * most + number] = chosen.value(i);
            places[block * most + number] = (u16)i;
            chosen.value(i) = 0.0f;
        });
        __syncthreads();
        if (error) give_out(chosen, error + start, size);
    }
}

template <bool ADDED>
__device__ void decode_places(const float *kept, const u16 *places, float *values, i64 count, i64 most, i64 last) {
    i64 blocks = (count + TOP_BLOCK - 1) / TOP_BLOCK;
    for (i64 block = blockIdx.x; block < blocks; block += gridDim.x) {
        i64 start = block * TOP_BLOCK, begin = block * most;
        int size = count - start < TOP_BLOCK ? (int)(count - start) : TOP_BLOCK;
        i64 wanted = size == TOP_BLOCK ? most : last;
        bool finite = is_finite(kept[begin]);
        if (!finite || !ADDED) {
            fill(values + start, size, finite ? 0.0f : float_from(NAN_BITS));
            __syncthreads();  // the zeros come first
        }
        for (i64 j = threadIdx.x; finite && j < wanted; j += THREADS) {
            float *at = values + start + places[begin + j];
            *at = ADDED ? added(*at, kept[begin + j]) : kept[begin + j];
        }
    }
}

KERNEL decode_top_k(const float *kept, const u16 *places, float *values, i64 count, i64 most, i64 last) {
    decode_places<false>(kept, places, values, count, most, last);
}
KERNEL add_decoded_top_k(const float *kept, const u16 *places, float *total, i64 count, i64 most, i64 last) {
    decode_places<true>(kept, places, total, count, most, last);
}
