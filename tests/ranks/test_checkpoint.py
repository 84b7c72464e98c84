"""A run that is resumed from a checkpoint goes on with the same bits, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from mpitrain import Checkpoint, Hook, Step, StopAtStep, Trainer, World
from mpitrain import state as checkpoint

from .checkpoints import OPTIMIZERS
from .trainings import Record, bare_numpy, bits, builder, initial_parameters, names_in

pytestmark = pytest.mark.usefixtures("a_slow_disk_is_waited_for")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_ends_with_the_same_bits(world: World, shared: Path, optimizer: str) -> None:
    """One run makes 10 steps. The other makes 5, saves in the middle of an epoch, and a new Trainer makes 5 more."""
    build = builder(45, 14, optimizer=OPTIMIZERS[optimizer])
    whole = Record()
    uninterrupted = Trainer(build, [StopAtStep(10), whole])
    uninterrupted.run()

    directory = shared / "new" / "folder"
    Trainer(build, [StopAtStep(5), Checkpoint(directory, steps=2)]).run()
    record = Record()
    resumed = Trainer(build, [StopAtStep(10), Checkpoint(directory, steps=100), record])
    resumed.run()
    assert [step.number for step in record.steps] == [6, 7, 8, 9, 10]
    assert [step.loss for step in record.steps] == [step.loss for step in whole.steps[5:]]
    assert [step.learning_rate for step in record.steps] == [step.learning_rate for step in whole.steps[5:]]
    assert bits(resumed) == bits(uninterrupted)
    assert names_in(directory) == ["step-00000004", "step-00000005", "step-00000010"]


def test_a_checkpoint_of_a_finished_run(world: World, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = builder(20, 10)
    first = Trainer(build, [StopAtStep(4), Checkpoint(shared, steps=4)])
    first.run()
    record = Record()
    again = Trainer(build, [StopAtStep(4), Checkpoint(shared, steps=4), record])
    again.run()
    assert record.steps == []
    assert bits(again) == bits(first)
    text = f"resumed from {shared / 'step-00000004'} at step 4\n"
    assert capsys.readouterr().out == (text if world.rank == 0 else "")


def test_a_checkpoint_fits_any_number_of_ranks(world: World, shared: Path) -> None:
    """Nothing in a checkpoint depends on ranks. One process would have written the same names, cursor and step."""
    trainer = Trainer(builder(45, 14), [StopAtStep(5), Checkpoint(shared, steps=5)])
    trainer.run()
    state = world.broadcast_object(checkpoint.load(shared / "step-00000005") if world.is_root else None)
    assert state["step"] == 5
    assert state["data"] == {"epoch": 1, "cursor": 14, "seed": 3, "shuffle": True, "num_samples": 45}
    assert set(state["adapter"]["parameters"]) == set(initial_parameters())
    assert state["adapter"]["optimizer"]["step"] == 5
    for name, value in bare_numpy(45, 14, 5)[0].items():
        numpy.testing.assert_allclose(state["adapter"]["parameters"][name], value, rtol=1e-12, atol=1e-14)


class Count(Hook):
    """A hook with a state: the steps that it has seen, also before a resume."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.seen.append(step.number)

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def restore(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def test_hooks_go_on_too(world: World, shared: Path) -> None:
    """Checkpoint saves what all hooks have seen of the step, wherever it stands. A new hook begins anew."""
    build = builder(20, 10)
    Trainer(build, [Checkpoint(shared, steps=3), StopAtStep(3), Count()]).run()
    hooks = [Count(), Count()]
    Trainer(build, [StopAtStep(5), Checkpoint(shared, steps=100), *hooks]).run()
    assert [hook.seen for hook in hooks] == [[1, 2, 3, 4, 5], [4, 5]]


def test_the_newest_and_the_best_are_kept(world: World, shared: Path) -> None:
    scores = iter([1.0, 7.0, float("nan"), 3.0, 2.0, 1.0])
    build = builder(20, 10)
    Trainer(build, [StopAtStep(5), Checkpoint(shared, steps=1, keep=2, score=lambda: next(scores))]).run()
    assert names_in(shared) == ["step-00000002", "step-00000004", "step-00000005"]
    Trainer(build, [StopAtStep(6), Checkpoint(shared, steps=1, keep=1, score=lambda: next(scores))]).run()
    assert names_in(shared) == ["step-00000002", "step-00000006"]
