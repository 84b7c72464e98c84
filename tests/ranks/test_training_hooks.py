"""Hooks of the Trainer: in which order they are called, what they print, and what ends a run."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from mpitrain import Checkpoint, Evaluation, Hook, Log, Step, StopAtStep, Trainer, World
from mpitrain.errors import ConfigError

from .common import skip_alone
from .placements import placed
from .trainings import Record, builder


def test_a_run_that_nothing_ends(world: World) -> None:
    with pytest.raises(ConfigError, match="nothing ends this run; add the hook StopAtStep"):
        Trainer(builder(20, 10)).run()


def test_the_earliest_stop_counts(world: World) -> None:
    trainer = Trainer(builder(20, 10), [StopAtStep(5), StopAtStep(3), StopAtStep(9)])
    trainer.run()
    assert (trainer.step_number, trainer.last_step) == (3, 3)


@pytest.mark.parametrize("make", [lambda: StopAtStep(0), lambda: Evaluation(0, dict), lambda: Checkpoint("x", 0)])
def test_steps_start_at_1(make: Callable[[], Hook]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        make()


def test_hooks_are_called_in_order(world: World) -> None:
    calls: list[str] = []

    class Note(Hook):
        def __init__(self, name: str) -> None:
            self.name = name

        def before_run(self, trainer: Trainer) -> None:
            calls.append(f"{self.name} before {trainer.step_number}")

        def after_step(self, trainer: Trainer, step: Step) -> None:
            calls.append(f"{self.name} step {step.number}")

        def after_run(self, trainer: Trainer) -> None:
            calls.append(f"{self.name} after {trainer.step_number}")

    Trainer(builder(20, 10), [Note("a"), StopAtStep(1), Note("b")]).run()
    assert calls == ["a before 0", "b before 0", "a step 1", "b step 1", "a after 1", "b after 1"]


def test_log_is_on_rank_0_only(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record()
    Trainer(builder(25, 10), [StopAtStep(4), Log(seconds=0.0), record]).run()
    output = capsys.readouterr()
    assert output.err == ""
    if world.rank:
        assert output.out == ""
        return
    pattern = r"epoch (\d+) step (\d+)/4 \| loss ([\d.]+) \| lr (\S+) \| ([\d,]+) samples/s \| (\d+:\d\d:\d\d) left"
    found = [re.fullmatch(pattern, line) for line in output.out.splitlines()]
    assert all(found)
    assert [(its[1], its[2]) for its in found if its] == [("1", "1"), ("1", "2"), ("1", "3"), ("2", "4")]
    assert [its[3] for its in found if its] == [f"{step.loss:.4f}" for step in record.steps]
    assert {its[4] for its in found if its} == {"0.1"}
    assert found[-1][6] == "0:00:00"


def test_log_shows_the_overlap_between_nodes(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    skip_alone(world)
    record = Record()
    trainer = Trainer(builder(25, 10), [StopAtStep(3), Log(seconds=0.0), record])
    trainer.world = placed(world, "alone on each node")
    trainer.run()
    found = re.findall(r" left \| wire ([\d.]+) ms, (\d+)% hidden\n", capsys.readouterr().out)
    shown = [(f"{step.overlap.wire_seconds * 1e3:.1f}", f"{step.overlap.hidden * 100:.0f}") for step in record.steps]
    assert found == (shown if world.is_root else [])


def test_the_parts_of_a_step_fit_into_it(world: World) -> None:
    record = Record()
    Trainer(builder(45, 14), [StopAtStep(5), record]).run()
    for step in record.steps:
        assert step.overlap.compute_seconds > 0
        assert step.overlap.exposed_seconds > 0
        assert step.overlap.compute_seconds + step.overlap.exposed_seconds <= step.seconds
        assert 0 < step.overlap.wire_seconds <= step.seconds


def test_log_keeps_to_its_interval(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(builder(25, 10), [StopAtStep(6), Log(seconds=1e6)]).run()
    steps = re.findall(r"step (\d+)/6", capsys.readouterr().out)
    assert steps == (["1", "6"] if world.rank == 0 else [])
