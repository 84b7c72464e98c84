"""The memory of every transport, and of what is built on them: who keeps it, when it comes back, and none left."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest

from mpitrain import GradientReducer, World
from mpitrain.cuda import peers
from mpitrain.cuda.memory import is_page_aligned, pinned
from mpitrain.cuda.sequential import DeviceSequential
from mpitrain.cuda.transports import make_transport
from mpitrain.errors import DeviceError
from mpitrain.reducer.exchange import PlainExchange, make_exchange
from tests.ranks.common import error_on_all, skip_alone
from tests.ranks.placements import placed
from tests.ranks.reducers import PARAMETERS, SMALL

from .transports import FLOAT32, emulated, expect, fill, made

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


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
        world.barrier()  # otherwise another rank may not have freed its array yet
        free.append(cupy.cuda.Device().mem_info[0])
        world.barrier()
    # On a real GPU, other processes take and return memory too.
    assert free[-1] >= free[1] - 2**21, free


def test_nccl_goes_with_its_last_reference_and_with_its_world(world: World) -> None:
    """The emulated NCCL has a thread for each communicator. A real one takes memory of the GPU."""
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


BYTES_OF_PARAMETERS = sum(parameter.count * parameter.dtype.itemsize for parameter in PARAMETERS)


def reducer(world: World) -> Callable[[], Any]:
    exchange = partial(PlainExchange, transport="staged")
    return partial(GradientReducer, world, PARAMETERS, exchange=exchange, bucket_bytes=SMALL, on_device=True)


def coded(world: World, name: str) -> Callable[[], Any]:
    exchange = make_exchange(placed(world, "alone on each node"), compression=name)
    exchange.allocate(1, FLOAT32, on_device=True)
    return partial(exchange.allocate, 2**20, FLOAT32, on_device=True)


# What takes memory, how many bytes are free, and what the error says of it.
WITHOUT_MEMORY: dict[str, tuple[Callable[[World], Callable[[], Any]], int, str]] = {
    "peer": (
        lambda world: partial(make_transport(world, "peer").allocate, 2**20, FLOAT32),
        2**20,
        "a bucket that the ranks of a node share",
    ),
    "staged": (lambda world: partial(make_transport(world, "staged").allocate, 2**20, FLOAT32), 2**20, "a bucket"),
    "reducer": (reducer, 0, "a bucket"),
    "reducer's flags": (reducer, BYTES_OF_PARAMETERS, "the flags of a reducer's buckets"),
    "int8": (partial(coded, name="int8"), 6 * 2**20, "the residual of a codec"),
    "power_sgd": (partial(coded, name="power_sgd:2"), 2**20, "a bucket"),
}


@emulated
@pytest.mark.parametrize("case", WITHOUT_MEMORY)
def test_no_memory_on_one_rank(world: World, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """All ranks raise the same error, say how much memory it was and for what, and continue."""
    skip_alone(world)
    prepare, free, what = WITHOUT_MEMORY[case]
    call = prepare(world)
    with monkeypatch.context() as patch:
        if world.rank == world.size - 1:
            gc.collect()
            used = cupy.cuda._used.get(cupy.cuda.Device().id, 0)
            patch.setenv("EMULATED_BYTES_OF_OTHERS", str(2**31 - used - free))
        said = error_on_all(world, DeviceError, call)
    last = world.size - 1
    named = f"{world.name(0)}: rank {last}: GPU " if case == "peer" else f"{world.name(last)}: GPU "
    assert said.startswith(named)
    assert f" bytes for {what}: " in said
    if not case.startswith("reducer"):
        assert "has no 4,194,304 bytes" in said
    if what.startswith("a bucket"):
        assert f"{free:,} of 2,147,483,648 are free" in said
    assert "MPITRAIN_BUCKET_MIB" in said
    call()
    assert (world.sum(cupy.ones(3)).get() == world.size).all()


@emulated
def test_no_page_locked_memory_on_one_rank(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_alone(world)
    call = coded(world, "power_sgd:2")

    def refused(num_bytes: int) -> None:
        raise cupy.cuda.runtime.CUDARuntimeError(2)

    if world.rank == world.size - 1:
        monkeypatch.setattr(cupy.cuda, "alloc_pinned_memory", refused)
    said = error_on_all(world, DeviceError, call)
    assert said.startswith(f"{world.name(world.size - 1)}: ")
    assert "cannot allocate 4194304 bytes of page-locked memory" in said.replace(",", "")


def test_page_locked_memory(world: World) -> None:
    for num_bytes in (0, 1, 4097):
        array = pinned(num_bytes)
        assert array.shape == (num_bytes,)
        array[:] = 7
    assert is_page_aligned(numpy.memmap("/dev/zero", numpy.uint8, "c", shape=8192))
