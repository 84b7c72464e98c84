"""The training of the pictures: digits with a step of a chosen length, and hosts that are slower or fail.

mpitrain run -n 4 benchmarks/pictures/digits.py --run runs/lr-0.05 --lr 0.05
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import mpitrain as mt
from datasets import load_images, standardised
from models import mlp

Batch = tuple[numpy.ndarray, numpy.ndarray]
OnGradient = Callable[[str, numpy.ndarray], None]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--step-ms", type=float, default=40.0, help="a step takes at least this long")
    parser.add_argument("--slow", default="", metavar="HOST", help="steps take three times as long there")
    parser.add_argument(
        "--fails-at", type=int, default=0, metavar="STEP", help="a file is missing there on the last rank"
    )
    arguments = parser.parse_args()
    world = mt.init()
    train_x, train_y, test_x, test_y = load_images("digits")
    train_x, test_x = standardised(train_x, test_x)
    label_noise = mt.tunable("label_noise", 0.2)
    seconds = arguments.step_ms / 1000 * (3 if arguments.slow == socket.gethostname() else 1)

    def build(world: mt.World) -> mt.Parts:
        data = mt.data.ArrayData(world, (train_x, train_y), global_batch=64, seed=arguments.seed)
        schedule = mt.optim.warmup_cosine(arguments.lr, warmup_steps=50, total_steps=arguments.steps)
        rng = numpy.random.default_rng(arguments.seed)
        noise = numpy.random.default_rng([arguments.seed, world.rank])

        def function(parameters: dict[str, numpy.ndarray], batch: Batch, on_gradient: OnGradient) -> float:
            time.sleep(seconds)
            x, y = batch
            is_wrong = noise.random(len(y)) < label_noise.value
            return mlp.loss_and_gradients(
                parameters, (x, numpy.where(is_wrong, noise.integers(10, size=len(y)), y)), on_gradient
            )

        parameters = mlp.initial(rng, numpy, inputs=train_x.shape[1], hidden=(64,))
        return mt.Parts(mt.ArrayFunction(function, parameters, mt.optim.SGD(schedule)), mt.Sync(), data)

    def metrics_of(trainer: mt.Trainer) -> dict[str, float]:
        parameters = trainer.adapter.parameters()

        def metrics(batch: tuple[numpy.ndarray, numpy.ndarray]) -> dict[str, float]:
            x, y = batch
            scores = mlp.scores(parameters, x)
            scores = scores - scores.max(axis=1, keepdims=True)
            loss = numpy.log(numpy.exp(scores).sum(axis=1)) - scores[numpy.arange(len(y)), y]
            return {"test accuracy": float((scores.argmax(axis=1) == y).mean()), "test loss": float(loss.mean())}

        return mt.evaluate(trainer.world, metrics, (test_x, test_y))

    class Fault(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            if step.number == arguments.fails_at and world.rank == world.size - 1:
                raise FileNotFoundError("/data/images-0007.npy")

    print(f"{socket.gethostname()}: {len(train_x)} images, label noise {label_noise.value}", flush=True)
    mt.Trainer(
        build,
        [
            mt.StopAtStep(arguments.steps),
            mt.Log(),
            Fault(),
            mt.Evaluation(100, metrics_of),
            mt.Record([mt.writers.JsonLines(arguments.run)]),
            mt.Checkpoint(arguments.run / "checkpoints", steps=200),
        ],
    ).run()


if __name__ == "__main__":
    main()
