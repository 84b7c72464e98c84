// The codec top_k:d:b of mpitrain/compression/quantised_top_k.py on the device: the same bits.
//
// A block of threads works on a block of 4096. Its bits are put together, and taken apart, in shared memory, because
// they begin at any byte of the wire.
#include "chosen.h"

enum { MOST_KEPT = TOP_BLOCK / 2, MOST_LEVELS = 8, EACH_KEPT = MOST_KEPT / THREADS };
// The upper bits of places are kept + ((n - 1) >> low): at most 2048 + 4094, where a short block of 4095 keeps 2048 and
// low is 0. Each thread looks at 24 of them. They begin at bit 2048 * (4 + 1) or before.
enum { EACH_UPPER = 24, WORDS = (MOST_KEPT * 5 + EACH_UPPER * THREADS) / 32 + 1 };
const u32 SIGN = 0x80000000u;

// Of a block: as Form in mpitrain/compression/kept_bits.py.
struct Form {
    i64 kept, low, num_bytes;
};

__device__ __forceinline__ void clear(u32 *words) {
    for (int i = threadIdx.x; i < WORDS; i += THREADS) words[i] = 0;
}

// Encode ----------------------------------------------------------------------------------------------------------------

// Shared memory of a block of threads, beside Chosen, whose `numbers` have the bits of the kept values here.
struct Packed {
    double halves[THREADS];
    double means[MOST_LEVELS];
    u32 counts[MOST_LEVELS];
    u32 words[WORDS];
    u16 places[MOST_KEPT];
    u8 part_of[MOST_KEPT];
};

// Set the mean of the |values| of a part, 0 for none. They are added by halves of 2048; what is missing counts as 0,
// which changes no sum. Thread t has the values t, t + 256, ...
__device__ void find_mean(Packed &packed, const u32 *kept_bits, u32 kept, u32 part) {
    const u32 t = threadIdx.x;
    double half[EACH_KEPT];
    u32 count = 0;
#pragma unroll
    for (int j = 0; j < EACH_KEPT; j++) {
        u32 i = t + j * THREADS;
        bool is_member = i < kept && packed.part_of[i] == part;
        half[j] = is_member ? to_double(float_from(kept_bits[i] & MAGNITUDE)) : 0.0;
        count += is_member;
    }
#pragma unroll
    for (int distance = EACH_KEPT / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int j = 0; j < distance; j++) half[j] = add(half[j], half[j + distance]);
    }
    packed.halves[t] = half[0];
    if (count) atomicAdd(&packed.counts[part], count);
    __syncthreads();
    if (t < 32) {
#pragma unroll
        for (int j = 0; j < THREADS / 32; j++) half[j] = packed.halves[t + j * 32];
#pragma unroll
        for (int distance = THREADS / 64; distance > 0; distance /= 2) {
#pragma unroll
            for (int j = 0; j < distance; j++) half[j] = add(half[j], half[j + distance]);
        }
        double sum = half[0];
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            sum = add(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, distance));
        u32 number = packed.counts[part];
        if (t == 0) packed.means[part] = number ? divide(sum, (double)number) : 0.0;
    }
    __syncthreads();
}

