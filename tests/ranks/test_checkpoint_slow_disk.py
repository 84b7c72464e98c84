"""Training goes on while a disk hangs, and waits for the disk only at the end."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mpitrain import Checkpoint, Hook, Step, StopAtStep, Trainer, World
from mpitrain.config import read_config
from mpitrain.state.store import write

from .trainings import builder, names_in

pytestmark = pytest.mark.usefixtures("a_slow_disk_is_waited_for")


def test_a_disk_that_hangs(world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Training skips the checkpoints that are due meanwhile. Only the last one waits for the disk."""
    go, calls = threading.Event(), []

    def hanging(directory: Path, name: str, *rest: Any) -> Path:
        calls.append(name)
        go.wait()
        return write(directory, name, *rest)

    class Recovers(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            if step.number == 6:
                go.set()

    monkeypatch.setattr("mpitrain.training.hooks.checkpoint.write", hanging)
    monkeypatch.setattr("mpitrain.training.hooks.checkpoint._PATIENCE_SECONDS", 0.05)
    Trainer(builder(20, 10), [StopAtStep(7), Checkpoint(shared, steps=2), Recovers()]).run()
    said = capfd.readouterr().err.splitlines()
    if world.is_root:
        assert calls == ["step-00000002", *calls[1:-1], "step-00000007"]
        assert len(calls) + len(said) == 4  # steps 2, 4, 6 and 7; at 6 the disk is back, before or after the look
        assert f"{shared}/step-00000004 was skipped: writing {shared}/step-00000002 has taken " in said[0]
    else:
        assert said == []
    world.barrier()
    assert {"step-00000002", "step-00000007"} <= set(names_in(shared))


def test_an_end_after_a_save_that_was_skipped(world: World, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step of the job is saved, even if the disk was too slow for it before."""
    go = threading.Event()

    def hanging(directory: Path, name: str, *rest: Any) -> Path:
        go.wait()
        return write(directory, name, *rest)

    class Ends(Checkpoint):  # a subclass, because all other hooks come before a Checkpoint
        def after_step(self, trainer: Trainer, step: Step) -> None:
            super().after_step(trainer, step)
            if step.number == 4:
                go.set()
                self.before_end(trainer, step)
                seen.extend(names_in(shared))

    monkeypatch.setattr("mpitrain.training.hooks.checkpoint.write", hanging)
    monkeypatch.setattr("mpitrain.training.hooks.checkpoint._PATIENCE_SECONDS", 0.05)
    seen = list[str]()
    Trainer(builder(20, 10), [StopAtStep(5), Ends(shared, steps=2)]).run()
    assert seen == ["step-00000002", "step-00000004"]


def test_a_disk_that_hangs_at_the_end(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The hook reports the wait after stall_seconds, after twice as long, and so on. Here the wait takes 3 s."""

    def hanging(directory: Path, name: str, *rest: Any) -> Path:
        time.sleep(3)
        return write(directory, name, *rest)

    monkeypatch.setattr("mpitrain.training.hooks.checkpoint.write", hanging)
    own = world.replaced(config=read_config({"MPITRAIN_STALL_SECONDS": "0.3"}, {}))
    monkeypatch.setattr("mpitrain.training.trainer.init", lambda: own)
    Trainer(builder(20, 10), [StopAtStep(1), Checkpoint(shared, steps=2)]).run()
    said = [line for line in capfd.readouterr().err.splitlines() if "is the disk there?" in line]
    begin = f"mpitrain: {world.name()}: writing {shared}/step-00000001 has taken "
    assert all(line.startswith(begin) for line in said)
    assert len(said) >= 2 if world.is_root else not said
