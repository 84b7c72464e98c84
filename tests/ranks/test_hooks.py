"""Hooks that end a run: all ranks after the same step, whatever a rank by itself would say; and hooks' state."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

import mpitrain
from mpitrain import (
    ArrayFunction,
    Checkpoint,
    EarlyStopping,
    Evaluation,
    Hook,
    Log,
    Parts,
    Step,
    StopAfter,
    StopAtStep,
    StopWhen,
    Sync,
    Trainer,
    World,
)
from mpitrain.data import ArrayData
from mpitrain.errors import CheckpointError, ConfigError, MismatchError
from mpitrain.optim import SGD
from tests.added.marked_steps import MarkedSteps

from .common import error_on_all, skip_alone
from .placements import placed
from .trainings import Record, builder, ran


def build(world: World) -> Parts:
    """A straight line through the points of a parabola; 3 steps an epoch, the last one smaller."""

    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        (x,) = batch
        error = parameters["w"][0] * x - x * x
        on_gradient("w", numpy.array([(2 * error * x).mean() if len(x) else 0.0]))
        return float((error**2).mean()) if len(x) else 0.0

    data = ArrayData(world, [numpy.linspace(-1, 2, 13)], global_batch=5)
    return Parts(ArrayFunction(function, {"w": numpy.zeros(1)}, SGD(0.1)), Sync(), data)


class Tell(Hook):
    """Reports a metric after some steps: value(step number)."""

    def __init__(self, value: Callable[[int], float], every: int = 1, name: str = "m") -> None:
        self._value, self._every, self._name = value, every, name

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if step.number % self._every == 0:
            trainer.report({self._name: self._value(step.number)})


class Sleep(Hook):
    """Makes steps take time, on one rank more than on others."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def after_step(self, trainer: Trainer, step: Step) -> None:
        time.sleep(self._seconds)


def last_step(world: World, hooks: Sequence[Hook]) -> int:
    """The step at which a run with these hooks ends, the same on every rank."""
    trainer = ran(build, hooks)
    assert len(set(world.allgather((trainer.step_number, trainer.last_step)))) == 1
    assert trainer.step_number == trainer.last_step
    return trainer.step_number


def test_stop_after_a_time(world: World) -> None:
    """The steps between two looks at the clock, of rank 0 alone, grow to half of what is left."""
    looks: list[int] = []

    class Counted(StopAfter):
        def _steps_to_make(self, number: int) -> int:
            looks.append(number)
            return super()._steps_to_make(number)

    begun = time.monotonic()
    steps = last_step(world, [Sleep(0.001 + 0.001 * world.rank), Counted(0.3), StopAtStep(10_000)])
    assert time.monotonic() - begun >= 0.3
    # Half, and half of the rest, ...: 0.3 s in steps of 1 ms and more are 9 looks; a slow machine makes some more.
    assert len(looks) < 40 if world.is_root else not looks
    assert looks[:1] + looks[-1:] == ([1, steps] if world.is_root else [])


def test_the_end_that_comes_first_counts(world: World) -> None:
    assert last_step(world, [StopAtStep(5), StopAtStep(3), StopAtStep(9)]) == 3
    assert last_step(world, [StopAfter(1e-9), StopAtStep(50)]) == 1
    assert last_step(world, [StopAfter(1e6), StopAtStep(4)]) == 4
    assert last_step(world, [Tell(float), StopWhen("m", at_least=3), StopAtStep(2)]) == 2
    with pytest.raises(ConfigError, match="nothing ends this run; add the hook StopAtStep"):
        Trainer(build).run()


