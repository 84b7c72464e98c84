"""compressed_mean and rounds of mpitrain.jax. NumPy alone computes the expected values."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy
import pytest

import mpitrain.jax
from mpitrain import GradientReducer, Parameter, World
from mpitrain.compression.power_sgd import first_factor, plan
from mpitrain.errors import ConfigError, DataError, MismatchError, NonFiniteError, TreeError
from mpitrain.jax.compressed import PowerSgdState
from mpitrain.reducer.exchange import make_exchange
from tests.ranks.common import assert_same_bits, error_on_all, skip_alone
from tests.ranks.placements import placed

from .test_jax import Pair, assert_equal, inside_jit


@pytest.fixture
def apart(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Each rank is as if on a node of its own."""
    there = placed(world, "alone on each node")
    monkeypatch.setattr(sys.modules["mpitrain.jax.compressed"], "init", lambda: there)
    return there


def largest(values: numpy.ndarray, count: int) -> numpy.ndarray:
    """The `count` values that are largest by size, and zeros: top_k of one block, where no two are equal."""
    kept = numpy.zeros_like(values)
    chosen = numpy.argsort(-abs(values))[:count]
    kept[chosen] = values[chosen]
    return kept


@pytest.mark.parametrize("inside", [False, True], ids=["outside jit", "inside"])
def test_the_largest_by_hand_with_error_feedback(apart: World, inside: bool) -> None:
    """Three steps of all ranks in float64, from weights that differ. Rank 0 has weight 0 in the second step."""
    skip_alone(apart)
    mean = mpitrain.jax.compressed_mean("top_k:0.25")
    update = jax.jit(lambda tree, left, weight: mean.update(tree, left, weight=weight)) if inside else None
    zeros = Pair(jnp.zeros((2, 8), "float32"), {"b": jnp.zeros(4, "float32"), "none": jnp.zeros((0, 3), "float32")})
    left = mean.init(zeros)
    lefts = [numpy.zeros(20) for _ in range(apart.size)]
    for step in range(3):
        everyone = [
            numpy.random.default_rng((rank, step)).standard_normal(20).astype("float32") for rank in range(apart.size)
        ]
        weights = [float(rank + 1) * (rank > 0 or step != 1) for rank in range(apart.size)]
        mine = everyone[apart.rank]
        tree = Pair(
            jnp.asarray(mine[:16].reshape(2, 8)),
            {"b": jnp.asarray(mine[16:]), "none": jnp.zeros((0, 3), "float32")},
        )
        own = weights[apart.rank]
        calls = [update(tree, left, own) if update else mean.update(tree, left, weight=own) for _ in range(2)]
        assert_equal(calls[1], calls[0])  # the state is all that a call continues from
        found, left = calls[0]
        expected = numpy.zeros(20)
        for rank, values in enumerate(everyone):
            whole = values.astype("float64") * (weights[rank] / sum(weights)) + lefts[rank]
            sent = largest(whole, 5)
            expected, lefts[rank] = expected + sent, whole - sent
        for one, wanted in ((found, expected), (left, lefts[apart.rank])):
            flat = numpy.concatenate([numpy.ravel(one.first), one.second["b"]])
            # Each value is a product and at most one sum for each rank and step, rounded to 24 bits.
            numpy.testing.assert_allclose(flat, wanted, rtol=0, atol=4 * apart.size * 2**-24)
            assert one.second["none"].shape == (0, 3)
        assert_same_bits(apart, *(numpy.asarray(leaf) for leaf in jax.tree.leaves(found)))
    assert any(one.any() for one in lefts)


# A matrix, a tensor whose rows are its first index, what is too small for power_sgd to send as a product, and nothing.
SHAPES = {"matrix": (20, 35), "kernel": (12, 3, 3, 4), "thin": (2, 3), "vector": (7,), "none": (0, 4)}
MATRICES = {"matrix": (2, 35), "kernel": (2, 36)}  # the factors of rank 2


def tree(rank: int, step: int) -> dict[str, numpy.ndarray]:
    rng = numpy.random.default_rng((rank, step))
    return {name: rng.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()}


def on_jax(arrays: dict[str, numpy.ndarray]) -> dict[str, Any]:
    return {name: jnp.asarray(array) for name, array in arrays.items()}


