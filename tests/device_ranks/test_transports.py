"""The contract of every transport in the registry; a new one inherits all of it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import numpy
import pytest

from mpitrain import World
from mpitrain.allreduce import make_algorithm
from mpitrain.allreduce.algorithm import DTYPES, FLOATS, INTEGERS
from mpitrain.allreduce.device import TRANSPORTS, make_transport
from mpitrain.allreduce.device.sequential import DeviceSequential
from mpitrain.arrays import Array
from mpitrain.cuda import peers
from mpitrain.errors import ConfigError, DeviceError, MismatchError
from tests.ranks.common import assert_equal, assert_same_bits, error_on_all, expected_sum, pattern, skip_alone
from tests.ranks.placements import PLACEMENTS, placed

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

FLOAT32 = numpy.dtype(numpy.float32)
INT32 = numpy.dtype(numpy.int32)
# The largest is several pieces in every transport, and a slab of peer's.
LENGTHS = (0, 1, 2, 3, 7, 1000, 100003)
LONG = 2_500_007


def made(world: World, name: str) -> DeviceSequential:
    try:
        return make_transport(world, name)
    except DeviceError as error:
        assert error.known_everywhere
        pytest.skip(str(error))


@pytest.fixture(params=sorted(TRANSPORTS), scope="module")
def transport(request: pytest.FixtureRequest, world: World) -> Iterator[DeviceSequential]:
    yield made(world, request.param)


def fill(world: World, flat: Array) -> Array:
    flat.set(pattern(flat.size, world.rank).astype(flat.dtype))
    return flat


def expect(world: World, flat: Array, factor: int = 1) -> None:
    expected = expected_sum(flat.size, world.size).astype(flat.dtype)
    assert_equal(flat.get(), expected * numpy.array(factor, flat.dtype))


def both_kinds(transport: DeviceSequential, length: int, dtype: numpy.dtype) -> list[Array]:
    """An array in the transport's own memory, and one in CuPy's pool."""
    return [transport.allocate(length, dtype), cupy.empty(length, dtype)]


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


@pytest.mark.parametrize("dtype", [numpy.int8, numpy.float32, numpy.float64])
def test_of_many_pieces(world: World, transport: DeviceSequential, dtype: type) -> None:
    for flat in both_kinds(transport, LONG, numpy.dtype(dtype)):
        transport.start(fill(world, flat)).wait()
        expect(world, flat)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["auto", "peer", "staged", "aware"])
def test_between_nodes(world: World, name: str, placement: str) -> None:
    transport = made(placed(world, placement), name)
    for dtype, lengths in ((FLOAT32, (*LENGTHS, LONG)), (numpy.dtype(numpy.int16), LENGTHS)):
        for length in lengths:
            for flat in both_kinds(transport, length, dtype):
                transport.start(fill(world, flat)).wait()
                expect(world, flat)


def test_work_before_start_and_after_wait(world: World, transport: DeviceSequential) -> None:
    """The work is on the current stream, for which the host has not waited: null, or one of the caller's own."""
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
                flat[...] = 0  # the sum must not come after this
                numpy.testing.assert_array_equal(later.get(), expected_sum(flat.size, world.size))
                assert not flat.get().any()


def test_several_are_started_before_the_first_is_waited_for(world: World, transport: DeviceSequential) -> None:
    lengths = (1, 300_003, 3, 0, 160_001, world.size - 1, 65_537)
    flats = [
        transport.allocate(length, INT32) if index % 3 else cupy.empty(length, INT32)
        for index, length in enumerate(lengths * 2)
    ]
    handles = [transport.start(fill(world, flat)) for flat in flats]
    handles[3].wait()
    handles[-1].wait()
    for flat, handle in zip(flats, handles, strict=True):
        assert handle.test()
        expect(world, flat)


def test_driven_by_test(world: World, transport: DeviceSequential) -> None:
    flats = [fill(world, cupy.empty(length, FLOAT32)) for length in (100_000, 3, 0)]
    handles = [transport.start(flat) for flat in flats]
    while not all(handle.test() for handle in handles):
        pass
    for flat in flats:
        expect(world, flat)
    assert all(handle.test() for handle in handles)  # stays true


