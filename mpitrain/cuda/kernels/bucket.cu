// Work on flat buffers: sums, packing, scaling, and whether all is finite.
#include "stride.h"

// total += arrived; each sum is rounded once to the arrays' dtype.
template <class T, int WIDTH> __device__ void add_arrays(T *total, const T *arrived, i64 count) {
    auto many = [=](i64 i) {
        Vector<T, WIDTH> sum = load<WIDTH>(total + i), other = load<WIDTH>(arrived + i);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) sum.at[k] = add(sum.at[k], other.at[k]);
        store(total + i, sum);
    };
    auto one = [=](i64 i) { total[i] = add(total[i], arrived[i]); };
    for_each<WIDTH>(count, common_head<WIDTH>(count, total, arrived), grid_thread(), grid_threads(), many, one);
}

// By value, so that a launch needs no table in device memory; 16 is MOST_PARTS of bucket.py.
struct Parts {
    u64 at[16];
    i64 count;
    u64 out[16];
    i64 num_out;
};

// Every out = parts[0] + parts[1] + ... in that order, each sum rounded once. They may be among the parts.
template <class T, int WIDTH> __device__ void sum_of_parts(const Parts &parts, i64 count) {
    i64 head = head_of<WIDTH>(reinterpret_cast<const T *>(parts.out[0]));
    bool alike = head < count;
    for (int p = 0; p < parts.count; p++)
        alike = alike && is_aligned<WIDTH>(reinterpret_cast<const T *>(parts.at[p]) + head);
    for (int p = 0; p < parts.num_out; p++)
        alike = alike && is_aligned<WIDTH>(reinterpret_cast<const T *>(parts.out[p]) + head);
    auto many = [&](i64 i) {
        Vector<T, WIDTH> sum = load<WIDTH>(reinterpret_cast<const T *>(parts.at[0]) + i);
#pragma unroll 4
        for (int p = 1; p < parts.count; p++) {
            Vector<T, WIDTH> other = load<WIDTH>(reinterpret_cast<const T *>(parts.at[p]) + i);
#pragma unroll
            for (int k = 0; k < WIDTH; k++) sum.at[k] = add(sum.at[k], other.at[k]);
        }
        for (int p = 0; p < parts.num_out; p++) store(reinterpret_cast<T *>(parts.out[p]) + i, sum);
    };
    auto one = [&](i64 i) {
        T sum = reinterpret_cast<const T *>(parts.at[0])[i];
        for (int p = 1; p < parts.count; p++) sum = add(sum, reinterpret_cast<const T *>(parts.at[p])[i]);
        for (int p = 0; p < parts.num_out; p++) reinterpret_cast<T *>(parts.out[p])[i] = sum;
    };
    for_each<WIDTH>(count, alike ? head : count, grid_thread(), grid_threads(), many, one);
}

#define SUMS(name, T, WIDTH)                                                                                           \
    KERNEL add_##name(T *total, const T *arrived, i64 count) { add_arrays<T, WIDTH>(total, arrived, count); }          \
    KERNEL sum_of_##name(const __grid_constant__ Parts parts, i64 count) {                                             \
        sum_of_parts<T, WIDTH>(parts, count);                                                                          \
    }
SUMS(bf16, bf16, 8)
SUMS(fp16, fp16, 8)
SUMS(f32, float, 4)
SUMS(f64, double, 2)
SUMS(u8, u8, 16)
SUMS(u16, u16, 8)
SUMS(u32, u32, 4)
SUMS(u64, u64, 2)

// Many arrays and one flat buffer, in which they lie one behind the other. A block takes one tile of the buffer at a
// time, and the arrays in it one after the other. 224 is MOST_ARRAYS of bucket.py: the table fills a launch's 4 KiB.
struct Table {
    u64 at[224];
    i64 start[225];  // in the buffer, in elements; the last one is the end
    i64 count;
};

// move(array, offset in it, place in the buffer, count) for every piece of an array that lies in a tile.
template <int TILE, class Move> __device__ void for_each_piece(const Table &table, Move move) {
    i64 begin = table.start[0], end = table.start[table.count];
    for (i64 tile = begin + blockIdx.x * (i64)TILE; tile < end; tile += gridDim.x * (i64)TILE) {
        i64 tile_end = tile + TILE < end ? tile + TILE : end;
        int low = 0, high = (int)table.count;  // the last array that starts at `tile` or before it
        while (high - low > 1) {
            int middle = (low + high) / 2;
            (table.start[middle] <= tile ? low : high) = middle;
        }
        for (int array = low; array < table.count && table.start[array] < tile_end; array++) {
            i64 from = table.start[array] > tile ? table.start[array] : tile;
            i64 to = table.start[array + 1] < tile_end ? table.start[array + 1] : tile_end;
            if (from < to) move(table.at[array], from - table.start[array], from, (int)(to - from));
        }
    }
}

template <class T, int WIDTH> __device__ void copy(const T *from, T *to, int count) {
    auto many = [=](int i) { store(to + i, load<WIDTH>(from + i)); };
    auto one = [=](int i) { to[i] = from[i]; };
    for_each<WIDTH>(count, (int)common_head<WIDTH>(count, from, to), (int)threadIdx.x, THREADS, many, one);
}

#define PACK(name, T, WIDTH)                                                                                           \
    KERNEL pack_##name(const __grid_constant__ Table table, T *flat) {                                                 \
        for_each_piece<THREADS * WIDTH>(table, [=](u64 array, i64 offset, i64 place, int count) {                      \
            copy<T, WIDTH>(reinterpret_cast<const T *>(array) + offset, flat + place, count);                          \
        });                                                                                                            \
    }
PACK(u8, u8, 16)
PACK(u16, u16, 8)
PACK(u32, u32, 4)
PACK(u64, u64, 2)

// flat *= factor, rounded once; all zeros where factor is 0, as 0 x NaN would be NaN.
template <class T, int WIDTH, class Factor> __device__ void scale_array(T *flat, Factor factor, i64 count) {
    bool clears = is_zero(factor);
    auto many = [=](i64 i) {
        Vector<T, WIDTH> values = load<WIDTH>(flat + i);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) values.at[k] = clears ? T{} : multiply(values.at[k], factor);
        store(flat + i, values);
    };
    auto one = [=](i64 i) { flat[i] = clears ? T{} : multiply(flat[i], factor); };
    for_each<WIDTH>(count, common_head<WIDTH>(count, flat), grid_thread(), grid_threads(), many, one);
}

// Sets flag[0] where a value is infinite or NaN; never clears it.
template <class T, int WIDTH> __device__ void find_non_finite(const T *flat, int *flag, i64 count) {
    bool found = false;
    auto many = [&](i64 i) {
        Vector<T, WIDTH> values = load<WIDTH>(flat + i);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) found = found || !is_finite(values.at[k]);
    };
    auto one = [&](i64 i) { found = found || !is_finite(flat[i]); };
    for_each<WIDTH>(count, common_head<WIDTH>(count, flat), grid_thread(), grid_threads(), many, one);
    if (found) *flag = 1;  // whichever thread: all write the same
}

#define FLOATS(name, T, WIDTH, Factor)                                                                                 \
    KERNEL scale_##name(T *flat, Factor factor, i64 count) { scale_array<T, WIDTH>(flat, factor, count); }             \
    KERNEL all_finite_##name(const T *flat, int *flag, i64 count) { find_non_finite<T, WIDTH>(flat, flag, count); }
FLOATS(bf16, bf16, 8, float)
FLOATS(fp16, fp16, 8, float)
FLOATS(f32, float, 4, float)
FLOATS(f64, double, 2, double)
