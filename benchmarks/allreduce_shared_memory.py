"""Our allreduce algorithms against the wheel's own Allreduce, ranks on one machine.

    mpiexec -n 2 python benchmarks/allreduce_shared_memory.py

In place, float32. `mpi` is the blocking MPI_Allreduce(IN_PLACE) of the library as installed. A ratio below 1 means
faster than that. busbw is nccl-tests' bus bandwidth: bytes / seconds x 2 (p - 1) / p.
"""

import argparse
import statistics

import numpy
from mpi4py import MPI

import mpitrain as mt
from mpitrain.allreduce import ALGORITHMS
from mpitrain.bench.rounds import alternate, ratio, versions_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="*", default=[0.0625, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 100])
    parser.add_argument("--algorithms", nargs="*", default=["native", "ring"], choices=ALGORITHMS)
    parser.add_argument("--seconds", type=float, default=3.0, help="about so long for each size")
    arguments = parser.parse_args()
    world = mt.init()
    world.print(f"{world.size} ranks, {versions_line()}")
    world.print(
        "| MiB | mpi median | mpi busbw | " + " | ".join(f"{name} / mpi" for name in arguments.algorithms) + " |"
    )
    world.print("| --- | --- | --- | " + " | ".join("---" for _ in arguments.algorithms) + " |")
    algorithms = {name: ALGORITHMS[name].make(world) for name in arguments.algorithms}
    for mib in arguments.mib:
        # Zeros stay zeros: no growth towards infinity, whose additions may take another time.
        flat = numpy.zeros(int(mib * 2**18), numpy.float32)
        variants = {"mpi": lambda flat=flat: world.comm.Allreduce(MPI.IN_PLACE, flat)}
        for name, algorithm in algorithms.items():
            variants[name] = lambda flat=flat, algorithm=algorithm: algorithm.start(flat, agreed=True).wait()
        trial = alternate(world, variants, 3)
        per_round = sum(statistics.median(times) for times in trial.values())
        rounds = max(5, min(400, int(arguments.seconds / per_round)))
        seconds = alternate(world, variants, world.broadcast(rounds))
        median = statistics.median(seconds["mpi"])
        busbw = flat.nbytes / median * 2 * (world.size - 1) / world.size / 1e9
        cells = []
        for name in arguments.algorithms:
            middle, low, high = ratio(seconds, name, "mpi")
            cells.append(f"{middle:.2f} [{low:.2f}-{high:.2f}]")
        world.print(f"| {mib:g} | {median * 1e3:.3f} ms | {busbw:.1f} GB/s | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
