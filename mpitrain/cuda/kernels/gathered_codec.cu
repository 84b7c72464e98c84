// The codecs sign and top_k of mpitrain/compression on the device: the same bits.
#include "stride.h"

// Which NaN an addition gives differs between devices and CPUs; the host's is this one.
__device__ __forceinline__ float added(float total, float part) {
    float sum = add(total, part);
    return (bits_of(sum) & MAGNITUDE) > INFINITE ? float_from(NAN_BITS) : sum;
}

// sign: blocks of 256 with a scale each, then a bit for each value ----------------------------------------------------
//
// A warp works on one block. Thread `lane` has the values (q * 32 + lane) * 4 + k, so that the sum by halves is made of
// its own values (128 apart), of those of other threads (64 to 4 apart), and of its own again.

enum { SIGN_BLOCK = 256, QUADS = 2 };
const u32 SIGN = 0x80000000u;

KERNEL encode_sign(const float *values, float *scales, u8 *signs, float *error, i64 count) {
    i64 blocks = (count + SIGN_BLOCK - 1) / SIGN_BLOCK;
    int lane = threadIdx.x % 32;
    for (i64 block = grid_thread() / 32; block < blocks; block += grid_threads() / 32) {  // the same for all of a warp
        i64 end = (block + 1) * SIGN_BLOCK < count ? (block + 1) * SIGN_BLOCK : count;
        i64 start = block * SIGN_BLOCK + lane * 4;
        float value[QUADS][4];
        double half[4] = {0, 0, 0, 0};
        bool finite = true;
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                i64 i = start + q * 128 + k;
                value[q][k] = i < end ? values[i] : 0.0f;
                finite = finite && is_finite(value[q][k]);
                half[k] = add(half[k], to_double(float_from(bits_of(value[q][k]) & MAGNITUDE)));
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
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 bits = bits_of(value[q][k]);
                if (finite && first + k < end) four |= bits >> 31 << k;
                float decoded = float_from((bits & SIGN) | bits_of(scale));
                if (error && first + k < end) error[first + k] = finite ? subtract(value[q][k], decoded) : 0.0f;
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
    for (i64 i = grid_thread(); i < count; i += grid_threads()) one(i);
}

KERNEL decode_sign(const float *scales, const u8 *signs, float *values, i64 count) {
    decode_signs<false>(scales, signs, values, count);
}
KERNEL add_decoded_sign(const float *scales, const u8 *signs, float *total, i64 count) {
    decode_signs<true>(scales, signs, total, count);
}

// top_k: blocks of 4096, of which a block of threads works on one; thread t has the values t * OWN and on ----------------

enum { TOP_BLOCK = 4096, OWN = TOP_BLOCK / THREADS, DIGITS = 2048 };

// Shared memory of a block of threads.
struct Chosen {
    u32 numbers[DIGITS];      // of values with each digit
    u32 before[2][THREADS];  // of each thread; then of all threads before it: larger ones, equal ones
    u32 limit, ties;
    u32 infinite;
};

// Replace each thread's number by the sum of those before it.
__device__ void sum_before(u32 *numbers) {
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 sum = 0;
        for (int t = 0; t < THREADS; t++) {
            u32 number = numbers[t];
            numbers[t] = sum;
            sum += number;
        }
    }
    __syncthreads();
}

// Find the highest digit with at least `ties` values that have it or a higher one; take the higher ones off `ties`.
__device__ void find_digit(Chosen &chosen, int shift) {
    const int EACH = DIGITS / THREADS;
    u32 sum = 0;
    for (int i = 0; i < EACH; i++) sum += chosen.numbers[threadIdx.x * EACH + i];
    chosen.before[0][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 ties = chosen.ties;
        int t = THREADS - 1;
        for (; chosen.before[0][t] < ties; t--) ties -= chosen.before[0][t];
        int digit = (t + 1) * EACH - 1;
        for (; chosen.numbers[digit] < ties; digit--) ties -= chosen.numbers[digit];
        chosen.ties = ties;
        chosen.limit |= (u32)digit << shift;
    }
    __syncthreads();
}

// A block keeps `most` values, a short one `last`.
KERNEL encode_top_k(const float *values, float *kept, u16 *places, float *error, i64 count, i64 most, i64 last) {
    __shared__ Chosen chosen;
    const int t = threadIdx.x;
    i64 blocks = (count + TOP_BLOCK - 1) / TOP_BLOCK;
    for (i64 block = blockIdx.x; block < blocks; block += gridDim.x) {
        i64 start = block * TOP_BLOCK;
        int size = count - start < TOP_BLOCK ? (int)(count - start) : TOP_BLOCK;
        u32 wanted = (u32)(size == TOP_BLOCK ? most : last);
        __syncthreads();  // the block before has been read
        if (t == 0) {
            chosen.limit = chosen.infinite = 0;
            chosen.ties = wanted;
        }
        __syncthreads();
        float value[OWN];
        for (int i = 0; i < OWN; i++) {
            value[i] = t * OWN + i < size ? values[start + t * OWN + i] : 0.0f;
            if (!is_finite(value[i])) atomicOr(&chosen.infinite, 1u);
        }
        __syncthreads();
        if (chosen.infinite) {
            for (u32 j = t; j < wanted; j += THREADS) {
                kept[block * most + j] = float_from(NAN_BITS);
                places[block * most + j] = (u16)j;
            }
            for (int i = 0; error && i < OWN; i++)
                if (t * OWN + i < size) error[start + t * OWN + i] = 0.0f;
            continue;
        }
        // The bits above `above` are those of the limit; the digit is those from `shift` on.
        for (int shift = 20, above = 31; shift >= 0; above = shift, shift -= 10) {
            for (int i = 0; i < DIGITS / THREADS; i++) chosen.numbers[i * THREADS + t] = 0;
            __syncthreads();
            for (int i = 0; i < OWN; i++) {
                u32 magnitude = bits_of(value[i]) & MAGNITUDE;
                if (t * OWN + i < size && magnitude >> above == chosen.limit >> above)
                    atomicAdd(&chosen.numbers[magnitude >> shift & ((1u << (above - shift)) - 1u)], 1u);
            }
            __syncthreads();
            find_digit(chosen, shift);
        }
        u32 limit = chosen.limit, ties = chosen.ties, larger = 0, equal = 0;
        for (int i = 0; i < OWN; i++) {
            u32 magnitude = bits_of(value[i]) & MAGNITUDE;
            larger += t * OWN + i < size && magnitude > limit;
            equal += t * OWN + i < size && magnitude == limit;
        }
        chosen.before[0][t] = larger;
        chosen.before[1][t] = equal;
        sum_before(chosen.before[0]);
        sum_before(chosen.before[1]);
        equal = chosen.before[1][t];
        u32 place = chosen.before[0][t] + (equal < ties ? equal : ties);
        for (int i = 0; i < OWN; i++) {
            int own = t * OWN + i;
            u32 magnitude = bits_of(value[i]) & MAGNITUDE;
            if (own >= size) continue;
            bool tie = magnitude == limit && equal < ties;
            if (magnitude == limit) equal++;
            if (magnitude > limit || tie) {
                kept[block * most + place] = value[i];
                places[block * most + place] = (u16)own;
                place++;
            }
            if (error) error[start + own] = magnitude > limit || tie ? 0.0f : value[i];
        }
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
            for (int i = threadIdx.x; i < size; i += THREADS) values[start + i] = finite ? 0.0f : float_from(NAN_BITS);
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
