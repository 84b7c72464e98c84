// What the kernels compute with one value, in functions that a CPU's compiler takes too: the tests compare every one of
// them with NumPy bit by bit.
//
// float32 operations on a device are PTX by name. `a + b` may be joined with a product (--fmad), and CuPy compiles every
// RawModule with -ftz=true, which makes __fadd_rn and its like flush subnormal numbers to zero; `add.rn.f32` does
// neither, whatever the options. Comparisons are made on bits, for the same reason. float64 has no such mode.
//
// NaN: the formats below make one NaN of every NaN, as the host's codecs do. Which NaN an addition or a product gives
// differs between devices and CPUs.
#pragma once

#ifdef __CUDA_ARCH__
#define BOTH __host__ __device__ __forceinline__
#else
#include <cmath>
#include <cstring>
#define BOTH inline
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef long long i64;

// A 16-bit word that is a float of that format.
struct bf16 {
    u16 word;
};
struct fp16 {
    u16 word;
};

// Bits --------------------------------------------------------------------------------------------------------------

BOTH u32 bits_of(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
#endif
}

BOTH u64 bits_of(double x) {
#ifdef __CUDA_ARCH__
    return (u64)__double_as_longlong(x);
#else
    u64 bits;
    memcpy(&bits, &x, 8);
    return bits;
#endif
}

BOTH float float_from(u32 bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float x;
    memcpy(&x, &bits, 4);
    return x;
#endif
}

enum : u32 { INFINITE = 0x7F800000u, MAGNITUDE = 0x7FFFFFFFu, NAN_BITS = 0x7FC00000u };

BOTH bool is_finite(float x) { return (bits_of(x) & MAGNITUDE) < INFINITE; }
BOTH bool is_finite(double x) { return (bits_of(x) & 0x7FFFFFFFFFFFFFFFull) < 0x7FF0000000000000ull; }
BOTH bool is_finite(bf16 x) { return (x.word & 0x7FFFu) < 0x7F80u; }
BOTH bool is_finite(fp16 x) { return (x.word & 0x7FFFu) < 0x7C00u; }

BOTH bool is_zero(float x) { return (bits_of(x) & MAGNITUDE) == 0; }
BOTH bool is_zero(double x) { return x == 0; }

// Operations, each rounded once -------------------------------------------------------------------------------------

#ifdef __CUDA_ARCH__
#define OPERATION(name, ptx, intrinsic, symbol)                                \
    BOTH float name(float a, float b) {                                        \
        float result;                                                          \
        asm(ptx ".rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));        \
        return result;                                                         \
    }                                                                          \
    BOTH double name(double a, double b) { return intrinsic(a, b); }
#else
#define OPERATION(name, ptx, intrinsic, symbol)                                \
    BOTH float name(float a, float b) { return a symbol b; }                   \
    BOTH double name(double a, double b) { return a symbol b; }
#endif
OPERATION(add, "add", __dadd_rn, +)
OPERATION(subtract, "sub", __dsub_rn, -)
OPERATION(multiply, "mul", __dmul_rn, *)
OPERATION(divide, "div", __ddiv_rn, /)
#undef OPERATION

BOTH float square_root(float x) {
#ifdef __CUDA_ARCH__
    float result;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return sqrtf(x);
#endif
}

BOTH double square_root(double x) {
#ifdef __CUDA_ARCH__
    return __dsqrt_rn(x);
#else
    return sqrt(x);
#endif
}

// To the nearest whole number, ties to even; |x| is below 2^31.
BOTH int nearest(float x) {
#ifdef __CUDA_ARCH__
    int result;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(result) : "f"(x));
    return result;
#else
    return (int)nearbyintf(x);
#endif
}

BOTH double to_double(double x) { return x; }

BOTH double to_double(float x) {
#ifdef __CUDA_ARCH__
    double result;
    asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(x));
    return result;
#else
    return x;
#endif
}

BOTH float rounded(double x) {
#ifdef __CUDA_ARCH__
    float result;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(x));
    return result;
#else
    return (float)x;
#endif
}

// Formats -----------------------------------------------------------------------------------------------------------

// Half of what is cut off is added first; one less where the last bit that stays is 0, so that ties go to even.
BOTH bf16 to_bf16(float x) {
    u32 bits = bits_of(x);
    u32 word = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    return bf16{(u16)((bits & MAGNITUDE) > INFINITE ? 0x7FC0u : word)};
}

BOTH float to_float(bf16 x) { return float_from((u32)x.word << 16); }

// The same in integers on the host, as in mpitrain/compression/kernels.py: subnormal numbers of fp16 are multiples of
// 2^-24, the last bit of a float32 from 0.5 to 1, so adding 0.5 rounds them.
BOTH fp16 to_fp16(float x) {
    u32 bits = bits_of(x), magnitude = bits & MAGNITUDE;
#ifdef __CUDA_ARCH__
    u16 word;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(word) : "f"(x));
#else
    u32 word;
    if (magnitude >= 0x477FF000u)  // 65520, halfway to what would come after the largest one
        word = 0x7C00u;
    else if (magnitude < 0x38800000u)  // 2^-14
        word = bits_of(float_from(magnitude) + 0.5f) - 0x3F000000u;
    else  // 15 - 127 in the place of the exponent, and half of what is cut off
        word = (magnitude + 0xC8000FFFu + (magnitude >> 13 & 1u)) >> 13;
    word |= bits >> 16 & 0x8000u;
#endif
    return fp16{(u16)(magnitude > INFINITE ? 0x7E00u : word)};
}

BOTH float to_float(fp16 x) {
    u32 sign = (u32)(x.word & 0x8000u) << 16, shifted = (u32)(x.word & 0x7FFFu) << 13;
    if (shifted > 0x0F800000u) return float_from(sign | (shifted + 0x70000000u));  // NaN
#ifdef __CUDA_ARCH__
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.word));
    return result;
