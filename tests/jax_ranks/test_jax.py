"""Each call of mpitrain.jax on every rank, inside jit and outside, and in whole programs.

NumPy alone computes the expected values.
"""

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
from mpitrain.collectives.trees import aligned
from mpitrain.errors import DataError, MismatchError, TreeError
from mpitrain.jax.leaves import back, named_leaves, on_host
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


# -- in whole programs -----------------------------------------------------------------------------------------------


def test_calls_are_made_in_the_order_of_the_program(world: World) -> None:
    """No call needs the result of another, and all calls look alike. Only their order distinguishes them."""

    @jax.jit
    def three(x: Any) -> Any:
        heavy = jnp.sin(x @ x) if world.rank % 2 else x  # the ranks come at different times
        first = mpitrain.jax.sum(heavy * 0 + 1)
        second = mpitrain.jax.sum(x * 0 + 10)
        return first, second, mpitrain.jax.sum(x * 0 + 100)

    x = jnp.ones((50, 50))
    for step in range(3):
        found = three(x)
        direct = world.sum(numpy.full((50, 50), 1000.0 + step))
        for one, expected in zip((*found, direct), (1, 10, 100, 1000 + step), strict=True):
            assert (numpy.asarray(one) == expected * world.size).all()

    def body(carried: Any, number: Any) -> Any:
        total = mpitrain.jax.sum(carried + number)
        return total / world.size, total

    _, totals = jax.jit(lambda: jax.lax.scan(body, 1.0 * world.rank, jnp.arange(3.0)))()
    middle = (world.size - 1) / 2
    numpy.testing.assert_allclose(totals, [world.size * (middle + n) for n in (0, 1, 3)], rtol=1e-14)


def test_what_is_constant_is_exchanged_in_every_run(world: World) -> None:
    """If tracing made the exchange, a rank that traces again would make it alone."""
    run = jax.jit(lambda x: x + mpitrain.jax.sum(world.rank) + mpitrain.jax.sum(numpy.ones(2)))
    expected = world.size * (world.size - 1) / 2 + world.size
    for length in (2, 1 if world.rank == 0 else 2):  # rank 0 traces again
        assert (run(jnp.zeros(length)) == expected).all()


# -- derivatives -----------------------------------------------------------------------------------------------------


def test_the_derivative_of_a_sum_is_that_of_all_ranks_losses(world: World) -> None:
    """The expected gradient is derived by hand for one process with all ranks' x. Central differences confirm it."""
    rng = numpy.random.default_rng(5)
    everyone, factors = rng.normal(size=(world.size, 4)), rng.normal(size=world.size)

    def losses(xs: numpy.ndarray) -> numpy.ndarray:
        """The losses of all ranks, in NumPy."""
        total = (xs**3).sum(axis=0)
        return factors * (numpy.sin(total).sum() + (xs * total).sum(axis=1))

    def mine(x: Any) -> Any:
        found = mpitrain.jax.sum({"total": x**3, "ranks": 1, "count": jnp.ones((), "int32")})
        total = found["total"] * found["count"] / world.size  # an integer has no gradient, and may be used
        return factors[world.rank] * (jnp.sin(total).sum() + (x * total).sum())

    total = (everyone**3).sum(axis=0)
    by_hand = (factors[:, None] * (numpy.cos(total) + everyone)).sum(axis=0) * 3 * everyone**2
    by_hand += factors[:, None] * total
    width = 1e-6
    for place in range(4):
        direction = numpy.zeros_like(everyone)
        direction[world.rank, place] = width
        slope = (losses(everyone + direction).sum() - losses(everyone - direction).sum()) / (2 * width)
        assert by_hand[world.rank, place] == pytest.approx(slope, rel=1e-6, abs=1e-6)
    x = jnp.asarray(everyone[world.rank])
    for gradient in (jax.grad(mine), jax.jit(jax.grad(mine))):
        numpy.testing.assert_allclose(gradient(x), by_hand[world.rank], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("place", [lambda call: call, jax.jit], ids=["outside", "inside"])
def test_a_sum_under_other_transformations(world: World, place: Any) -> None:
    """Forward mode, vmap and jax.checkpoint, against derivatives by hand. In forward mode all ranks move at once."""
    rng = numpy.random.default_rng(6)
    xs, ts = rng.normal(size=(2, world.size, 3))
    x, t = jnp.asarray(xs[world.rank]), jnp.asarray(ts[world.rank])

    def loss(x: Any) -> Any:
        return (mpitrain.jax.sum({"x": x**2, "ranks": 1})["x"] ** 2).sum() / world.size

    def close(found: Any, expected: Any) -> None:
        numpy.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)

    total, moved = (xs**2).sum(axis=0), (2 * xs * ts).sum(axis=0)
    mine = xs[world.rank]
    close(place(lambda x, t: jax.jvp(loss, (x,), (t,))[1])(x, t), (2 * total * moved).sum() / world.size)
    close(jax.linearize(place(loss), x)[1](t), (2 * total * moved).sum() / world.size)
    close(place(lambda x, t: jax.jvp(jax.grad(loss), (x,), (t,))[1])(x, t), 4 * (moved * mine + total * ts[world.rank]))
    close(place(jax.hessian(loss))(x), numpy.diag(4 * (2 * xs.sum(axis=0) * mine + total)))
    close(place(jax.jacrev(mpitrain.jax.sum))(x), world.size * numpy.eye(3))
    close(place(jax.grad(jax.checkpoint(loss)))(x), 4 * total * mine)
    close(place(jax.vmap(jax.grad(loss)))(jnp.stack([x, x])), [4 * total * mine] * 2)
    weights = numpy.arange(1.0, world.size + 1)
    mean = jax.vmap(mpitrain.jax.weighted_mean, (1, None))
    close(place(mean)(jnp.outer(x, jnp.ones(2)), weights[world.rank]), [weights @ xs / weights.sum()] * 2)


