"""What a rank's child processes cost, with fork and with forkserver: their start, and the rank's steps meanwhile.

    mpiexec -n 2 python benchmarks/helper_processes.py
    mpiexec -n 2 python benchmarks/helper_processes.py --megabytes 1000

Start: from `start` of two processes, which get a small object each, to the first word of both; a forkserver is running
already, and the processes import what this script imports, NumPy. Step: the rank writes all of its memory once, as an
optimizer does, and makes a mean of a tenth of it over the ranks: without processes, for the first time after their
start (after a fork, the kernel copies each page that is written), and later. Milliseconds are the slowest rank's;
all are made in turns.
"""

import argparse
import multiprocessing
import time
from collections import defaultdict
from multiprocessing.connection import Connection

import numpy

import mpitrain as mt
from mpitrain.bench.rounds import spread, versions_line


def helper(connection: Connection) -> None:
    connection.send("here")
    connection.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=100)
    arguments = parser.parse_args()
    world = mt.init()
    memory = numpy.ones(arguments.megabytes * 10**6 // 4, numpy.float32)
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, begun: float) -> None:
        seconds[name].append(max(world.allgather(time.perf_counter() - begun)))

    def step(name: str) -> None:
        world.barrier()
        begun = time.perf_counter()
        memory[:] += 1
        world.mean(memory[: len(memory) // 10])
        timed(name, begun)

    for number in range(arguments.rounds + 1):
        if number == 1:
            seconds.clear()  # the first round starts the forkserver
        for method in ("fork", "forkserver") if number % 2 else ("forkserver", "fork"):
            context = multiprocessing.get_context(method)
            step(f"{method}: step without processes")
            world.barrier()
            begun = time.perf_counter()
            pipes = [context.Pipe() for _ in range(2)]
            processes = [context.Process(target=helper, args=(there,), daemon=True) for _, there in pipes]
            for process in processes:
                process.start()
            for here, _ in pipes:
                here.recv()
            timed(f"{method}: start of two processes", begun)
            step(f"{method}: first step with them")
            step(f"{method}: later step")
            for here, _ in pipes:
                here.send("end")
            for process in processes:
                process.join()
    world.print(versions_line(), f"{world.size} ranks, {arguments.megabytes} MB")
    for name, values in seconds.items():
        middle, low, high = (1e3 * value for value in spread(values))
        world.print(f"{name:<36} {middle:8.1f} ms [{low:.1f}-{high:.1f}]")


if __name__ == "__main__":
    main()
