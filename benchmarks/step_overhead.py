"""What mpitrain adds to a step: a Trainer in a world of one against the same loop in bare NumPy.

    OMP_NUM_THREADS=1 python benchmarks/step_overhead.py

With --device cuda both sides are CuPy's, and it is wall time until the GPU is done that counts.

Both sides call the same model function on the same samples; the bare loop keeps its parameters, momentum and updates
in plain arrays, in place, with nothing of mpitrain. Blocks of steps alternate in one process; CPU seconds are compared,
because other work on the machine adds to wall time at random.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy

import mpitrain as mt
from mpitrain.cuda.device import array_module
from mpitrain.forecast.rounds import ratio, versions_line

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from datasets import load_images
from models import cnn, mlp

RATE, MOMENTUM, DECAY, BATCH = 1e-3, 0.9, 5e-4, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--data", default="fashion", help="fashion or digits")
    parser.add_argument("--device", default="host", choices=["host", "cuda"])
    arguments = parser.parse_args()
    xp = array_module(mt.init(), arguments.device)
    now = clock(xp)
    print(versions_line(), "" if xp is numpy else f"CuPy {xp.__version__}")
    x, y, _, _ = load_images(arguments.data)
    for model, steps in ((mlp, 50), (cnn, 4)):
        sides = {"bare": bare(model, x, y, xp), "mpitrain": with_mpitrain(model, x, y, xp)}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(arguments.rounds + 1):
            for name in sorted(sides, reverse=bool(number % 2)):
                started = now()
                for _ in range(steps):
                    sides[name]()
                if number:  # the first round warms up
                    seconds[name].append((now() - started) / steps)
        middle, low, high = ratio(seconds, "mpitrain", "bare")
        base = statistics.median(seconds["bare"]) * 1e3
        print(f"{model.__name__}: bare {base:.3f} ms a step, mpitrain / bare {middle:.3f} [{low:.3f}-{high:.3f}]")


def clock(xp: ModuleType) -> Callable[[], float]:
    """CPU seconds; on a GPU, seconds at which it is done with all it was given."""

    def now() -> float:
        xp.cuda.get_current_stream().synchronize()
        return time.perf_counter()

    return time.process_time if xp is numpy else now


def bare(model: ModuleType, x: numpy.ndarray, y: numpy.ndarray, xp: ModuleType) -> Callable[[], float]:
    """A step of SGD with momentum and weight decay as one writes it by hand."""
    parameters = model.initial(numpy.random.default_rng(0), xp, inputs=x.shape[1])
    velocity = {name: xp.zeros_like(value) for name, value in parameters.items()}
    scratch = {name: xp.empty_like(value) for name, value in parameters.items()}
    order = numpy.random.default_rng((0, 0)).permutation(len(x))
    cursor = 0

    def step() -> float:
        nonlocal cursor
        chosen = order[cursor : cursor + BATCH]
        cursor = (cursor + BATCH) % (len(x) - BATCH)
        gradients: dict[str, numpy.ndarray] = {}
        batch = (xp.asarray(x[chosen]), xp.asarray(y[chosen]))
        loss = model.loss_and_gradients(parameters, batch, gradients.__setitem__)
        for name, value in parameters.items():
            if value.ndim > 1:
                xp.multiply(value, DECAY, out=scratch[name])
                gradients[name] += scratch[name]
            velocity[name] *= MOMENTUM
            velocity[name] += gradients[name]
            xp.multiply(velocity[name], RATE, out=scratch[name])
            xp.subtract(value, scratch[name], out=value)
        return loss

    return step


def with_mpitrain(model: ModuleType, x: numpy.ndarray, y: numpy.ndarray, xp: ModuleType) -> Callable[[], mt.Step]:
    """Make the same steps with a Trainer."""

    def build(world: mt.World) -> mt.Parts:
        parameters = model.initial(numpy.random.default_rng(0), xp, inputs=x.shape[1])
        optimizer = mt.optim.SGD(RATE, momentum=MOMENTUM, weight_decay=DECAY)
        adapter = mt.ArrayFunction(model.loss_and_gradients, parameters, optimizer)
        return mt.Parts(adapter, mt.Sync(), mt.data.ArrayData(world, (x, y), global_batch=BATCH))

    return mt.Trainer(build).step


if __name__ == "__main__":
    main()
