// Clip and update in one pass over the parameters.
//
//     gradient = gradient * factor          factor: in device memory, from clip_factor; or none
//     then the step of arithmetic.h; a gradient that is not finite leaves its parameter and state as they are
#include "stride.h"

template <class T> struct Buffers {
    T *parameters;
    const T *gradients;
    const double *factor;
    // Sorted begins and ends of the ranges that decay; none: all decay.
    const i64 *bounds;
    int num_bounds;
};

template <class T> __device__ __forceinline__ T number(double x);
template <> __device__ __forceinline__ float number<float>(double x) { return rounded(x); }
template <> __device__ __forceinline__ double number<double>(double x) { return x; }

// How many of the bounds are at i or before it: odd inside a range.
__device__ __forceinline__ int bounds_up_to(const i64 *bounds, int count, i64 i) {
    int low = 0;
    while (low < count) {
        int middle = (low + count) / 2;
        if (bounds[middle] <= i)
            low = middle + 1;
        else
            count = middle;
    }
    return low;
}

// step(parameter, gradient, one of state1, one of state2, whether it decays). A null state is not there.
template <class T, int WIDTH, class Step>
__device__ __forceinline__ void update(const Buffers<T> &its, T *state1, T *state2, i64 count, Step step) {
    T factor = its.factor ? number<T>(*its.factor) : (T)1;
    auto apply = [&](T &parameter, T gradient, T &one, T &two, bool decays) {
        gradient = multiply(gradient, factor);
        if (is_finite(gradient)) step(parameter, gradient, one, two, decays);
    };
    auto many = [&](i64 i) {
        Vector<T, WIDTH> parameter = load<WIDTH>(its.parameters + i), gradient = load<WIDTH>(its.gradients + i);
        Vector<T, WIDTH> one = {}, two = {};
        if (state1) one = load<WIDTH>(state1 + i);
        if (state2) two = load<WIDTH>(state2 + i);
        int before = its.bounds ? bounds_up_to(its.bounds, its.num_bounds, i) : 1;
        bool mixed = before < its.num_bounds && its.bounds[before] < i + WIDTH;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            int bound = mixed ? bounds_up_to(its.bounds, its.num_bounds, i + k) : before;
            apply(parameter.at[k], gradient.at[k], one.at[k], two.at[k], bound % 2 != 0);
        }
        store(its.parameters + i, parameter);
        if (state1) store(state1 + i, one);
        if (state2) store(state2 + i, two);
    };
    auto single = [&](i64 i) {
        T parameter = its.parameters[i], one = state1 ? state1[i] : (T)0, two = state2 ? state2[i] : (T)0;
        int before = its.bounds ? bounds_up_to(its.bounds, its.num_bounds, i) : 1;
        apply(parameter, its.gradients[i], one, two, before % 2 != 0);
        its.parameters[i] = parameter;
        if (state1) state1[i] = one;
        if (state2) state2[i] = two;
    };
    i64 head = common_head<WIDTH>(count, its.parameters, its.gradients, state1, state2);
    for_each<WIDTH>(count, head, grid_thread(), grid_threads(), many, single);
}

template <class T, int WIDTH>
__device__ __forceinline__ void sgd(const Buffers<T> &its, T *velocity, const SgdSettings<T> &settings, i64 count) {
    update<T, WIDTH>(its, velocity, (T *)nullptr, count, [&](T &parameter, T gradient, T &one, T &, bool decays) {
        SgdSettings<T> used = settings;
        if (!decays) used.decay = 0;
        sgd_step(parameter, gradient, one, used);
    });
}

template <class T, int WIDTH>
__device__ __forceinline__ void adam(const Buffers<T> &its, T *first, T *second, const AdamSettings<T> &settings,
                                     i64 count) {
    update<T, WIDTH>(its, first, second, count, [&](T &parameter, T gradient, T &one, T &two, bool decays) {
        AdamSettings<T> used = settings;
        if (!decays) used.keep = 1;
        adam_step(parameter, gradient, one, two, used);
    });
}

#define OPTIMIZERS(name, T, WIDTH)                                                                                     \
    KERNEL_OF_64 sgd_##name(const __grid_constant__ Buffers<T> its, T *velocity,                                       \
                            const __grid_constant__ SgdSettings<T> settings, i64 count) {                              \
        sgd<T, WIDTH>(its, velocity, settings, count);                                                                 \
    }                                                                                                                  \
    KERNEL_OF_64 adam_##name(const __grid_constant__ Buffers<T> its, T *first, T *second,                              \
                             const __grid_constant__ AdamSettings<T> settings, i64 count) {                            \
        adam<T, WIDTH>(its, first, second, settings, count);                                                           \
    }
OPTIMIZERS(f32, float, 4)
OPTIMIZERS(f64, double, 2)
