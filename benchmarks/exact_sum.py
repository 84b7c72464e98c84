"""Exact sums against plain ones, by the same algorithm, in turns in one run.

    mpiexec -n 2 python benchmarks/exact_sum.py --algorithms auto
    benchmarks/shaped_hosts 2 1gbit '$MPIEXEC python benchmarks/exact_sum.py --algorithms auto ring'

In place, random normal values, which are filled in anew before each round, in memory of the algorithm's own. A cell is
the median of the rounds' ratios exact / plain, with the 10th and 90th percentile, and the bytes on the busiest link
relative to those of plain. `in words` is the way of algorithms in which partial sums travel; see
mpitrain/allreduce/exact.py.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import numpy

import mpitrain as mt
from mpitrain.allreduce import ALGORITHMS, make_algorithm
from mpitrain.allreduce.algorithm import AllreduceHandle
from mpitrain.allreduce.exact import exact_sum
from mpitrain.allreduce.fixed_point import FORMS
from mpitrain.forecast.cluster_profile import find_link
from mpitrain.forecast.rounds import Variant, measure, ratio, versions_line

NAMES = {str(dtype): dtype for dtype in FORMS}


def variant(start: Callable[..., AllreduceHandle], flat: numpy.ndarray, values: numpy.ndarray) -> Variant:
    return Variant(lambda: start(flat, agreed=True).wait(), lambda: numpy.copyto(flat, values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="*", default=[0.25, 4, 16])
    parser.add_argument("--algorithms", nargs="*", default=["auto", "ring"], choices=ALGORITHMS)
    parser.add_argument("--dtype", default="float32", choices=NAMES)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    world, dtype = mt.init(), NAMES[arguments.dtype]
    link = find_link(world)
    world.print(f"{world.size} ranks on {world.num_nodes} hosts, {dtype}, {versions_line('numba')}")
    world.print("| MiB | algorithm | plain | exact / plain | in words / plain | bytes: exact, in words |")
    world.print("| --- " * 6 + "|")
    for mib in arguments.mib:
        values = numpy.random.default_rng(world.rank).standard_normal(int(mib * 2**20) // dtype.itemsize).astype(dtype)
        for name in arguments.algorithms:
            plain, exact = make_algorithm(world, name), exact_sum(world, name)
            flat = exact.allocate(values.size, dtype)
            variants = {
                "plain": variant(plain.start, plain.allocate(values.size, dtype), values),
                "exact": variant(exact.start, flat, values),
                "in words": variant(partial(exact.start, others=()), flat, values),
            }
            measure(world, variants, 2)
            measured = measure(world, variants, arguments.rounds, link.counters)
            seconds = {key: one.seconds for key, one in measured.items()}
            cells = ["{:.2f} [{:.2f}-{:.2f}]".format(*ratio(seconds, key, "plain")) for key in ("exact", "in words")]
            sent = {key: statistics.median(one.link_bytes) for key, one in measured.items()}
            wire = [f"{sent[key] / sent['plain']:.2f}" if sent["plain"] else "-" for key in ("exact", "in words")]
            world.print(
                f"| {mib:g} | {name} | {statistics.median(seconds['plain']) * 1e3:.2f} ms | {' | '.join(cells)} | "
                f"{', '.join(wire)} |"
            )


if __name__ == "__main__":
    main()
