"""compressed_mean("power_sgd"): its sums, what it hands on, and what it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy
import pytest

import mpitrain.jax
from mpitrain import GradientReducer, Parameter, World
from mpitrain.compression.power_sgd import first_factor, plan
from mpitrain.errors import ConfigError, NonFiniteError, TreeError
from mpitrain.jax.compressed import PowerSgdState
from mpitrain.reducer.exchange import make_exchange
from tests.ranks.common import assert_same_bits, error_on_all, skip_alone

from .test_compressed import apart as apart  # a fixture
from .test_jax import assert_equal

# A matrix, a tensor whose rows are its first index, what is too small to be sent as a product, and nothing.
SHAPES = {"matrix": (20, 35), "kernel": (12, 3, 3, 4), "thin": (2, 3), "vector": (7,), "none": (0, 4)}
MATRICES = {"matrix": (2, 35), "kernel": (2, 36)}  # the factors of rank 2


def tree(rank: int, step: int) -> dict[str, numpy.ndarray]:
    rng = numpy.random.default_rng((rank, step))
    return {name: rng.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()}


def on_jax(arrays: dict[str, numpy.ndarray]) -> dict[str, Any]:
    return {name: jnp.asarray(array) for name, array in arrays.items()}


@pytest.mark.parametrize("inside", [False, True], ids=["outside jit", "inside"])
def test_the_bits_of_a_reducer(apart: World, inside: bool) -> None:
    """Over four steps. A second call with the same state has the same result: the state is all that goes on."""
    skip_alone(apart)
    mean = mpitrain.jax.compressed_mean("power_sgd:2")
    plain = lambda tree, left, weight: mean.update(tree, left, weight=weight)  # noqa: E731
    update = jax.jit(plain) if inside else plain
    left = mean.init(on_jax(tree(0, 0)))
    assert {name: factor.shape for name, factor in left.factors.items()} == MATRICES
    names = sorted(SHAPES)  # as JAX orders a dict
    parameters = [Parameter(name, SHAPES[name], numpy.dtype("float32")) for name in names]
    reducer = GradientReducer(apart, parameters, exchange=lambda own: make_exchange(own, compression="power_sgd:2"))
    for step in range(4):
        weight = float((apart.rank + 1) * (apart.rank > 0 or step != 1))
        mine = tree(apart.rank, step)
        again, _ = update(on_jax(mine), left, weight)
        found, left = update(on_jax(mine), left, weight)
        assert_equal(again, found)
        reducer.begin(weight)
        for index, name in enumerate(names):
            reducer.ready(index, mine[name])
        reducer.finish()
        residual = reducer.state()["residual"]
        for index, name in enumerate(names):
            assert numpy.asarray(found[name]).tobytes() == reducer.gradients[index].tobytes()
            assert numpy.asarray(left.left_out[name]).tobytes() == residual[name].tobytes()
        assert_equal(left.factors, reducer.factors())
        assert_same_bits(apart, *(numpy.asarray(leaf) for leaf in jax.tree.leaves((found, left.factors))))
    reducer.close()


def test_nothing_is_lost(apart: World) -> None:
    """The means of five steps, and what is left out after them, are the weighted means in float64."""
    skip_alone(apart)
    mean = mpitrain.jax.compressed_mean("power_sgd:2")
    left = mean.init(on_jax(tree(0, 0)))
    weights = numpy.arange(1, apart.size + 1) / (apart.size * (apart.size + 1) / 2)
    total, expected = ({name: numpy.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for step in range(5):
        everyone = [tree(rank, step) for rank in range(apart.size)]
        found, left = mean.update(on_jax(everyone[apart.rank]), left, weight=apart.rank + 1)
        for name in SHAPES:
            total[name] += numpy.asarray(found[name], "float64")
            expected[name] += sum(weight * one[name] for weight, one in zip(weights, everyone, strict=True))
    for name in SHAPES:
        owed = apart.sum(numpy.asarray(left.left_out[name], "float64"))
        assert owed.any() == (name in MATRICES)
        # Values below 2^5, in products with sums of at most 36 numbers.
        numpy.testing.assert_allclose(total[name] + owed, expected[name], rtol=0, atol=5 * 36 * 2.0**-19)


def test_a_sum_of_low_rank_is_exact(apart: World) -> None:
    """By hand: rank r has (2 r + 1) u v^T, so the mean over p equal ranks is p u v^T, and nothing is left out."""
    skip_alone(apart)
    mean = mpitrain.jax.compressed_mean("power_sgd:1")
    product = numpy.outer([3, 4, 0, 0], [1, 2, 2, 0, 0, 4])
    mine = {"w": jnp.asarray(product * (2 * apart.rank + 1), "float32")}
    found, left = mean.update(mine, mean.init(mine))
    numpy.testing.assert_allclose(found["w"], apart.size * product, rtol=0, atol=16 * apart.size * 2.0**-22)
    numpy.testing.assert_allclose(left.left_out["w"], 0 * product, rtol=0, atol=32 * apart.size * 2.0**-22)
    # The next step goes on from v, of length 1 (5 is the root of 1 + 4 + 4 + 16).
    numpy.testing.assert_allclose(numpy.abs(left.factors["w"]), [[0.2, 0.4, 0.4, 0, 0, 0.8]], rtol=0, atol=1e-6)


def test_on_one_node_nothing_is_compressed(world: World) -> None:
    """What was left out before is sent once; the factors stay."""
    mean = mpitrain.jax.compressed_mean("power_sgd")
    mine = {"w": jnp.full((30, 40), world.rank + 1.0, "float32")}
    state = mean.init(mine)
    matrix = plan([("w", (30, 40))], 4).matrices[0]
    assert state.factors["w"].tobytes() == first_factor(matrix).tobytes()
    state = PowerSgdState({"w": jnp.full((30, 40), 0.5, "float32")}, state.factors)
    for call in (mean.update, jax.jit(mean.update)):
        left = state
        for more in (world.size / 2, 0.0):
            found, left = call(mine, left)
            numpy.testing.assert_allclose(found["w"], numpy.full((30, 40), (world.size + 1) / 2 + more), rtol=1e-6)
            assert_equal(left.left_out["w"], numpy.zeros((30, 40), "float32"))
            assert_equal(left.factors, state.factors)


def test_what_it_does_not_take(apart: World) -> None:
    for rank in ("0", "65", "x"):
        with pytest.raises(ConfigError, match=f"the rank is '{rank}'; allowed are whole numbers from 1 to 64"):
            mpitrain.jax.compressed_mean(f"power_sgd:{rank}")
    mean = mpitrain.jax.compressed_mean("power_sgd:2")
    mine = {"w": jnp.ones((20, 30), "float32")}
    state = mean.init(mine)
    with pytest.raises(TreeError, match="got a dict for what was left out; give the PowerSgdState"):
        mean.update(mine, {"w": mine["w"]})
    with pytest.raises(TreeError, match="of w: it is float64; codecs take arrays of float32"):
        mean.init({"w": jnp.ones((20, 30))})
    for factors in ({"w": jnp.ones((4, 30), "float32")}, {"w": jnp.ones((2, 30))}):
        with pytest.raises(TreeError, match=r"the factors of power_sgd has float.* for w; .* float32 \(2, 30\)"):
            mean.update(mine, PowerSgdState(state.left_out, factors))
    with pytest.raises(TreeError, match="the factors of power_sgd has another form"):
        mean.update(mine, PowerSgdState(state.left_out, {}))
    skip_alone(apart)
    odd = apart.size - 1
    bad = {"w": jnp.full((20, 30), numpy.inf if apart.rank == odd else 1.0, "float32")}
    text = error_on_all(apart, NonFiniteError, lambda: mean.update(bad, state))
    assert f"{apart.name(odd)}: the gradient of w holds NaN or infinity" in text
