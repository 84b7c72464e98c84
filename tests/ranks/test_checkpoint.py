"""Runs that are resumed from checkpoints, on any number of ranks; damaged ones, those of other runs, and slow disks."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpitrain import Checkpoint, Hook, Step, StopAtStep, Trainer, World
from mpitrain import state as checkpoint
from mpitrain.config import read_config
from mpitrain.errors import CheckpointError
from mpitrain.state.manifest import _checksum
from mpitrain.state.store import TENSORS, write
from tests.added.marked_steps import MarkedSteps

from .checkpoints import OPTIMIZERS, flip_a_bit, truncate
from .common import error_on_all
from .trainings import Record, bits, builder, initial_parameters, names_in, ran

pytestmark = pytest.mark.usefixtures("a_slow_disk_is_waited_for")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_ends_with_the_same_bits(world: World, shared: Path, optimizer: str) -> None:
    """One run makes 10 steps. The other makes 5, saves in the middle of an epoch, and a new Trainer makes 5 more.

    Nothing in a checkpoint depends on ranks: one process would have written the same names, cursor and step.
    """
    build = builder(45, 14, optimizer=OPTIMIZERS[optimizer])
    whole = Record()
    uninterrupted = ran(build, [StopAtStep(10), whole])

    directory = shared / "new" / "folder"
    Trainer(build, [StopAtStep(5), Checkpoint(directory, steps=2)]).run()
    world.barrier()
    state = checkpoint.load(directory / "step-00000005")
    assert state["data"] == {"epoch": 1, "cursor": 14, "seed": 3, "shuffle": True, "num_samples": 45}
    assert (state["step"], state["adapter"]["optimizer"]["step"]) == (5, 5)
    assert set(state["adapter"]["parameters"]) == set(initial_parameters())
    record = Record()
    resumed = ran(build, [StopAtStep(10), Checkpoint(directory, steps=100), record])
    kept = [[(step.number, step.loss, step.learning_rate) for step in one] for one in (record.steps, whole.steps[5:])]
    assert kept[0] == kept[1]
    assert bits(resumed) == bits(uninterrupted)
    assert names_in(directory) == ["step-00000004", "step-00000005", "step-00000010"]


def test_hooks_go_on_too(world: World, shared: Path) -> None:
    """Checkpoint saves what all hooks have seen of the step, wherever it stands. A new hook begins anew."""
    build = builder(20, 10)
    Trainer(build, [Checkpoint(shared, steps=3), StopAtStep(3), MarkedSteps()]).run()
    hooks = [MarkedSteps(), MarkedSteps()]
    Trainer(build, [StopAtStep(5), Checkpoint(shared, steps=100), *hooks]).run()
    assert [hook.numbers for hook in hooks] == [[1, 2, 3, 4, 5], [4, 5]]


def test_the_newest_and_the_best_are_kept(world: World, shared: Path) -> None:
    scores = iter([1.0, 7.0, float("nan"), 3.0, 2.0, 1.0])
    build = builder(20, 10)
    Trainer(build, [StopAtStep(5), Checkpoint(shared, steps=1, keep=2, score=lambda: next(scores))]).run()
    assert names_in(shared) == ["step-00000002", "step-00000004", "step-00000005"]
    Trainer(build, [StopAtStep(6), Checkpoint(shared, steps=1, keep=1, score=lambda: next(scores))]).run()
    assert names_in(shared) == ["step-00000002", "step-00000006"]


def change_values(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Replace values in the manifest. The manifest is then whole, and has the right checksum."""

    def apply(path: Path) -> None:
        content = json.loads((path / "manifest.json").read_text())["manifest"]
        content["values"] = change(content["values"])
        (path / "manifest.json").write_text(json.dumps({"manifest": content, "sha256": _checksum(content)}))

    return apply


