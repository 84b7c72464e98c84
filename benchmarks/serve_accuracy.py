"""Does training with a server reach the accuracy of allreduce, in each mode?

    mpiexec -n 3 python benchmarks/serve_accuracy.py --plot served.png
    mpiexec -n 3 python benchmarks/serve_accuracy.py --models mlp --steps 938 --seeds 1 --dtype float64

The MLP and the CNN of examples/train.py, smaller, on Fashion-MNIST, each with several seeds: mt.Sync on all ranks, and
a server on rank 0 with 8 workers, threads of the other ranks. A step of sync has 128 samples, in jobs of 16. The jobs
of async and bounded have `--job` samples. They have no momentum, and the learning rate that moves as far for each
sample as that of sync with its momentum. All modes begin with the same parameters and see as many samples.

`loss` is the mean over the last tenth of the samples, `test` is the accuracy in percent, both as mean over the seeds
with their standard deviation; `apart` is the mean of the differences from `allreduce` with the same seed. `all steps`
is the largest difference of a loss from that of `allreduce` in the same step. `staleness` is the mean.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["_MPITRAIN_SERVERS"] = "1"  # each rank has a World of its own

import numpy

import mpitrain as mt
from losses import Losses, plot
from mpitrain.forecast.rounds import versions_line
from mpitrain.job.start import the_job
from serving import Place, make_place, start_workers

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from datasets import load_images, standardised
from models import cnn, mlp

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {"mlp": (mlp, {"hidden": (64,)}), "cnn": (cnn, {"channels": (8, 16)})}
NUM_WORKERS, BATCH = 8, 128
RATE, MOMENTUM = 0.05, 0.9  # of allreduce and sync
# By name: the strategy of a server; None: mt.Sync.
MODES: dict[str, dict[str, Any] | None] = {
    "allreduce": None,
    "sync": {"mode": "sync"},
    "bounded, s = 4": {"mode": "bounded", "staleness": 4},
    "async": {"mode": "async"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["mlp", "cnn"])
    parser.add_argument("--steps", type=int, nargs="*", default=[938, 300], help="of each model")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--job", type=int, default=8, help="samples of a job of async and bounded; it divides 128")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--plot", type=Path, help="write a PNG: the loss over the steps, mean and range of the seeds")
    arguments = parser.parse_args()
    mt.init()
    everyone = the_job().everyone
    assert everyone is not None
    modes = ["allreduce", *(mode for mode in arguments.modes if mode != "allreduce")]
    if everyone.is_root:
        print(f"{everyone.size - 1} ranks with {NUM_WORKERS} workers, {arguments.dtype}, {versions_line('pyzmq')}")
    curves: dict[str, dict[str, numpy.ndarray]] = {}
    for model, steps in zip(arguments.models, arguments.steps, strict=True):
        build, test = images(*MODELS[model], steps, arguments.dtype, arguments.job)
        losses: dict[str, list[list[float]]] = {mode: [] for mode in modes}
        tested: dict[str, list[float]] = {mode: [] for mode in modes}
        stale: dict[str, float] = dict.fromkeys(modes, 0.0)
        for seed in range(arguments.seeds):
            for mode in modes:
                hook, begun = Losses(), time.monotonic()
                updates = updates_of(mode, arguments.job)
                hooks = [mt.StopAtStep(steps * updates), hook]
                trainer = train(everyone, partial(build, seed=seed, mode=mode), hooks, served=mode != "allreduce")
                losses[mode].append(numpy.reshape(hook.values, (-1, updates)).mean(axis=1).tolist())
                if trainer is None:
                    continue
                tested[mode].append(100 * test(trainer))
                if trainer.served:
                    counter = trainer.strategy.stats.staleness  # type: ignore[attr-defined]
                    stale[mode] += (
                        sum(key * count for key, count in counter.items()) / counter.total() / arguments.seeds
                    )
                if everyone.is_root:
                    seconds = time.monotonic() - begun
                    print(f"# {model} seed {seed} {mode}: {tested[mode][-1]:.2f} % after {seconds:.0f} s", flush=True)
        if everyone.is_root:
            curves[model] = {mode: numpy.array(losses[mode]) for mode in modes}
            table(f"{model}, {steps} steps, {arguments.seeds} seeds", curves[model], tested, stale)
    if everyone.is_root:
        print(f"load {statistics.mean(os.getloadavg()):.1f}, {os.cpu_count()} cores")
        if arguments.plot:
            plot(curves, arguments.plot)


def updates_of(mode: str, job: int) -> int:
    """How many updates a mode makes for each 128 samples."""
    return 1 if mode in ("allreduce", "sync") else BATCH // job


def images(
    model: Any, sizes: dict[str, Any], steps: int, dtype: str, job: int
) -> tuple[Callable[..., mt.Parts], Callable[[mt.Trainer], float]]:
    """How to build a training, and how to test what it has trained."""
    train_x, train_y, test_x, test_y = load_images("fashion")
    train_x, test_x = (x.astype(dtype) for x in standardised(train_x, test_x))

    def build(world: mt.World, seed: int, mode: str) -> mt.Parts:
        options, updates = MODES[mode], updates_of(mode, job)
        rate, momentum = (RATE, MOMENTUM) if updates == 1 else (RATE / (1 - MOMENTUM) / updates, 0.0)
        parameters = model.initial(numpy.random.default_rng(seed), numpy, inputs=784, dtype=dtype, **sizes)
        total = steps * updates
        schedule = mt.optim.warmup_cosine(rate, warmup_steps=total // 10, total_steps=total)
        optimizer = mt.optim.SGD(schedule, momentum=momentum, nesterov=momentum > 0, weight_decay=5e-4)
        data = mt.data.ArrayData(world, (train_x, train_y), global_batch=BATCH, seed=seed)
        samples = job if updates > 1 else None
        strategy = mt.Sync() if options is None else mt.ParameterServer(**options, unit_samples=samples)
        return mt.Parts(mt.ArrayFunction(model.loss_and_gradients, parameters, optimizer), strategy, data)

    def test(trainer: mt.Trainer) -> float:
        parameters = trainer.adapter.parameters()

        def right(batch: Any) -> dict[str, float]:
            return {"right": float((model.scores(parameters, batch[0]).argmax(axis=1) == batch[1]).mean())}

        return mt.evaluate(trainer.world, right, (test_x, test_y))["right"]

    return build, test


def train(everyone: mt.World, build: Any, hooks: list[mt.Hook], *, served: bool) -> mt.Trainer | None:
    """Train once. Collective. Return the Trainer; None on a rank of workers."""
    if not served:
        job = the_job()
        before, job.role = job.role, type(job.role)()
        trainer = mt.Trainer(build, hooks, everyone)
        trainer.run()
        trainer.close()
        job.role = before
        return trainer
    with tempfile.TemporaryDirectory() as name:
        place: Place = everyone.broadcast_object(make_place(Path(name), plain="lo") if everyone.is_root else None)
        if everyone.is_root:
            trainer = place.trainer("server", build, hooks, NUM_WORKERS)
            trainer.run()
        else:
            for thread in start_workers(place, [build] * len(range(everyone.rank, NUM_WORKERS + 1, everyone.size - 1))):
                thread.join()
        everyone.barrier()
    return trainer if everyone.is_root else None


def table(
    title: str, losses: dict[str, numpy.ndarray], tested: dict[str, list[float]], stale: dict[str, float]
) -> None:
    """Print the results of a model."""
    print(f"\n{title}\n\n| mode | loss | apart | test | apart | all steps | staleness |\n|{' --- |' * 7}")
    last = {mode: array[:, -max(1, array.shape[1] // 10) :].mean(axis=1) for mode, array in losses.items()}
    for mode in losses:
        cells = []
        for values, base, digits in (
            (last[mode], last["allreduce"], 4),
            (numpy.array(tested[mode]), numpy.array(tested["allreduce"]), 2),
        ):
            deviation = statistics.stdev(values.tolist()) if len(values) > 1 else 0.0
            cells += [f"{values.mean():.{digits}f} ± {deviation:.{digits}f}", f"{(values - base).mean():+.{digits}f}"]
        apart = abs(losses[mode] - losses["allreduce"]).max()
        print(f"| {mode} | {' | '.join(cells)} | {apart:.2g} | {stale[mode]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
