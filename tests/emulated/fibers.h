// Threads of a CUDA block as fibers on one CPU thread, and what a launch from Python needs: see cuda_on_host.h.
#pragma once

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <ucontext.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

extern "C" {  // from the linker, where there is such a section
extern char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));
}

struct uint3 {
    unsigned x, y, z;
};
typedef uint3 dim3;
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static const int warpSize = 32;

namespace on_host {

enum State { READY, AT_BLOCK, AT_WARP, ENDED };
const size_t STACK_BYTES = 1 << 16;

struct Fiber {
    ucontext_t start;
    jmp_buf here;
    char *stack = nullptr;
    bool begun = false;
    State state = ENDED;
    unsigned rank = 0, mask = 0;
    uint3 index = {};
    uint64_t value = 0;    // what it shows the others
    uint64_t seen[32] = {};  // what all showed, once they have all arrived
};

static std::vector<Fiber> fibers;
static Fiber *current = nullptr;
static jmp_buf scheduler;
static char problem[512];
static void (*body)(void **) = nullptr;
static void **body_arguments = nullptr;
static uint64_t random_state = 88172645463325252ull;
static std::mutex one_launch_at_a_time;

[[noreturn]] static void leave() { longjmp(scheduler, 1); }

static void fail(const char *text) {
    if (!problem[0])
        snprintf(problem, sizeof problem, "block (%u, %u, %u), thread (%u, %u, %u): %s", blockIdx.x, blockIdx.y,
                 blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, text);
    leave();
}

// A fiber is made once and runs one kernel after the other.
static void fiber_main() {
    for (;;) {
        body(body_arguments);
        current->state = ENDED;
        if (!_setjmp(current->here)) leave();
    }
}

static void run(Fiber &fiber) {
    current = &fiber;
    threadIdx = fiber.index;
    if (_setjmp(scheduler)) return;
    if (fiber.begun) longjmp(fiber.here, 1);
    fiber.begun = true;
    setcontext(&fiber.start);
}

static void wait_as(State state) {
    Fiber *mine = current;
    mine->state = state;
    if (!_setjmp(mine->here)) leave();
}

static void prepare(unsigned count) {
    if (problem[0]) {  // fibers of a launch that failed are in the middle of something
        for (auto &fiber : fibers) free(fiber.stack);
        fibers.clear();
    }
    while (fibers.size() < count) {
        fibers.emplace_back();
        fibers.back().stack = (char *)malloc(STACK_BYTES);
    }
    for (auto &fiber : fibers) {
        if (fiber.begun) continue;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack;
        fiber.start.uc_stack.ss_size = STACK_BYTES;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, fiber_main, 0);
    }
    problem[0] = 0;
}

// Lets go on who waited for nobody but threads that wait as well; false if there is nobody.
static bool release(unsigned count) {
    bool any = false;
    for (unsigned first = 0; first < count; first += 32) {
        unsigned lanes = count - first < 32 ? count - first : 32;
        for (unsigned lane = 0; lane < lanes; lane++) {
            Fiber &fiber = fibers[first + lane];
            if (fiber.state != AT_WARP) continue;
            unsigned arrived = 0;
            for (unsigned other = 0; other < lanes; other++) {
                Fiber &its = fibers[first + other];
                if (its.state == AT_WARP && its.mask == fiber.mask) arrived |= 1u << other;
            }
            if ((arrived & fiber.mask) != fiber.mask) continue;
            uint64_t shown[32] = {};
            for (unsigned other = 0; other < lanes; other++) shown[other] = fibers[first + other].value;
            for (unsigned other = 0; other < lanes; other++) {
                if (!(fiber.mask >> other & 1)) continue;
                memcpy(fibers[first + other].seen, shown, sizeof shown);
                fibers[first + other].state = READY;
            }
            any = true;
        }
    }
    if (any) return true;
    for (unsigned i = 0; i < count; i++)
        if (fibers[i].state != AT_BLOCK) return false;
    for (unsigned i = 0; i < count; i++) fibers[i].state = READY;
    return true;
}

static void shuffle(std::vector<unsigned> &order) {
    for (size_t i = order.size(); i-- > 1;) {
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        std::swap(order[i], order[random_state % (i + 1)]);
    }
}

