// How top_k and quantised_top_k find the largest values of a block of 4096, on which a block of threads works.
//
// The values are in shared memory, with a gap after each 16: thread t looks for what is kept in the 16 from t * 16 on.
#pragma once
#include "stride.h"

// Which NaN an addition gives differs between devices and CPUs; the host's is this one.
__device__ __forceinline__ float added(float total, float part) {
    float sum = add(total, part);
    return (bits_of(sum) & MAGNITUDE) > INFINITE ? float_from(NAN_BITS) : sum;
}

enum { TOP_BLOCK = 4096, OWN = TOP_BLOCK / THREADS, DIGITS = 2048 };

// Shared memory of a block of threads.
struct Chosen {
    float values[TOP_BLOCK + THREADS];
    u32 numbers[DIGITS];     // of values with each digit
    u32 before[2][THREADS];  // of each thread; then of all threads before it: larger ones, equal ones
    u32 limit, ties, infinite;

    __device__ float &value(int i) { return values[i + i / OWN]; }
};

// Go over a part of an array, by fours where it is aligned.
template <class T, class Many, class One>
__device__ __forceinline__ void over(T *part, int size, Many many, One one) {
    int head = is_aligned<4>(part) ? 0 : size;
    for_each<4>(size, head, (int)threadIdx.x, (int)THREADS, many, one);
}

__device__ __forceinline__ void fill(float *part, int size, float value) {
    for (int i = threadIdx.x; i < size; i += THREADS) part[i] = value;
}

// Replace each thread's number by the sum of those before it.
__device__ void sum_before(u32 *numbers) {
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 sum = 0;
#pragma unroll 1
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
#pragma unroll 1
    for (int i = 0; i < EACH; i++) sum += chosen.numbers[threadIdx.x * EACH + i];
    chosen.before[0][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 ties = chosen.ties;
        int t = THREADS - 1;
#pragma unroll 1
        for (; chosen.before[0][t] < ties; t--) ties -= chosen.before[0][t];
        int digit = (t + 1) * EACH - 1;
#pragma unroll 1
        for (; chosen.numbers[digit] < ties; digit--) ties -= chosen.numbers[digit];
        chosen.ties = ties;
        chosen.limit |= (u32)digit << shift;
    }
    __syncthreads();
}

// Take a block into shared memory, and see whether it is finite.
__device__ void take_in(Chosen &chosen, const float *part, int size, u32 wanted) {
    __syncthreads();  // the block before has been read
    if (threadIdx.x == 0) {
        chosen.limit = chosen.infinite = 0;
        chosen.ties = wanted;
    }
    __syncthreads();
    auto one = [&](int i) {
        float value = chosen.value(i) = part[i];
        if (!is_finite(value)) atomicOr(&chosen.infinite, 1u);
    };
    auto many = [&](int i) {
        Vector<float, 4> four = load<4>(part + i);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            chosen.value(i + k) = four.at[k];
            if (!is_finite(four.at[k])) atomicOr(&chosen.infinite, 1u);
        }
    };
    over(part, size, many, one);
    __syncthreads();
}

// Call keep(number, i) for each value i that is kept; its number is that in the order of i. The block is finite.
template <class Keep> __device__ __forceinline__ void choose(Chosen &chosen, int size, Keep keep) {
    const int t = threadIdx.x;
    // The bits from `above` on are those of the limit; the digit is those from `shift` to there.
#pragma unroll 1
    for (int shift = 20, above = 31; shift >= 0; above = shift, shift -= 10) {
#pragma unroll 1
        for (int i = t; i < DIGITS; i += THREADS) chosen.numbers[i] = 0;
        __syncthreads();
#pragma unroll 1
        for (int i = t; i < size; i += THREADS) {
            u32 magnitude = bits_of(chosen.value(i)) & MAGNITUDE;
            if (magnitude >> above == chosen.limit >> above)
                atomicAdd(&chosen.numbers[magnitude >> shift & ((1u << (above - shift)) - 1u)], 1u);
        }
        __syncthreads();
        find_digit(chosen, shift);
    }
    u32 limit = chosen.limit, ties = chosen.ties, larger = 0, equal = 0;
    int end = (t + 1) * OWN < size ? (t + 1) * OWN : size;
#pragma unroll 1
    for (int i = t * OWN; i < end; i++) {
        u32 magnitude = bits_of(chosen.value(i)) & MAGNITUDE;
        larger += magnitude > limit;
        equal += magnitude == limit;
    }
    chosen.before[0][t] = larger;
    chosen.before[1][t] = equal;
    sum_before(chosen.before[0]);
    sum_before(chosen.before[1]);
    equal = chosen.before[1][t];
    u32 number = chosen.before[0][t] + (equal < ties ? equal : ties);
#pragma unroll 1
    for (int i = t * OWN; i < end; i++) {
        u32 magnitude = bits_of(chosen.value(i)) & MAGNITUDE;
        bool is_tie = magnitude == limit && equal < ties;
        equal += magnitude == limit;
        if (magnitude > limit || is_tie) keep(number++, i);
    }
}

// Write the values of the block to `part`.
__device__ __forceinline__ void give_out(Chosen &chosen, float *part, int size) {
    auto many = [&](int i) {
        Vector<float, 4> four;
#pragma unroll
        for (int k = 0; k < 4; k++) four.at[k] = chosen.value(i + k);
        store(part + i, four);
    };
    over(part, size, many, [&](int i) { part[i] = chosen.value(i); });
}
