// The products of PowerSGD, with the bits of mpitrain/compression/products.py, which states the order of each sum.
//
// A matrix lies row by row: matrix[i * columns + j]. P and Q lie by columns: pt[c * rows + i], qt[c * columns + j].
// A warp works on one row, 128 elements at a time: thread `lane` has the elements, and so the lanes of the sum, from
// lane * 4 on. Factors are read once for each row, from the cache.
#include "stride.h"

enum { LANES = 128, ROWS = 32, TILE = 4 };  // the first two as in products.py; columns of P and Q that a thread adds up
const double DEPENDENT = 1e-6;              // as in products.py

typedef Vector<float, 4> Four;

// The elements from j on, as far as the row goes. `aligned`: all four are there, at a multiple of 16 bytes.
__device__ __forceinline__ Four take(const float *row, i64 j, i64 columns, bool aligned) {
    if (aligned) return load<4>(row + j);
    Four four;
#pragma unroll
    for (int k = 0; k < 4; k++) four.at[k] = j + k < columns ? row[j + k] : 0.0f;
    return four;
}

__device__ __forceinline__ void put(float *row, i64 j, i64 columns, bool aligned, const Four &four) {
    if (aligned) return store(row + j, four);
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (j + k < columns) row[j + k] = four.at[k];
}

template <class... Arrays> __device__ __forceinline__ bool by_fours(i64 columns, const Arrays *...arrays) {
    return columns % 4 == 0 && all_aligned<4>(0, arrays...);
}

// matrix += left_out; pt = matrix Q.
KERNEL low_rank_times(float *matrix, const float *left_out, const float *qt, float *pt, i64 rows, i64 columns,
                      i64 rank) {
    bool aligned = by_fours(columns, matrix, left_out, qt);
    int lane = threadIdx.x % 32;
    for (i64 i = grid_thread() / 32; i < rows; i += grid_threads() / 32) {  // the same for all of a warp
        float *row = matrix + i * columns;
        for (i64 first = 0; first < rank; first += TILE) {
            float sums[TILE][4] = {};
#pragma unroll 1
            for (i64 j = lane * 4; j < columns; j += LANES) {
                Four values = take(row, j, columns, aligned);
                if (first == 0) {
                    Four missing = take(left_out + i * columns, j, columns, aligned);
#pragma unroll
                    for (int k = 0; k < 4; k++) values.at[k] = add(values.at[k], missing.at[k]);
                    put(row, j, columns, aligned, values);
                }
#pragma unroll
                for (int c = 0; c < TILE; c++) {
                    if (first + c >= rank) break;
                    Four factors = take(qt + (first + c) * columns, j, columns, aligned);
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        if (aligned || j + k < columns)
                            sums[c][k] = add(sums[c][k], multiply(values.at[k], factors.at[k]));
                }
            }
#pragma unroll
            for (int c = 0; c < TILE; c++) {
                // Lanes 64 to 4 apart are those of other threads; 2 and 1 apart, this thread's own.
#pragma unroll
                for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        sums[c][k] = add(sums[c][k], __shfl_xor_sync(0xFFFFFFFFu, sums[c][k], distance));
                }
                float sum = add(add(sums[c][0], sums[c][2]), add(sums[c][1], sums[c][3]));
                if (lane == 0 && first + c < rank) pt[(first + c) * rows + i] = sum;
            }
        }
    }
}

// The sums over ROWS rows each, of the columns from `first` of P on, at most TILE: parts[block of rows][c][j].
KERNEL low_rank_parts(const float *matrix, const float *pt, float *parts, i64 rows, i64 columns, i64 rank, i64 first) {
    bool aligned = by_fours(columns, matrix, parts);
    i64 fours = (columns + 3) / 4, blocks = (rows + ROWS - 1) / ROWS, tile = rank - first < TILE ? rank - first : TILE;
    for (i64 item = grid_thread(); item < blocks * fours; item += grid_threads()) {
        i64 block = item / fours, j = item % fours * 4;
        i64 end = (block + 1) * ROWS < rows ? (block + 1) * ROWS : rows;
        float sums[TILE][4] = {};
#pragma unroll 4
        for (i64 i = block * ROWS; i < end; i++) {
            Four values = take(matrix + i * columns, j, columns, aligned);
#pragma unroll
            for (int c = 0; c < TILE; c++) {
                if (c >= tile) break;
                float factor = pt[(first + c) * rows + i];
#pragma unroll
                for (int k = 0; k < 4; k++) sums[c][k] = add(sums[c][k], multiply(factor, values.at[k]));
            }
        }
#pragma unroll
        for (int c = 0; c < TILE; c++) {
            if (c >= tile) break;
            Four sum = {sums[c][0], sums[c][1], sums[c][2], sums[c][3]};
            put(parts + (block * tile + c) * columns, j, columns, aligned, sum);
        }
    }
}

