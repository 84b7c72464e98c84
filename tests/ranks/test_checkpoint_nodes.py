"""Checkpoints of nodes that share no directory, and what a codec has left out, which each rank keeps in a part."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy
import pytest

from mpitrain import Checkpoint, Hook, StopAtStep, World
from mpitrain import state as checkpoint
from mpitrain.config import read_config
from mpitrain.errors import CheckpointError
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.reducer import GradientReducer
from mpitrain.state.manifest import Manifest
from mpitrain.state.names import split
from mpitrain.state.resume import own_part, part_name, read_part
from mpitrain.state.store import TENSORS, write

from .checkpoints import flip_a_bit, trainer_there, truncate
from .common import error_on_all, skip_alone
from .placements import PLACEMENTS, placed
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


@pytest.mark.parametrize("codec", ["int4", "top_k:0.1", "power_sgd:2"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_compressed_training_goes_on_bit_for_bit(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, placement: str, codec: str
) -> None:
    if len({PLACEMENTS[placement](rank) for rank in range(world.size)}) == 1:
        pytest.skip("all ranks are on one node")
    whole = trainer_there(world, monkeypatch, placement, [StopAtStep(8)], codec)
    whole.run()
    first = trainer_there(world, monkeypatch, placement, [StopAtStep(5), Checkpoint(shared, steps=2)], codec)
    first.run()
    resumed = trainer_there(world, monkeypatch, placement, [StopAtStep(8), Checkpoint(shared, steps=9)], codec)
    resumed.run()
    assert bits(resumed) == bits(whole)
    mine, expected = (trainer.strategy.own_state() for trainer in (resumed, whole))
    assert mine["place"] == expected["place"]
    for name, value in expected["residual"].items():
        assert mine["residual"][name].tobytes() == value.tobytes()
    assert any(world.allgather(any(value.any() for value in mine["residual"].values())))
    world.barrier()
    parts = [name for name in names_in(shared) if "part" in name]
    assert len(parts) == 3 * world.size


def test_a_resume_without_the_codec_sends_what_it_has_left_out(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    skip_alone(world)
    there = "alone on each node"
    first = trainer_there(world, monkeypatch, there, [StopAtStep(3), Checkpoint(shared, steps=3)], "top_k:0.1")
    first.run()
    left = first.strategy.own_state()["residual"]
    world.barrier()
    capfd.readouterr()
    again = trainer_there(world, monkeypatch, there, [StopAtStep(4), Checkpoint(shared, steps=9)], "none")
    again.restore(first.state())
    again.strategy.restore_own(first.strategy.own_state())
    assert ("this run has no codec: the next step sends it whole" in capfd.readouterr().out) == world.is_root
    carried = again.strategy.own_state()["carried"]
    for name, value in left.items():
        assert carried[name].tobytes() == value.tobytes()
    again.step()
    assert "carried" not in again.strategy.own_state()
    plain = trainer_there(world, monkeypatch, there, [StopAtStep(4), Checkpoint(shared, steps=9)], "none")
    plain.restore(first.state())
    plain.step()
    assert bits(plain) != bits(again)  # which has sent it


def test_a_part_that_is_damaged_or_missing(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    skip_alone(world)
    there = "alone on each node"
    first = trainer_there(world, monkeypatch, there, [StopAtStep(3), Checkpoint(shared, steps=3)], "int4")
    first.run()
    left = world.allgather(first.strategy.own_state()["residual"])
    world.barrier()
    if world.is_root:
        flip_a_bit(shared / f"step-00000003.part-1-of-{world.size}")
    world.barrier()
    capfd.readouterr()
    again = trainer_there(world, monkeypatch, there, [StopAtStep(3), Checkpoint(shared, steps=3)], "int4")
    again.run()
    said = capfd.readouterr().out
    if world.is_root:
        assert "mpitrain: step-00000003: what rank 1 had left to send is lost. This costs the rounding of " in said
        assert f"part-1-of-{world.size}/{TENSORS} is damaged" in said
    # What the other ranks had left is not lost, though rank 0 now carries it.
    carried = world.allgather(again.strategy.own_state().get("carried"))
    assert [its is None for its in carried] == [False] + [True] * (world.size - 1)
    for name, value in carried[0].items():
        expected = sum(its[name].astype(numpy.float64) for rank, its in enumerate(left) if rank != 1)
        numpy.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("compression", ["none", "int4", "top_k:0.3", "power_sgd:1"])
def test_what_other_ranks_had_left_to_send_is_sent(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    """The parts are of more ranks than there are now. Their sum is in the next mean, once, whichever rank sends it."""
    size = world.size + 2
    random = numpy.random.default_rng(4)
    parameters = [Parameter("a", (3, 2), numpy.dtype("f4")), Parameter("b", (5,), numpy.dtype("f4"))]
    left = [{its.name: random.integers(-8, 8, its.shape).astype("f4") for its in parameters} for _ in range(size)]
    manifest = Manifest(7, "run", parts=size)
    if world.is_root:
        for rank, residual in enumerate(left):
            tensors, values = split({"place": "elsewhere", "residual": residual})
            write(shared, part_name(7, rank, size), replace(manifest, values=values), tensors)
    there = placed(world, "alone on each node").replaced(config=read_config({"MPITRAIN_COMPRESSION": compression}, {}))
    reducer = GradientReducer(there, parameters)
    place, read = reducer.state().get("place"), partial(read_part, shared, manifest)
    part = own_part(there, "step 7", manifest.parts, place, read, reads=there.is_root)
    assert bool(part["carried"]) == world.is_root
    reducer.restore(part)
    means = []
    for _ in range(2):
        reducer.begin(world.rank + 1)
        for index, its in enumerate(parameters):
            reducer.ready(index, numpy.full(its.shape, 2.0, "f4"))
        reducer.finish()
        means.append([gradient.copy() for gradient in reducer.gradients])
    owed = [sum(its[parameter.name] for its in left) for parameter in parameters]
    assert any(value.any() for value in owed)
    for first, second, sums in zip(*means, owed, strict=True):
        if compression not in ("none", "int4") and world.size > 1:
            continue  # below
        if compression == "none" or world.size == 1:
            numpy.testing.assert_allclose(first, 2.0 + sums, rtol=1e-6)
            numpy.testing.assert_allclose(second, 2.0, rtol=1e-6)
        else:  # what int4 leaves out of the first mean is in the second
            numpy.testing.assert_allclose(first, 2.0 + sums, atol=abs(sums + 2).max() * 2 * 0.51 / 7)
    if world.size > 1:  # nothing is lost: it has come out, or is kept
        kept = world.sum(reducer.state().get("residual", {}))
        for its, first, second, sums in zip(parameters, *means, owed, strict=True):
            numpy.testing.assert_allclose(first + second + kept.get(its.name, 0), 4.0 + sums, rtol=1e-5, atol=1e-4)