def test_driven_by_a_thread(world: World, transport: DeviceSequential) -> None:
    """The thread's current device is 0 and its stream the null one, whatever those of the caller are."""
    flat = transport.allocate(200_003, FLOAT32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        fill(world, flat)
        handle = transport.start(flat)
        thread = threading.Thread(target=handle.wait)
        thread.start()
        thread.join()
        handle.wait()  # this thread's stream has not heard of it yet
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


def test_a_buffer_in_flight_is_kept(world: World, transport: DeviceSequential) -> None:
    """Only the transport still has the buffer. Memory that is allocated meanwhile lies elsewhere."""
    flat, last = fill(world, cupy.empty(300_000, FLOAT32)), cupy.ones(3, FLOAT32)
    handle, end = transport.start(flat), transport.start(last)
    handle.test()
    del flat, handle
    others = [cupy.full(300_000, 7, FLOAT32) for _ in range(4)]
    end.wait()
    assert (last.get() == world.size).all()
    assert all((other.get() == 7).all() for other in others)


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


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap(world: World, transport: DeviceSequential, dtype: numpy.dtype) -> None:
    if dtype not in transport.dtypes:
        pytest.skip("test_sum_is_exact has it")
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


def test_an_array_outlives_its_transport(world: World) -> None:
    """The memory of the array stays too, until the next allocation after the array has gone."""
    another = made(world, "peer")
    transport = made(world, "peer")
    flat = fill(world, transport.allocate(100_003, FLOAT32))
    transport.start(flat).wait()
    gone = weakref.ref(transport)
    del transport
    gc.collect()
    assert gone() is None
    taken = another.allocate(100_003, FLOAT32)
    assert len(peers._left) == 1
    taken.fill(-1)
    expect(world, flat)
    del flat
    another.allocate(1, FLOAT32)
    assert peers._left == []


def test_memory_comes_back(world: World, transport: DeviceSequential) -> None:
    free = []
    for _ in range(6):
        flat = fill(world, transport.allocate(1_000_003, FLOAT32))
        transport.start(flat).wait()
        expect(world, flat)
        del flat
        cupy.get_default_memory_pool().free_all_blocks()
        world.barrier()  # or another rank is still on its way
        free.append(cupy.cuda.Device().mem_info[0])
        world.barrier()
    # On a real GPU other processes take and return memory too.
    assert free[-1] >= free[1] - 2**21, free


def test_nccl_goes_with_its_last_reference_and_with_its_world(world: World) -> None:
    """The emulated one has a thread for each; a real one takes memory of the GPU."""
    others = set(threading.enumerate())
    transport = made(world, "nccl")
    threads = [thread for thread in threading.enumerate() if thread not in others and thread.name == "emulated NCCL"]
    if not threads:
        pytest.skip("NCCL is a real one")
    apart = world.apart()
    kept = made(apart, "nccl")
    threads += [
        thread for thread in threading.enumerate() if thread not in {*others, *threads, threading.main_thread()}
    ]
    del transport
    gc.collect()
    apart.free()
    for thread in threads:
        thread.join(60)
    assert [thread.is_alive() for thread in threads] == [False, False]
    del kept


@pytest.mark.parametrize(
    ("make", "text"),
    [
        pytest.param(lambda: numpy.ones(10), "takes a CuPy array on GPU .*, not a NumPy array on the host", id="host"),
        pytest.param(lambda: [1.0], "takes a CuPy array on GPU .*, not list", id="list"),
        pytest.param(lambda: cupy.ones(10)[::2], "one-dimensional, contiguous array", id="strided"),
        pytest.param(lambda: cupy.ones((2, 5)), "one-dimensional, contiguous array", id="two dimensions"),
        pytest.param(lambda: cupy.ones(3, bool), "cannot sum bool", id="bool"),
    ],
)
def test_refuses_what_it_cannot_sum_in_place(transport: DeviceSequential, make: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        transport.start(make())


def test_refuses_another_gpus_array(transport: DeviceSequential) -> None:
    if cupy.cuda.runtime.getDeviceCount() == 1:
        pytest.skip("there is one GPU")
    mine = transport.place.gpu.number
    with cupy.cuda.Device((mine + 1) % cupy.cuda.runtime.getDeviceCount()):
        flat = cupy.ones(3)
    with pytest.raises(ValueError, match=rf"GPU {mine} .*this rank's; the array is on GPU {flat.device.id}"):
        transport.start(flat)


def test_the_hosts_algorithms_refuse_device_arrays(world: World) -> None:
    with pytest.raises(ValueError, match=r"takes a NumPy array on the host, not cupy.*make_transport"):
        make_algorithm(world, "ring").start(cupy.ones(3))


def test_other_names_on_other_ranks(world: World) -> None:
    skip_alone(world)
    text = error_on_all(world, MismatchError, lambda: make_transport(world, "peer" if world.rank == 1 else "staged"))
    assert f"{world.name(1)}: peer; {world.name(0)}: staged" in text


def test_unknown_name(world: World) -> None:
    with pytest.raises(ConfigError, match=f"no transport 'pear'; known: {', '.join(sorted(TRANSPORTS))}"):
        make_transport(world, "pear")


def test_peer_wants_two_ranks_on_a_node(world: World) -> None:
    skip_alone(world)
    alone = placed(world, "alone on each node")
    text = error_on_all(world, DeviceError, lambda: make_transport(alone, "peer"))
    assert "the transport peer is not possible here" in text
    assert "no two ranks are on one node" in text


@pytest.mark.parametrize("length", [0, 2])
def test_bytes_of_all_mates_none_too(world: World, length: int) -> None:
    mates = peers.Mates(world.comm, tuple(range(world.size)), world.rank, 77)
    received: list[list[bytes]] = []

    def steps() -> Iterator[float | None]:
        received.append((yield from peers.exchange(mates, bytes([world.rank, 1])[:length])))

    world.control.wait(steps(), "exchange bytes")
    assert received == [[bytes([rank, 1])[:length] for rank in range(world.size)]]