static void run_block(unsigned count) {
    if (__start_shared_memory)
        memset(__start_shared_memory, 0xA5, __stop_shared_memory - __start_shared_memory);
    unsigned rank = 0;
    for (unsigned z = 0; z < blockDim.z; z++)
        for (unsigned y = 0; y < blockDim.y; y++)
            for (unsigned x = 0; x < blockDim.x; x++, rank++) {
                fibers[rank].index = uint3{x, y, z};
                fibers[rank].rank = rank;
                fibers[rank].state = READY;
            }
    std::vector<unsigned> order(count);
    for (unsigned i = 0; i < count; i++) order[i] = i;
    for (;;) {
        shuffle(order);
        for (unsigned i : order) {
            if (fibers[i].state != READY) continue;
            run(fibers[i]);
            if (problem[0]) return;
        }
        unsigned ended = 0;
        for (unsigned i = 0; i < count; i++) ended += fibers[i].state == ENDED;
        if (ended == count) return;
        if (!release(count)) {
            unsigned stuck = 0;
            while (fibers[stuck].state == ENDED) stuck++;
            snprintf(problem, sizeof problem,
                     "block (%u, %u, %u), thread %u waits at a %s barrier that others never reach; %u of %u have ended",
                     blockIdx.x, blockIdx.y, blockIdx.z, stuck, fibers[stuck].state == AT_WARP ? "warp's" : "block's",
                     ended, count);
            return;
        }
    }
}

static const char *launch(void (*kernel)(void **), const unsigned *grid, const unsigned *block, void **arguments) {
    std::lock_guard<std::mutex> guard(one_launch_at_a_time);
    gridDim = dim3{grid[0], grid[1], grid[2]};
    blockDim = dim3{block[0], block[1], block[2]};
    unsigned count = block[0] * block[1] * block[2];
    prepare(count);
    body = kernel;
    body_arguments = arguments;
    std::vector<unsigned> order(grid[0] * grid[1] * grid[2]);
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    shuffle(order);
    for (unsigned i : order) {
        blockIdx = uint3{i % grid[0], i / grid[0] % grid[1], i / grid[0] / grid[1]};
        run_block(count);
        if (problem[0]) return problem;
    }
    return nullptr;
}

// What a kernel takes: for each argument a letter for its kind, its bytes, and for a pointer the bytes it points to.
struct Argument {
    char kind;
    int bytes, pointed_to;
};

template <class T> constexpr int pointed_to() {
    typedef std::remove_cv_t<std::remove_pointer_t<T>> To;
    if constexpr (!std::is_pointer_v<T> || std::is_void_v<To>)
        return 0;
    else
        return sizeof(To);
}

template <class T> constexpr Argument describe() {
    char kind = std::is_pointer_v<T>           ? 'p'
                : std::is_same_v<T, bool>      ? 'b'
                : std::is_floating_point_v<T>  ? 'f'
                : std::is_integral_v<T>        ? (std::is_signed_v<T> ? 'i' : 'u')
                                               : 's';
    return Argument{kind, (int)sizeof(T), pointed_to<T>()};
}

template <class F> struct Signature;
template <class... A> struct Signature<void (*)(A...)> {
    static constexpr int count = sizeof...(A);
    static inline const Argument arguments[sizeof...(A) + 1] = {describe<A>()..., Argument{0, 0, 0}};
    template <void (*F)(A...), size_t... I> static void call(void **values, std::index_sequence<I...>) {
        F(*static_cast<std::remove_reference_t<A> *>(values[I])...);
    }
    template <void (*F)(A...)> static void call(void **values) { call<F>(values, std::make_index_sequence<count>()); }
};

// All lanes of `mask` show a value and see the others'.
inline const uint64_t *exchange(unsigned mask, uint64_t value) {
    if (!(mask >> current->rank % 32 & 1)) fail("the mask of a warp operation lacks the calling thread");
    current->mask = mask;
    current->value = value;
    wait_as(AT_WARP);
    return current->seen;
}

template <class T> T shuffled(unsigned mask, T value, unsigned from) {
    uint64_t bits = 0;
    static_assert(sizeof(T) <= 8, "shuffles take up to 8 bytes");
    memcpy(&bits, &value, sizeof(T));
    const uint64_t *seen = exchange(mask, bits);
    if (from >= 32 || !(mask >> from & 1)) fail("a shuffle reads from a thread that does not take part");
    memcpy(&value, &seen[from], sizeof(T));
    return value;
}

inline unsigned lane() { return current->rank % 32; }

}  // namespace on_host
