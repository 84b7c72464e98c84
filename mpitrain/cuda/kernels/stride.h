// How a kernel goes over arrays: loops over the whole grid, by 16 bytes at a time where all arrays are aligned alike.
//
//     elements   0 .. head-1 | head .. | ... whole vectors ... | rest
//                one by one    WIDTH at a time                   one by one
//
// `head` is chosen so that the vectors of every array are aligned; parts of arrays that begin at the same index have the
// same head. Where there is none (the arrays are not aligned alike), all goes one by one: correct, and slower.
// Indices are 64-bit, but inside a tile.
#pragma once
#include "arithmetic.h"

#define THREADS 256  // of a block; the same number is in launch.py
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
// Four blocks on a processor: up to 64 registers, where the compiler would take more.
#define KERNEL_OF_64 extern "C" __global__ void __launch_bounds__(THREADS, 4)

template <class T, int WIDTH> struct alignas(sizeof(T) * WIDTH) Vector {
    T at[WIDTH];
};

template <int WIDTH, class T> __device__ __forceinline__ Vector<T, WIDTH> load(const T *from) {
    return *reinterpret_cast<const Vector<T, WIDTH> *>(from);
}

template <int WIDTH, class T> __device__ __forceinline__ void store(T *to, const Vector<T, WIDTH> &vector) {
    *reinterpret_cast<Vector<T, WIDTH> *>(to) = vector;
}

__device__ __forceinline__ i64 grid_thread() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ i64 grid_threads() { return (i64)gridDim.x * blockDim.x; }

template <int WIDTH, class T> __device__ __forceinline__ bool is_aligned(const T *pointer) {
    return reinterpret_cast<u64>(pointer) % (sizeof(T) * WIDTH) == 0;
}

// The elements before the first vector of `pointer`; WIDTH is a power of two.
template <int WIDTH, class T> __device__ __forceinline__ i64 head_of(const T *pointer) {
    return (i64)(0 - reinterpret_cast<u64>(pointer) / sizeof(T)) & (WIDTH - 1);
}

template <int WIDTH> __device__ __forceinline__ bool all_aligned(i64) { return true; }
template <int WIDTH, class T, class... Others>
__device__ __forceinline__ bool all_aligned(i64 head, const T *pointer, const Others *...others) {
    // A null pointer stands for an array that is not there.
    return (pointer == nullptr || is_aligned<WIDTH>(pointer + head)) && all_aligned<WIDTH>(head, others...);
}

template <int WIDTH, class T, class... Others>
__device__ __forceinline__ i64 common_head(i64 count, const T *pointer, const Others *...others) {
    i64 head = head_of<WIDTH>(pointer);
    return head < count && all_aligned<WIDTH>(head, pointer, others...) ? head : count;
}

// many(i) for WIDTH elements from i on, one(i) for the element i; by `threads` threads, of which this is `thread`.
template <int WIDTH, class Index, class Many, class One>
__device__ __forceinline__ void for_each(Index count, Index head, Index thread, Index threads, Many many, One one) {
    Index vectors = (count - head) / WIDTH, rest = head + vectors * WIDTH;
    // Not unrolled: the other threads of the processor hide the latency, and need its registers.
#pragma unroll 1
    for (Index vector = thread; vector < vectors; vector += threads) many(head + vector * WIDTH);
#pragma unroll 1
    for (Index i = thread; i < head + count - rest; i += threads) one(i < head ? i : rest - head + i);
}
