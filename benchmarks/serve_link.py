"""A push and a pull between a server and a worker: how long they take, and what they cost the server's cores.

    .venv/bin/mpiexec -n 2 .venv/bin/python benchmarks/serve_link.py [--mib 16] [--rounds 40]
    benchmarks/shaped_hosts 2 1gbit '$MPIEXEC .venv/bin/python benchmarks/serve_link.py --gbit 1'

Rank 0 is the server, rank 1 the worker. MPI only tells the worker where the server is. Both connections, encrypted and
plain, are open all the time, and take turns. A push and its pull come one after the other, so with --gbit the bound is
the time that the link needs for both. CPU seconds are those of the whole process, ZeroMQ's thread included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy

import mpitrain as mt
from mpitrain.forecast.rounds import Variant, measure, ratio, spread, versions_line
from mpitrain.server.security import make_keys, parse_key
from mpitrain.server.server_link import ServerLink
from mpitrain.server.worker_link import WorkerLink

MODES = ("encrypted", "plain")


def main() -> None:
    parser = argparse.ArgumentParser(description="A push and a pull between a server and a worker.")
    parser.add_argument("--mib", type=float, default=16.0, help="size of a push, and of a pull")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--gbit", type=float, help="rate of the link, for the bound")
    arguments = parser.parse_args()
    world = mt.init()
    if world.size != 2:
        raise SystemExit(f"{world.size} ranks; the benchmark takes 2")
    values = numpy.random.default_rng(world.rank).random(int(arguments.mib * 2**20) // 8)
    most = 2 * values.nbytes
    cpu: dict[str, list[float]] = {mode: [] for mode in MODES}
    runs: dict[str, Callable[[], None]] = {}
    here = world.num_nodes == 1
    if world.rank == 0:
        keys = make_keys()
        interface = "lo" if here else "eth0"
        host = "127.0.0.1" if here else "*"
        servers = {mode: ServerLink(f"{host}:*", keys, most, plain=interface * (mode == "plain")) for mode in MODES}
        ports = {mode: link.address.rpartition(":")[2] for mode, link in servers.items()}
        world.broadcast_object([world.host, ports, keys.worker.text])
        runs = {mode: serving(link, values, cpu[mode]) for mode, link in servers.items()}
        links: list[ServerLink | WorkerLink] = list(servers.values())
    else:
        host, ports, text = world.broadcast_object()
        key = parse_key(text, "the key")
        host = "127.0.0.1" if here else host
        workers = {mode: WorkerLink([f"{host}:{ports[mode]}"], key, most, plain=mode == "plain") for mode in MODES}
        runs = {mode: working(link, values, cpu[mode]) for mode, link in workers.items()}
        links = list(workers.values())
    variants = {mode: Variant(run) for mode, run in runs.items()}
    measure(world, variants, 3)
    for spent in cpu.values():
        spent.clear()
    seconds = {mode: measured.seconds for mode, measured in measure(world, variants, arguments.rounds).items()}
    for link in links:
        link.close()
    costs = world.allgather(cpu)
    world.print(versions_line("pyzmq"))
    world.print(f"push and pull of {arguments.mib:g} MiB each, {arguments.rounds} rounds, {world.num_nodes} hosts")
    for mode in MODES:
        median, low, high = spread(seconds[mode])
        gigabytes = 2 * values.nbytes / 1e9
        line = f"{mode:9}: {1e3 * median:.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f}), {gigabytes / median:.2f} GB/s"
        if arguments.gbit:
            line += f", {8 * gigabytes / arguments.gbit / median:.3f} of the link"
        each = [spread([one / gigabytes for one in costs[rank][mode]])[0] for rank in range(2)]
        world.print(f"{line}; CPU seconds per GB: server {each[0]:.2f}, worker {each[1]:.2f}")
    median, low, high = ratio(seconds, "encrypted", "plain")
    world.print(f"encrypted / plain: {median:.2f} ({low:.2f} to {high:.2f})")


def serving(link: ServerLink, values: numpy.ndarray, cpu: list[float]) -> Callable[[], None]:
    def serve() -> None:
        begun = time.process_time()
        events = []
        while not events:
            events = link.receive(1.0)
        (message,) = events
        assert message.arrays[0].nbytes == values.nbytes
        link.send(message.peer, "unit", {}, [values])
        while not link.receive(1.0):  # the worker has all of it
            continue
        cpu.append(time.process_time() - begun)

    return serve


def working(link: WorkerLink, values: numpy.ndarray, cpu: list[float]) -> Callable[[], None]:
    def work() -> None:
        begun = time.process_time()
        link.send("done", {}, [values])
        while (message := link.receive(1.0)) is None:
            continue
        assert message.arrays[0].nbytes == values.nbytes
        link.send("next", {})
        cpu.append(time.process_time() - begun)

    return work


if __name__ == "__main__":
    main()
