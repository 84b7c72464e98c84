"""The rules for every strategy of the registry, and for the one of tests/added.

A model with one weight vector w and the loss mean((w - x)^2) / 2: its gradient on some samples is w - mean(x).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from mpitrain import ArrayFunction, DiLoCo, LocalSGD, StreamingDiLoCo, World
from mpitrain.errors import ConfigError, MissingGradientError, NonFiniteError
from mpitrain.job.worlds import make_world
from mpitrain.optim import SGD
from mpitrain.reducer.bucket import plan_layout
from mpitrain.reducer.means import Remarks
from mpitrain.state.resume import add_up
from mpitrain.strategies import STRATEGIES, ServedStrategy, Strategy, make_strategy
from tests.added.together import Together

from .common import assert_same_bits, error_on_all, first_ranks

WIDTH, RATE, MOMENTUM, STEPS = 7, 0.25, 0.5, 6

# Strategies whose ranks train by themselves, with the arguments that make them Sync for an optimizer without momentum.
ROUNDS: dict[str, Callable[[], Strategy]] = {
    "local_sgd": lambda: LocalSGD(1),
    "diloco": lambda: DiLoCo(1, outer=SGD(1.0)),
    "streaming_diloco": lambda: StreamingDiLoCo(1, fragments=3, delay=0, alpha=0.0, outer=SGD(1.0)),
}
# Strategies that send float32 in a shorter form, and so never the whole means: test_sparse_loco.py has what they send.
CODED = ["sparse_loco"]


def as_sync(name: str) -> tuple[Strategy, float]:
    """Return a strategy that does what Sync does, and the momentum with which it does."""
    return (ROUNDS[name](), 0.0) if name in ROUNDS else (make_strategy(name), MOMENTUM)


def dtype_of(name: str) -> str:
    """Return the dtype of parameters that a strategy takes on several ranks."""
    return "float32" if name in CODED else "float64"


def adapter(
    function: Any = None, *, seed: int = 0, dtype: str = "float64", momentum: float = MOMENTUM
) -> ArrayFunction:
    rng = numpy.random.default_rng(seed)
    parameters = {"w": rng.standard_normal(WIDTH).astype(dtype), "v": rng.standard_normal((2, 3)).astype(dtype)}
    return ArrayFunction(function or quadratic, parameters, SGD(lambda step: RATE / (1 + step), momentum=momentum))


def quadratic(parameters: Any, batch: Any, on_gradient: Any) -> float:
    w, v = parameters["w"], parameters["v"]
    if not len(batch):
        on_gradient("v", numpy.zeros_like(v))
        on_gradient("w", numpy.zeros_like(w))
        return 0.0
    on_gradient("v", v - v.dtype.type(batch.mean()))
    on_gradient("w", w - batch.mean(axis=0).astype(w.dtype))
    return float(((w - batch) ** 2).sum() / 2 / len(batch))


def samples(rank: int, step: int, count: int) -> numpy.ndarray:
    return numpy.random.default_rng((rank, step)).standard_normal((count, WIDTH))


def count_of(rank: int, step: int, size: int) -> int:
    """Uneven, and another rank without samples in every step, where there are several."""
    return 0 if size > 1 and (rank + step) % size == 0 else 1 + (3 * rank + step) % 5


def one_step(strategy: Strategy, model: ArrayFunction, batch: numpy.ndarray) -> tuple[Any, float]:
    """Make one step as the Trainer does."""
    strategy.begin_step(len(batch))
    loss = model.loss_and_gradients(batch, strategy.on_gradient)
    return strategy.finish_step(model, loss)


def train(world: World, strategy: Strategy, model: ArrayFunction, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = samples(world.rank, step, count_of(world.rank, step, world.size))
        means, rate = one_step(strategy, model, batch)
        assert means.weight == sum(count_of(rank, step, world.size) for rank in range(world.size))
        assert rate == RATE / (1 + step)
        losses.append(means.loss)
    return losses


def values(model: ArrayFunction) -> list[numpy.ndarray]:
    return list(model.parameters().values())


class Plain:
    """The same training in one process, in float64."""

    def __init__(self, momentum: float) -> None:
        self.w, self.v = (value.copy() for value in values(adapter(seed=0)))
        self.momentum, self.speed = momentum, [numpy.zeros_like(self.w), numpy.zeros_like(self.v)]

    def step(self, number: int, every: list[numpy.ndarray]) -> float:
        """Make a step with the samples of all ranks. Return the mean loss."""
        x = numpy.concatenate(every)
        loss = ((self.w - x) ** 2).sum() / 2 / len(x)
        gone = self.w - x.mean(axis=0), self.v - x.mean()
        self.speed = [self.momentum * old + new for old, new in zip(self.speed, gone, strict=True)]
        self.w = self.w - RATE / (1 + number) * self.speed[0]
        self.v = self.v - RATE / (1 + number) * self.speed[1]
        return float(loss)

    def assert_close(self, model: ArrayFunction) -> None:
        for found, expected in zip(values(model), (self.w, self.v), strict=True):
            numpy.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def one_rank_is_plain_training(world: World, name: str) -> None:
    """Bit for bit, in float32 too: every rank by itself, beside a loop without a strategy."""
    from mpi4py import MPI

    for dtype in ("float64", "float32"):
        alone = make_world(MPI.COMM_SELF)
        strategy, model = make_strategy(name), adapter(dtype=dtype)
        strategy.begin(alone, model)
        plain = adapter(dtype=dtype)
        plan = plan_layout(plain.layout)
        for step in range(STEPS):
            batch = samples(world.rank, step, 1 + world.rank).astype(dtype)
            means, _ = one_step(strategy, model, batch)
            flats = {kind: numpy.empty(count, kind) for kind, count in plan.counts.items()}
            views = plan.views(flats)
            loss = plain.loss_and_gradients(
                batch, lambda index, gradient, views=views: numpy.copyto(views[index], gradient)
            )
            plain.apply_gradients(flats, Remarks())
            assert means.loss == loss
            assert [one.tobytes() for one in values(model)] == [one.tobytes() for one in values(plain)]
        strategy.close()
        alone.free()


def means_are_by_samples(world: World, name: str) -> None:
    """Against float64, worked out from all ranks' samples at once; replicas that begin unequal have equal bits."""
    strategy, momentum = as_sync(name)
    model = adapter(seed=world.rank, momentum=momentum)
    strategy.begin(world, model)
    plain = Plain(momentum)
    for step in range(STEPS):
        loss = plain.step(step, [samples(rank, step, count_of(rank, step, world.size)) for rank in range(world.size)])
        assert train(world, strategy, model, range(step, step + 1)) == pytest.approx([loss], rel=1e-13)
        assert_same_bits(world, *values(model))
    plain.assert_close(model)
    strategy.close()


