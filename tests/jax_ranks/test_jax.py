"""Each call of mpitrain.jax on every rank, inside jit and outside. NumPy alone computes the expected values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy
import pytest

import mpitrain.jax
from mpitrain import World
from mpitrain.allreduce.algorithm import DTYPES, FLOATS
from mpitrain.errors import DataError, MismatchError, TreeError
from mpitrain.jax.leaves import named_leaves
from tests.ranks.common import assert_same_bits, error_on_all, expected_sum, pattern, skip_alone

LENGTHS = (0, 1, 1000)


@jax.tree_util.register_dataclass
@dataclass
class Pair:
    first: Any
    second: Any


def assert_equal(found: Any, expected: Any) -> None:
    """Assert that both trees have the same bits, dtypes and form."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        mine, theirs = numpy.asarray(one), numpy.asarray(other)
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert mine.tobytes() == theirs.tobytes()


# -- broadcast ----------------------------------------------------------------------------------------------------


def test_sync(world: World) -> None:
    second = jax.devices()[1]
    mesh = jax.sharding.Mesh(jax.devices(), ("both",))
    both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("both"))

    def values(rank: int) -> Pair:
        of_each = {name: jnp.asarray(pattern(5, rank), name) for name in ("float32", "bfloat16", "float16", "int8")}
        moved = [
            jax.device_put(jnp.arange(3) + rank, second),
            jax.device_put(jnp.arange(8.0).reshape(4, 2) * rank, both),
        ]
        return Pair(
            of_each | {"bool": jnp.asarray([rank % 2 == 0])}, [*moved, jnp.ones((0, 4)), numpy.float32(rank), rank]
        )

    mine = values(world.rank)
    for root in {0, world.size - 1}:
        found = mpitrain.jax.broadcast(mine, root)
        assert_equal(found, values(root))
        for one, model in zip(jax.tree.leaves(found), jax.tree.leaves(mine), strict=True):
            assert type(one) is type(model)
            if isinstance(one, jax.Array):
                assert (one.sharding, one.committed) == (model.sharding, model.committed)
    assert_equal(mine, values(world.rank))


def test_sync_of_unequal_trees(world: World) -> None:
    skip_alone(world)
    odd = world.size - 1
    text = error_on_all(
        world,
        MismatchError,
        lambda: mpitrain.jax.broadcast({"dense": Pair(jnp.ones(2 + (world.rank == odd)), jnp.ones(1))}),
    )
    assert f"{world.name(odd)}: ['dense/first'] float64 (3,); {world.name(0)}: ['dense/first'] float64 (2,)" in text


def test_what_sync_does_not_take() -> None:
    with pytest.raises(TreeError, match=r"^step/0 has PRNG keys, key<fry>; exchange jax\.random\.key_data"):
        mpitrain.jax.broadcast({"step": [jax.random.key(0)]})
    with pytest.raises(TreeError, match="broadcast inside jit: call it outside"):
        jax.jit(mpitrain.jax.broadcast)(jnp.ones(2))


# -- mean and sum ----------------------------------------------------------------------------------------------------


def loss(parameters: dict[str, Any], x: Any, y: Any) -> Any:
    return jnp.mean((x @ parameters["w"] + parameters["b"][0] - y) ** 2)


def test_the_gradient_of_uneven_batches_is_that_of_the_whole(world: World) -> None:
    """Some ranks have no sample. Their mean is NaN, and has no weight."""
    rng = numpy.random.default_rng(3)
    counts = [(3 * rank + 2) % 5 for rank in range(world.size)]  # 2, 0, 3, 1, 4
    x, y = rng.normal(size=(sum(counts), 3)), rng.normal(size=(sum(counts),))
    ends = numpy.cumsum(counts)
    mine = slice(ends[world.rank] - counts[world.rank], ends[world.rank])
    parameters = mpitrain.jax.broadcast({"w": jnp.arange(3.0), "b": (jnp.asarray(0.5),), "unused": jnp.ones((0, 2))})
    step = mpitrain.jax.mean(jax.value_and_grad(loss), weight=lambda _, x, y: len(x))
    off = x @ numpy.arange(3.0) + 0.5 - y
    expected = ((off**2).mean(), 2 * x.T @ off / len(x), 2 * off.mean())
    found = step(parameters, x[mine], y[mine])
    value, gradients = found
    for one, other in zip((value, gradients["w"], gradients["b"][0]), expected, strict=True):
        numpy.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-14)
    assert gradients["unused"].shape == (0, 2)
    assert_equal(jax.jit(step)(parameters, jnp.asarray(x[mine]), jnp.asarray(y[mine])), found)
    assert_same_bits(world, *(numpy.asarray(leaf) for leaf in jax.tree.leaves(found)))


