"""Virtual ranks in JAX: virtual_mean has the same bits on any number of ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy
import pytest
from threadpoolctl import threadpool_limits

import mpitrain.jax
from mpitrain import World
from mpitrain.errors import ConfigError, DataError, GradientError, MismatchError, TreeError
from mpitrain.job.worlds import make_world
from tests.ranks.common import error_on_all, skip_alone

V, WIDTH = 7, 5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With several threads, the probe makes one pass more."""
    with threadpool_limits(1):
        yield


@contextmanager
def alone(world: World) -> Iterator[None]:
    """A block in which this rank computes by itself."""
    with pytest.MonkeyPatch.context() as patch:
        own = make_world(world.comm.Split(world.rank, 0))
        patch.setattr(sys.modules["mpitrain.jax.virtual"], "init", lambda: own)
        yield


def loss(params: Any, batch: Any, key: Any) -> Any:
    """Batch norm with running means, dropout, and noise on the samples."""
    x, y = batch
    first, second = jax.random.split(key)
    x = x + jax.random.normal(first, x.shape, x.dtype) / 10
    mean = x.mean(0)
    hidden = jnp.tanh((x - mean) @ params["in"])
    hidden = jnp.where(jax.random.bernoulli(second, 0.7, hidden.shape), hidden / 0.7, 0)
    return ((hidden @ params["out"] - y) ** 2).mean(), mean


COMPILED = jax.jit(jax.value_and_grad(loss, has_aux=True))


def batches() -> Iterator[Any]:
    """Of 21, 15, 3 and 1 samples: in the last two, most virtual ranks have none."""
    rng = numpy.random.default_rng(0)
    for count in (21, 15, 3, 1):
        yield rng.standard_normal((count, WIDTH)).astype("f4"), rng.standard_normal(count).astype("f4")


def trained(seed: int = 0) -> list[Any]:
    """The parameters, the running means and the losses. NumPy makes the steps: JAX would compile each operation."""
    rng = numpy.random.default_rng(1)
    params = {"in": rng.standard_normal((WIDTH, 8)).astype("f4"), "out": rng.standard_normal(8).astype("f4")}
    running = numpy.zeros(WIDTH, "f4")
    means = mpitrain.jax.virtual_mean(COMPILED, V, seed)
    values = []
    for number, batch in enumerate(batches()):
        (value, mean), gradient = means(params, batch, number)
        rate = numpy.float32(0.1)
        params = {name: params[name] - rate * numpy.asarray(gradient[name]) for name in params}
        running = running + rate * (numpy.asarray(mean) - running)
        values.append(float(value))
    return [params, running, values]


def bits(result: Any) -> list[bytes]:
    return [numpy.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result)]


def test_bits_are_those_of_one_rank(world: World) -> None:
    with_all = trained()
    with alone(world):
        assert bits(trained()) == bits(with_all)
        assert bits(trained(seed=1)) != bits(with_all)
    assert len(set(world.allgather(tuple(bits(with_all))))) == 1


def test_the_mean_is_the_rounded_sum_of_products(world: World) -> None:
    """Of numbers whose sum depends on its order; float64 and float32, and a Python number."""
    x = numpy.array([1.0, 2.0**-30, -1.0, 2.0**-29, 3.0, 2.0**-28, -3.0])

    def function(params: Any, part: Any, key: Any) -> Any:
        return {"wide": part.mean(), "narrow": part.astype("f4").mean(), "number": float(part.sum()), "none": x[:0]}

    result = mpitrain.jax.virtual_mean(function, V)(0.0, x, 0)
    products = [value * (1 / 7) for value in x.tolist()]
    narrow = [float(numpy.float32(value) * numpy.float32(1 / 7)) for value in x.tolist()]
    assert result["wide"] == result["number"] == math.fsum(products)
    assert numpy.float32(result["narrow"]) == numpy.float32(math.fsum(narrow))
    assert result["none"].shape == (0,)