#else
    if (shifted == 0x0F800000u) return float_from(sign | INFINITE);
    // A subnormal number is made normal by adding 2^-14 in bits, and taking it off in float32.
    if (shifted < 0x00800000u) return float_from(sign | bits_of(float_from(shifted + 0x38800000u) - 0x1p-14f));
    return float_from(sign | (shifted + 0x38000000u));
#endif
}

BOTH float to_float(float x) { return x; }
BOTH double to_double(bf16 x) { return to_double(to_float(x)); }
BOTH double to_double(fp16 x) { return to_double(to_float(x)); }

template <class T> struct Cast;
template <> struct Cast<float> {
    static BOTH float from(float x) { return x; }
};
template <> struct Cast<bf16> {
    static BOTH bf16 from(float x) { return to_bf16(x); }
};
template <> struct Cast<fp16> {
    static BOTH fp16 from(float x) { return to_fp16(x); }
};

// Sums and products in an array's own dtype; integers wrap, so signed ones are added as unsigned ones.
BOTH bf16 add(bf16 a, bf16 b) { return to_bf16(add(to_float(a), to_float(b))); }
BOTH fp16 add(fp16 a, fp16 b) { return to_fp16(add(to_float(a), to_float(b))); }
BOTH u8 add(u8 a, u8 b) { return (u8)(a + b); }
BOTH u16 add(u16 a, u16 b) { return (u16)(a + b); }
BOTH u32 add(u32 a, u32 b) { return a + b; }
BOTH u64 add(u64 a, u64 b) { return a + b; }
BOTH bf16 multiply(bf16 a, float b) { return to_bf16(multiply(to_float(a), b)); }
BOTH fp16 multiply(fp16 a, float b) { return to_fp16(multiply(to_float(a), b)); }

// int8 and int4: a scale for each block, as in mpitrain/compression/int8.py and int4.py -------------------------------

struct Scale {
    float scale;    // of the wire: 0 for a block of too small numbers, NaN for one that is not finite
    float inverse;  // what a value is multiplied with to become a code; 0 in both of those cases
    bool finite;
};

// STEPS is the largest code: 127 or 7. `largest` has the bits of the block's largest |value|: without their sign, the
// bits of floats are ordered as the floats are, with infinity and NaN above all others.
template <int STEPS> BOTH Scale scale_of(u32 largest) {
    // STEPS * 2^-126: below it the scale would be subnormal. The largest scale times STEPS is finite.
    const u32 smallest = STEPS == 127 ? 0x03FE0000u : 0x01E00000u;
    const u32 largest_scale = STEPS == 127 ? 0x7C010203u : 0x7E124924u;
    if (largest >= INFINITE) return Scale{float_from(NAN_BITS), 0.0f, false};
    if (largest < smallest) return Scale{0.0f, 0.0f, true};
    float absmax = float_from(largest), scale = divide(absmax, (float)STEPS);
    if (bits_of(scale) > largest_scale) scale = float_from(largest_scale);
    return Scale{scale, divide((float)STEPS, absmax), true};
}

BOTH int code_of(float value, Scale block) { return block.finite ? nearest(multiply(value, block.inverse)) : 0; }

// Where the scale is NaN, that very NaN: devices would make another one of it.
BOTH float decoded(int code, float scale) { return is_finite(scale) ? multiply((float)code, scale) : scale; }

BOTH float left_out(float value, int code, Scale block) {
    return block.finite ? subtract(value, decoded(code, block.scale)) : 0.0f;
}

// What a cast leaves out; 0 where what was decoded is not finite.
BOTH float left_out(float value, float decoded) { return is_finite(decoded) ? subtract(value, decoded) : 0.0f; }

BOTH int low_nibble(u32 byte) { return (int)((byte & 15u) ^ 8u) - 8; }
BOTH int high_nibble(u32 byte) { return (int)((byte >> 4 & 15u) ^ 8u) - 8; }

// Optimizers: the operations of mpitrain/optim/optimizers.py in their order, so that the bits are the same -----------

template <class T> struct SgdSettings {
    T rate, momentum, decay;  // decay is 0 for a parameter that does not decay
    bool nesterov;
};

// `velocity` is left alone where momentum is 0.
template <class T> BOTH void sgd_step(T &parameter, T gradient, T &velocity, SgdSettings<T> its) {
    if (!is_zero(its.decay)) gradient = add(gradient, multiply(parameter, its.decay));
    T direction = gradient;
    if (!is_zero(its.momentum)) {
        direction = velocity = add(multiply(velocity, its.momentum), gradient);
        if (its.nesterov) direction = add(multiply(velocity, its.momentum), gradient);
    }
    parameter = subtract(parameter, multiply(direction, its.rate));
}

template <class T> struct AdamSettings {
    T beta1, rest1, beta2, rest2;  // rest1 = 1 - beta1
    T root_correction;             // 1 / sqrt(1 - beta2^t)
    T epsilon;
    T rate;  // learning rate / (1 - beta1^t)
    T keep;  // what a parameter is multiplied with first: 1, or for AdamW 1 - learning rate * weight decay
};

template <class T> BOTH void adam_step(T &parameter, T gradient, T &first, T &second, AdamSettings<T> its) {
    parameter = multiply(parameter, its.keep);
    first = add(multiply(first, its.beta1), multiply(gradient, its.rest1));
    second = add(multiply(second, its.beta2), multiply(multiply(gradient, gradient), its.rest2));
    T divisor = add(multiply(square_root(second), its.root_correction), its.epsilon);
    parameter = subtract(parameter, multiply(divide(first, divisor), its.rate));
}
