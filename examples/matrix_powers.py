"""Powers of two matrices on two nodes: the first exercise with distributed TensorFlow, A^n + B^n.

    mpiexec -n 2 python examples/matrix_powers.py                       # two ranks of this machine
    mpiexec -n 2 -ppn 1 -hosts a,b python examples/matrix_powers.py     # two nodes
    python examples/matrix_powers.py                                    # this process alone

Rank 0 asks for A^n on the first node and for B^n on the second one, adds them up, and compares the time with that of
one node. As in the exercise, a power is made by n - 1 multiplications. On one machine, each rank has its share of the
cores. The two sides are compared in turns, and the medians are printed.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy

import mpitrain as mt
from arguments import positive


def power(matrix: numpy.ndarray, exponent: int) -> numpy.ndarray:
    """matrix^exponent by exponent - 1 multiplications. Any square matrix; a new one is returned."""
    result = matrix
    for _ in range(exponent - 1):
        result = result @ matrix
    return result


def same(matrix: numpy.ndarray) -> numpy.ndarray:
    """Return the matrix itself: a call of `power` without its computation, to time the transfer."""
    return matrix


def main() -> None:
    arguments = parse()
    world = mt.init()
    # Two nodes, if there are two; else the first and the last rank, which may be the same one.
    first, second = ("node 0", "node 1") if world.num_nodes > 1 else ("rank 0", f"rank {world.size - 1}")
    rng = numpy.random.default_rng(0)
    scale = arguments.size**-0.5  # keeps powers of random matrices finite
    a, b = scale * rng.standard_normal((2, arguments.size, arguments.size))

    def on_both() -> numpy.ndarray:
        powers = [mt.run_on(first, power, a, arguments.power), mt.run_on(second, power, b, arguments.power)]
        return sum(future.result() for future in powers)

    def on_one() -> numpy.ndarray:
        return sum(mt.run_on(first, power, matrix, arguments.power).result() for matrix in (a, b))

    def there_and_back() -> numpy.ndarray:
        return mt.run_on(second, same, b).result()

    with mt.workers(world) as leads:
        if leads:
            if not numpy.array_equal(on_both(), on_one()):  # also warms up
                raise SystemExit("the sums differ: do the nodes have different processors?")
            one, both, way = medians(arguments.rounds, on_one, on_both, there_and_back)
            print(f"{arguments.size} x {arguments.size}, n = {arguments.power}, {world.size} ranks, ", end="")
            print(f"{world.num_nodes} nodes: the sum is equal on one place and on two")
            print(f"one place ({first}): {1e3 * one:.2f} ms; two ({first}, {second}): {1e3 * both:.2f} ms; ", end="")
            print(f"{one / both:.2f} times as fast")
            if first != second and arguments.power > 1:
                print(when_it_pays(one / (2 * (arguments.power - 1)), way))


def medians(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """The median seconds of each call, over rounds in which the calls take turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, seconds, strict=True):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return [statistics.median(times) for times in seconds]


def when_it_pays(multiplication: float, way: float) -> str:
    """From which n on the second place saves time. One place multiplies 2 (n - 1) times, two n - 1 times each."""
    least = int(way / multiplication) + 2
    return (
        f"It pays from n = {least} on: a multiplication takes {1e3 * multiplication:.2f} ms, and a matrix takes "
        f"{1e3 * way:.2f} ms there and back."
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Powers of two matrices on two nodes.")
    parser.add_argument("--size", type=positive, default=500, help="rows and columns of a matrix")
    parser.add_argument("--power", type=positive, default=50, metavar="N", help="the exponent")
    parser.add_argument("--rounds", type=positive, default=5, help="how often each side is timed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