def test_every_dtype_and_length(world: World) -> None:
    def tree(dtypes: Any) -> Any:
        return {str(dtype): Pair([pattern(n, world.rank).astype(dtype) for n in LENGTHS], ()) for dtype in dtypes}

    numbers = tree(DTYPES)
    expected = jax.tree.map(lambda one: expected_sum(one.size, world.size).astype(one.dtype), numbers)
    arrays = jax.tree.map(jnp.asarray, numbers)
    for found in (mpitrain.jax.sum(arrays), mpitrain.jax.sum(numbers), jax.jit(mpitrain.jax.sum)(arrays)):
        assert_equal(found, expected)
    # The weighted mean has the bits of World.mean, because both take one path.
    numbers, weight = tree(FLOATS), world.rank + 0.5
    names, leaves, form = named_leaves(numbers)
    plain = world.mean(dict(zip(names, leaves, strict=True)), weight)
    expected = jax.tree.unflatten(form, [plain[name] for name in names])
    arrays = jax.tree.map(jnp.asarray, numbers)
    known = jax.jit(lambda tree: mpitrain.jax.weighted_mean(tree, weight))
    traced = jax.jit(mpitrain.jax.weighted_mean)
    for found in (mpitrain.jax.weighted_mean(arrays, jnp.asarray(weight)), known(arrays), traced(arrays, weight)):
        assert_equal(found, expected)


def test_numbers(world: World) -> None:
    total = world.size * (world.size + 1) // 2
    assert mpitrain.jax.sum({"a": world.rank + 1, "a/b": 1.0, "a ": (None,)}) == {
        "a": total,
        "a/b": world.size,
        "a ": (None,),
    }
    assert mpitrain.jax.sum({}) == {}
    # Two names that look alike.
    assert mpitrain.jax.sum({"a/b": 1, "a": {"b": 2}}) == {"a/b": world.size, "a": {"b": 2 * world.size}}
    found = jax.jit(lambda: mpitrain.jax.weighted_mean({"loss": world.rank + 1, "rate": 0.5}))()
    assert found == {"loss": total / world.size, "rate": 0.5}


@pytest.mark.parametrize("inside", [False, True])
def test_wrong_leaves(inside: bool) -> None:
    place = jax.jit if inside else (lambda call: call)
    with pytest.raises(TreeError, match=r"mean of .*0.*: its dtype is int32; allowed are float16, .*"):
        place(mpitrain.jax.weighted_mean)([jnp.ones(2, "int32")])
    with pytest.raises(TreeError, match=r"sum of .*x.*: its dtype is bool; allowed are"):
        place(mpitrain.jax.sum)({"x": jnp.ones(2, bool)})
    with pytest.raises(TypeError, match="mean takes a function, not dict; of a pytree: weighted_mean"):
        mpitrain.jax.mean({})  # type: ignore[arg-type]


def test_wrong_weights(world: World) -> None:
    text = error_on_all(world, DataError, lambda: mpitrain.jax.weighted_mean(jnp.ones(2), 0))
    assert inside_jit(world, lambda x: mpitrain.jax.weighted_mean(x, 0)).endswith(text)
    assert inside_jit(world, lambda x: mpitrain.jax.weighted_mean(x, x[0] * 0)).endswith(text)
    if world.size > 1:
        only = 1.0 * (world.rank == 1)
        found = jax.jit(mpitrain.jax.weighted_mean)(jnp.asarray(1.0 if only else numpy.nan), only)
        assert found == 1.0


def inside_jit(world: World, call: Any) -> str:
    """The text of the error that a call inside jit raises on every rank. The last line is the same on all ranks."""
    with pytest.raises((jax.errors.JaxRuntimeError, DataError)) as caught:
        jax.block_until_ready(jax.jit(call)(jnp.ones(2)))
    text = str(caught.value).strip()
    assert len(set(world.allgather(text.splitlines()[-1]))) == 1
    return text


def test_ranks_that_disagree_inside_jit(world: World) -> None:
    skip_alone(world)
    odd = world.size - 1
    is_odd = world.rank == odd
    text = inside_jit(world, lambda x: mpitrain.jax.sum({"w": jnp.ones(2 + is_odd), "x": x}))
    expected = f"MismatchError: {world.name(odd)}: ['w'] float64 (3,); {world.name(0)}: ['w'] float64 (2,); they must"
    assert expected in text
    text = inside_jit(world, mpitrain.jax.weighted_mean if is_odd else mpitrain.jax.sum)
    assert f"MismatchError: {world.name(odd)}: mean; {world.name(0)}: sum; do all ranks make the same calls" in text
    assert mpitrain.jax.sum(1) == jax.jit(mpitrain.jax.sum)(1) == world.size  # the errors leave no call behind


# -- batches ---------------------------------------------------------------------------------------------------------


def test_shard(world: World) -> None:
    sizes = (world.size, 2 * world.size + 1, 1)
    batches = [Pair(jnp.arange(size * 2).reshape(size, 2), [jnp.arange(size)]) for size in sizes]
    for start in (0, 2):
        parts = list(mpitrain.jax.shard(batches, start))
        assert all(isinstance(part, Pair) and len(part.second) == 1 for part in parts)
        everyone = world.allgather([(part.first, part.second[0]) for part in parts])
        for number, batch in enumerate(batches[start:]):
            together = [numpy.concatenate(found) for found in zip(*(its[number] for its in everyone), strict=True)]
            assert_equal(together, [batch.first, batch.second[0]])
