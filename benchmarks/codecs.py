"""What a codec costs: GB/s of float32 values, one core, compiled by Numba against its NumPy twin, beside a plain copy.

    python benchmarks/codecs.py

The values lie in memory (64 MiB, so in no cache) and are taken in pieces of 65536, as an exchange does. Seconds are CPU
seconds of the one thread that works, which other processes disturb least. To pay, a codec must be well above what the
network takes: a link of 10 Gbit/s takes 1.2 GB/s of wire, that is 2.4 GB/s of float32 as bf16 or fp16, and 4.7 GB/s as
int8.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy

from mpitrain.compression import CODECS, make_codec
from mpitrain.compression.codec import PIECE_VALUES
from mpitrain.compression.kernels import can_compile
from pairs import versions

OPERATIONS = ("encode", "encode+error", "decode", "add")


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

    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():  # in this order, so that every wire is written before it is read
        call()
    for number in range(arguments.rounds):
        for name in sorted(variants, reverse=bool(number % 2)):
            started = time.thread_time()
            variants[name]()
            seconds[name].append(time.thread_time() - started)
    print(versions("ml_dtypes", *(["numba"] if can_compile() else [])))
    for name, times in seconds.items():
        rates = sorted(values.nbytes / 1e9 / second for second in times)
        tenths = statistics.quantiles(rates, n=10)
        print(f"{name:28} {statistics.median(rates):6.1f} GB/s [{tenths[0]:.1f} to {tenths[-1]:.1f}]")


if __name__ == "__main__":
    main()