// Split the kept values into as many parts as there are levels, and write the levels.
__device__ void split(Packed &packed, const u32 *kept_bits, u32 kept, u32 bits, float *levels) {
#pragma unroll 1
    for (u32 depth = 0; depth < bits; depth++) {
        u32 num_parts = 1u << depth;
        if (threadIdx.x < num_parts) packed.counts[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll 1
        for (u32 part = 0; part < num_parts; part++) find_mean(packed, kept_bits, kept, part);
        if (depth == bits - 1) {
            if (threadIdx.x < num_parts) levels[threadIdx.x] = rounded(packed.means[threadIdx.x]);
            break;
        }
#pragma unroll 1
        for (u32 i = threadIdx.x; i < kept; i += THREADS) {
            u32 part = packed.part_of[i];
            bool is_above = to_double(float_from(kept_bits[i] & MAGNITUDE)) > packed.means[part];
            packed.part_of[i] = (u8)(2 * part + is_above);
        }
        __syncthreads();
    }
}

// Put the `width` bits of a number, which has no others, at bit `at`.
__device__ __forceinline__ void put(u32 *words, u32 at, u32 number, u32 width) {
    atomicOr(&words[at / 32], number << at % 32);
    if (at % 32 + width > 32) atomicOr(&words[at / 32 + 1], number >> (32 - at % 32));
}

// `most` and what follows are the form of a block of 4096, `last` and what follows that of a short one; there are
// 2^(bits - 1) levels a block.
KERNEL_OF_64 encode_quantised_top_k(const float *values, float *levels, u8 *stream, float *error, i64 count, i64 most,
                                    i64 most_low, i64 most_bytes, i64 last, i64 last_low, i64 last_bytes, i64 bits) {
    __shared__ Chosen chosen;
    __shared__ Packed packed;
    const u32 t = threadIdx.x;
    i64 blocks = (count + TOP_BLOCK - 1) / TOP_BLOCK;
    for (i64 block = blockIdx.x; block < blocks; block += gridDim.x) {
        i64 start = block * TOP_BLOCK;
        int size = count - start < TOP_BLOCK ? (int)(count - start) : TOP_BLOCK;
        Form form = size == TOP_BLOCK ? Form{most, most_low, most_bytes} : Form{last, last_low, last_bytes};
        u32 kept = (u32)form.kept, low = (u32)form.low, width = (u32)bits;
        float *its_levels = levels + (block << (bits - 1));
        u8 *octets = stream + block * most_bytes;
        take_in(chosen, values + start, size, kept);
        const bool finite = !chosen.infinite;
        clear(packed.words);
        for (u32 i = t; i < kept; i += THREADS) packed.part_of[i] = 0;
        if (finite) {
            choose(chosen, size, [&](u32 number, int i) {
                chosen.numbers[number] = bits_of(chosen.value(i));
                packed.places[number] = (u16)i;
            });
            __syncthreads();
            split(packed, chosen.numbers, kept, width, its_levels);
        } else {
            for (u32 i = t; i < kept; i += THREADS) {
                chosen.numbers[i] = 0;
                packed.places[i] = (u16)i;
            }
            if (t < 1u << (width - 1)) its_levels[t] = float_from(NAN_BITS);
        }
        __syncthreads();
#pragma unroll 1
        for (u32 i = t; i < kept; i += THREADS) {
            u32 value_bits = chosen.numbers[i], part = packed.part_of[i], place = packed.places[i];
            put(packed.words, i * width, value_bits >> 31 | part << 1, width);
            put(packed.words, kept * width + i * low, place & ((1u << low) - 1u), low);
            put(packed.words, kept * (width + low) + (place >> low) + i, 1u, 1);
            float sent = float_from((value_bits & SIGN) | bits_of(rounded(packed.means[part])));
            if (finite) chosen.value(place) = subtract(float_from(value_bits), sent);
        }
        __syncthreads();
        for (int i = t; i < form.num_bytes; i += THREADS) octets[i] = (u8)(packed.words[i / 4] >> i % 4 * 8);
        if (!error) continue;
        if (finite) {
            give_out(chosen, error + start, size);
        } else {
            fill(error + start, size, 0.0f);
        }
    }
}

// Decode ----------------------------------------------------------------------------------------------------------------

// `width` bits from bit `at` on, at most 24.
__device__ __forceinline__ u32 get(const u32 *words, u32 at, u32 width) {
    u32 number = words[at / 32] >> at % 32;
    if (at % 32) number |= words[at / 32 + 1] << (32 - at % 32);
    return number & ((1u << width) - 1u);
}

template <bool ADDED>
__device__ void decode_bits(const float *levels, const u8 *stream, float *values, i64 count, Form whole, Form last,
                            i64 bits) {
    __shared__ u32 words[WORDS], before[THREADS];
    const u32 t = threadIdx.x;
    i64 blocks = (count + TOP_BLOCK - 1) / TOP_BLOCK;
    for (i64 block = blockIdx.x; block < blocks; block += gridDim.x) {
        i64 start = block * TOP_BLOCK;
        int size = count - start < TOP_BLOCK ? (int)(count - start) : TOP_BLOCK;
        Form form = size == TOP_BLOCK ? whole : last;
        u32 kept = (u32)form.kept, low = (u32)form.low, width = (u32)bits;
        const float *its_levels = levels + (block << (bits - 1));
        bool finite = is_finite(its_levels[0]);
        if (!finite || !ADDED) fill(values + start, size, finite ? 0.0f : float_from(NAN_BITS));
        __syncthreads();  // the zeros come first, and the block before has been read
        if (!finite) continue;
        clear(words);
        __syncthreads();
        const u8 *octets = stream + block * whole.num_bytes;
        for (int i = t; i < form.num_bytes; i += THREADS) atomicOr(&words[i / 4], (u32)octets[i] << i % 4 * 8);
        __syncthreads();
        // The number of a place is the number of ones before its own.
        u32 upper = get(words, kept * (width + low) + t * EACH_UPPER, EACH_UPPER), number = 0;
#pragma unroll
        for (int bit = 0; bit < EACH_UPPER; bit++) number += upper >> bit & 1u;
        before[t] = number;
        sum_before(before);
        u32 i = before[t];
#pragma unroll 1
        for (u32 bit = 0; bit < EACH_UPPER; bit++) {
            if (!(upper >> bit & 1u)) continue;
            u32 place = (t * EACH_UPPER + bit - i) << low | get(words, kept * width + i * low, low);
            u32 code = get(words, i * width, width);
            float part = float_from(bits_of(its_levels[code >> 1]) | code << 31);
            float *at = values + start + place;
            *at = ADDED ? added(*at, part) : part;
            i++;
        }
    }
}

KERNEL decode_quantised_top_k(const float *levels, const u8 *stream, float *values, i64 count, i64 most, i64 most_low,
                              i64 most_bytes, i64 last, i64 last_low, i64 last_bytes, i64 bits) {
    decode_bits<false>(levels, stream, values, count, Form{most, most_low, most_bytes}, Form{last, last_low, last_bytes},
                       bits);
}
KERNEL add_decoded_quantised_top_k(const float *levels, const u8 *stream, float *total, i64 count, i64 most,
                                   i64 most_low, i64 most_bytes, i64 last, i64 last_low, i64 last_bytes, i64 bits) {
    decode_bits<true>(levels, stream, total, count, Form{most, most_low, most_bytes}, Form{last, last_low, last_bytes},
                      bits);
}
