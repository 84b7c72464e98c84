"""Stages that are cut by what layers cost: measured with a clock of the test, so that the cut is known."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from mpitrain import Checkpoint, Pipeline, StopAtStep, Trainer, World
from mpitrain.adapters import staged
from mpitrain.errors import ConfigError, DataError, MpitrainError

from .common import error_on_all, skip_alone
from .layered import LAYERS, WIDTHS, Dense, builder, layered, plain, samples
from .trainings import Record

COUNT, BATCH = 45, 14


class Clock:
    """Goes on in passes of layers only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(staged, "time", SimpleNamespace(perf_counter=lambda: self.seconds))

    def layers(self, *seconds: int) -> list[Dense]:
        return [Timed(number, self, one) for number, one in enumerate(seconds)]


class Timed(Dense):
    """Takes as long as it is told: a third of it forwards."""

    def __init__(self, number: int, clock: Clock, seconds: int) -> None:
        super().__init__(number)
        self.clock, self.seconds = clock, seconds

    def forward(self, *arguments: Any) -> Any:
        self.clock.seconds += self.seconds
        return super().forward(*arguments)

    def backward(self, *arguments: Any) -> Any:
        self.clock.seconds += 2 * self.seconds
        return super().backward(*arguments)


def test_the_cut_follows_the_costs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one rank measures other times than the others, and with forward passes that are made twice."""
    clock = Clock(monkeypatch)
    if world.size > LAYERS:
        pytest.skip("there are 6 layers")
    for recompute in (False, True):
        strategy = Pipeline("auto", sample=samples(4), recompute=recompute)
        odd = world.rank == world.size - 1
        model = layered(clock.layers(5, 1, 1, 1, 1, 1 + odd))
        strategy.begin(world, model)
        if world.size == 2:
            assert strategy.layers == [range(1), range(1, 6)]
        assert [piece.start for piece in strategy.layers][:1] == [0]
        assert strategy.layers[-1].stop == 6
        assert len(set(world.allgather(str(strategy.layers)))) == 1
        if world.size > 1:
            times = [cost.seconds for cost in strategy.costs[-1]]
            assert times == [(4 if recompute else 3) * one for one in (5, 1, 1, 1, 1, 2)]
            assert strategy.costs[0][-1].seconds == (4 if recompute else 3)
        for number, cost in enumerate(strategy.costs[0]):
            rows, columns = WIDTHS[number], WIDTHS[number + 1]
            assert cost.parameter_bytes == 8 * (rows * columns + columns)
            assert cost.activation_bytes == 8 * 4 * (rows if recompute else rows + columns)
        assert strategy.table().splitlines()[-1].startswith(f"  all  {world.size - 1:5}  ")
        strategy.close()


def test_it_is_training_in_one_process(world: World) -> None:
    """With real times, wherever they cut: all numbers of stages, and several pieces."""
    _, losses = plain(COUNT, BATCH, 5)
    for stages in [one for one in range(1, LAYERS + 1) if world.size % one == 0]:
        ways: list[dict[str, Any]] = [{"micro_batches": 5}]
        if 2 <= stages <= 3:
            ways.append({"schedule": "interleaved", "micro_batches": 2 * stages})
        for way in ways:
            record = Record()
            strategy = partial(Pipeline, "auto", num_stages=stages, sample=samples(3), **way)
            trainer = Trainer(builder(COUNT, BATCH, strategy), [StopAtStep(5), record])
            trainer.run()
            assert [step.loss for step in record.steps] == pytest.approx(losses, rel=1e-13), way
            trainer.close()


def test_a_resume_may_cut_elsewhere(world: World, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints have no stage, so layers that take other times after a restart do no harm."""
    skip_alone(world)
    if world.size > LAYERS:
        pytest.skip("there are 6 layers")
    _, losses = plain(COUNT, BATCH, 6)
    clock, record, cuts = Clock(monkeypatch), Record(), []
    for number, seconds in enumerate([(9, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 9)], 1):
        strategy = Pipeline("auto", micro_batches=3, sample=samples(4))
        build = builder(COUNT, BATCH, lambda made=strategy: made, clock.layers(*seconds))
        trainer = Trainer(build, [StopAtStep(3 * number), Checkpoint(shared, 3), record])
        trainer.run()
        cuts.append(strategy.layers)
        trainer.close()
    assert [step.loss for step in record.steps] == pytest.approx(losses, rel=1e-13)
    assert (cuts[0] != cuts[1]) == (world.size < LAYERS)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"stages": "best"}, "stages='best'; allowed: a number, a list of numbers, or 'auto'"),
        ({"stages": "auto"}, "stages='auto' without a sample"),
        ({"stages": 2, "num_stages": 2}, "num_stages or sample with stages=2"),
        ({"stages": "auto", "sample": 0, "schedule": "interleaved"}, "stages='auto' and no num_stages"),
        (
            {"stages": "auto", "sample": 0, "schedule": "interleaved", "num_stages": 2, "micro_batches": 3},
            "micro_batches=3; allowed: a multiple of the 2 stages",
        ),
    ],
)
def test_auto_values_that_are_not_allowed(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Pipeline(**values)


def test_what_cannot_be_measured(world: World) -> None:
    """Fewer layers than stages, a sample without samples, and a layer that fails on one rank alone."""
    few = [Dense(number) for number in range(world.size - 1)]
    if few:
        strategy = Pipeline("auto", sample=samples(2))
        text = error_on_all(world, ConfigError, lambda: strategy.begin(world, layered(few)))
        assert f"{world.size - 1} layers cannot be cut into {world.size} stages" in text
    strategy = Pipeline("auto", num_stages=1, sample=samples(0))
    with pytest.raises(DataError, match="a batch without samples"):
        strategy.begin(world, layered())
    inputs, targets = samples(2)
    wrong = inputs[:, : 5 - (world.rank == world.size - 1)]
    strategy = Pipeline("auto", num_stages=1, sample=(wrong, targets))
    with pytest.raises(MpitrainError, match=f"rank {world.size - 1} on .*, measure the layers: ValueError: matmul"):
        strategy.begin(world, layered())


def test_there_is_no_table_without_measurements(world: World) -> None:
    strategy = Pipeline(1)
    strategy.begin(world, layered())
    with pytest.raises(ConfigError, match="stages='auto' measures them"):
        strategy.table()
    strategy.close()
    assert numpy.size(strategy.costs) == 0
