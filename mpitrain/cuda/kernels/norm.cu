// The squared 2-norm in float64, with additions in an order that depends on nothing but the number of values: not on the
// device, the launch or where the array lies. So ranks with equal gradients get equal norms.
//
// Lane t of LANES adds up the squares of the values 4t .. 4t+3, then of those 4 LANES further on, and so on, one after
// the other. The lanes of a block are added in a tree, then the blocks in another.
#include "stride.h"

#define BLOCKS 256  // the same number is in norm.py
#define LANES ((i64)BLOCKS * THREADS)

// Thread 0 gets the sum of all threads': t and t + 128, then t and t + 64, ...
__device__ double block_sum(double mine) {
    __shared__ double sums[THREADS];
    sums[threadIdx.x] = mine;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] = add(sums[threadIdx.x], sums[threadIdx.x + half]);
    }
    return sums[0];
}

template <class T> __device__ void block_norms(const T *flat, i64 count, double *partial) {
    double sum = 0;
    bool aligned = is_aligned<4>(flat);
    i64 i = grid_thread() * 4;
    // Few threads, as their number is fixed: so each has four loads under way at a time.
    for (; aligned && i + 3 * LANES * 4 + 4 <= count; i += 4 * LANES * 4) {
        Vector<T, 4> values[4];
#pragma unroll
        for (int row = 0; row < 4; row++) values[row] = load<4>(flat + i + row * LANES * 4);
#pragma unroll
        for (int row = 0; row < 4; row++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                double value = to_double(values[row].at[k]);
                sum = add(sum, multiply(value, value));
            }
        }
    }
    for (; i < count; i += LANES * 4) {
        if (aligned && i + 4 <= count) {
            Vector<T, 4> values = load<4>(flat + i);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                double value = to_double(values.at[k]);
                sum = add(sum, multiply(value, value));
            }
        } else {
            for (i64 k = i; k < count && k < i + 4; k++) {
                double value = to_double(flat[k]);
                sum = add(sum, multiply(value, value));
            }
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

KERNEL norm_bf16(const bf16 *flat, i64 count, double *partial) { block_norms(flat, count, partial); }
KERNEL norm_fp16(const fp16 *flat, i64 count, double *partial) { block_norms(flat, count, partial); }
KERNEL norm_f32(const float *flat, i64 count, double *partial) { block_norms(flat, count, partial); }
KERNEL norm_f64(const double *flat, i64 count, double *partial) { block_norms(flat, count, partial); }

// One block: the sum of the blocks'.
KERNEL norm_total(const double *partial, double *out) {
    double sum = block_sum(partial[threadIdx.x]);
    if (threadIdx.x == 0) *out = sum;
}

// factor = max_norm / norm where that is below 1 and the norm finite, else 1.
KERNEL clip_factor(const double *squared, double max_norm, double *factor) {
    double norm = square_root(*squared);
    if (threadIdx.x == 0) *factor = max_norm < norm && is_finite(norm) ? divide(max_norm, norm) : 1.0;
}
