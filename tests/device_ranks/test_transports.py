"""The contract of every transport in the registry; a new one inherits all of it."""

from __future__ import annotations

import threading

import numpy
import pytest

from mpitrain import World
from mpitrain.allreduce.algorithm import DTYPES, FLOATS, INTEGERS
from mpitrain.cuda.sequential import DeviceSequential
from tests.ranks.common import assert_same_bits, expected_sum, pattern
from tests.ranks.placements import placed

from .transports import FLOAT32, LENGTHS, LONG, both_kinds, expect, fill, made, placements

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
INT32 = numpy.dtype(numpy.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_is_exact(world: World, transport: DeviceSequential, dtype: numpy.dtype) -> None:
    for length in LENGTHS:
        if dtype not in transport.dtypes:
            with pytest.raises(ValueError, match=r"cannot sum .* Another transport can: MPITRAIN_TRANSPORT=staged"):
                transport.start(cupy.empty(length, dtype))
            continue
        for flat in both_kinds(transport, length, dtype):
            transport.start(fill(world, flat)).wait()
            assert flat.dtype == dtype
            expect(world, flat)


def test_of_many_pieces(world: World, transport: DeviceSequential) -> None:
    for dtype in ("int8", "float64"):
        for flat in both_kinds(transport, LONG, numpy.dtype(dtype)):
            transport.start(fill(world, flat)).wait()
            expect(world, flat)


@placements
@pytest.mark.parametrize("name", ["auto", "peer", "staged", "aware"])
def test_between_nodes(world: World, name: str, placement: str) -> None:
    transport = made(placed(world, placement), name)
    for dtype, lengths in ((FLOAT32, (*LENGTHS, LONG)), (numpy.dtype(numpy.int16), LENGTHS)):
        for length in lengths:
            for flat in both_kinds(transport, length, dtype):
                transport.start(fill(world, flat)).wait()
                expect(world, flat)


def test_work_before_start_and_after_wait(world: World, transport: DeviceSequential) -> None:
    """The host has not waited for the work on the current stream, which is the null stream or the caller's own."""
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        for flat in both_kinds(transport, 50_001, FLOAT32):
            values = cupy.asarray(pattern(flat.size, world.rank).astype(FLOAT32))
            cupy.cuda.get_current_stream().synchronize()
            with stream:
                flat[...] = 0
                flat[...] = values
                transport.start(flat).wait()
                later = cupy.zeros(flat.size, FLOAT32)
                later[...] = flat
                flat[...] = 0  # the sum must come before this
                numpy.testing.assert_array_equal(later.get(), expected_sum(flat.size, world.size))
                assert not flat.get().any()


def test_several_are_started_before_the_first_is_waited_for(world: World, transport: DeviceSequential) -> None:
    """They are driven by wait, or by test alone; a finished handle stays finished."""
    lengths = (1, 300_003, 3, 0, 160_001, world.size - 1, 65_537)
    for waits in (True, False):
        flats = [
            transport.allocate(length, INT32) if index % 3 else cupy.empty(length, INT32)
            for index, length in enumerate(lengths * 2)
        ]
        handles = [transport.start(fill(world, flat)) for flat in flats]
        for handle in (handles[3], handles[-1]) if waits else ():
            handle.wait()
        while not (waits or all(handle.test() for handle in handles)):
            pass
        for flat, handle in zip(flats, handles, strict=True):
            assert handle.test()
            expect(world, flat)


def test_driven_by_a_thread(world: World, transport: DeviceSequential) -> None:
    """The thread's device is 0 and its stream is the null stream, whatever the caller's are."""
    flat = transport.allocate(200_003, FLOAT32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        fill(world, flat)
        handle = transport.start(flat)
        thread = threading.Thread(target=handle.wait)
        thread.start()
        thread.join()
        handle.wait()  # the stream of this thread has not waited for the sum yet
        flat *= 2
        expect(world, flat, 2)
        assert cupy.cuda.get_current_stream() == stream


def test_leaves_the_device_and_the_stream_of_the_caller(world: World, transport: DeviceSequential) -> None:
    device = cupy.cuda.Device().id
    stream = cupy.cuda.Stream(non_blocking=True).use()
    try:
        handle = transport.start(fill(world, cupy.empty(70_000, FLOAT32)))
        while not handle.test():
            assert cupy.cuda.get_current_stream() == stream
            assert cupy.cuda.Device().id == device
        assert cupy.cuda.get_current_stream() == stream
    finally:
        cupy.cuda.Stream.null.use()


def test_only_the_slice_is_changed(world: World, transport: DeviceSequential) -> None:
    for whole in both_kinds(transport, 1000, FLOAT32):
        whole.fill(1)
        transport.start(whole[10:990]).wait()
        values = whole.get()
        assert (values[10:990] == world.size).all()
        assert (values[:10] == 1).all()
        assert (values[990:] == 1).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_same_bits_everywhere(world: World, transport: DeviceSequential, dtype: numpy.dtype) -> None:
    """Rounded values, NaN and infinities have the same bits on every rank, and again in a second sum."""
    values = numpy.random.default_rng(world.rank).standard_normal(40_003).astype(dtype)
    values[:5] = [numpy.inf, -numpy.inf, numpy.nan, -0.0, 0.0]
    values[5:9].view(f"u{dtype.itemsize}")[:] = numpy.array(numpy.nan, dtype).view(f"u{dtype.itemsize}") + world.rank
    results = []
    for flat in both_kinds(transport, values.size, dtype):
        flat.set(values)
        transport.start(flat).wait()
        assert_same_bits(world, flat.get())
        results.append(flat.get()[9:])
    parts = numpy.array(world.allgather(values[9:].astype(numpy.longdouble)))
    bound = (world.size - 1) * float(numpy.finfo(dtype).eps if dtype.kind == "f" else 2.0**-7) * abs(parts).sum(axis=0)
    assert (abs(results[0].astype(numpy.longdouble) - parts.sum(axis=0)) <= bound).all()
    numpy.testing.assert_array_equal(results[0], results[1])


def test_integers_wrap(world: World, transport: DeviceSequential) -> None:
    for dtype in [dtype for dtype in INTEGERS if dtype in transport.dtypes]:
        top = numpy.iinfo(dtype).max
        flat = cupy.full(5, top, dtype)
        transport.start(flat).wait()
        wrapped = (int(top) * world.size) % (1 << 8 * dtype.itemsize)
        assert (flat.get().view(f"u{dtype.itemsize}") == wrapped).all()


def test_own_memory_on_some_ranks_only(world: World, transport: DeviceSequential) -> None:
    own, other = both_kinds(transport, 30_001, FLOAT32)
    flat = fill(world, own if world.rank % 2 else other)
    transport.start(flat).wait()
    expect(world, flat)
