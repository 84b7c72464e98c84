"""Runs of several servers and three workers in one process, for models of any shape."""

from __future__ import annotations

from typing import Any

import numpy
from counting import NUM_SAMPLES, train_served

import mpitrain as mt

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "tensors": {"a": (3, 5), "b": (7,), "none": (0, 4), "c": (), "d": (2, 2, 2)},
    "one larger than all others": {"a": (2,), "large": (101, 3), "b": (1,)},
    "fewer elements than servers": {"a": (1,), "none": (0,), "b": (1,)},
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: mt.optim.SGD(lambda step: 0.1 / (1 + step), momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda: mt.optim.AdamW(lambda step: 0.01 * (1 + step), weight_decay=0.1),
    "clipped": lambda: mt.optim.AdamW(0.01, clip_norm=0.5),
}


def towards(parameters: Any, batch: Any, on_gradient: Any) -> float:
    """Each parameter goes towards other values with each sample."""
    for number, (name, value) in enumerate(parameters.items()):
        goal = numpy.sin(numpy.arange(value.size).reshape(value.shape) + batch.mean() + number)
        on_gradient(name, (value - goal).astype(value.dtype))
    return 1.0


def several(
    number: int,
    shapes: Any,
    optimizer: Any,
    hooks: Any = (),
    *,
    function: Any = towards,
    dtype: str = "float32",
    steps: int = 7,
    mode: str = "sync",
    make_scale: Any = None,
) -> tuple[mt.Trainer, Any]:
    """A run of so many servers and of three workers."""

    def build(world: mt.World) -> mt.Parts:
        rng = numpy.random.default_rng(7)
        values = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        data = mt.data.ArrayData(world, numpy.arange(NUM_SAMPLES), global_batch=8, seed=5)
        model = mt.ArrayFunction(function, values, optimizer(), loss_scale=make_scale and make_scale())
        return mt.Parts(model, mt.ParameterServer(mode), data)  # type: ignore[arg-type]

    hooks = [mt.StopAtStep(steps), *hooks]
    trainer, others = train_served(build, [build] * 3, hooks, shard_builds=[build] * (number - 1))
    assert others.errors == {}
    return trainer, others


def bits(trainer: mt.Trainer) -> dict[str, Any]:
    """Parameters and optimizer."""
    state = trainer.adapter.state()
    found = {f"parameter {name}": value.tobytes() for name, value in state["parameters"].items()}
    for key, entry in state["optimizer"].items():
        found[key] = entry if isinstance(entry, int) else [value.tobytes() for value in entry.values()]
    return found


class Everything(mt.Hook):
    """Sees the whole model after each step, as a hook of a user does."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
        self.seen.append(str(bits(trainer)).encode())
