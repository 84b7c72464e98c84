"""ShardedSync beside Sync: the same training, with 1/p of the optimizer's state on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest

from mpitrain import Accumulate, ArrayFunction, ShardedSync, Sync, World
from mpitrain.optim import SGD, Adam, AdamW, LossScale, warmup_cosine
from mpitrain.reducer.exchange import make_exchange
from mpitrain.reducer.scattered import ScatteredExchange

from .common import assert_same_bits
from .placements import PLACEMENTS, placed
from .sharded import assert_equal_states, everything, flat, mean_gradients, parameters, scattered, small_buckets, train

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: Adam(warmup_cosine(0.01, warmup_steps=3, total_steps=12)),
    "adamw": lambda: AdamW(0.01, weight_decay=0.1),
}


def both(name: str) -> tuple[Sync, ShardedSync]:
    """With them, both strategies add in the same order."""
    return Sync(lambda one: make_exchange(one, name)), ShardedSync(lambda one: ScatteredExchange(one, name))


@pytest.mark.parametrize(
    ("optimizer", "dtype", "placement", "names"),
    [
        *((name, "float32", "", ("ring", "shared_memory")) for name in OPTIMIZERS),
        ("adamw", "float64", "", ("direct", "halving_doubling", "hierarchical")),
        *(("adamw", "float32", placement, ("ring", "hierarchical")) for placement in PLACEMENTS),
    ],
)
def test_the_bits_of_sync(world: World, optimizer: str, dtype: str, placement: str, names: tuple[str, ...]) -> None:
    """Parameters, losses and the state of the optimizer, where both add in the same order; also in pieces."""
    there = small_buckets(placed(world, placement) if placement else world)
    for name in names:
        states, made = [], []
        for strategy in both(name):
            inner = ArrayFunction(scattered, parameters(dtype), OPTIMIZERS[optimizer]())
            model = Accumulate(inner, per_rank_batch=2) if name == "direct" else inner
            strategy.begin(there, model)
            made.append(train(there, strategy, model, range(5)))
            states.append(everything(strategy, model))
            strategy.close()
            assert_same_bits(world, flat(model))
        assert made[0] == made[1]
        assert_equal_states(states[1], states[0])


@pytest.mark.parametrize("sizes", [{"w": (1,)}, {"w": (2,)}, {"w": (3, 1)}, {"w": (10_007,), "v": (3,)}], ids=str)
def test_each_rank_has_its_share(world: World, sizes: dict[str, tuple[int, ...]]) -> None:
    """Of one bucket, no rank has more than one element more than another one. Together they have each element once."""
    optimizer = Adam(0.01)
    strategy, model = ShardedSync(), ArrayFunction(scattered, parameters("float64", sizes), optimizer)
    strategy.begin(world, model)
    train(world, strategy, model, range(2))
    total = sum(int(numpy.prod(shape)) for shape in sizes.values())
    for name in ("first", "second"):
        held = world.allgather(optimizer.state()[name].size)
        assert sum(held) == total
        assert max(held) - min(held) <= 1
    strategy.close()


def test_clipping_by_the_norm_of_all(world: World) -> None:
    """Against plain SGD in float64, and the measured norm is that of all elements, on every rank."""
    strategy, model = ShardedSync(), ArrayFunction(scattered, parameters("float64"), SGD(0.5, clip_norm=0.75))
    there = small_buckets(world)
    strategy.begin(there, model)
    at = flat(model).copy()
    for step in range(4):
        train(there, strategy, model, range(step, step + 1))
        gradient = mean_gradients(world, at, step)
        norm = float(numpy.sqrt((gradient.astype(numpy.longdouble) ** 2).sum()))
        assert norm > 0.75
        assert model.gradient_norm() == pytest.approx(norm, rel=1e-13)
        assert len(set(world.allgather(model.gradient_norm()))) == 1
        at -= 0.5 * gradient * (0.75 / norm)
        numpy.testing.assert_allclose(flat(model), at, rtol=1e-12, atol=1e-14)
        at = flat(model).copy()
    assert_same_bits(world, flat(model))
    strategy.close()


def test_an_optimizer_starts_anew_without_its_division(world: World) -> None:
    """An optimizer that was divided, and then starts for Sync, makes the steps of a new one: all elements, clipped."""
    used, new = (SGD(0.5, momentum=0.9, clip_norm=0.75) for _ in range(2))
    found = []
    for strategy, optimizer in ((ShardedSync(), used), (Sync(), used), (Sync(), new)):
        model = ArrayFunction(scattered, parameters("float64"), optimizer)
        strategy.begin(world, model)
        losses = train(world, strategy, model, range(3))
        found.append((losses, flat(model).tobytes(), model.gradient_norm()))
        strategy.close()
    assert found[1] == found[2]


@pytest.mark.parametrize("bad", [numpy.inf, numpy.nan], ids=str)
def test_a_skipped_step_changes_nothing(world: World, bad: float) -> None:
    """On one rank a gradient is infinite: no rank makes the step, all halve the scale, and go on as Sync does."""

    def function(values: Any, batch: Any, on_gradient: Any, loss_scale: float) -> float:
        return scattered(values, batch, on_gradient if now != 1 or world.rank else spoiled(on_gradient), loss_scale)

    def spoiled(on_gradient: Any) -> Any:
        return lambda name, value: on_gradient(name, value * value.dtype.type(bad) if name == "e" else value)

    found = []
    for strategy in both("ring"):
        model = ArrayFunction(function, parameters("float32"), AdamW(0.01), loss_scale=LossScale(8.0))
        strategy.begin(world, model)
        rates = []
        for now in range(4):
            before = flat(model).tobytes()
            rates += [rate for _, rate in train(world, strategy, model, range(now, now + 1))]
            # Rank 0 has no samples in step 0 of several ranks, and some in step 1.
            assert (flat(model).tobytes() == before) == (now == 1)
        assert rates == [0.01, 0.0, 0.01, 0.01]
        assert model.loss_scale is not None
        found.append((flat(model).tobytes(), model.loss_scale.state()))
        strategy.close()
    assert found[0] == found[1]
    assert found[1][1]["skipped_steps"] == 1


def test_verify_sees_whole_means(world: World) -> None:
    """With `mpitrain verify`, every rank has the whole mean, as its recorder looks at it."""
    seen: list[dict[str, numpy.ndarray]] = []

    class Observer:
        def saw_means(self, means: Any, weight: float) -> None:
            seen.append({name: mean.copy() for name, mean in means.items()})

        def gave(self, tree: Any) -> None:
            """What `world.broadcast` has given."""

    there = small_buckets(world).replaced(observer=Observer())  # type: ignore[arg-type]
    strategy, model = ShardedSync(), ArrayFunction(scattered, parameters("float64"), Adam(0.01))
    strategy.begin(there, model)
    at = flat(model).copy()
    train(there, strategy, model, range(1))
    found = numpy.concatenate([mean.reshape(-1) for mean in seen[0].values()])
    numpy.testing.assert_allclose(found, mean_gradients(world, at, 0), rtol=1e-12, atol=1e-14)
    strategy.close()
