"""What mt.run_on adds to a function, on two ranks, beside MPICommExecutor of mpi4py.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/run_on.py

Rounds of calls take turns: a block of mt.workers, then one of MPICommExecutor. A call is one function on rank 1, with
its result back on rank 0. The time that the function measures for itself is taken off. Arrays go there and back.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy
from mpi4py import MPI
from mpi4py.futures import MPICommExecutor

import mpitrain as mt
from mpitrain.forecast.rounds import spread, versions_line

# The seconds that the function sleeps, what is sent, and the number of calls of a round.
Case: TypeAlias = tuple[float, Any, int]


def slept(seconds: float, value: Any) -> tuple[float, Any]:
    """Sleep, and return the seconds that this function took, and the value itself."""
    started = time.perf_counter()
    if seconds:
        time.sleep(seconds)
    return time.perf_counter() - started, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, nargs="*", default=[2**16, 2**20])
    parser.add_argument("--alone", action="store_true", help="without MPICommExecutor")
    arguments = parser.parse_args()
    world = mt.init()
    cases: dict[str, Case] = {
        "a function that does nothing": (0.0, None, 100),
        "a function of 50 ms": (0.05, None, 20),
    }
    for size in arguments.bytes:
        cases[f"an array of {size:,} bytes, there and back"] = 0.0, numpy.zeros(size, numpy.uint8), 5
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(arguments.rounds + 1):
        with mt.workers(world) as leads:
            if leads:
                timed(seconds, "run_on", cases, lambda *given: mt.run_on(1, slept, *given).result(), number)
        if not arguments.alone:
            with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
                if executor is not None:
                    submit = partial(executor.submit, slept)
                    timed(seconds, "executor", cases, lambda *given, submit=submit: submit(*given).result(), number)
    world.print(versions_line())
    for (case, side), times in seconds.items():
        middle, low, high = (1e6 * value for value in spread(times))
        world.print(f"{case}: {side} {middle:.0f} us [{low:.0f}-{high:.0f}]")


def timed(
    seconds: dict[tuple[str, str], list[float]],
    side: str,
    cases: Mapping[str, Case],
    call: Callable[[float, Any], tuple[float, Any]],
    number: int,
) -> None:
    """Add the times of every call of this round. The first round warms up."""
    for case, (sleep_seconds, value, calls) in cases.items():
        for _ in range(calls):
            started = time.perf_counter()
            own, _ = call(sleep_seconds, value)
            passed = time.perf_counter() - started
            if number:
                seconds.setdefault((case, side), []).append(passed - own)


if __name__ == "__main__":
    main()
