"""The trainings with virtual ranks that the tests compare, on all ranks and in a World of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
from threadpoolctl import threadpool_limits

from mpitrain import ArrayFunction, Hook, Parts, Step, StopAtStep, Sync, Trainer, World
from mpitrain.data import ArrayData, Prefetch, StreamData
from mpitrain.job.worlds import make_world
from mpitrain.optim import SGD, LossScale

from .trainings import bits

V, COUNT, WIDTH = 7, 80, 300  # 300 values are more than a block of an exact sum


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With several threads, the probe makes one pass more."""
    with threadpool_limits(1):
        yield


def alone(world: World) -> World:
    """A World of this rank."""
    return make_world(world.comm.Split(world.rank, 0))


def noisy(parameters: Any, batch: Any, on_gradient: Any, random: numpy.random.Generator, loss_scale: Any = 1) -> float:
    """A model of one layer with dropout. Its gradients have all bits in use."""
    x, y = batch
    if not len(x):
        for name, value in parameters.items():
            on_gradient(name, numpy.zeros_like(value))
        return 0.0
    x = x * (random.random(x.shape) < 0.7)
    error = x @ parameters["w"] + parameters["b"] - y
    scaled = (error * (loss_scale / len(x))).astype(error.dtype)
    on_gradient("b", scaled.sum(axis=0, keepdims=True))
    on_gradient("w", x.T @ scaled)
    return float((error.astype("f8") ** 2).mean() / 2)


def samples() -> tuple[numpy.ndarray, numpy.ndarray]:
    rng = numpy.random.default_rng(3)
    return rng.standard_normal((COUNT, WIDTH)).astype("f4"), rng.standard_normal(COUNT).astype("f4")


def shifted(sample: Any, random: numpy.random.Generator) -> Any:
    x, y = sample
    return x + numpy.float32(random.normal()), y


def model(function: Any = noisy, **options: Any) -> ArrayFunction:
    rng = numpy.random.default_rng(1)
    parameters = {"w": (rng.standard_normal(WIDTH) / 10).astype("f4"), "b": numpy.zeros(1, "f4")}
    return ArrayFunction(function, parameters, SGD(0.01, momentum=0.9, clip_norm=1.0), **options)


def builder(
    global_batch: int = 21,
    number: Any = V,
    *,
    seed: Any = 5,
    adapter: Callable[[], Any] = model,
    data: Callable[[World, int], Any] | None = None,
) -> Callable[[World], Parts]:
    def arrays(world: World, global_batch: int) -> Any:
        return ArrayData(world, samples(), global_batch=global_batch, seed=2, augment=shifted)

    def build(world: World) -> Parts:
        return Parts(adapter(), Sync(virtual_ranks=number, seed=seed), (data or arrays)(world, global_batch))

    return build


def too_large() -> LossScale:
    """A scale with which the first steps are skipped, and another one later."""
    return LossScale(2.0**18, growth_interval=2)


class Losses(Hook):
    """Keeps what a step reports."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float | None]] = []

    def before_run(self, trainer: Trainer) -> None:
        trainer.adapter.measure_gradient_norm()

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.steps.append((step.loss, step.samples, trainer.adapter.gradient_norm()))
        trainer.adapter.measure_gradient_norm()


def trained(
    world: World, build: Callable[[World], Parts], steps: int = 9, state: Any = None
) -> tuple[dict[str, bytes], list[Any], Trainer]:
    """All that a checkpoint keeps, and all that the steps have reported."""
    losses = Losses()
    trainer = Trainer(build, [StopAtStep(steps), losses], world=world)
    if state is not None:
        trainer.restore(state)
    trainer.run()
    return bits(trainer), losses.steps, trainer


def in_a_stream(world: World, global_batch: int) -> StreamData:
    return StreamData(world, lambda epoch: zip(*samples(), strict=True), global_batch=global_batch, augment=shifted)


def ahead(world: World, global_batch: int) -> Prefetch:
    return Prefetch(ArrayData(world, samples(), global_batch=global_batch, seed=2))
