"""What importing mpitrain costs beyond NumPy and mpi4py, in new interpreters, alternating.

python benchmarks/import_time.py
"""

import argparse
import statistics
import subprocess
import sys

BASE = "import numpy, mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
VARIANTS = {
    "numpy and mpi4py": BASE,
    "and import mpitrain": f"{BASE}; import mpitrain",
    "and every public name": f"{BASE}; from mpitrain import *",
}
# CPU time, which other work on the machine disturbs least.
CLOCK = "; import time; print(time.process_time())"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.rounds):
        for name, code in VARIANTS.items():
            done = subprocess.run([sys.executable, "-c", code + CLOCK], capture_output=True, text=True, check=True)
            seconds[name].append(float(done.stdout))
    base = statistics.median(seconds["numpy and mpi4py"])
    for name, values in seconds.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name}: {middle * 1e3:.0f} ms [{low * 1e3:.0f}-{high * 1e3:.0f}], {1e3 * (middle - base):+.0f} ms")


if __name__ == "__main__":
    main()