def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda numbers: {name: value for name, value in numbers.items() if not name.startswith(names)}


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, f"{TENSORS} has "),
    "a flipped bit": (flip_a_bit, f"{TENSORS} is damaged"),
    "no tensors": (lambda path: (path / TENSORS).unlink(), f"has no {TENSORS}"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "has no manifest.json"),
    "half a manifest": (lambda path: os.truncate(path / "manifest.json", 20), "manifest.json is damaged"),
    "a file": (lambda path: (shutil.rmtree(path), path.write_text("")), "manifest.json cannot be read: Not a dir"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_named_and_passed_over(
    world: World, shared: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    apply, text = DAMAGES[damage]
    build = builder(20, 10)
    whole = ran(build, [StopAtStep(3), Checkpoint(shared, steps=1)])
    if world.is_root:
        apply(shared / "step-00000003")
        (shared / ".writing-step-00000004-1").mkdir()
    world.barrier()
    record = Record()
    capfd.readouterr()
    resumed = ran(build, [StopAtStep(3), Checkpoint(shared, steps=3), record])
    said = capfd.readouterr().err
    if world.is_root:
        assert f"{shared}/step-00000003" in said
        assert text in said
        assert f"{shared}/.writing-step-00000004-1 is incomplete; it is skipped" in said
        assert said.count("skipped") == 2
    else:
        assert said == ""
    assert [step.number for step in record.steps] == [3]
    assert bits(resumed) == bits(whole)
    world.barrier()
    # A new checkpoint replaces the damaged one, and the half-written one is gone.
    assert names_in(shared) == ["step-00000001", "step-00000002", "step-00000003"]


def test_none_is_whole(world: World, shared: Path) -> None:
    """A new start would hide the damage, and would finally remove the checkpoints."""
    build = builder(20, 10)
    Trainer(build, [StopAtStep(2), Checkpoint(shared, steps=1)]).run()
    if world.is_root:
        truncate(shared / "step-00000001")
        flip_a_bit(shared / "step-00000002")
    world.barrier()
    trainer = Trainer(build, [StopAtStep(3), Checkpoint(shared, steps=1)])
    text = error_on_all(world, CheckpointError, trainer.run)
    assert text.startswith(
        f"none of the checkpoints in {shared} is complete: {shared}/step-00000002/{TENSORS} is damaged"
    )
    assert "remove them all to start over" in text
    assert trainer.step_number == 0
    assert names_in(shared) == ["step-00000001", "step-00000002"]


# What is done to the checkpoint, or how the run that finds it differs, and what is said.
OTHERS: dict[str, tuple[Callable[[Path], object] | dict[str, Any], str]] = {
    "no step": (change_values(without("step")), "has no entry 'step'"),
    "no data": (change_values(without("data")), "has no entry 'data'"),
    "no optimizer": (change_values(without("adapter")), "the saved one lacks step"),
    "cursor behind the end": (change_values(lambda old: old | {"data/cursor": 21}), "epoch=0 cursor=21; .* 0 to 20"),
    "other model": ({"hidden": 4}, r"has float64 \(6, 5\) for dense1.weight, the model float64 \(6, 4\)"),
    "other optimizer": ({"optimizer": OPTIMIZERS["adam"]}, "state for Adam: the saved one lacks first"),
    "other samples": ({"count": 21}, "num_samples=20, this run's 21"),
    "other seed": ({"seed": 4}, "seed=3, this run's 4"),
    "other order": ({"shuffle": False}, "shuffle=True, this run's False"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_something_else(world: World, shared: Path, other: str) -> None:
    """The checkpoint is whole, so the run does not skip it. Nothing is changed."""
    change, text = OTHERS[other]
    Trainer(builder(20, 10), [StopAtStep(2), Checkpoint(shared, steps=1)]).run()
    if world.is_root and callable(change):
        change(shared / "step-00000002")
    world.barrier()
    build = builder(**({"count": 20, "global_batch": 10} | ({} if callable(change) else change)))
    trainer = Trainer(build, [StopAtStep(3), Checkpoint(shared, steps=1)])
    before, data_before = bits(trainer), trainer.data.state()
    with pytest.raises(CheckpointError, match=text) as caught:
        trainer.run()
    assert caught.value.known_everywhere
    assert (trainer.step_number, bits(trainer), trainer.data.state()) == (0, before, data_before)
    world.barrier()
    assert names_in(shared) == ["step-00000001", "step-00000002"]


def test_a_directory_that_is_none(world: World, shared: Path) -> None:
    """The error comes before the first step, not after many of them."""
    if world.is_root:
        (shared / "file").write_text("")
    for path in (shared / "file", shared / "file" / "below"):
        trainer = Trainer(builder(20, 10), [StopAtStep(2), Checkpoint(path, steps=1)])
        with pytest.raises(CheckpointError, match=f"cannot write into .* {path}: Not a directory; name one ") as caught:
            trainer.run()
        assert caught.value.known_everywhere
        assert trainer.step_number == 0
    world.barrier()
    assert names_in(shared) == ["file"]


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