// qt, from `first` on = the sum of the parts.
KERNEL low_rank_sums(const float *parts, float *qt, i64 blocks, i64 count) {
    bool aligned = by_fours(count, parts, qt);
    for (i64 j = grid_thread() * 4; j < count; j += grid_threads() * 4) {
        Four sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 2
        for (i64 block = 0; block < blocks; block++) {
            Four part = take(parts + block * count, j, count, aligned);
#pragma unroll
            for (int k = 0; k < 4; k++) sum.at[k] = add(sum.at[k], part.at[k]);
        }
        put(qt, j, count, aligned, sum);
    }
}

// out = P Q^T, or whole - P Q^T where there is a `whole`.
KERNEL low_rank_product(const float *pt, const float *qt, const float *whole, float *out, i64 rows, i64 columns,
                        i64 rank) {
    bool aligned = by_fours(columns, qt, whole, out);
    for (i64 i = grid_thread() / 32; i < rows; i += grid_threads() / 32) {
        for (i64 j = threadIdx.x % 32 * 4; j < columns; j += LANES) {
            Four sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
            for (i64 c = 0; c < rank; c++) {
                float factor = pt[c * rows + i];
                Four column = take(qt + c * columns, j, columns, aligned);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float one = multiply(factor, column.at[k]);
                    sum.at[k] = c == 0 ? one : add(sum.at[k], one);
                }
            }
            if (whole) {
                Four from = take(whole + i * columns, j, columns, aligned);
#pragma unroll
                for (int k = 0; k < 4; k++) sum.at[k] = subtract(from.at[k], sum.at[k]);
            }
            put(out + i * columns, j, columns, aligned, sum);
        }
    }
}

// The product of two rows in float64, for all threads of the one block: thread t is lane t.
__device__ double product_of(const double *one, const double *other, i64 count) {
    __shared__ double sums[LANES];
    double sum = 0;
#pragma unroll 2
    for (i64 j = threadIdx.x; j < count; j += LANES) sum = add(sum, multiply(one[j], other[j]));
    __syncthreads();  // the product before has been read
    sums[threadIdx.x] = sum;
    for (int half = LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] = add(sums[threadIdx.x], sums[threadIdx.x + half]);
    }
    __syncthreads();
    return sums[0];
}

// One block of LANES threads. Each thread reads and writes its own elements of `work` only, which has as many as `rows`.
KERNEL low_rank_orthogonalise(float *rows, double *work, i64 rank, i64 count) {
    for (i64 c = 0; c < rank; c++) {
        double *row = work + c * count;
#pragma unroll 2
        for (i64 j = threadIdx.x; j < count; j += LANES) row[j] = to_double(rows[c * count + j]);
        double before = square_root(product_of(row, row, count));
        for (i64 step = 0; step < 2 * c; step++) {
            const double *earlier = work + step % c * count;
            double factor = product_of(earlier, row, count);
#pragma unroll 2
            for (i64 j = threadIdx.x; j < count; j += LANES) row[j] = subtract(row[j], multiply(factor, earlier[j]));
        }
        double length = square_root(product_of(row, row, count));
        bool depends = !(length > multiply(DEPENDENT, before));
#pragma unroll 1
        for (i64 j = threadIdx.x; j < count; j += LANES) {
            row[j] = depends ? 0.0 : divide(row[j], length);
            rows[c * count + j] = rounded(row[j]);
        }
    }
}
