"""Sums of buffers on GPUs: the transports side by side, each timed until the GPU has the sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy

from mpitrain.allreduce.device import KINDS, make_transport
from mpitrain.allreduce.device.select import choose
from mpitrain.allreduce.device.sequential import DeviceSequential
from mpitrain.arrays import Array
from mpitrain.bench import data
from mpitrain.bench.rounds import Variant
from mpitrain.cuda.device import bind, cupy_module
from mpitrain.errors import DeviceError
from mpitrain.world import World

# Calls per run, and the bytes of their buffers: a single short call would be timed with the end of the barrier.
_MOST_CALLS, _TOGETHER_BYTES = 16, 2**18


def device_sums(
    world: World, names: Sequence[str], may_refuse: bool
) -> Callable[[int, numpy.dtype], dict[tuple[str, str], Variant]]:
    """Return a function that makes the variants for a number of elements and a dtype, by (transport, codec).
    Collective.

    Raises:
        DeviceError: some rank has no GPU, or a transport is not possible here and may not be left out.
    """
    bind(world)
    made: dict[str, DeviceSequential] = {}
    for name in names:
        try:
            made[name] = make_transport(world, name)
        except DeviceError as error:
            if not may_refuse:
                raise
            world.print(f"# {name} is left out: {error}")

    def variants(count: int, dtype: numpy.dtype) -> dict[tuple[str, str], Variant]:
        return {
            (name, "none"): _sums(world, transport, count, dtype)
            for name, transport in made.items()
            if dtype in transport.dtypes
        }

    return variants


def _sums(world: World, transport: DeviceSequential, count: int, dtype: numpy.dtype) -> Variant:
    calls = max(1, min(_MOST_CALLS, _TOGETHER_BYTES // (count * dtype.itemsize)))
    flats: list[Array] = [transport.allocate(count, dtype) for _ in range(calls)]
    filled = numpy.empty(count, dtype)
    data.fill([filled], data.tile(world.rank, world.size, dtype))
    expected = data.sum_tile(world.size, dtype)

    def prepare() -> None:
        for flat in flats:
            flat.set(filled)
        _finish()

    def run() -> None:
        for flat in flats:
            transport.start(flat).wait()
        _finish()

    return Variant(run, prepare, lambda: sum(data.count_wrong(flat.get(), expected) for flat in flats), calls=calls)


def _finish() -> None:
    cupy_module().cuda.get_current_stream().synchronize()


def transport_choices(world: World) -> list[str]:
    """Describe what `auto` does with buffers on GPUs in this World, in lines for people. Collective."""
    return choose(world, KINDS)[1].lines()


def about_gpus(world: World) -> str:
    """Describe which GPUs the buffers are on. Collective."""
    gpus = world.allgather((world.node_rank, bind(world).identity, bind(world).name))
    names = " and ".join(dict.fromkeys(name for _, _, name in gpus))
    number = len({gpu[:2] for gpu in gpus})
    return f"buffers on {number} GPU(s) for {world.size} ranks: {names}; mpi itself does not run"