def a_rank_may_have_no_data(world: World, name: str) -> None:
    """In no step at all."""
    strategy, momentum = as_sync(name)
    model, plain = adapter(momentum=momentum), Plain(momentum)
    strategy.begin(world, model)
    counts = [2 + rank for rank in range(world.size)]
    counts[world.size // 2] *= world.size == 1
    for step in range(STEPS):
        loss = plain.step(step, [samples(rank, step, count) for rank, count in enumerate(counts)])
        means, _ = one_step(strategy, model, samples(world.rank, step, counts[world.rank]))
        assert means.loss == pytest.approx(loss, rel=1e-13)
        assert_same_bits(world, *values(model))
    plain.assert_close(model)
    strategy.close()


def fewer_ranks_go_on(world: World, name: str) -> None:
    """Half of the ranks, from the state of all; what belonged to single ranks is added up."""
    first, momentum = as_sync(name)
    model, plain = adapter(momentum=momentum), Plain(momentum)
    first.begin(world, model)
    for step in range(STEPS // 2):
        plain.step(step, [samples(rank, step, count_of(rank, step, world.size)) for rank in range(world.size)])
    train(world, first, model, range(STEPS // 2))
    own, total = world.allgather(first.own_state()), {}
    for part in own:
        add_up(total, part)
    state, saved = world.broadcast_object((first.state(), model.state()))
    first.close()
    size = (world.size + 1) // 2
    there = first_ranks(world, size)
    if there is not None:
        second, model = as_sync(name)[0], adapter(seed=99, momentum=momentum)
        second.begin(there, model)
        second.restore(state)
        model.restore(saved)
        if any(own):
            second.restore_own(total if there.is_root else {"carried": {}})
        train(there, second, model, range(STEPS // 2, STEPS))
        for step in range(STEPS // 2, STEPS):
            plain.step(step, [samples(rank, step, count_of(rank, step, size)) for rank in range(size)])
        plain.assert_close(model)
        assert_same_bits(there, *values(model))
        second.close()
        there.free()
    world.barrier()


def a_resume_has_the_same_bits(world: World, name: str) -> None:
    dtype = dtype_of(name)
    whole, model = make_strategy(name), adapter(dtype=dtype)
    whole.begin(world, model)
    train(world, whole, model, range(STEPS))
    whole.close()
    first, begun = make_strategy(name), adapter(dtype=dtype)
    first.begin(world, begun)
    train(world, first, begun, range(STEPS // 2))
    state, own, saved = first.state(), first.own_state(), begun.state()
    assert len({repr(one) for one in world.allgather(state)}) == 1
    second, resumed = make_strategy(name), adapter(seed=99, dtype=dtype)
    second.begin(world, resumed)
    second.restore(state)
    resumed.restore(saved)
    second.restore_own(own)
    first.close()
    train(world, second, resumed, range(STEPS // 2, STEPS))
    second.close()
    assert [one.tobytes() for one in values(resumed)] == [one.tobytes() for one in values(model)]


def errors_come_on_every_rank(world: World, name: str) -> None:
    """The error leaves the parameters of the previous step. Training continues afterwards."""
    odd = world.size - 1
    bad = ""

    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        def hand_in(which: str, gradient: Any) -> None:
            if bad == "missing" and which == "w":
                return
            on_gradient(which, gradient * numpy.nan if bad == "NaN" and which == "w" else gradient)

        return quadratic(parameters, batch, hand_in)

    strategy, model = make_strategy(name), adapter(function, dtype=dtype_of(name))
    strategy.begin(world, model)
    batch = samples(world.rank, 0, 2)
    one_step(strategy, model, batch)
    before = [one.tobytes() for one in values(model)]
    for what, kind in (("missing", MissingGradientError), ("NaN", NonFiniteError)):
        bad = what if world.rank == odd else ""
        text = error_on_all(world, kind, lambda: one_step(strategy, model, batch))
        assert world.name(odd) in text
        assert "w" in text
        assert [one.tobytes() for one in values(model)] == before
    bad = ""
    one_step(strategy, model, batch)
    assert [one.tobytes() for one in values(model)] != before
    strategy.end_run()
    assert_same_bits(world, *values(model))
    strategy.close()


CONTRACT: list[Callable[[World, str], None]] = [
    one_rank_is_plain_training,
    means_are_by_samples,
    a_rank_may_have_no_data,
    fewer_ranks_go_on,
    a_resume_has_the_same_bits,
    errors_come_on_every_rank,
]


OF_WHOLE_MEANS = (means_are_by_samples, a_rank_may_have_no_data, fewer_ranks_go_on)


@pytest.mark.parametrize("holds", CONTRACT, ids=lambda holds: holds.__name__)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_contract(world: World, name: str, holds: Callable[[World, str], None]) -> None:
    """A strategy for servers and workers trains on one rank as all others do; tests/server has the rest."""
    if world.size > 1 and isinstance(make_strategy(name), ServedStrategy) and holds is not one_rank_is_plain_training:
        text = error_on_all(world, ConfigError, lambda: make_strategy(name).begin(world, adapter()))
        assert f"{world.size} equal ranks were started" in text
        return
    if world.size > 1 and name in CODED and holds in OF_WHOLE_MEANS:
        pytest.skip("it sends no whole means; see test_sparse_loco.py")
    holds(world, name)


def test_a_name_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"there is no strategy 'sink'; known: .*sync"):
        make_strategy("sink")


def test_a_strategy_that_is_added(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new strategy inherits the contract tests, and can fail them."""
    together = type("Together", (Together,), {})
    monkeypatch.setitem(sys.modules, "mpitrain.strategies.together", SimpleNamespace(Together=together))
    monkeypatch.setitem(STRATEGIES, "together", "together.Together")
    for holds in CONTRACT:
        holds(world, "together")
    if world.size > 1:
        monkeypatch.setattr(together, "begin_step", lambda self, weight: vars(self).update(weight=1, gradients={}))
        with pytest.raises(AssertionError):
            means_are_by_samples(world, "together")