def test_stop_at_a_metric(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert last_step(world, [Tell(lambda number: 10.0 - number), StopWhen("m", at_most=4.0)]) == 6
    assert capsys.readouterr().out == ("step 6: stopped, m is 4\n" if world.is_root else "")
    assert last_step(world, [Tell(float, every=4), StopWhen("m", at_least=5.0)]) == 8
    assert last_step(world, [Tell(lambda number: math.nan), StopWhen("m", at_least=0.0), StopAtStep(3)]) == 3


def test_rank_0_decides(world: World) -> None:
    """The metric differs between ranks, as a sum in another order may: all end with rank 0."""
    assert last_step(world, [Tell(lambda number: number + 0.5 * world.rank), StopWhen("m", at_least=5.0)]) == 5
    early = EarlyStopping("m", patience=2)
    values = Tell(lambda number: 1.0 / number if number < 4 or world.rank else 1.0)
    assert last_step(world, [values, early]) == 5
    assert (early.best, early.best_step) == (1.0 / 3, 3)


def test_a_metric_that_one_rank_has_not(world: World) -> None:
    skip_alone(world)
    odd = world.size - 1
    hooks = [Tell(float, every=2 if world.rank == odd else 1), StopWhen("m", at_least=9)]
    with pytest.raises(MismatchError, match="broadcast"):
        Trainer(build, hooks).run()


@pytest.mark.parametrize(
    ("values", "options", "end", "best"),
    [
        ([5, 4, 3, 3, 3, 3], {"patience": 2}, 5, (3.0, 3)),
        ([5, 4, 6, 3, 6, 6], {"patience": 2}, 6, (3.0, 4)),
        ([1, 2, 3, 2, 2, 9], {"patience": 2, "goal": "max"}, 5, (3.0, 3)),
        ([5, 4.5, 4.1, 3.9, 1, 1], {"patience": 3, "margin": 1.0}, 6, (1.0, 5)),
        ([math.nan, math.nan, 1, 1, 1, 1], {"patience": 2}, 2, (None, 0)),
        ([4, math.nan, 3, math.inf, 2, 1], {"patience": 1}, 2, (4.0, 1)),
    ],
)
def test_early_stopping(
    world: World,
    capsys: pytest.CaptureFixture[str],
    values: list[float],
    options: dict[str, Any],
    end: int,
    best: tuple[float | None, int],
) -> None:
    hook = EarlyStopping("m", **options)
    assert last_step(world, [Tell(lambda number: values[number - 1]), hook, StopAtStep(6)]) == end
    assert (hook.best, hook.best_step) == best
    out = capsys.readouterr().out
    expected = f"step {end}: stopped early, m " if end < 6 and world.is_root else ""
    assert out.startswith(expected) and bool(out) == bool(expected)


def test_early_stopping_across_a_resume(world: World, shared: Path) -> None:
    """Stopped anywhere and resumed, it ends where the uninterrupted run does."""
    values = [9.0, 5.0, 7.0, 6.0, 8.0, 1.0, 1.0]

    def hooks(steps: int, directory: str) -> list[Hook]:
        early = EarlyStopping("m", patience=3)
        return [Tell(lambda number: values[number - 1]), early, StopAtStep(steps), Checkpoint(shared / directory, 1)]

    for cut in (2, 4):
        assert last_step(world, hooks(cut, str(cut))) == cut
        again = hooks(7, str(cut))
        assert last_step(world, again) == 5
        assert (again[1].best, again[1].best_step) == (5.0, 2)
        assert last_step(world, hooks(7, str(cut))) == 5  # and stays there


def test_states_of_hooks_go_by_name(world: World) -> None:
    first = Trainer(build, [EarlyStopping("a", patience=1), Tell(float), EarlyStopping("b", patience=1)])
    first.hooks[0].best, first.hooks[2].best = 1.0, 2.0
    state = first.state()
    assert {name: its["best"] for name, its in state["hooks"].items()} == {"EarlyStopping": 1.0, "EarlyStopping 2": 2.0}
    second = Trainer(build, [EarlyStopping("a", patience=1)])  # one hook fewer
    second.restore(state)
    assert second.hooks[0].best == 1.0
    second.restore({**state, "hooks": {}})  # written before there were hooks with a state
    assert second.hooks[0].best == 1.0


def test_a_damaged_state_changes_nothing(world: World) -> None:
    trainer = Trainer(build, [EarlyStopping("a", patience=1), EarlyStopping("b", patience=1), StopAtStep(2)])
    state = trainer.state()
    trainer.run()
    trainer.hooks[0].best = 7.0
    before = repr(trainer.state())
    state["hooks"] |= {"EarlyStopping": {"best": 1.0, "best_step": 1, "num_worse": 0}, "EarlyStopping 2": {"best": 1.0}}
    with pytest.raises(CheckpointError, match=r"the state of EarlyStopping is .*; was it written"):
        trainer.restore(state)
    assert repr(trainer.state()) == before


def test_a_metric_that_never_comes_is_told(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    last_step(world, [Tell(float, name="accuracy"), StopWhen("acuracy", at_least=1), StopAtStep(2)])
    last_step(world, [EarlyStopping("m", patience=1), Tell(float), StopAtStep(2)])  # it stands before what reports
    lines = [
        "mpitrain: StopWhen: no step had the metric 'acuracy'; those reported by hooks before it: accuracy",
        "mpitrain: EarlyStopping: no step had the metric 'm'; those reported by hooks before it: none",
    ]
    assert capfd.readouterr().err.splitlines() == (lines if world.is_root else [])


def test_a_name_is_reported_once(world: World) -> None:
    text = error_on_all(world, ConfigError, lambda: Trainer(build, [Tell(float), Tell(float), StopAtStep(2)]).run())
    assert "step 1: the metric 'm' was reported" in text
    assert "no other hook" in error_on_all(
        world, ConfigError, lambda: Trainer(build, [Tell(float, name="a\nb"), StopAtStep(2)]).run()
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: StopAfter(0),
        lambda: StopAfter(math.inf),
        lambda: StopAfter(math.nan),
        lambda: StopWhen("m"),
        lambda: StopWhen("m", at_least=1, at_most=2),
        lambda: EarlyStopping("m", patience=0),
        lambda: EarlyStopping("m", patience=1, goal="least"),
        lambda: EarlyStopping("m", patience=1, margin=-1.0),
        lambda: EarlyStopping("m", patience=1, margin=math.nan),
        lambda: StopAtStep(0),
        lambda: Evaluation(0, dict),
        lambda: Checkpoint("x", 0),
    ],
)
def test_values_that_are_not_allowed(make: Callable[[], Hook]) -> None:
    with pytest.raises(ConfigError, match=r"allowed|give at_least or at_most|at least 1"):
        make()


def test_hooks_are_called_in_order_and_closed_also_after_an_error(world: World) -> None:
    calls: list[str] = []

    class Note(Hook):
        def __init__(self, name: str) -> None:
            self.name = name

        def before_run(self, trainer: Trainer) -> None:
            calls.append(f"{self.name} before {trainer.step_number}")

        def after_step(self, trainer: Trainer, step: Step) -> None:
            calls.append(f"{self.name} step {step.number}")
            if step.number == 2:
                raise ConfigError("on purpose")

        def after_run(self, trainer: Trainer) -> None:
            calls.append(f"{self.name} after {trainer.step_number}")

        def close(self) -> None:
            calls.append(f"{self.name} closed")

    Trainer(build, [Note("a"), StopAtStep(1), Note("b")]).run()
    assert calls[:4] == ["a before 0", "b before 0", "a step 1", "b step 1"]
    assert calls[4:6] == ["a after 1", "b after 1"]
    assert sorted(calls[6:]) == ["a closed", "b closed"]
    calls.clear()
    with pytest.raises(ConfigError, match="on purpose"):
        Trainer(build, [Note("a"), StopAtStep(3)]).run()
    assert calls == ["a before 0", "a step 1", "a step 2", "a closed"]


def test_log_is_on_rank_0_only(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks on several nodes see the overlap, too. An interval leaves only the first and the last step."""
    record = Record()
    trainer = Trainer(builder(25, 10), [StopAtStep(4), Log(seconds=0.0), record])
    trainer.world = placed(world, "alone on each node")
    trainer.run()
    Trainer(builder(25, 10), [StopAtStep(6), Log(seconds=1e6)]).run()
    output = capsys.readouterr()
    assert output.err == ""
    if world.rank:
        assert output.out == ""
        return
    pattern = (
        r"epoch (\d+) step (\d+)/4 \| loss ([\d.]+) \| lr (\S+) \| ([\d,]+) samples/s \| (\d+:\d\d:\d\d) left"
        r"(?: \| wire ([\d.]+) ms, (\d+)% hidden)?"
    )
    lines = output.out.splitlines()
    found = [re.fullmatch(pattern, line) for line in lines[:4]]
    assert all(found)
    assert [(its[1], its[2]) for its in found if its] == [("1", "1"), ("1", "2"), ("1", "3"), ("2", "4")]
    assert [its[3] for its in found if its] == [f"{step.loss:.4f}" for step in record.steps]
    assert {its[4] for its in found if its} == {"0.1"}
    assert found[-1][6] == "0:00:00"
    shown = [(f"{step.overlap.wire_seconds * 1e3:.1f}", f"{step.overlap.hidden * 100:.0f}") for step in record.steps]
    assert [(its[7], its[8]) for its in found if its] == (shown if world.size > 1 else [(None, None)] * 4)
    assert re.findall(r"step (\d+)/6", "".join(lines[4:])) == ["1", "6"]


DOCUMENTS = [Path(__file__).parents[2] / "README.md", *sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))]
HOOKS = [
    name
    for name in mpitrain._HOME
    if isinstance(getattr(mpitrain, name), type) and issubclass(getattr(mpitrain, name), Hook) and name != "Hook"
]


def has_only_events_that_there_are(hook: type[Hook]) -> None:
    """A misspelled event would never be called."""
    events = {name for name in vars(hook) if name.startswith(("before_", "after_"))}
    assert events <= vars(Hook).keys(), events - vars(Hook).keys()


def is_described(hook: type[Hook]) -> None:
    assert hook.__doc__
    assert any(f"{hook.__name__}" in document.read_text() for document in DOCUMENTS), "no document names it"


CONTRACT = [has_only_events_that_there_are, is_described]


@pytest.mark.parametrize("holds", CONTRACT, ids=lambda holds: holds.__name__)
@pytest.mark.parametrize("name", HOOKS)
def test_every_hook(name: str, holds: Callable[[type[Hook]], None]) -> None:
    holds(getattr(mpitrain, name))


def test_a_hook_that_is_added(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook inherits the tests of every hook and of the documents, with their failures."""
    hook = MarkedSteps()
    trainer = ran(build, [StopAtStep(4), hook])
    assert hook.numbers == [1, 2, 3, 4]
    resumed = MarkedSteps()
    Trainer(build, [resumed]).restore(trainer.state())
    assert resumed.numbers == [1, 2, 3, 4]
    has_only_events_that_there_are(MarkedSteps)
    with pytest.raises(AssertionError, match="after_stop"):
        has_only_events_that_there_are(type("Misspelled", (MarkedSteps,), {"after_stop": MarkedSteps.after_step}))
    monkeypatch.setattr(sys.modules[__name__], "DOCUMENTS", [tmp_path / "page.md"])
    (tmp_path / "page.md").write_text("Nothing.")
    with pytest.raises(AssertionError, match="no document names it"):
        is_described(MarkedSteps)
    (tmp_path / "page.md").write_text("`mt.MarkedSteps` keeps the numbers of the steps.")
    is_described(MarkedSteps)
