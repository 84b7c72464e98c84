"""mpitrain.jax in whole programs: the order of its calls, derivatives, and the memory of results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy
import pytest

import mpitrain.jax
from mpitrain import World
from mpitrain.collectives.trees import aligned
from mpitrain.jax.leaves import back, on_host

# -- order -----------------------------------------------------------------------------------------------------------


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


def test_calls_wait_for_what_jax_still_has_to_do(world: World) -> None:
    waited: list[int] = []
    world.control.elsewhere.append(lambda: waited.append(world.control.calls))
    try:
        before = world.control.calls
        world.barrier()
    finally:
        world.control.elsewhere.pop()
    assert waited == [before]


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
