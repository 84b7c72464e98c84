// arithmetic.h for a CPU's compiler, over arrays: what tests/cuda/test_arithmetic.py calls.
#include "arithmetic.h"

#define EACH for (i64 i = 0; i < count; i++)
#define ONE(name, From, To, expression)                                     \
    extern "C" void name(const From *a, To *out, i64 count) { EACH out[i] = expression; }
#define TWO(name, A, B, To, expression)                                     \
    extern "C" void name(const A *a, const B *b, To *out, i64 count) { EACH out[i] = expression; }

ONE(float_to_bf16, float, bf16, to_bf16(a[i]))
ONE(float_to_fp16, float, fp16, to_fp16(a[i]))
ONE(bf16_to_float, bf16, float, to_float(a[i]))
ONE(fp16_to_float, fp16, float, to_float(a[i]))
ONE(finite_float, float, u8, is_finite(a[i]))
ONE(finite_double, double, u8, is_finite(a[i]))
ONE(finite_bf16, bf16, u8, is_finite(a[i]))
ONE(finite_fp16, fp16, u8, is_finite(a[i]))
ONE(root_float, float, float, square_root(a[i]))
ONE(root_double, double, double, square_root(a[i]))
ONE(float_to_double, float, double, to_double(a[i]))
ONE(double_to_float, double, float, rounded(a[i]))
ONE(nearest_float, float, int, nearest(a[i]))
#define OPERATIONS(T)                                                       \
    TWO(add_##T, T, T, T, add(a[i], b[i]))                                  \
    TWO(subtract_##T, T, T, T, subtract(a[i], b[i]))                        \
    TWO(multiply_##T, T, T, T, multiply(a[i], b[i]))                        \
    TWO(divide_##T, T, T, T, divide(a[i], b[i]))
OPERATIONS(float)
OPERATIONS(double)
TWO(add_bf16, bf16, bf16, bf16, add(a[i], b[i]))
TWO(add_fp16, fp16, fp16, fp16, add(a[i], b[i]))
TWO(add_u8, u8, u8, u8, add(a[i], b[i]))
TWO(add_u16, u16, u16, u16, add(a[i], b[i]))
TWO(add_u32, u32, u32, u32, add(a[i], b[i]))
TWO(add_u64, u64, u64, u64, add(a[i], b[i]))
TWO(scale_bf16, bf16, float, bf16, multiply(a[i], b[i]))
TWO(scale_fp16, fp16, float, fp16, multiply(a[i], b[i]))
TWO(cast_error_bf16, float, bf16, float, left_out(a[i], to_float(b[i])))
TWO(cast_error_fp16, float, fp16, float, left_out(a[i], to_float(b[i])))

template <int STEPS, int BLOCK>
static void blocks(const float *values, float *scales, int *codes, float *back, float *error, i64 count) {
    for (i64 first = 0; first < count; first += BLOCK) {
        i64 end = first + BLOCK < count ? first + BLOCK : count;
        u32 largest = 0;
        for (i64 i = first; i < end; i++) {
            u32 magnitude = bits_of(values[i]) & MAGNITUDE;
            if (magnitude > largest) largest = magnitude;
        }
        Scale scale = scale_of<STEPS>(largest);
        scales[first / BLOCK] = scale.scale;
        for (i64 i = first; i < end; i++) {
            codes[i] = code_of(values[i], scale);
            back[i] = decoded(codes[i], scale.scale);
            error[i] = left_out(values[i], codes[i], scale);
        }
    }
}
extern "C" void blocks_int8(const float *v, float *s, int *c, float *b, float *e, i64 n) { blocks<127, 256>(v, s, c, b, e, n); }
extern "C" void blocks_int4(const float *v, float *s, int *c, float *b, float *e, i64 n) { blocks<7, 64>(v, s, c, b, e, n); }
ONE(low, u8, int, low_nibble(a[i]))
ONE(high, u8, int, high_nibble(a[i]))

#define STEPS(T)                                                                                      \
    extern "C" void sgd_##T(T *p, const T *g, T *v, const SgdSettings<T> *its, i64 count) {           \
        EACH sgd_step(p[i], g[i], v[i], *its);                                                        \
    }                                                                                                 \
    extern "C" void adam_##T(T *p, const T *g, T *m, T *v, const AdamSettings<T> *its, i64 count) {   \
        EACH adam_step(p[i], g[i], m[i], v[i], *its);                                                 \
    }
STEPS(float)
STEPS(double)
