"""Sums of buffers on GPUs: the transports side by side, each timed until the GPU has the sum.

`mpiexec -n 2 python -m mpitrain.forecast.on_gpus` prints one JSON object about the transports that are possible here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy

from mpitrain.arrays import Array
from mpitrain.cuda.device import bind, cupy_module
from mpitrain.cuda.sequential import DeviceSequential
from mpitrain.cuda.transports import KINDS, choose, make_transport
from mpitrain.errors import DeviceError
from mpitrain.forecast.rounds import Variant, count_wrong, fill, num_calls, sum_tile, tile
from mpitrain.job.start import init
from mpitrain.world.world import World


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
    flats: list[Array] = [transport.allocate(count, dtype) for _ in range(num_calls(count * dtype.itemsize))]
    filled = numpy.empty(count, dtype)
    fill([filled], tile(world.rank, world.size, dtype))
    expected = sum_tile(world.size, dtype)

    def prepare() -> None:
        for flat in flats:
            flat.set(filled)
        _finish()

    def run() -> None:
        for flat in flats:
            transport.start(flat).wait()
        _finish()

    return Variant(run, prepare, lambda: sum(count_wrong(flat.get(), expected) for flat in flats), calls=len(flats))


def _finish() -> None:
    cupy_module().cuda.get_current_stream().synchronize()


def transport_choices(world: World) -> list[str]:
    """Describe what `auto` does with buffers on GPUs in this World, in lines for the user. Collective."""
    return choose(world, KINDS)[1].lines()


def about_gpus(world: World) -> str:
    """Describe which GPUs the buffers are on. Collective."""
    gpus = world.allgather((world.node_rank, bind(world).identity, bind(world).name))
    names = " and ".join(dict.fromkeys(name for _, _, name in gpus))
    number = len({gpu[:2] for gpu in gpus})
    return f"buffers on {number} GPU(s) for {world.size} ranks: {names}; mpi itself does not run"


def main() -> None:
    """Run on every rank. Rank 0 prints why each transport is not possible ("": it is), and the choice of `auto`."""
    world = init()
    answer = {"transports": {}, "choice": "", "error": ""}
    try:
        _, choice = choose(world, KINDS)
        answer["transports"] = {name: choice.why_not.get(name, "") for name in KINDS}
        answer["choice"] = choice.lines()[-1]
    except DeviceError as error:  # the same on all ranks
        answer["error"] = str(error)
    world.print(json.dumps(answer))


if __name__ == "__main__":
    main()
