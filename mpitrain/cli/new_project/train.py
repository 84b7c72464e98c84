"""Train a small network on made-up data.

Put your own data into `make`, and your own model into the next two functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

import mpitrain as mt

NUM_SAMPLES, GLOBAL_BATCH, NUM_EPOCHS = 4000, 64, 10
STEPS_PER_EPOCH = -(-NUM_SAMPLES // GLOBAL_BATCH)


def make(rng: numpy.random.Generator, count: int) -> tuple[Any, Any]:
    """The samples, along the first dimension. They must be the same on every rank."""
    x = rng.standard_normal((count, 8)).astype("float32")
    return x, (x**2).sum(axis=1, keepdims=True) - 8


def forward(parameters: Any, x: Any) -> tuple[Any, Any]:
    """The hidden layer and the output."""
    hidden = numpy.maximum(x @ parameters["weight1"] + parameters["bias1"], 0)
    return hidden, hidden @ parameters["weight2"] + parameters["bias2"]


def loss_and_gradients(parameters: Any, batch: Any, on_gradient: Callable[[str, Any], None]) -> float:
    """The mean loss of this rank's part of a batch. Each gradient is passed on as soon as it is final."""
    x, y = batch
    count = max(len(x), 1)  # the last batch of an epoch may leave a rank without samples
    hidden, output = forward(parameters, x)
    d = 2 / count * (output - y)
    on_gradient("bias2", d.sum(axis=0))
    on_gradient("weight2", hidden.T @ d)
    d = d @ parameters["weight2"].T * (hidden > 0)
    on_gradient("bias1", d.sum(axis=0))
    on_gradient("weight1", x.T @ d)
    return float(numpy.square(output - y).sum() / count)


def build(world: mt.World) -> mt.Parts:
    """Everything that depends on the ranks. A restart on other hosts calls it again."""
    rng = numpy.random.default_rng(0)
    data = mt.data.ArrayData(world, make(rng, NUM_SAMPLES), global_batch=GLOBAL_BATCH, seed=0)
    parameters = {
        "weight1": (rng.standard_normal((8, 64)) * 0.5).astype("float32"),
        "bias1": numpy.zeros(64, "float32"),
        "weight2": (rng.standard_normal((64, 1)) * 0.2).astype("float32"),
        "bias2": numpy.zeros(1, "float32"),
    }
    return mt.Parts(mt.ArrayFunction(loss_and_gradients, parameters, mt.optim.Adam(3e-3)), mt.Sync(), data)


def test_error(trainer: mt.Trainer) -> dict[str, float]:
    """The error on samples that are not trained on."""

    def error(batch: Any) -> dict[str, float]:
        x, y = batch
        return {"mean squared error": numpy.square(forward(trainer.adapter.parameters(), x)[1] - y).mean()}

    return mt.evaluate(trainer.world, error, make(numpy.random.default_rng(1), 1000))


if __name__ == "__main__":
    hooks = [
        mt.StopAtStep(NUM_EPOCHS * STEPS_PER_EPOCH),
        mt.Log(),
        mt.Evaluation(5 * STEPS_PER_EPOCH, test_error),
        mt.Checkpoint("checkpoints", steps=5 * STEPS_PER_EPOCH),
    ]
    mt.Trainer(build, hooks).run()
