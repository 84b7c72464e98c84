"""What local updates refuse, and what a step leaves that cannot be made."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest

from mpitrain import (
    ArrayFunction,
    DiLoCo,
    LocalSGD,
    Parts,
    SparseLoCo,
    StopAtStep,
    StreamingDiLoCo,
    Sync,
    Trainer,
    World,
)
from mpitrain.data import ArrayData
from mpitrain.errors import CheckpointError, ConfigError, MismatchError, NonFiniteError
from mpitrain.optim import SGD
from mpitrain.strategies import Strategy

from .common import assert_same_bits, error_on_all, skip_alone
from .rounds_by_hand import EVERY, KINDS, all_bits, flat, kinds
from .test_strategies import WIDTH, adapter, one_step, samples, train, values


def test_power_sgd(world: World) -> None:
    """It would compress nothing: a fragment is a flat range."""
    low_rank = world.replaced(config=replace(world.config, compression="power_sgd:2"))
    for make in (LocalSGD, StreamingDiLoCo):
        text = error_on_all(world, ConfigError, lambda make=make: make(3).begin(low_rank, adapter()))
        assert "compression=power_sgd:2: an outer step exchanges ranges of all parameters" in text


class Overflow:
    """A function whose finite gradients make infinite parameters on the last rank in two steps."""

    def __init__(self, world: World) -> None:
        self.is_odd, self.is_on = world.rank == world.size - 1, True

    def __call__(self, parameters: Any, batch: Any, on_gradient: Any) -> float:
        for name, value in parameters.items():
            on_gradient(name, numpy.full_like(value, 1.5e308 if self.is_odd and self.is_on else 1.0 + len(batch)))
        return 0.0


# By name: the strategy; the step that cannot be made; the parameter in the error. Two fragments are sent at once.
NOT_FINITE: dict[str, tuple[Callable[[], Strategy], int, str]] = {
    "whole": (lambda: DiLoCo(2, outer=SGD(1.0)), 2, "v"),
    "parts": (lambda: StreamingDiLoCo(2, fragments=4, delay=0, alpha=0.0), 2, "v[0:2]"),
    "parts, late": (lambda: StreamingDiLoCo(2, fragments=4, delay=2), 4, "v[0:2]"),
}


@pytest.mark.parametrize("kind", NOT_FINITE)
def test_parameters_that_are_not_finite_reach_no_other_rank(world: World, kind: str) -> None:
    """There is one error, and the step that raises it changes nothing. A close raises no other one."""
    make, bad_step, name = NOT_FINITE[kind]
    overflow = Overflow(world)
    strategy, model = make(), adapter(overflow, momentum=0.9)
    strategy.begin(world, model)
    batch = samples(world.rank, 0, 3 + world.rank)

    def seen() -> list[Any]:
        own = [] if "late" in kind else [all_bits(strategy, model)]  # what is late would arrive
        return [*own, repr(strategy.state()), [value.tobytes() for value in values(model)]]

    with numpy.errstate(over="ignore", invalid="ignore"):
        for step in range(1, bad_step):
            overflow.is_on = step <= 2
            one_step(strategy, model, batch)
        overflow.is_on = bad_step == 2
        before = seen()
        text = error_on_all(world, NonFiniteError, lambda: one_step(strategy, model, batch))
        assert f"{world.name(world.size - 1)}: {name} has become NaN or infinity in the steps of this round" in text
        assert seen() == before
        if "late" in kind:
            text = error_on_all(world, NonFiniteError, strategy.end_run)
            assert "has become NaN or infinity in the steps of this round" in text
            assert seen() == before
            one_step(strategy, model, batch)  # sends what is not finite
        else:  # the parameters are those of before the bad step
            strategy.end_run()
            assert_same_bits(world, *values(model))
    strategy.close()
    assert world.sum(1) == world.size


def test_the_name_of_a_parameter_that_is_not_finite(world: World) -> None:
    """The error has the whole name, whatever words are in it."""
    name = "rank 7: the gradient of what it holds NaN"

    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        on_gradient(name, numpy.full(3, 1.5e308))
        return 0.0

    strategy = DiLoCo(1)
    strategy.begin(world, model := ArrayFunction(function, {name: numpy.zeros(3)}, SGD(1e9)))
    with numpy.errstate(over="ignore", invalid="ignore"):
        text = error_on_all(world, NonFiniteError, lambda: one_step(strategy, model, samples(world.rank, 0, 2)))
    assert text.startswith(f"{world.name(0)}: {name} has become NaN or infinity in the steps of this round")
    strategy.close()


@kinds
@pytest.mark.parametrize("done", [4, 5])
def test_a_refused_restore_changes_nothing(world: World, kind: str, done: int) -> None:
    """The model of the state is another one. What this rank has learned in the round, and what travels, continues."""
    whole, model = KINDS[kind][0](), adapter()
    whole.begin(world, model)
    train(world, whole, model, range(done))

    def build(its: World) -> Parts:
        return Parts(adapter(), KINDS[kind][0](), ArrayData(its, (numpy.zeros(60),), global_batch=6))

    trainer = Trainer(build, [])
    train(world, trainer.strategy, trainer.adapter, range(done))
    state = trainer.state()
    assert all_bits(trainer.strategy, trainer.adapter) == all_bits(whole, model)
    state["adapter"]["parameters"] = {**state["adapter"]["parameters"], "w": numpy.zeros(WIDTH + 1)}
    with pytest.raises(CheckpointError, match=r"float64 \(8,\) for w, the model float64 \(7,\)"):
        trainer.restore(state)
    assert all_bits(trainer.strategy, trainer.adapter) == all_bits(whole, model)
    for strategy, one in ((whole, model), (trainer.strategy, trainer.adapter)):
        train(world, strategy, one, range(done, done + EVERY))
        strategy.end_run()
    assert flat(trainer.adapter).tobytes() == flat(model).tobytes()
    whole.close()
    trainer.close()


def test_an_outer_optimizer_of_another_model(world: World) -> None:
    """A strategy refuses it before it takes over anything."""
    strategy, model = DiLoCo(2), adapter()
    strategy.begin(world, model)
    train(world, strategy, model, range(2))
    before, state = all_bits(strategy, model), strategy.state()
    state["outer"]["0"]["float64"]["velocity"] = numpy.zeros(5)
    with pytest.raises(CheckpointError, match=r"outer optimizer of fragment 0: .* float64 \(5,\) for velo"):
        strategy.restore(state)
    assert all_bits(strategy, model) == before
    strategy.close()


@pytest.mark.parametrize(
    ("make", "given", "text"),
    [
        *(
            (kind, {"sync_every": 3} | given, f"{name}={value!r}; it must be an int of at least")
            for kind in (LocalSGD, DiLoCo)
            for given in ({"sync_every": 0}, {"sync_every": True}, {"sync_every": 2.0}, {"warm_up": -1})
            for name, value in given.items()
        ),
        (StreamingDiLoCo, {"fragments": 0}, "fragments=0; it must be an int of at least 1"),
        (StreamingDiLoCo, {"delay": 4}, "delay=4; it must be an int from 0 to sync_every=3, as a fragment must arrive"),
        (StreamingDiLoCo, {"delay": -1}, "delay=-1; it must be an int from 0"),
        (StreamingDiLoCo, {"alpha": 1.0}, "alpha=1.0; it must be at least 0 and below 1"),
        (StreamingDiLoCo, {"alpha": -0.5}, "alpha=-0.5; it must be at least 0"),
        (StreamingDiLoCo, {"delay": 0, "alpha": 0.5}, "alpha=0.5; it must be at least 0 and below 1, and 0 without"),
    ],
)
def test_numbers_that_are_refused(make: Any, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{make.__name__}: {text}")):
        make(**({"sync_every": 3} | given))


def test_fragments_of_short_rounds() -> None:
    """With the defaults, one is sent after each of 4 steps. In fewer steps, several are sent at once."""
    default = StreamingDiLoCo(4).schedule
    assert (default.fragments, default.delay, default.alpha, default.offsets) == (4, 1, 0.0, [1, 2, 3, 4])
    assert StreamingDiLoCo(3).schedule.offsets == [1, 2, 3, 3]
    assert StreamingDiLoCo(1).schedule.offsets == [1, 1, 1, 1]


def test_more_fragments_than_elements(world: World) -> None:
    model = adapter()
    StreamingDiLoCo(30, fragments=13).begin(world, model)
    text = error_on_all(world, ConfigError, lambda: StreamingDiLoCo(30, fragments=14).begin(world, model))
    assert text == "fragments=14 of a model with 13 trained elements; allowed are 1 to 13"


def test_ranks_that_differ(world: World) -> None:
    skip_alone(world)
    odd = world.rank == world.size - 1
    text = error_on_all(world, MismatchError, lambda: LocalSGD(3 if odd else 4).begin(world, adapter()))
    assert f"{world.name(world.size - 1)}: LocalSGD(sync_every=3, warm_up=0, " in text
    outer = SGD(0.5 if odd else 0.7)
    text = error_on_all(world, MismatchError, lambda: DiLoCo(3, outer=outer).begin(world, adapter()))
    assert "outer optimizer SGD" in text
    assert "0.5" in text


def test_a_longer_round_is_not_gone_on_from_by_a_shorter_one(world: World) -> None:
    strategy = DiLoCo(5)
    strategy.begin(world, model := adapter())
    train(world, strategy, model, range(4))
    shorter = DiLoCo(4)
    shorter.begin(world, adapter())
    with pytest.raises(CheckpointError, match=r"after 4 steps of a round, .* sync_every=4 .* sync_every above 4"):
        shorter.restore(strategy.state())
    strategy.close()
    shorter.close()


def few_rounds() -> SGD:
    return SGD(1.0, momentum=0.8, nesterov=True)


# A strategy, the steps of a training, and the least rounds; 0: no warning.
ROUNDS: list[tuple[Callable[[], Strategy], int, int]] = [
    (lambda: DiLoCo(2), 599, 300),
    (lambda: DiLoCo(2), 600, 0),
    (lambda: DiLoCo(2, outer=few_rounds()), 119, 60),
    (lambda: DiLoCo(2, outer=few_rounds()), 120, 0),
    (lambda: DiLoCo(2, outer=SGD(0.5)), 119, 60),  # of this one nothing is known
    (lambda: DiLoCo(2, warm_up=3, outer=few_rounds()), 122, 60),
    (lambda: DiLoCo(2, warm_up=3, outer=few_rounds()), 123, 0),
    (lambda: StreamingDiLoCo(3, fragments=2), 179, 60),
    (lambda: SparseLoCo(1, density=0.3), 3, 4),
    (lambda: SparseLoCo(1, density=0.3), 4, 0),
    (lambda: LocalSGD(50), 3, 0),
    (Sync, 3, 0),
]


@pytest.mark.parametrize(("make", "steps", "least"), ROUNDS)
def test_a_training_with_too_few_rounds_is_warned_of_once(
    world: World, make: Callable[[], Strategy], steps: int, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """By rank 0, at its start."""
    function = ArrayFunction(lambda p, _, hand_in: hand_in("w", p["w"]) or 0.0, {"w": numpy.ones(4, "f4")}, SGD(0.1))
    data = ArrayData(world, (numpy.zeros((8 * world.size, 1), "f4"),), global_batch=2 * world.size)
    trainer = Trainer(lambda _: Parts(function, make(), data), [StopAtStep(steps)])
    trainer.run()
    trainer.run()  # after step 0, it says no more
    trainer.close()
    said = f"it needs at least {least} rounds, since with fewer the loss was above that of mt.Sync."
    out = capsys.readouterr().out
    assert out.count(said) == (1 if least and world.is_root and world.size > 1 else 0)
    if said in out and least == 300:
        assert "With outer=mt.optim.SGD(1.0, momentum=0.8, nesterov=True), 60 rounds lost nothing. Make sync" in out
