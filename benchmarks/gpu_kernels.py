"""The kernels against the rate at which the GPU copies.

    python benchmarks/gpu_kernels.py

Each kernel in turns with a copy within the GPU, by CUDA events; `of the copy` is bytes read and written a second over
the copy's. Bytes an element are those of docs/dev/cuda-kernels.md.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy

from mpitrain.compression import CODECS
from mpitrain.cuda import kernels
from mpitrain.forecast.rounds import ratio, spread


def cases(cupy: Any, count: int) -> dict[str, tuple[float, Callable[[], object]]]:
    """The bytes read and written per element, and the call, by name."""

    def floats() -> Any:
        return cupy.full(count, 0.5, numpy.float32)

    one, two, three, four = (floats() for _ in range(4))
    flag, norm = cupy.zeros(1, numpy.int32), cupy.zeros(1, numpy.float64)
    codecs = [name for name, make in CODECS.items() if make(False).device_code]
    wires = {codec: cupy.zeros(kernels.wire_bytes(codec, count), numpy.uint8) for codec in codecs}
    pieces = [two[begin : begin + count // 100] for begin in range(0, count // 100 * 100, count // 100)]
    result: dict[str, tuple[float, Callable[[], object]]] = {
        "add float32": (12, lambda: kernels.add(one, two)),
        "sum_of 4": (20, lambda: kernels.sum_of([one, two, three, four], one)),
        "sum_of 2, written twice": (16, lambda: kernels.sum_of([one, two], one, copies=[two])),
        "pack 100 arrays": (8, lambda: kernels.pack(pieces, one[: len(pieces) * (count // 100)])),
        "all_finite": (4, lambda: kernels.all_finite(one, flag)),
        "squared_norm": (4, lambda: kernels.squared_norm(one, norm)),
        "sgd, momentum": (20, lambda: kernels.sgd(one, two, three, rate=1e-3, momentum=0.9)),
        "adamw": (28, lambda: kernels.adamw(one, two, three, four, step=1, rate=1e-3)),
    }
    for codec, wire in wires.items():
        each = wire.nbytes / count
        result[f"encode {codec}, error"] = (
            8 + each,
            lambda codec=codec, wire=wire: kernels.encode(codec, two, wire, three),
        )
        result[f"add_decoded {codec}"] = (
            8 + each,
            lambda codec=codec, wire=wire: kernels.add_decoded(codec, wire, four),
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=256, help="of float32")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    import cupy

    count = int(arguments.mib * 2**18)
    source, target = cupy.zeros(count, numpy.float32), cupy.zeros(count, numpy.float32)

    def seconds(call: Callable[[], object]) -> float:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        for _ in range(8):  # while it is busy, the host gets ahead: it is the GPU's time that counts
            cupy.copyto(target, source)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e-3

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"{name}, CuPy {cupy.__version__}, {arguments.mib:g} MiB of float32")
    print("| kernel | GB/s | of the copy |\n" + "| --- " * 3 + "|")
    for kernel, (num_bytes, call) in cases(cupy, count).items():
        times: dict[str, list[float]] = {"copy": [], "kernel": []}
        for number in range(arguments.rounds + 1):
            taken, copied = seconds(call), seconds(lambda: cupy.copyto(target, source))
            if number:  # the first round compiles
                times["kernel"].append(taken / num_bytes)
                times["copy"].append(copied / 8)
        rate = count / spread(times["kernel"])[0] / 1e9
        middle, low, high = ratio(times, "copy", "kernel")
        print(f"| {kernel} | {rate:.0f} | {middle:.0%} [{low:.0%}-{high:.0%}] |", flush=True)


if __name__ == "__main__":
    main()