@pytest.mark.parametrize(
    "codec", ["bf16", "power_sgd:2", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("int8", "top_k:0.1"))]
)
def test_what_is_left_out_comes_later(apart: World, codec: str) -> None:
    """What came out of five steps, and what is left out after them, are the sum of the weighted means in float64."""
    skip_alone(apart)
    mean, is_factored = mpitrain.jax.compressed_mean(codec), codec.startswith("power_sgd")
    left = before = mean.init(on_jax(tree(0, 0)))
    weights = numpy.arange(1, apart.size + 1) / (apart.size * (apart.size + 1) / 2)
    total, expected = ({name: numpy.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for step in range(5):
        everyone = [tree(rank, step) for rank in range(apart.size)]
        found, left = mean.update(on_jax(everyone[apart.rank]), left, weight=apart.rank + 1)
        for name in SHAPES:
            total[name] += numpy.asarray(found[name], "float64")
            expected[name] += sum(weight * one[name] for weight, one in zip(weights, everyone, strict=True))
    for name in SHAPES:
        of_each, at_first = (one.left_out if is_factored else one for one in (left, before))
        assert not numpy.any(at_first[name])  # the old state was not changed
        owed = apart.sum(numpy.asarray(of_each[name], "float64"))
        assert owed.any() == (name in MATRICES if is_factored else name != "none")
        # Values below 2^5, in products with sums of at most 36 numbers.
        bound = 5 * 36 * 2.0**-19 if is_factored else 5 * 8 * apart.size * 2.0**-24
        numpy.testing.assert_allclose(total[name] + owed, expected[name], rtol=0, atol=bound)
        assert name not in MATRICES or abs(total[name] - expected[name]).max() > 1e-4


@pytest.mark.parametrize("inside", [False, True], ids=["outside jit", "inside"])
def test_the_bits_of_a_reducer(apart: World, inside: bool) -> None:
    """Over four steps. A second call with the same state has the same result: the state is all that continues."""
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


def test_on_one_node_nothing_is_compressed(world: World) -> None:
    """What was left out in a state of several nodes is sent once. `params` is a name, as in optax; factors stay."""
    mine = {"w": jnp.full((30, 40), world.rank + 1.0, "float32")}
    zeros = numpy.zeros((30, 40), "float32")
    for codec in ("int8", "power_sgd"):
        mean = mpitrain.jax.compressed_mean(codec)
        begun = mean.init(mine)
        saved = {"w": jnp.full((30, 40), 0.5 + world.rank * (world.rank != 1), "float32")}
        owed = sum(0.5 + rank * (rank != 1) for rank in range(world.size))
        if codec == "power_sgd":
            assert begun.factors["w"].tobytes() == first_factor(plan([("w", (30, 40))], 4).matrices[0]).tobytes()
            saved = PowerSgdState(saved, begun.factors)
        for call in (mean.update, jax.jit(mean.update)):
            left = saved
            for more in (owed, 0.0):
                found, left = call(mine, left, params=mine, weight=1.0)
                numpy.testing.assert_allclose(found["w"], zeros + (world.size + 1) / 2 + more, rtol=1e-6)
                assert_equal(left.left_out["w"] if codec == "power_sgd" else left["w"], zeros)
                assert codec == "int8" or left.factors["w"].tobytes() == begun.factors["w"].tobytes()


def test_what_compressed_mean_does_not_take(world: World) -> None:
    with pytest.raises(ConfigError, match="there is no compression 'zip'"):
        mpitrain.jax.compressed_mean("zip")
    mean = mpitrain.jax.compressed_mean("int8")
    wrong = {"a": jnp.ones(2), "b": jnp.ones(2, "float32")}
    for call in (mean.init, lambda tree: mean.update(tree, tree), jax.jit(lambda tree: mean.update(tree, tree))):
        with pytest.raises(TreeError, match="of a: it is float64; codecs take arrays of float32"):
            call(wrong)
    with pytest.raises(TreeError, match=r"what was left out has another form than .*keys: \['c'\]"):
        mean.update({"b": jnp.ones(2, "float32")}, {"c": jnp.ones(2, "float32")})
    with pytest.raises(TreeError, match=r"what was left out has float32 \(3,\) for b; the tree that comes .* \(2,\)"):
        mean.update({"b": jnp.ones(2, "float32")}, {"b": jnp.ones(3, "float32")})
    ones = {"w": jnp.ones(3, "float32")}
    odd = world.size - 1
    bad = {"w": jnp.full(3, numpy.nan if world.rank == odd else 1.0, "float32")}
    text = error_on_all(world, NonFiniteError, lambda: mean.update(bad, ones))
    assert f"{world.name(odd)}: the gradient of w holds NaN or infinity" in text
    assert "weight is 0 on every rank" in error_on_all(world, DataError, lambda: mean.update(ones, ones, weight=0))
    both = lambda x: mean.update({"w": x.astype("float32")}, {"w": x.astype("float32")}, weight=x[0] * 0)  # noqa: E731
    assert "the weight is 0 on every rank" in inside_jit(world, both)


def test_what_power_sgd_does_not_take(apart: World) -> None:
    for rank in ("0", "65", "x"):
        with pytest.raises(ConfigError, match=f"the rank is '{rank}'; allowed are whole numbers from 1 to 64"):
            mpitrain.jax.compressed_mean(f"power_sgd:{rank}")
    mean = mpitrain.jax.compressed_mean("power_sgd:2")
    mine = {"w": jnp.ones((20, 30), "float32")}
    state = mean.init(mine)
    with pytest.raises(TreeError, match="got a dict as its state; give the PowerSgdState"):
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


# -- rounds ----------------------------------------------------------------------------------------------------------


class Nesterov:
    """An outer optimizer with the calls of optax: what it returns is added."""

    def init(self, params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(self, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        assert jax.tree.structure(params) == jax.tree.structure(gradients)
        state = jax.tree.map(lambda speed, gradient: 0.9 * speed + gradient, state, gradients)
        return jax.tree.map(lambda gradient, speed: -0.7 * (gradient + 0.9 * speed), gradients, state), state


def gradient(w: Any, x: Any) -> Any:
    """Of mean((w - x)^2) / 2; 0 without samples."""
    return w - x.mean(axis=0) if len(x) else 0 * w


@pytest.mark.parametrize("kind", ["local_sgd", "diloco", "diloco by optax"])
def test_rounds_by_hand(world: World, kind: str) -> None:
    """Ranks with other numbers of samples, some with none, in NumPy; the last round is shorter."""
    outer: Any = None if kind == "local_sgd" else Nesterov()
    if kind == "diloco by optax":
        optax = pytest.importorskip("optax", reason="optax is not installed")
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    rounds = mpitrain.jax.rounds(3, outer)
    params = mpitrain.jax.broadcast({"w": jnp.arange(4.0) + world.rank, "more": [jnp.ones((2, 0))]})
    state = rounds.init(params)
    step = jax.jit(lambda params, x: {**params, "w": params["w"] - 0.25 * gradient(params["w"], x)})
    common, speed = numpy.arange(4.0), numpy.zeros(4)
    own, counts = [common] * world.size, [0] * world.size
    for number in range(8):
        sizes = [0 if world.size > 1 and (rank + number) % world.size == 0 else 1 + rank for rank in range(world.size)]
        parts = [numpy.random.default_rng((rank, number)).standard_normal((n, 4)) for rank, n in enumerate(sizes)]
        params = step(params, parts[world.rank])
        before = state
        params, state = rounds.update(params, state, sizes[world.rank])
        assert before.steps == number % 3
        own = [w - 0.25 * gradient(w, x) for w, x in zip(own, parts, strict=True)]
        counts = [count + size for count, size in zip(counts, sizes, strict=True)]
        if number == 7:
            params, state = rounds.end(params, state)
        if number in (2, 5, 7):
            gone = sum((common - w) * (count / sum(counts)) for w, count in zip(own, counts, strict=True))
            if outer:
                speed = 0.9 * speed + gone
                gone = 0.7 * (gone + 0.9 * speed)
            common = common - gone
            own, counts = [common] * world.size, [0] * world.size
            assert_same_bits(world, numpy.asarray(params["w"]), numpy.asarray(state.common["w"]))
        numpy.testing.assert_allclose(params["w"], own[world.rank], rtol=1e-13, atol=1e-14)
        assert params["w"].dtype == "float64"
    again, same = rounds.end(params, state)
    assert again is params
    assert same is state


@pytest.mark.parametrize("kind", ["numpy in place", "donated"])
def test_a_step_may_overwrite_its_parameters(world: World, kind: str) -> None:
    """Over two rounds, from the state of `init` and from that of an outer step. By hand: ranks have equal weights."""
    rounds, common = mpitrain.jax.rounds(2), 8.0
    donating = jax.jit(lambda w: w - 0.5 * (w - world.rank), donate_argnums=0)
    params = {"w": numpy.full(3, common, "float32") if kind != "donated" else jnp.full(3, common, "float32")}
    state = rounds.init(params)
    for _ in range(2):
        for _ in range(2):
            if kind == "donated":
                params = {"w": donating(params["w"])}
            else:
                params["w"] -= numpy.float32(0.5) * (params["w"] - world.rank)
            params, state = rounds.update(params, state, 1)
        common = sum(rank + 0.25 * (common - rank) for rank in range(world.size)) / world.size
        numpy.testing.assert_allclose(params["w"], numpy.full(3, common), rtol=1e-6)
        assert_same_bits(world, numpy.asarray(params["w"]))


def test_rounds_with_a_codec(apart: World) -> None:
    """What has been sent and what is left out are the sum of the means; the state has both."""
    skip_alone(apart)
    rounds = mpitrain.jax.rounds(1, compression="top_k:0.25")
    params = {"w": jnp.zeros(8, "float32")}
    state = rounds.init(params)
    moves = numpy.stack(
        [numpy.random.default_rng(rank).standard_normal(8).astype("float32") for rank in range(apart.size)]
    )
    for _ in range(3):
        params, state = rounds.update({"w": params["w"] + moves[apart.rank]}, state, 1 + apart.rank)
        assert_same_bits(apart, numpy.asarray(params["w"]))
    weights = numpy.arange(1, apart.size + 1) / (apart.size * (apart.size + 1) / 2)
    owed = apart.sum(numpy.asarray(state.left_out["w"], "float64"))
    assert owed.any()
    numpy.testing.assert_allclose(params["w"] - owed, 3 * weights @ moves, rtol=0, atol=3 * 8 * apart.size * 2**-23)


def test_what_rounds_do_not_take(world: World) -> None:
    for wrong in (0, True, 2.0):
        with pytest.raises(ConfigError, match="it must be an int of at least 1"):
            mpitrain.jax.rounds(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="use a codec, such as int8, or none"):
        mpitrain.jax.rounds(5, compression="power_sgd")
    rounds = mpitrain.jax.rounds(2)
    with pytest.raises(TreeError, match="rounds of n: it is int32; allowed are arrays of float16"):
        rounds.init({"n": jnp.ones(2, "int32")})
    with pytest.raises(TreeError, match=r'it is float64; codecs take arrays of float32.*take compression="none"'):
        mpitrain.jax.rounds(2, compression="int8").init({"w": jnp.ones(2)})
    params = {"w": jnp.ones(2), "v": jnp.ones(1)}
    state = rounds.init(params)
    for other in (jnp.ones((3, 2)), jnp.ones(2, "bfloat16")):
        with pytest.raises(TreeError, match=r"the state of the rounds has float64 \(2,\) for w; .* They must have"):
            rounds.end({**params, "w": other}, state._replace(steps=1))
    with pytest.raises(TypeError):
        rounds.update(params, state)
    with pytest.raises(TreeError, match="rounds inside jit: call its functions outside"):
        jax.jit(lambda params: rounds.update(params, state, 1)[0])(params)
    if world.size > 1:
        other = {"w": jnp.full(2, 1.0 + (world.rank == 1))}
        text = error_on_all(world, MismatchError, lambda: rounds.init(other))
        assert "mpitrain.jax.broadcast gives all ranks those of rank 0" in text
        assert world.name(1) in text
    odd = world.size - 1
    bad = {**params, "w": jnp.asarray([1.0, numpy.nan if world.rank == odd else 1.0])}
    _, counted = rounds.update(params, state, 1)
    text = error_on_all(world, NonFiniteError, lambda: rounds.update(bad, counted, 1))
    assert f"{world.name(odd)}: w has become NaN or infinity in the steps of this round" in text
    assert counted.steps == 1
    found, _ = rounds.update(params, counted, 1)  # the ranks can continue from what they had
    assert_equal(found, params)
