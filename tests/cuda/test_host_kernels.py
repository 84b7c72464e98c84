"""tests/emulated/host_kernels.py runs kernels as a device would, and finds what they must not do."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

EMULATED = Path(__file__).parents[1] / "emulated"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

KERNELS = r"""
#define NAMED(name) extern "C" __global__ void __launch_bounds__(256) name
struct alignas(16) Four { float at[4]; };
struct Pair { double a; int b; };

NAMED(reverse)(float *x) {
    __shared__ float all[64];
    all[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = all[63 - threadIdx.x];
}
NAMED(reverse_without_waiting)(float *x) {
    __shared__ float all[64];
    all[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = all[63 - threadIdx.x];
}
NAMED(warp_sums)(int *x) {
    int sum = x[threadIdx.x];
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, far);
    int first = __shfl_sync(0xFFFFFFFFu, x[threadIdx.x], 0);
    int next = __shfl_down_sync(0xFFFFFFFFu, x[threadIdx.x], 1), last = __shfl_up_sync(0xFFFFFFFFu, x[threadIdx.x], 1);
    unsigned odd = __ballot_sync(0xFFFFFFFFu, x[threadIdx.x] % 2);
    x[threadIdx.x] = threadIdx.x % 32 == 0 ? sum : threadIdx.x % 32 == 1 ? first : threadIdx.x % 32 == 2 ? next
        : threadIdx.x % 32 == 3 ? last : (int)odd;
}
NAMED(count_up)(int *x) { atomicAdd(x, 1); }
NAMED(where)(long long *x) {
    x[(blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x * blockDim.y + threadIdx.y * blockDim.x + threadIdx.x] =
        threadIdx.x + 10 * threadIdx.y + 100 * blockIdx.x + 1000 * blockIdx.y;
}
NAMED(takes)(float *x, long long i, double d, float f, unsigned char u, bool b, const __grid_constant__ Pair pair) {
    if (x) x[0] = i + d + f + u + b + pair.a + pair.b;
}
NAMED(some_wait)(float *x) { if (threadIdx.x < 3) __syncthreads(); }
NAMED(some_shuffle)(float *x) { if (threadIdx.x < 3) x[0] = __shfl_sync(0xFFFFFFFFu, x[0], 0); }
NAMED(shuffle_from_outside)(float *x) { if (threadIdx.x < 2) x[0] = __shfl_sync(3u, x[0], 5); }
NAMED(unaligned)(float *x) { *reinterpret_cast<Four *>(x) = Four{1, 2, 3, 4}; }
NAMED(outside)(float *x) { __shared__ float all[4]; all[threadIdx.x] = x[0]; }
NAMED(overflowing)(int *x) { x[0] = x[0] + 2147483647; }
NAMED(far_shift)(int *x) { x[1] = 1 << x[0]; }
"""


@pytest.fixture(scope="module")
def host_kernels() -> Iterator[Any]:
    sys.path.insert(0, str(EMULATED))
    try:
        import host_kernels

        yield host_kernels
    finally:
        sys.path.remove(str(EMULATED))
        sys.modules.pop("host_kernels", None)


@pytest.fixture(scope="module")
def module(host_kernels: Any) -> Any:
    return host_kernels.HostModule(KERNELS)


def test_threads_wait_for_each_other(module: Any) -> None:
    x = numpy.arange(64, dtype=numpy.float32)
    module.kernel("reverse")((1,), (64,), (x,))
    assert x.tolist() == [*range(63, -1, -1)]
    for _ in range(5):
        x = numpy.arange(64, dtype=numpy.float32)
        module.kernel("reverse_without_waiting")((1,), (64,), (x,))
        assert x.tolist() != [*range(63, -1, -1)]


def test_warps(module: Any) -> None:
    x = numpy.arange(64, dtype=numpy.int32)
    module.kernel("warp_sums")((1,), (64,), (x,))
    assert x[:5].tolist() == [sum(range(32)), 0, 3, 2, numpy.int32(numpy.uint32(0xAAAAAAAA).view(numpy.int32))]
    assert x[32:36].tolist() == [sum(range(32, 64)), 32, 35, 34]


def test_blocks_and_threads_have_places(module: Any) -> None:
    x = numpy.zeros(36, numpy.int64)
    module.kernel("where")((2, 3), (3, 2), (x,))
    assert x.tolist() == [
        tx + 10 * ty + 100 * bx + 1000 * by for by in range(3) for bx in range(2) for ty in range(2) for tx in range(3)
    ]
    count = numpy.zeros(1, numpy.int32)
    module.kernel("count_up")((7,), (1000,), (count,))
    assert count[0] == 7000


PAIR = numpy.array((0.5, 3), numpy.dtype([("a", "f8"), ("b", "i4")], align=True))


def test_arguments(module: Any) -> None:
    x = numpy.zeros(1, numpy.float32)
    right = [x, 10, 0.25, numpy.float32(0.125), numpy.uint8(1), True, PAIR]
    takes = module.kernel("takes")
    takes((1,), (1,), right)
    assert x[0] == 10 + 0.25 + 0.125 + 1 + 1 + 0.5 + 3
    takes((1,), (1,), [None, *right[1:]])
    for place, wrong in [
        (0, numpy.zeros(1)), (0, 5), (1, 1.0), (1, numpy.int32(1)), (2, 1), (2, numpy.float32(1)), (3, 1.0),
        (4, 1), (4, numpy.uint16(1)), (5, 1), (6, numpy.zeros(())), (6, 1),
    ]:  # fmt: skip
        with pytest.raises(TypeError, match=f"takes, argument {place}: "):
            takes((1,), (1,), [*right[:place], wrong, *right[place + 1 :]])
    with pytest.raises(TypeError, match="takes 7 arguments, not 6"):
        takes((1,), (1,), right[1:])
    for grid, block in (((0,), (1,)), ((1,), (0,)), ((1,), (1025,)), ((1,), (64, 32)), ((1, 1, 1, 1), (1,))):
        with pytest.raises(ValueError, match="takes: "):
            takes(grid, block, right)
    with pytest.raises(AttributeError):
        module.kernel("not_there")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some_wait", r"block \(0, 0, 0\), thread \d+ waits at a block's barrier .* 61 of 64 have ended"),
        ("some_shuffle", r"thread \d+ waits at a warp's barrier that others never reach"),
        ("shuffle_from_outside", "reads from a thread that does not take part"),
        ("unaligned", r"kernels\.cu:\d+: a pointer that is not aligned"),
        ("outside", r"kernels\.cu:\d+: an index outside the array"),
        ("overflowing", r"kernels\.cu:\d+: a signed integer overflows"),
        ("far_shift", r"kernels\.cu:\d+: a shift too far"),
    ],
)
def test_mistakes(module: Any, host_kernels: Any, name: str, message: str) -> None:
    x = numpy.full(100, 77, numpy.int32 if name in ("overflowing", "far_shift") else numpy.float32)
    with pytest.raises(host_kernels.LaunchError, match=message):
        module.kernel(name)((1,), (64,), (x[1:],))
    # The next launch starts afresh.
    count = numpy.zeros(1, numpy.int32)
    module.kernel("count_up")((1,), (64,), (count,))
    assert count[0] == 64


def test_a_text_that_does_not_compile(host_kernels: Any) -> None:
    with pytest.raises(host_kernels.CompilationError, match=r"kernels\.cu:2:.*nothing"):
        host_kernels.HostModule('\nextern "C" __global__ void f() { nothing(); }')


def test_options_define_macros(host_kernels: Any) -> None:
    module = host_kernels.HostModule('extern "C" __global__ void f(int *x) { *x = N; }', ("-DN=5", "--fmad=false"))
    x = numpy.zeros(1, numpy.int32)
    module.kernel("f")((1,), (1,), (x,))
    assert x[0] == 5
