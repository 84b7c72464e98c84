"""Our allreduce against the wheel's own and torch.distributed's gloo, between hosts; all in one set of processes.

    benchmarks/shaped_hosts 4 1gbit '$MPIEXEC python benchmarks/allreduce_hosts.py --gbit 1'

Needs PyTorch for gloo (left out without it). In place, float32, alternating, the slowest rank's time. `bound` is the
time of 2(m-1)/m times the buffer at the nominal rate, m the number of hosts; TCP itself reaches 1.045 of it.
`cores` is CPU seconds per second of a rank, `wire` bytes sent by the busiest host over 2(m-1)/m times the buffer.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy
from mpi4py import MPI

import mpitrain as mt
from mpitrain.bench.rounds import ratio, versions_line
from mpitrain.compression import CODECS
from mpitrain.exchange.exchange import Exchange, make_exchange


def gloo(world: mt.World) -> Callable[[numpy.ndarray], None] | None:
    try:
        import torch
        from torch import distributed
    except ImportError:
        return None
    address = Path("/proc/sys/kernel/hostname").read_text().strip() if world.num_nodes > 1 else "127.0.0.1"
    address = world.broadcast(address)
    if world.num_nodes > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    distributed.init_process_group("gloo", init_method=f"tcp://{address}:29500", rank=world.rank, world_size=world.size)
    return lambda flat: distributed.all_reduce(torch.from_numpy(flat))


def sent_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if not line.strip().startswith("lo:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="*", default=[0.0625, 1, 16])
    parser.add_argument("--variants", nargs="*", default=["mpi", "gloo", "ring", "direct", "auto", "bf16", "int8"])
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=6.0, help="about so long for each size and variant")
    arguments = parser.parse_args()
    world = mt.init()
    world.print(f"{world.size} ranks on {world.num_nodes} hosts, {arguments.gbit:g} Gbit/s, {versions_line()}")
    calls: dict[str, Callable[[numpy.ndarray], object]] = {}
    exchanges: dict[str, Exchange] = {}
    for name in arguments.variants:
        if name == "mpi":
            calls[name] = lambda flat: world.comm.Allreduce(MPI.IN_PLACE, flat)
        elif name == "gloo":
            if call := gloo(world):
                calls[name] = call
        else:
            codec = name if name in CODECS else None
            exchanges[name] = make_exchange(world, None if codec else name, codec)
    hosts = world.num_nodes
    world.print("| MiB | variant | median | spread | bound x | mpi x | gloo x | cores | wire |\n" + "| --- " * 9 + "|")
    for mib in arguments.mib:
        count, dtype = int(mib * 2**18), numpy.dtype(numpy.float32)
        sums: dict[str, Callable[[], object]] = {}
        for name, call in calls.items():
            sums[name] = partial(call, numpy.zeros(count, dtype))
        for name, exchange in exchanges.items():  # as a reducer's buckets are made
            slot = exchange.allocate(count, dtype)
            slot.flat[:] = 0
            sums[name] = lambda slot=slot, exchange=exchange: exchange.mean(slot, slice(None), 1.0).wait()
        least = 2 * (hosts - 1) / hosts * 4 * count
        seconds: dict[str, list[float]] = {name: [] for name in sums}
        cores: dict[str, list[float]] = {name: [] for name in sums}
        wire: dict[str, list[float]] = {name: [] for name in sums}
        rounds = 1
        number = 0
        while number < rounds + 1:
            for name in sorted(sums, reverse=bool(number % 2)):
                world.comm.Barrier()
                used, sent, started = time.process_time(), sent_bytes(), time.perf_counter()
                sums[name]()
                own_seconds = time.perf_counter() - started
                cores[name].append((time.process_time() - used) / own_seconds)
                seconds[name].append(world.comm.allreduce(own_seconds, MPI.MAX))
                wire[name].append(world.comm.allreduce(sent_bytes() - sent, MPI.MAX) / max(least, 1))
            if number == 0:
                slowest = max(times[0] for times in seconds.values())
                rounds = world.broadcast(max(3, min(100, int(arguments.seconds / slowest))))
            number += 1
        for name in sums:
            times = seconds[name][1:]
            tenths = statistics.quantiles(times, n=10)
            median = statistics.median(times)
            bound = least * 8 / arguments.gbit / 1e9
            others = [
                f"{ratio({k: v[1:] for k, v in seconds.items()}, name, base)[0]:.3f}" if base in sums else "-"
                for base in ("mpi", "gloo")
            ]
            spread = f"{tenths[0] / median:.2f}-{tenths[-1] / median:.2f}"
            world.print(
                f"| {mib:g} | {name} | {median * 1e3:.3f} ms | {spread} | "
                f"{median / bound if bound else 0:.3f} | {' | '.join(others)} | "
                f"{statistics.median(cores[name][1:]):.2f} | {statistics.median(wire[name][1:]):.2f} |"
            )


if __name__ == "__main__":
    main()
