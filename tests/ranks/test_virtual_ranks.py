"""Virtual ranks: the same training on any number of ranks, bit for bit.

Each rank compares the training on all ranks with one that it makes alone, in a World of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from mpitrain import Accumulate, ArrayFunction, Parts, StopAtStep, Sync, Trainer, World
from mpitrain.data import ArrayData
from mpitrain.data.order import permuted
from mpitrain.errors import GradientError, MissingGradientError, NonFiniteError
from mpitrain.optim import SGD

from .common import error_on_all, skip_alone
from .trainings import bits
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

# -- the same bits ---------------------------------------------------------------------------------------------------


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


# -- faults of a pass ------------------------------------------------------------------------------------------------


class Turns:
    """A model that does something else in one pass of the second step, on the last rank."""

    def __init__(self, world: World, fault: Callable[[Any], Any], *, is_first: bool) -> None:
        own = -(-V // world.size) if world.rank < V % world.size else V // world.size
        self._fault, self._is_last = fault, world.rank == world.size - 1
        self._turn = 2 + own + (1 if is_first or own == 1 else own)  # after two passes of the probe, and a step
        self._passes = 0

    def __call__(self, parameters: Any, batch: Any, on_gradient: Any, random: Any) -> float:
        self._passes += 1
        if self._is_last and self._passes == self._turn:
            return float(self._fault(noisy)(parameters, batch, on_gradient, random))
        return noisy(parameters, batch, on_gradient, random)


def without_b(function: Any) -> Any:
    def faulty(parameters: Any, batch: Any, on_gradient: Any, random: Any) -> float:
        def only_w(name: str, gradient: Any) -> None:
            if name == "w":
                on_gradient(name, gradient)

        return float(function(parameters, batch, only_w, random))

    return faulty


def with_nan(function: Any) -> Any:
    def faulty(parameters: Any, batch: Any, on_gradient: Any, random: Any) -> float:
        return float(function(parameters, batch, lambda name, value: on_gradient(name, value * numpy.nan), random))

    return faulty


def with_infinite_loss(function: Any) -> Any:
    return lambda *arguments: function(*arguments) * math.inf


@pytest.mark.parametrize("is_first", [True, False], ids=["first pass", "last pass"])
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (without_b, MissingGradientError, "without the gradient of b"),
        (with_nan, NonFiniteError, "NaN or infinity"),
        (with_infinite_loss, NonFiniteError, "the loss is NaN or infinity"),
    ],
)
def test_a_fault_in_a_pass_is_an_error_on_all(
    world: World, fault: Any, kind: type[GradientError], words: str, is_first: bool
) -> None:
    turns = Turns(world, fault, is_first=is_first)
    trainer = Trainer(builder(adapter=lambda: model(turns)), [StopAtStep(5)], world=world)
    trainer.step()
    before = {name: value.copy() for name, value in trainer.adapter.parameters().items()}
    text = error_on_all(world, kind, trainer.step)
    assert words in text and world.name(world.size - 1) in text
    assert ("the losses, the batches" in text) == (fault is with_nan)
    assert ("the loss is inf" in text) == (fault is with_infinite_loss)
    for name, value in trainer.adapter.parameters().items():
        assert value.tobytes() == before[name].tobytes()
    trainer.step()  # the next step is whole again


# -- the probe -------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("where", ["a generator of its own", "a state"])
def test_a_model_that_is_not_reproducible_is_named(world: World, where: str) -> None:
    rng, seen = numpy.random.default_rng(), [0.0]

    def other(parameters: Any, batch: Any, on_gradient: Any, random: Any) -> float:
        seen[0] += 1.0
        generator = rng if where == "a generator of its own" else random
        shift = seen[0] if where == "a state" else 0.0
        return noisy(parameters, (batch[0] + numpy.float32(shift), batch[1]), on_gradient, generator)

    trainer = Trainer(builder(adapter=lambda: model(other)), [StopAtStep(5)], world=world)
    text = error_on_all(world, GradientError, trainer.step)
    assert f"{world.name(0)}: the gradient of b has other bits when the same virtual rank is computed again" in text