def test_keys_differ_by_seed_step_and_virtual_rank(world: World) -> None:
    drawn: list[float] = []

    def function(params: Any, part: Any, key: Any) -> Any:
        drawn.append(float(jax.random.uniform(key)))
        return jnp.zeros(1)

    for seed in (0, 1):
        means = mpitrain.jax.virtual_mean(function, V, seed)
        for step in (0, 1):
            means(0.0, numpy.zeros(V), step)
    of_all = [number for of_rank in world.allgather(drawn) for number in of_rank]
    assert len(of_all) == 2 * (2 * V + 2 * world.size)  # the probe computes the first one twice
    assert len(set(of_all)) == 2 * 2 * V


def test_a_function_that_cannot_be_traced_on_ranks_without_samples(world: World) -> None:
    """The batch has one sample, so only rank 0 has any."""
    means = mpitrain.jax.virtual_mean(lambda params, part, key: {"mean": float(part.mean())}, V)
    assert means(0.0, numpy.array([0.1]), 0) == {"mean": 0.1}


# -- what is refused -------------------------------------------------------------------------------------------------


def averaged(**options: Any) -> Callable[..., Any]:
    return mpitrain.jax.virtual_mean(lambda params, part, key: part.mean(), **{"virtual_ranks": V, **options})


def test_what_it_does_not_take(world: World) -> None:
    for batch in (numpy.zeros(0), (numpy.zeros(7), numpy.zeros(8)), (numpy.zeros(7), 1.0), ()):
        with pytest.raises(DataError, match="the arrays of a batch have"):
            averaged()(0.0, batch, 0)
    for step in (-1, True, 0.5, None):
        with pytest.raises(DataError, match=f"step={step!r}; it must be an int of at least 0"):
            averaged()(0.0, numpy.zeros(V), step)
    with pytest.raises(TreeError, match="virtual_mean inside jit"):
        jax.jit(lambda x: averaged()(0.0, x, 0))(numpy.zeros(V))
    counts = mpitrain.jax.virtual_mean(lambda params, part, key: {"count": jnp.arange(3)}, V)
    with pytest.raises(TreeError, match=r"weighted sum of \['count'\]: its dtype is int"):
        counts(0.0, numpy.zeros(V), 0)
    text = error_on_all(world, ConfigError, lambda: averaged(virtual_ranks=0)(0.0, numpy.zeros(V), 0))
    assert "virtual_mean: virtual_ranks=0; it must be an int of at least 1" in text
    skip_alone(world)
    fewer = averaged(virtual_ranks=world.size - 1)
    text = error_on_all(world, ConfigError, lambda: fewer(0.0, numpy.zeros(V), 0))
    assert f"virtual_ranks={world.size - 1} for {world.size} ranks" in text


def test_ranks_with_other_steps_and_batches(world: World) -> None:
    skip_alone(world)
    odd = world.rank == world.size - 1
    text = error_on_all(world, MismatchError, lambda: averaged()(0.0, numpy.zeros(V), 1 + odd))
    assert "step 2, 7 samples" in text and "step 1, 7 samples" in text
    assert "8 samples" in error_on_all(world, MismatchError, lambda: averaged()(0.0, numpy.zeros(V + odd), 1))


# -- the probe -------------------------------------------------------------------------------------------------------


def test_a_rank_that_computes_otherwise_is_named(world: World) -> None:
    skip_alone(world)
    odd = world.rank == world.size - 1
    means = mpitrain.jax.virtual_mean(lambda params, part, key: {"w": part.mean() + 1e-9 * odd}, V)
    text = error_on_all(world, GradientError, lambda: means(0.0, numpy.zeros(V), 0))
    assert f"{world.name(world.size - 1)}: the result w has other bits than on {world.name(0)}" in text
    assert "XLA" in text


def test_a_function_that_is_not_reproducible_is_named(world: World) -> None:
    count = iter(range(100))
    means = mpitrain.jax.virtual_mean(lambda params, part, key: part.mean() + next(count), V)
    text = error_on_all(world, GradientError, lambda: means(0.0, numpy.zeros(V), 0))
    assert "the result value has other bits when the same virtual rank is computed again" in text
