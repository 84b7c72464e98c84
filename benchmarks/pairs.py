"""Compare variants fairly on a noisy machine: all in one process set, alternating, medians and spread."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

from mpi4py import MPI

from mpitrain import World


def alternate(world: World, variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of each variant: the slowest rank's time. Every other round runs in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        call()
    for number in range(rounds):
        for name in sorted(variants, reverse=bool(number % 2)):
            world.comm.Barrier()
            started = time.perf_counter()
            variants[name]()
            mine = time.perf_counter() - started
            seconds[name].append(world.comm.allreduce(mine, MPI.MAX))
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> tuple[float, float, float]:
    """The median of the rounds' ratios name / base, and their 10th and 90th percentile."""
    ratios = [mine / other for mine, other in zip(seconds[name], seconds[base], strict=True)]
    if len(ratios) < 2:
        return ratios[0], ratios[0], ratios[0]
    tenths = statistics.quantiles(ratios, n=10)
    return statistics.median(ratios), tenths[0], tenths[-1]


def versions(*packages: str) -> str:
    """One line for the log: Python, packages, MPI library and machine."""
    library = MPI.Get_library_version().split("\n")[0].split(",")[0].replace("\t", "").strip("\0 ")
    names = ", ".join(f"{package} {version(package)}" for package in ("mpi4py", "numpy", *packages))
    return f"Python {platform.python_version()}, {names}, {library}, Linux {platform.release()} {platform.machine()}"
