"""What CompareReplicas costs: one look at all parameters, beside one pass of NumPy over the same memory.

    mpiexec -n 2 python benchmarks/compare_replicas.py
    mpiexec -n 2 python benchmarks/compare_replicas.py --device cuda

Both sides in one set of processes, in turns; milliseconds are the slowest rank's. The last line sets it against a step
of 50 ms: what it takes of a training that looks every 100 steps.
"""

import argparse
import statistics
from collections.abc import Callable

import numpy

import mpitrain as mt
from mpitrain.cuda.device import array_module
from mpitrain.forecast.rounds import Variant, measure, versions_line

STEP_SECONDS, EVERY = 0.05, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="host", choices=["host", "cuda"])
    parser.add_argument("--megabytes", type=int, nargs="*", default=[1, 10, 100])
    arguments = parser.parse_args()
    world = mt.init()
    xp = array_module(world, arguments.device)
    world.print(versions_line(), f"{world.size} ranks")
    for megabytes in arguments.megabytes:
        values = {f"layer{i}": xp.ones(megabytes * 10**6 // 40, numpy.float32) for i in range(10)}

        def build(world: mt.World, values: dict[str, numpy.ndarray] = values) -> mt.Parts:
            adapter = mt.ArrayFunction(lambda *_: 0.0, values, mt.optim.SGD(0.1))
            return mt.Parts(adapter, mt.Sync(), mt.data.ArrayData(world, numpy.ones(99), global_batch=99))

        trainer = mt.Trainer(build)
        step = mt.Step(1, 0.0, 1.0, 0.0, 0.0, overlap=None)  # type: ignore[arg-type]
        measured = measure(
            world,
            {"compare": Variant(look(mt.CompareReplicas(1), trainer, step)), "sum": Variant(total(trainer))},
            arguments.rounds,
        )
        texts = []
        for name, variant in measured.items():
            ordered = sorted(second * 1e3 for second in variant.seconds)
            texts.append(f"{name} {statistics.median(ordered):.2f} ms [{ordered[0]:.2f}-{ordered[-1]:.2f}]")
        share = statistics.median(measured["compare"].seconds) / (EVERY * STEP_SECONDS)
        world.print(f"{megabytes} MB: {', '.join(texts)}; every {EVERY} steps of 50 ms: {share:.2%}")


def look(hook: mt.CompareReplicas, trainer: mt.Trainer, step: mt.Step) -> Callable[[], None]:
    return lambda: hook.after_step(trainer, step)


def total(trainer: mt.Trainer) -> Callable[[], None]:
    """Reads every parameter once."""

    def run() -> None:
        for value in trainer.adapter.parameters().values():
            float(value.sum())

    return run


if __name__ == "__main__":
    main()
