// CUDA C++ for the host: what host_kernels.py puts in front of a .cu text.
//
// The threads of a block are fibers on one CPU thread, which take turns where they wait for each other: __syncthreads,
// __syncwarp, shuffles and votes. In every turn they run in another order, so that a missing __syncthreads shows.
// Blocks run one after the other, in any order. Shared memory holds nonsense until it is written. A mistake ends the
// launch with a message: threads that wait at different barriers, or for a thread that has ended; and what the
// compiler's sanitizer finds, such as a vector that is not aligned, an index outside an array, a signed overflow or a
// shift too far.
#pragma once

#include "fibers.h"

#define __device__
#define __host__
// All of a block's shared memory lies in one section, to be filled with nonsense before the block starts.
#define __shared__ static __attribute__((section("shared_memory")))
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

inline void __syncthreads() { on_host::wait_as(on_host::AT_BLOCK); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { on_host::exchange(mask, 0); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

template <class T> T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    return on_host::shuffled(mask, value, on_host::lane() / width * width + from % width);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    unsigned from = on_host::lane() ^ bits;
    return on_host::shuffled(mask, value, from / width == on_host::lane() / width ? from : on_host::lane());
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    unsigned from = on_host::lane() + by;
    return on_host::shuffled(mask, value, from / width == on_host::lane() / width ? from : on_host::lane());
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    unsigned from = on_host::lane() % width < by ? on_host::lane() : on_host::lane() - by;
    return on_host::shuffled(mask, value, from);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const uint64_t *seen = on_host::exchange(mask, predicate != 0);
    unsigned result = 0;
    for (unsigned i = 0; i < 32; i++) result |= (mask >> i & 1 && seen[i]) ? 1u << i : 0;
    return result;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

// One fiber runs at a time, so these are whole.
template <class T> T atomicAdd(T *at, T value) {
    T before = *at;
    *at = before + value;
    return before;
}
template <class T> T atomicOr(T *at, T value) {
    T before = *at;
    *at = before | value;
    return before;
}
template <class T> T atomicMax(T *at, T value) {
    T before = *at;
    if (value > before) *at = value;
    return before;
}
template <class T> T atomicExch(T *at, T value) {
    T before = *at;
    *at = value;
    return before;
}
template <class T> T atomicCAS(T *at, T expected, T value) {
    T before = *at;
    if (before == expected) *at = value;
    return before;
}

// What the sanitizer calls. All it hands over begins with the place in the source.
namespace on_host {
struct Place {
    const char *file;
    uint32_t line, column;
};
static void found(void *data, const char *what) {
    Place *place = (Place *)data;
    char text[256];
    snprintf(text, sizeof text, "%s:%u: %s", place->file, place->line, what);
    fail(text);
}
}  // namespace on_host
extern "C" {
__attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(void *data, void *pointer) {
    on_host::found(data, pointer ? "a pointer that is not aligned for what is read or written there" : "a null pointer");
}
__attribute__((visibility("hidden"))) void __ubsan_handle_out_of_bounds(void *data, void *) {
    on_host::found(data, "an index outside the array");
}
__attribute__((visibility("hidden"))) void __ubsan_handle_shift_out_of_bounds(void *data, void *, void *) {
    on_host::found(data, "a shift too far, or of a negative number");
}
#define OVERFLOW(name)                                                                                \
    __attribute__((visibility("hidden"))) void __ubsan_handle_##name(void *data, void *, void *) {     \
        on_host::found(data, "a signed integer overflows");                                           \
    }
OVERFLOW(add_overflow)
OVERFLOW(sub_overflow)
OVERFLOW(mul_overflow)
OVERFLOW(divrem_overflow)
#undef OVERFLOW
__attribute__((visibility("hidden"))) void __ubsan_handle_negate_overflow(void *data, void *) {
    on_host::found(data, "a signed integer overflows");
}
}
