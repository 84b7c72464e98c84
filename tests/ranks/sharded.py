"""Shared by the tests of ShardedSync: a small model, uneven batches, steps without a Trainer, and expected means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy

from mpitrain import World
from mpitrain.strategies import Strategy

# One element, none, some that few numbers of ranks divide; decayed are those of two dimensions.
SHAPES = {"a": (37, 11), "b": (11,), "empty": (0, 3), "c": (5, 7, 3), "d": (1,), "e": (1009,), "scale": ()}


def small_buckets(world: World, num_bytes: int = 1200) -> World:
    """The World with buckets of this size, so that a small model has several."""
    return world.replaced(config=replace(world.config, bucket_mib=num_bytes / 2**20))


def parameters(dtype: str, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, numpy.ndarray]:
    rng = numpy.random.default_rng(5)
    return {name: numpy.asarray(rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}


def scattered(values: Any, batch: Any, on_gradient: Any, loss_scale: float = 1.0) -> float:
    """A loss whose gradient depends on the parameters and on every sample, in an order of its own."""
    for name in reversed(list(values)):
        value = values[name]
        factor = value.dtype.type(batch.mean() * loss_scale if len(batch) else 0.0)
        on_gradient(name, numpy.asarray(numpy.sin(value * 3) * factor + value * value.dtype.type(0.1 * loss_scale)))
    return float((batch**2).mean()) if len(batch) else 0.0


def batch_of(rank: int, step: int, size: int) -> numpy.ndarray:
    """Uneven, and one rank without samples in every step, where there are several."""
    count = 0 if size > 1 and (rank + step) % size == 0 else 1 + (3 * rank + step) % 4
    return numpy.random.default_rng((rank, step)).standard_normal((count, 2))


def train(world: World, strategy: Strategy, model: Any, steps: range) -> list[tuple[float, float]]:
    made = []
    for step in steps:
        batch = batch_of(world.rank, step, world.size)
        strategy.begin_step(len(batch))
        loss = model.loss_and_gradients(batch, strategy.on_gradient)
        means, rate = strategy.finish_step(model, loss)
        made.append((means.loss, rate))
    return made


def flat(model: Any) -> numpy.ndarray:
    return numpy.concatenate([value.reshape(-1) for value in model.parameters().values()])


def everything(strategy: Strategy, model: Any) -> dict[str, Any]:
    strategy.own_state()
    state: dict[str, Any] = model.state()
    return state


def assert_equal_states(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for name in found:
            assert_equal_states(found[name], expected[name])
    elif isinstance(found, numpy.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    else:
        assert found == expected


def mean_gradients(world: World, at: numpy.ndarray, step: int) -> numpy.ndarray:
    """In float64, of all samples, without mpitrain."""
    every = [batch_of(rank, step, world.size) for rank in range(world.size)]
    total = sum(len(batch) for batch in every)
    gradient = numpy.zeros_like(at)
    for batch in every:
        if len(batch):
            gradient += len(batch) / total * (numpy.sin(3 * at) * batch.mean() + 0.1 * at)
    return gradient
