"""Virtual ranks: the same training on any number of ranks, bit for bit.

Each rank compares the training on all ranks with one that it makes alone, in a World of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import pytest

from mpitrain import Accumulate, ArrayFunction, Balance, GradientReducer, Parts, StopAtStep, Sync, Trainer, World
from mpitrain.data import ArrayData, Prefetch
from mpitrain.data.order import permuted
from mpitrain.data.samples import random_of
from mpitrain.errors import CheckpointError, ConfigError, GradientError, MissingGradientError, NonFiniteError
from mpitrain.optim import SGD, LossScale
from mpitrain.reducer.exchange import make_exchange
from mpitrain.strategies.virtual_ranks import VirtualRanks
from mpitrain.world.shard import part_of

from .common import error_on_all, skip_alone
from .reducers import PARAMETERS, SMALL, gradients_of
from .trainings import Record, bits, ran
from .virtual_trainings import (
    COUNT,
    WIDTH,
    V,
    ahead,
    alone,
    builder,
    in_a_stream,
    model,
    noisy,
    one_thread,
    samples,
    too_large,
    trained,
)

__all__ = ["one_thread"]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(builder(), id="a last batch of 17, in which two have fewer samples or none"),
        pytest.param(builder(7), id="one sample each"),
        pytest.param(builder(63, 9), id="more virtual ranks than ranks"),
        pytest.param(builder(data=in_a_stream), id="a stream"),
        pytest.param(builder(data=ahead), id="prefetched"),
        pytest.param(builder(adapter=lambda: Accumulate(model(), per_rank_batch=2)), id="in pieces of two samples"),
        pytest.param(builder(adapter=lambda: model(precision="fp16", loss_scale=too_large())), id="a loss scale"),
    ],
)
def test_bits_are_those_of_one_rank(world: World, build: Callable[[World], Parts]) -> None:
    with_all, losses, _ = trained(world, build)
    by_itself, expected, _ = trained(alone(world), build)
    assert losses == expected
    assert with_all == by_itself
    assert len({math.isfinite(loss) and loss for loss, _, _ in losses}) == 9


def test_means_are_correctly_rounded_sums_of_products(world: World) -> None:
    """The first step by hand: order, cut, random numbers, shares and sum are computed without our code for them."""
    rate = 0.5
    x, y = samples()
    start = {"w": (numpy.arange(WIDTH) / 100).astype("f4"), "b": numpy.zeros(1, "f4")}

    def build(world: World) -> Parts:
        data = ArrayData(world, samples(), global_batch=14, seed=2)
        return Parts(ArrayFunction(noisy, start, SGD(rate)), Sync(virtual_ranks=V, seed=5), data)

    _, losses, trainer = trained(world, build, 1)
    order = permuted(numpy.arange(14), COUNT, (2, 0))
    products: dict[str, list[numpy.ndarray]] = {"w": [], "b": []}
    weighted = []
    for virtual_rank in range(V):
        chosen = order[2 * virtual_rank : 2 * virtual_rank + 2]
        random = numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence((5, 1, virtual_rank, 1))))
        loss = noisy(
            start,
            (x[chosen], y[chosen]),
            lambda name, gradient: products[name].append(gradient * numpy.float32(2 / 14)),
            random,
        )
        weighted.append(2 * loss)
    assert losses[0][0] == math.fsum(weighted) / 14
    for name, of_virtual_ranks in products.items():
        mean = numpy.array([math.fsum(map(float, column)) for column in zip(*of_virtual_ranks, strict=True)], "f4")
        assert trainer.adapter.parameters()[name].tobytes() == (start[name] - numpy.float32(rate) * mean).tobytes()


def test_a_run_goes_on_with_other_ranks(world: World) -> None:
    """From all ranks to one, and from one to all; also into another epoch."""
    expected, losses, _ = trained(alone(world), builder())
    _, first, begun = trained(world, builder(), 4)
    got, rest, _ = trained(alone(world), builder(), state=begun.state())
    assert (got, first + rest) == (expected, losses)
    _, first, begun = trained(alone(world), builder(), 4)
    got, rest, _ = trained(world, builder(), state=begun.state())
    assert (got, first + rest) == (expected, losses)


def test_random_numbers_differ_by_seed_step_and_virtual_rank(world: World) -> None:
    drawn: list[float] = []

    def draw(parameters: Any, batch: Any, on_gradient: Any, random: numpy.random.Generator) -> float:
        drawn.append(random.random())
        return noisy(parameters, batch, on_gradient, random)

    for seed in (0, 1):
        trained(world, builder(70, seed=seed, adapter=lambda: model(draw)), 3)
    of_all = [number for of_rank in world.allgather(drawn) for number in of_rank]
    # The probe computes virtual rank 0 of the first step twice, on every rank.
    assert len(of_all) == 2 * (3 * V + 2 * world.size)
    assert len(set(of_all)) == 2 * 3 * V


@pytest.mark.parametrize("is_first", [True, False], ids=["first pass", "last pass"])
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("missing", MissingGradientError, "without the gradient of b"),
        ("NaN", NonFiniteError, "the losses, the batches"),
        ("infinite loss", NonFiniteError, "the loss is inf"),
    ],
)
def test_a_fault_in_a_pass_is_an_error_on_all(
    world: World, fault: str, kind: type[GradientError], words: str, is_first: bool
) -> None:
    """In one pass of the second step, on the last rank."""
    own = len(range(V)[part_of(V, world.rank, world.size)])
    turn = 2 + own + (1 if is_first or own == 1 else own)  # after two passes of the probe, and a step
    passes = 0

    def function(parameters: Any, batch: Any, on_gradient: Any, random: Any) -> float:
        nonlocal passes
        passes += 1
        bad = fault if world.rank == world.size - 1 and passes == turn else ""

        def hand_in(name: str, gradient: Any) -> None:
            if bad != "missing" or name == "w":
                on_gradient(name, gradient * (numpy.nan if bad == "NaN" else 1))

        return noisy(parameters, batch, hand_in, random) * (math.inf if bad == "infinite loss" else 1)

    trainer = Trainer(builder(adapter=lambda: model(function)), [StopAtStep(5)], world=world)
    trainer.step()
    before = {name: value.copy() for name, value in trainer.adapter.parameters().items()}
    text = error_on_all(world, kind, trainer.step)
    assert words in text and world.name(world.size - 1) in text
    assert ("NaN or infinity" in text) == (fault != "missing")
    for name, value in trainer.adapter.parameters().items():
        assert value.tobytes() == before[name].tobytes()
    trainer.step()  # the next step is whole again


def test_a_rank_that_computes_otherwise_is_named(world: World) -> None:
    skip_alone(world)
    odd = world.rank == world.size - 1

    def otherwise(parameters: Any, batch: Any, on_gradient: Any, random: Any) -> float:
        def hand_in(name: str, gradient: Any) -> None:
            on_gradient(name, numpy.nextafter(gradient, numpy.float32(9)) if odd and name == "w" else gradient)

        return noisy(parameters, batch, hand_in, random)

    trainer = Trainer(builder(adapter=lambda: model(otherwise)), [StopAtStep(5)], world=world)
    before = bits(trainer)["adapter/parameters/w"]
    text = error_on_all(world, GradientError, trainer.step)
    assert f"{world.name(world.size - 1)}: the gradient of w has other bits than on {world.name(0)}" in text
    assert "threads:" in text
    assert bits(trainer)["adapter/parameters/w"] == before


def test_a_model_that_is_not_reproducible_is_named(world: World) -> None:
    """It has a generator of its own."""
    rng = numpy.random.default_rng()

    def other(parameters: Any, batch: Any, on_gradient: Any, random: Any) -> float:
        return noisy(parameters, batch, on_gradient, rng)

    trainer = Trainer(builder(adapter=lambda: model(other)), [StopAtStep(5)], world=world)
    text = error_on_all(world, GradientError, trainer.step)
    assert f"{world.name(0)}: the gradient of b has other bits when the same virtual rank is computed again" in text


WEIGHTS = [3, 3, 3, 2, 2, 1, 0]  # in samples, by virtual rank
EMPTY = WEIGHTS.index(0)


def means_of(world: World, *, threaded: bool) -> list[tuple[float, float, dict[str, bytes]]]:
    """Of three steps. Each virtual rank hands in its gradients in an order of its own."""
    reducer = GradientReducer(
        world,
        PARAMETERS,
        exchange=partial(make_exchange, reduction="exact"),
        bucket_bytes=SMALL,
        threaded=threaded,
        virtual_ranks=len(WEIGHTS),
    )
    own = part_of(len(WEIGHTS), world.rank, world.size)
    numbers = range(own.start, own.stop)
    made = []
    for step in range(3):
        reducer.begin([WEIGHTS[number] for number in numbers], 2.0 if step % 2 else 1.0)
        for number in numbers:
            gradients = gradients_of(number, step)
            for index in numpy.random.default_rng((step, number, world.rank)).permutation(len(PARAMETERS)).tolist():
                gradient = gradients[index]
                reducer.ready(index, numpy.full_like(gradient, numpy.nan) if number == EMPTY else gradient)
            loss = numpy.nan if number == EMPTY else number + 0.1
            if number != numbers[-1]:
                reducer.next_pass(loss)
        means = reducer.finish(loss)
        made.append((means.loss, means.weight, {str(dtype): flat.tobytes() for dtype, flat in reducer.flats.items()}))
    reducer.close()
    return made


@pytest.mark.parametrize("threaded", [False, True], ids=["called", "threaded"])
def test_means_are_those_of_one_rank(world: World, threaded: bool) -> None:
    made = means_of(world, threaded=threaded)
    assert made == means_of(alone(world), threaded=False)
    assert all(numpy.isfinite(loss) and weight == sum(WEIGHTS) for loss, weight, _ in made)
    for _, _, flats in made:
        assert numpy.isfinite(numpy.frombuffer(flats["float32"], "f4")).all()


LIMIT = 4.0  # at this loss scale and above, something overflows
MARKED, OTHER = samples()[1][[11, 40]]  # the labels of two samples


def gradients_overflow(parameters: Any, batch: Any, on_gradient: Any, random: Any, loss_scale: float) -> float:
    """Those of one sample."""
    added = numpy.float32(math.inf if loss_scale >= LIMIT and MARKED in batch[1] else 0)
    return noisy(parameters, batch, lambda name, value: on_gradient(name, value + added), random, loss_scale)


def losses_overflow(parameters: Any, batch: Any, on_gradient: Any, random: Any, loss_scale: float) -> float:
    """That of one sample to one side, and that of another to the other side."""
    loss = noisy(parameters, batch, on_gradient, random, loss_scale)
    if loss_scale >= LIMIT:
        loss += (math.inf if MARKED in batch[1] else 0.0) - (math.inf if OTHER in batch[1] else 0.0)
    return loss


def test_random_numbers_are_not_those_of_augment() -> None:
    key = VirtualRanks(7, 5).key(2, 3)
    own = numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence(key)))
    assert own.random(4).tolist() != random_of(5, 2, 3).random(4).tolist()


@pytest.mark.parametrize(("function", "global_batch"), [(gradients_overflow, 21), (losses_overflow, 77)])
def test_a_virtual_rank_that_overflows(world: World, function: Any, global_batch: int) -> None:
    """Losses of both signs are infinite in a batch of nearly all samples, so that both are in one step."""

    def build(world: World) -> Any:
        scale = LossScale(2 * LIMIT, growth_interval=2)
        return builder(global_batch, adapter=lambda: model(function, loss_scale=scale))(world)

    found = []
    for there in (world, alone(world)):
        record = Record()
        trainer = ran(build, [StopAtStep(12), record], world=there)
        made = [(step.loss.hex(), step.skipped) for step in record.steps]
        found.append((bits(trainer), made))
    assert found[0] == found[1]
    assert ("nan" in {loss for loss, _ in made}) == (function is losses_overflow)
    if function is gradients_overflow:
        assert {skipped for _, skipped in made} == {True, False}
        assert all(math.isfinite(float.fromhex(loss)) for loss, _ in made)


ELSEWHERE = "this training continues where kernels may round differently"


@pytest.mark.parametrize("where", ["here", "on another processor"])
def test_a_run_that_goes_on(
    world: World, where: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _, _, begun = trained(world, builder(), 2)
    if where != "here":
        monkeypatch.setattr("mpitrain.strategies.virtual_ranks._processor", lambda: "Abacus 3000")
    capfd.readouterr()
    _, _, resumed = trained(world, builder(), 4, state=begun.state())
    said = capfd.readouterr().out
    assert (ELSEWHERE in said) == (world.is_root and where != "here")
    assert ("Now it is computed on: Abacus 3000, " in said) == (world.is_root and where != "here")
    # Later runs know both places, and say nothing on either.
    monkeypatch.undo()
    _, _, third = trained(world, builder(), 5, state=resumed.state())
    assert ELSEWHERE not in capfd.readouterr().out
    assert len(third.strategy.places.state()) == (1 if where == "here" else 2)
    # They do not depend on the number of ranks.
    _, _, by_itself = trained(alone(world), builder(), 1)
    assert by_itself.strategy.places.state() == begun.strategy.places.state() != []


class Batches:
    """Data that cannot be cut."""

    epoch = steps_per_epoch = 0

    def state(self) -> dict[str, Any]:
        return {}


class Unseeded(ArrayFunction):
    seeded: Any = None


def of_sync(strategy: Callable[[], Sync], function: Any = noisy) -> Callable[[World], Parts]:
    def build(world: World) -> Parts:
        return Parts(model(function), strategy(), ArrayData(world, samples(), global_batch=V))

    return build


def own_exchange() -> Sync:
    return Sync(lambda world: make_exchange(world, "ring"), virtual_ranks=V)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        *((builder(number=one), f"virtual_ranks={one!r}; it must be an int of at least 1") for one in (0, True, 7.0)),
        *((builder(seed=one), f"seed={one!r}; it must be an int of at least 0") for one in (-1, 0.5, None)),
        (builder(22), "virtual_ranks=7 and a global batch of 22 samples"),
        (builder(22), "Take global_batch=21 or 28"),
        (of_sync(own_exchange), "virtual_ranks=7 and an exchange= of its own"),
        (builder(data=lambda *_: Batches()), "Batches has no method cut(virtual_ranks)"),
        (builder(data=lambda *_: Prefetch(Prefetch(Batches()))), "Batches has no method cut(virtual_ranks)"),
    ],
)
def test_what_is_refused(world: World, build: Callable[[World], Parts], words: str) -> None:
    assert words in error_on_all(world, ConfigError, lambda: Trainer(build, [StopAtStep(1)], world=world))


def test_fewer_virtual_ranks_than_ranks(world: World) -> None:
    skip_alone(world)
    build = builder(20 * (world.size - 1), world.size - 1)
    text = error_on_all(world, ConfigError, lambda: Trainer(build, [StopAtStep(1)], world=world))
    assert f"virtual_ranks={world.size - 1} for {world.size} ranks" in text
    assert f"Start at most {world.size - 1} ranks" in text


def test_what_does_not_go_together(world: World) -> None:
    coded = world.replaced(config=replace(world.config, compression="int8"))
    text = error_on_all(world, ConfigError, lambda: Trainer(builder(), [StopAtStep(1)], world=coded))
    assert "virtual_ranks=7 and compression=int8" in text
    pieces = Accumulate(Unseeded(noisy, model().parameters(), SGD(0.01)), per_rank_batch=2)
    with pytest.raises(ConfigError, match=r"Unseeded has no method seeded\(key\)"):
        Trainer(builder(adapter=lambda: pieces), [StopAtStep(1)], world=world)
    trainer = Trainer(builder(), [StopAtStep(9), Balance(steps=1)], world=world)
    assert "each rank has whole virtual ranks" in error_on_all(world, ConfigError, trainer.run)


def test_functions_without_virtual_ranks(world: World) -> None:
    """One with random numbers needs them, unless they have a default; one of C has no signature."""

    class Native:
        @property
        def __signature__(self) -> Any:
            raise ValueError("no signature found")

        def __call__(self, parameters: Any, batch: Any, on_gradient: Any) -> float:
            return noisy(parameters, batch, on_gradient, numpy.random.default_rng(0))

    given: list[Any] = []

    def with_default(parameters: Any, batch: Any, on_gradient: Any, random: Any = None) -> float:
        given.append(random)
        return noisy(parameters, batch, on_gradient, numpy.random.default_rng(0))

    own = alone(world)
    with pytest.raises(GradientError, match="there are no virtual ranks"):
        Trainer(of_sync(Sync), [StopAtStep(1)], world=own).step()
    for function in (with_default, Native()):
        assert Trainer(of_sync(Sync, function), [StopAtStep(1)], world=own).step().number == 1
    assert given == [None]


def test_states_of_others(world: World) -> None:
    """Of another number, of another seed, and with values that a codec has left out."""
    _, _, written = trained(world, builder(), 1)
    for number, seed, words in ((21, 5, "virtual_ranks=21"), (7, 6, "seed=6")):
        trainer = Trainer(builder(number=number, seed=seed), [StopAtStep(2)], world=world)
        before = bits(trainer)
        with pytest.raises(CheckpointError, match=words):
            trainer.restore(written.state())
        assert bits(trainer) == before
    left_out = {"place": "elsewhere", "residual": dict(trainer.adapter.parameters())}
    with pytest.raises(CheckpointError, match="virtual ranks send all of a gradient"):
        trainer.strategy.restore_own(left_out)
