"""What a codec costs: GB/s of float32 values, one core, compiled by Numba against its NumPy twin, beside a plain copy.

    python benchmarks/codecs.py

The values are normally distributed. They lie in memory (64 MiB, so in no cache) and are taken in pieces of 65536, as an
exchange does. The time is the process's own processor time: a codec waits for nothing, and other work on the machine
then counts only by what it does to caches and clocks. To pay, a codec
must be well above what the network takes: a link of 10 Gbit/s takes 1.2 GB/s of wire, that is 2.4 GB/s of float32 as
bf16 or fp16, and 4.7 GB/s as int8.

power_sgd is no codec: its products of rank 4 are measured by themselves, on matrices of 1024 x 1024, and so is what a
rank computes for a step: these products, and the factors made orthogonal.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy

from mpitrain.compression import CODECS, make_codec, power_sgd
from mpitrain.compression.codec import PIECE_VALUES
from mpitrain.compression.kernels import can_compile
from mpitrain.compression.power_sgd import Matrix, Products, first_factor
from mpitrain.forecast.rounds import versions_line

OPERATIONS = ("encode", "encode+error", "decode", "add")


WIDTH = 1024  # of power_sgd's matrices


def low_rank(values: numpy.ndarray, other: numpy.ndarray, products: Products) -> dict[str, Callable[[], object]]:
    """What power_sgd computes for all of the values, by name. `other` is what is left out."""
    matrices = [values[at : at + WIDTH**2].reshape(WIDTH, WIDTH) for at in range(0, values.size, WIDTH**2)]
    residuals = [other[at : at + WIDTH**2].reshape(WIDTH, WIDTH) for at in range(0, values.size, WIDTH**2)]
    results = [numpy.empty_like(matrices[0]) for _ in matrices]  # so that the values stay what they are
    qt = first_factor(Matrix("", 0, WIDTH, WIDTH, power_sgd.RANK))
    pt, rt = numpy.empty_like(qt), numpy.empty_like(qt)

    def orthogonalise() -> None:
        pt[:] = qt
        products.orthogonalise(pt)

    def times(number: int) -> None:
        residuals[number].fill(0)
        products.times(matrices[number], residuals[number], qt, pt)

    def step(number: int) -> None:
        times(number)
        orthogonalise()
        products.project(matrices[number], pt, rt, residuals[number])
        products.product(pt, rt, results[number])
        orthogonalise()

    def all_of(work: Callable[[int], object]) -> Callable[[], None]:
        return lambda: [work(number) for number in range(len(matrices))] and None

    return {
        "times": all_of(times),
        "orthogonalise": all_of(lambda _: orthogonalise()),
        "project": all_of(lambda number: products.project(matrices[number], pt, rt, residuals[number])),
        "product": all_of(lambda number: products.product(pt, rt, results[number])),
        "step": all_of(step),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="of float32 values")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    count = arguments.mib * 2**18
    values = numpy.random.default_rng(0).standard_normal(count).astype(numpy.float32)
    other = numpy.zeros(count, numpy.float32)
    pieces = [slice(start, min(start + PIECE_VALUES, count)) for start in range(0, count, PIECE_VALUES)]

    def in_pieces(work: Callable[[slice], object]) -> Callable[[], None]:
        def run() -> None:
            for piece in pieces:
                work(piece)

        return run

    variants = {"copy": in_pieces(lambda piece: numpy.copyto(other[piece], values[piece]))}
    for name, factory in CODECS.items():
        started = time.perf_counter()
        made = make_codec(name)
        print(f"{name}: made in {time.perf_counter() - started:.2f} s, compiled: {made.compiled}")
        for codec in (made, factory(False)) if made.compiled else (made,):
            wires = {
                piece.start: numpy.empty(codec.wire_bytes(piece.stop - piece.start), numpy.uint8) for piece in pieces
            }
            calls: list[Callable[[slice], object]] = [
                lambda piece, codec=codec, wires=wires: codec.encode(values[piece], wires[piece.start]),
                lambda piece, codec=codec, wires=wires: codec.encode(values[piece], wires[piece.start], other[piece]),
                lambda piece, codec=codec, wires=wires: codec.decode(wires[piece.start], other[piece]),
                lambda piece, codec=codec, wires=wires: codec.add(wires[piece.start], other[piece]),
            ]
            how = "Numba" if codec.compiled else "NumPy"
            variants |= {f"{name} {how} {op}": in_pieces(call) for op, call in zip(OPERATIONS, calls, strict=True)}

    compiled = can_compile()
    products = Products(compiled)
    variants |= {
        f"{power_sgd.NAME} {'Numba' if compiled else 'NumPy'} {op}": call
        for op, call in low_rank(values[: count - count % WIDTH**2], other, products).items()
    }

    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():  # in this order, so that every wire is written before it is read
        call()
    for number in range(arguments.rounds):
        for name in sorted(variants, reverse=bool(number % 2)):
            started = time.process_time()
            variants[name]()
            seconds[name].append(time.process_time() - started)
    print(versions_line("ml_dtypes", *(["numba"] if compiled else [])))
    for name, times in seconds.items():
        rates = sorted(values.nbytes / 1e9 / second for second in times)
        tenths = statistics.quantiles(rates, n=10)
        print(f"{name:28} {statistics.median(rates):6.1f} GB/s [{tenths[0]:.1f} to {tenths[-1]:.1f}]")


if __name__ == "__main__":
    main()
