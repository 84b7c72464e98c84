"""Checkpoints of nodes that share no directory: how many copies are kept, and which of them is resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mpitrain import Checkpoint, Hook, StopAtStep, World
from mpitrain import state as checkpoint
from mpitrain.errors import CheckpointError
from mpitrain.state.store import TENSORS

from .checkpoints import trainer_there, truncate
from .common import error_on_all, skip_alone
from .placements import PLACEMENTS
from .trainings import Record, bits, names_in

pytestmark = pytest.mark.usefixtures("a_slow_disk_is_waited_for")


def node_of(world: World, placement: str) -> int:
    return PLACEMENTS[placement](world.rank)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_node_keeps_a_copy(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, placement: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A node that has lost its copy, or has only an older one, resumes from the newest copy of any node."""
    nodes = [PLACEMENTS[placement](rank) for rank in range(world.size)]
    if len(set(nodes)) == 1:
        pytest.skip("all ranks are on one node")
    own = shared / f"node{node_of(world, placement)}"
    whole = trainer_there(world, monkeypatch, placement, [StopAtStep(6)])
    whole.run()
    trainer_there(world, monkeypatch, placement, [StopAtStep(4), Checkpoint(own, steps=2)]).run()
    world.barrier()
    contents = [(own / "step-00000004" / TENSORS).read_bytes(), names_in(own)]
    assert world.allgather(contents) == [contents] * world.size
    if world.is_root:
        shutil.rmtree(shared / "node0")
        for node in range(1, max(nodes)):
            truncate(shared / f"node{node}" / "step-00000004")
    world.barrier()
    record = Record()
    capfd.readouterr()
    resumed = trainer_there(world, monkeypatch, placement, [StopAtStep(6), Checkpoint(own, steps=6), record])
    resumed.run()
    assert [step.number for step in record.steps] == [5, 6]
    assert bits(resumed) == bits(whole)
    world.barrier()
    assert "step-00000006" in names_in(own)
    if world.is_root:
        count = len(set(nodes))
        holder = nodes.index(max(nodes))
        assert capfd.readouterr().out.splitlines() == [
            f"checkpoints in {own}: not shared: {count} of {count} nodes keep a copy",
            f"resumed from {own}/step-00000004 of {world.name(holder)} at step 4",
        ]


def test_one_copy_is_asked_for(world: World, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_alone(world)
    own = shared / f"node{world.rank}"
    hooks: list[Hook] = [StopAtStep(2), Checkpoint(own, steps=2, copies=1)]
    trainer_there(world, monkeypatch, "alone on each node", hooks).run()
    world.barrier()
    assert names_in(shared) == ["node0"]


@pytest.mark.parametrize("copies", [None, 1, 2])
def test_some_nodes_see_the_directory_of_others(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], copies: int | None
) -> None:
    """Nodes 0, 2, ... see one directory, and nodes 1, 3, ... another. One rank writes into each of the two."""
    skip_alone(world)
    own = shared / f"of-{world.rank % 2}"
    hooks: list[Hook] = [StopAtStep(4), Checkpoint(own, steps=1, keep=None, copies=copies)]
    trainer_there(world, monkeypatch, "alone on each node", hooks).run()
    world.barrier()
    names = [f"step-0000000{step}" for step in (1, 2, 3, 4)]
    count = copies or 2
    assert {path.name: names_in(path) for path in shared.iterdir()} == {f"of-{n}": names for n in range(count)}
    output = capfd.readouterr()
    assert "cannot write" not in output.err
    if world.is_root:
        assert f"checkpoints in {own}: not shared: {count} of {world.size} nodes keep a copy\n" in output.out
    resumed = trainer_there(world, monkeypatch, "alone on each node", [StopAtStep(5), Checkpoint(own, steps=1)])
    resumed.run()
    if world.is_root:
        assert f"resumed from {own}/step-00000004 of {world.name()} at step 4" in capfd.readouterr().out


def test_nodes_that_see_one_directory_write_one_copy(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    skip_alone(world)
    trainer_there(world, monkeypatch, "alone on each node", [StopAtStep(2), Checkpoint(shared, steps=2)]).run()
    world.barrier()
    assert names_in(shared) == ["step-00000002"]
    said = f"checkpoints in {shared}: all nodes see one directory\n"
    assert capfd.readouterr().out == (said if world.is_root else "")


def test_copies_of_different_trainings(world: World, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier training has used the directory on another set of nodes."""
    skip_alone(world)
    own = shared / f"node{world.rank}"
    trainer_there(world, monkeypatch, "alone on each node", [StopAtStep(2), Checkpoint(own, steps=2)]).run()
    world.barrier()
    if world.is_root:
        checkpoint.save(shared / "node0", 3, {"step": 3})
    world.barrier()
    trainer = trainer_there(world, monkeypatch, "alone on each node", [StopAtStep(4), Checkpoint(own, steps=2)])
    text = error_on_all(world, CheckpointError, trainer.run)
    assert text.startswith("the checkpoints are of different trainings: ")
    assert f"unnamed ({world.name(0)})" in text
