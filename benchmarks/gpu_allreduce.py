"""Transports of GPU buffers against each other and against what the GPU's memory allows.

    mpiexec -n 2 python benchmarks/gpu_allreduce.py

Float32, in place, in memory that the transport allocates; transports in turn, the slowest rank's time until its GPU has
the sum. `bound` is for ranks that share one GPU: the bytes that `peer` must read and write there, 2 p times the buffer
for p ranks (each of p segments read p times and written p times), at the rate of the GPU's own copy, counted the same
way and measured here while the other ranks are idle.
"""

import argparse
import time
from collections.abc import Callable

import numpy

import mpitrain as mt
from mpitrain.cuda.device import bind
from mpitrain.cuda.transports import TRANSPORTS, make_transport
from mpitrain.errors import DeviceError
from mpitrain.forecast.rounds import ratio, spread, versions_line

COPIES = 10


def copy_rate(world: mt.World, num_bytes: int) -> float:
    """Bytes read and written a second by a copy within the GPU, the other ranks idle."""
    import cupy

    source, target = cupy.zeros(num_bytes, numpy.uint8), cupy.zeros(num_bytes, numpy.uint8)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    rate = 0.0
    for turn in range(world.size):
        world.barrier()
        if turn == world.rank:
            for number in range(COPIES + 1):
                cupy.copyto(target, source)
                if number == 0:  # warm, and busy while the host goes ahead
                    begin.record()
            end.record()
            end.synchronize()
            rate = COPIES * 2 * num_bytes / (float(cupy.cuda.get_elapsed_time(begin, end)) * 1e-3)
    world.barrier()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="*", default=[0.0625, 1, 16, 256])
    parser.add_argument("--transports", nargs="*", default=sorted(set(TRANSPORTS) - {"auto"}))
    parser.add_argument("--copy-mib", type=float, default=256, help="of the copy that the bound is taken from")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    import cupy

    world = mt.init()
    gpu = bind(world)
    made = {}
    for name in arguments.transports:
        try:
            made[name] = make_transport(world, name)
        except DeviceError as error:
            world.print(f"| {name} | not possible: {error} |")
    rate = copy_rate(world, int(arguments.copy_mib * 2**20))
    alone = len(gpu.ranks) == world.size
    world.print(f"{world.size} ranks, {gpu.name}, {versions_line()}, CuPy {cupy.__version__}")
    world.print(f"copies within the GPU: {rate / 1e9:.0f} GB/s, read and written")
    world.print("| MiB | transport | median | spread | x staged | of the bound |\n" + "| --- " * 6 + "|")
    for mib in arguments.mib:
        count = int(mib * 2**18)
        flats = {name: transport.allocate(count, numpy.dtype(numpy.float32)) for name, transport in made.items()}
        seconds: dict[str, list[float]] = {name: [] for name in made}
        for number in range(arguments.rounds + 1):
            for name in sorted(made, reverse=bool(number % 2)):
                flat, transport = flats[name], made[name]
                flat.fill(world.rank + 1)
                taken = timed(world, lambda flat=flat, transport=transport: transport.start(flat, agreed=True).wait())
                right = bool((flat == world.size * (world.size + 1) // 2).all())
                if not all(world.allgather(right)):
                    raise SystemExit(f"{name}: the sum is wrong")
                if number:  # the first round warms up
                    seconds[name].append(taken)
        bound = 2 * world.size * 4 * count / rate
        for name, times in seconds.items():
            middle, low, high = spread(times)
            share = f"{bound / middle:.0%}" if alone else "-"
            staged = f"{ratio(seconds, name, 'staged')[0]:.3f}" if "staged" in seconds else "-"
            around = f"{low / middle:.2f}-{high / middle:.2f}"
            world.print(f"| {mib:g} | {name} | {middle * 1e3:.3f} ms | {around} | {staged} | {share} |")
        del flat, flats
        cupy.get_default_memory_pool().free_all_blocks()


def timed(world: mt.World, call: Callable[[], object]) -> float:
    """The slowest rank's seconds until its GPU is done."""
    import cupy

    cupy.cuda.get_current_stream().synchronize()
    world.barrier()
    started = time.perf_counter()
    call()
    cupy.cuda.get_current_stream().synchronize()
    return max(world.allgather(time.perf_counter() - started))


if __name__ == "__main__":
    main()