def test_a_mean_beside_a_differentiated_loss(world: World) -> None:
    """Its derivative, also in its weight, is not asked for."""

    def loss(x: Any) -> Any:
        return (x**2).sum(), mpitrain.jax.weighted_mean(x, x.sum())

    xs = numpy.arange(1.0, world.size + 1)[:, None] * numpy.ones(3)
    for call in (jax.grad(loss, has_aux=True), jax.jit(jax.grad(loss, has_aux=True))):
        gradient, mean = call(jnp.asarray(xs[world.rank]))
        assert (gradient == 2 * xs[world.rank]).all()
        numpy.testing.assert_allclose(mean, (xs**2).sum(axis=0) / xs[:, 0].sum(), rtol=1e-14)


def test_what_is_refused(world: World) -> None:
    x = jnp.ones(4)
    for place in (lambda call: call, jax.jit):
        with pytest.raises(TypeError, match=r"put mean\(\) around jax.value_and_grad\(loss\), or build the loss"):
            place(jax.grad(lambda x: mpitrain.jax.weighted_mean(x).sum()))(x)
        with pytest.raises(TypeError, match=r"put mean\(\) around jax.value_and_grad\(loss\), or build the loss"):
            place(lambda x: jax.jvp(mpitrain.jax.weighted_mean, (x,), (x,)))(x)
    with pytest.raises(TypeError, match="vmap of a mean over ranks with a weight for each element"):
        jax.vmap(mpitrain.jax.weighted_mean)(x, x)
    if world.size > 1:
        mesh = jax.sharding.Mesh(jax.devices(), ("both",))
        spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("both")))
        assert (mpitrain.jax.sum(spread) == world.size).all()  # outside jit, an array may be on several devices


# -- memory ----------------------------------------------------------------------------------------------------------


def test_nothing_is_copied_that_need_not_be() -> None:
    x = jnp.arange(1000.0)
    (seen,) = on_host(["x"], [x])
    assert seen.ctypes.data == x.unsafe_buffer_pointer()
    assert not seen.flags.writeable
    for dtype in ("float64", "int8", jnp.bfloat16):
        _, parts = aligned([3, 0, 1000, 1], numpy.dtype(dtype))
        for part in parts:
            part[...] = 1
        arrays = back(parts, [x] * 4)
        assert [array.unsafe_buffer_pointer() for array in arrays if array.size] == [
            part.ctypes.data for part in parts if part.size
        ]
        assert [array.dtype for array in arrays] == [part.dtype for part in parts]


def test_results_keep_their_values(world: World) -> None:
    """No other array uses the memory of a result."""
    results = [mpitrain.jax.sum({"a": jnp.full(5000, number), "b": jnp.full(3, number)}) for number in range(5)]
    for number, found in enumerate(results):
        assert (found["a"] == number * world.size).all()
        assert (found["b"] == number * world.size).all()
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert (donating(results[1]["a"]) == world.size + 1).all()
    assert (results[1]["b"] == world.size).all()
    # Calls of a World wait for what JAX still has to do.
    waited: list[int] = []
    world.control.elsewhere.append(lambda: waited.append(world.control.calls))
    before = world.control.calls
    world.barrier()
    world.control.elsewhere.pop()
    assert waited == [before]
