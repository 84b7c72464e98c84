"""A small training, the same in NumPy alone, and what the tests keep of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

from models import mlp
from mpitrain import ArrayFunction, Hook, Parts, Step, Sync, Trainer, World
from mpitrain.data import ArrayData
from mpitrain.data.order import permuted
from mpitrain.optim import SGD
from mpitrain.state.names import split
from mpitrain.strategies import Strategy

INPUTS, HIDDEN, CLASSES = 6, 5, 3


RATE, MOMENTUM, DECAY = 0.1, 0.9, 0.01


def samples_of(count: int, seed: int = 7) -> tuple[numpy.ndarray, numpy.ndarray]:
    rng = numpy.random.default_rng(seed)
    return rng.standard_normal((count, INPUTS)), rng.integers(0, CLASSES, count)


def initial_parameters(hidden: int = HIDDEN) -> dict[str, numpy.ndarray]:
    return mlp.initial(
        numpy.random.default_rng(1), numpy, inputs=INPUTS, hidden=(hidden,), classes=CLASSES, dtype="float64"
    )


def builder(
    count: int,
    global_batch: int,
    *,
    optimizer: Callable[[], Any] = lambda: SGD(RATE, momentum=MOMENTUM, weight_decay=DECAY),
    function: Any = mlp.loss_and_gradients,
    hidden: int = HIDDEN,
    seed: int = 3,
    shuffle: bool = True,
    strategy: Callable[[], Strategy] = Sync,
) -> Callable[[World], Parts]:
    def build(world: World) -> Parts:
        data = ArrayData(world, samples_of(count), global_batch=global_batch, seed=seed, shuffle=shuffle)
        return Parts(ArrayFunction(function, initial_parameters(hidden), optimizer()), strategy(), data)

    return build


class Record(Hook):
    """Keeps every step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.steps.append(step)


def bits(trainer: Trainer) -> dict[str, bytes]:
    """Everything that a checkpoint keeps."""
    return {
        name: value.tobytes() if isinstance(value, numpy.ndarray) else repr(value).encode()
        for part in split(trainer.state())
        for name, value in part.items()
    }


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def bare_numpy(count: int, global_batch: int, steps: int) -> tuple[dict[str, numpy.ndarray], list[float], list[int]]:
    """The same training without the model's code, and of mpitrain the order of samples alone: one process."""
    x, y = samples_of(count)
    w = {name: value.copy() for name, value in initial_parameters().items()}
    velocity = {name: numpy.zeros_like(value) for name, value in w.items()}
    losses, sizes = [], []
    order, epoch = [], 0
    for _ in range(steps):
        if not len(order):
            order = permuted(numpy.arange(count), count, (3, epoch))
            epoch += 1
        chosen, order = order[:global_batch], order[global_batch:]
        inputs, labels = x[chosen], y[chosen]
        hidden = inputs @ w["dense1.weight"] + w["dense1.bias"]
        active = numpy.where(hidden > 0, hidden, 0)
        logits = active @ w["dense2.weight"] + w["dense2.bias"]
        probabilities = numpy.exp(logits) / numpy.exp(logits).sum(axis=1)[:, None]
        losses.append(float(-numpy.log(probabilities[numpy.arange(len(labels)), labels]).mean()))
        sizes.append(len(labels))
        d_logits = (probabilities - numpy.eye(CLASSES)[labels]) / len(labels)
        d_hidden = (d_logits @ w["dense2.weight"].T) * (hidden > 0)
        gradients = {
            "dense1.weight": inputs.T @ d_hidden,
            "dense1.bias": d_hidden.sum(axis=0),
            "dense2.weight": active.T @ d_logits,
            "dense2.bias": d_logits.sum(axis=0),
        }
        for name, gradient in gradients.items():
            decay = DECAY if name.endswith("weight") else 0.0
            velocity[name] = MOMENTUM * velocity[name] + gradient + decay * w[name]
            w[name] = w[name] - RATE * velocity[name]
    return w, losses, sizes


def ran(build: Callable[[World], Parts], hooks: Sequence[Hook], world: World | None = None) -> Trainer:
    """A Trainer that has run."""
    trainer = Trainer(build, hooks, world)
    trainer.run()
    return trainer
