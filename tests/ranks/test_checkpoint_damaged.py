"""Checkpoints that are damaged, or of another run, are named on all ranks; the damaged ones are passed over."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpitrain import Checkpoint, StopAtStep, Trainer, World
from mpitrain.errors import CheckpointError
from mpitrain.state.manifest import _checksum
from mpitrain.state.store import TENSORS

from .checkpoints import OPTIMIZERS, flip_a_bit, truncate
from .common import error_on_all
from .trainings import Record, bits, builder, names_in

pytestmark = pytest.mark.usefixtures("a_slow_disk_is_waited_for")


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
    whole = Trainer(build, [StopAtStep(3), Checkpoint(shared, steps=1)])
    whole.run()
    if world.is_root:
        apply(shared / "step-00000003")
        (shared / ".writing-step-00000004-1").mkdir()
    world.barrier()
    record = Record()
    capfd.readouterr()
    resumed = Trainer(build, [StopAtStep(3), Checkpoint(shared, steps=3), record])
    resumed.run()
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


OTHERS: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "no step": (change_values(without("step")), {}, "has no entry 'step'"),
    "no data": (change_values(without("data")), {}, "has no entry 'data'"),
    "no optimizer": (change_values(without("adapter")), {}, r"the saved one lacks step"),
    "other model": (
        lambda _: None,
        {"hidden": 4},
        r"has float64 \(6, 5\) for dense1.weight, the model float64 \(6, 4\)",
    ),
    "other optimizer": (
        lambda _: None,
        {"optimizer": OPTIMIZERS["adam"]},
        r"state for Adam: the saved one lacks first",
    ),
    "other samples": (lambda _: None, {"count": 21}, "num_samples=20, this run's 21"),
    "other seed": (lambda _: None, {"seed": 4}, "seed=3, this run's 4"),
    "cursor behind the end": (
        change_values(lambda old: old | {"data/cursor": 21}),
        {},
        "epoch=0 cursor=21; .* 0 to 20",
    ),
    "other order": (lambda _: None, {"shuffle": False}, "shuffle=True, this run's False"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_something_else(world: World, shared: Path, other: str) -> None:
    """The checkpoint is whole, so the run does not skip it. Nothing is changed."""
    apply, changed, text = OTHERS[other]
    Trainer(builder(20, 10), [StopAtStep(2), Checkpoint(shared, steps=1)]).run()
    if world.is_root:
        apply(shared / "step-00000002")
    world.barrier()
    build = builder(**({"count": 20, "global_batch": 10} | changed))
    trainer = Trainer(build, [StopAtStep(3), Checkpoint(shared, steps=1)])
    before, data_before = bits(trainer), trainer.data.state()
    with pytest.raises(CheckpointError, match=text) as caught:
        trainer.run()
    assert caught.value.known_everywhere
    assert trainer.step_number == 0
    assert bits(trainer) == before
    assert trainer.data.state() == data_before
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
