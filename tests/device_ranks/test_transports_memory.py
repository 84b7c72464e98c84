"""The memory of every transport: who keeps it, and when it comes back."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from mpitrain import World
from mpitrain.cuda import peers
from mpitrain.cuda.sequential import DeviceSequential

from .transports import FLOAT32, expect, fill, made

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
