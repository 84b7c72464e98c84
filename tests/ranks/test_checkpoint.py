"""Checkpoints on any number of ranks and nodes: the same bits go on, what is damaged is passed over, on all ranks."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest

from models import mlp
from mpitrain import (
    Adam,
    ArrayData,
    ArrayFunction,
    Checkpoint,
    Hook,
    Parts,
    Sgd,
    Step,
    StopAtStep,
    Sync,
    Trainer,
    World,
    warmup_cosine,
)
from mpitrain.config import read_config
from mpitrain.errors import CheckpointError
from mpitrain.exchange.bucket import Parameter
from mpitrain.exchange.reducer import GradientReducer
from mpitrain.training import checkpoint
from mpitrain.training.checkpoint.manifest import Manifest, _checksum
from mpitrain.training.checkpoint.names import split
from mpitrain.training.checkpoint.parts import part_name, read_part
from mpitrain.training.checkpoint.resume import own_part
from mpitrain.training.checkpoint.store import TENSORS, write

from .common import error_on_all, skip_alone
from .placements import PLACEMENTS, placed
from .trainings import (
    MOMENTUM,
    RATE,
    Record,
    bare_numpy,
    bits,
    builder,
    initial_parameters,
    names_in,
    samples_of,
)

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: Sgd(RATE, momentum=MOMENTUM, nesterov=True),
    "adam": lambda: Adam(warmup_cosine(0.01, warmup_steps=3, total_steps=12), clip_norm=0.5),
}


@pytest.fixture(autouse=True)
def a_slow_disk_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for every save that is due: on a busy machine some writes take longer than the hook's patience."""
    monkeypatch.setattr("mpitrain.training.hooks.checkpoint._PATIENCE_SECONDS", float("inf"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_ends_with_the_same_bits(world: World, shared: Path, optimizer: str) -> None:
    """10 steps at once, or 5, a checkpoint in the middle of an epoch, a new Trainer and 5 more."""
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
    """Nothing in a checkpoint comes from a rank: one process would have written the same names, cursor and step."""
    trainer = Trainer(builder(45, 14), [StopAtStep(5), Checkpoint(shared, steps=5)])
    trainer.run()
    state = world.broadcast(checkpoint.load(shared / "step-00000005") if world.is_root else None)
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
    """Wherever Checkpoint stands, it saves what the others have seen of the step; a hook that is new begins anew."""
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


# -- damaged ----------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    file = path / TENSORS
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray((path / TENSORS).read_bytes())
    content[-9] ^= 1
    (path / TENSORS).write_bytes(content)


def change_values(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Another manifest that is whole in itself."""

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
    # Saved anew in the place of the damaged one; what was half written is gone.
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


def test_a_disk_that_hangs(world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Training goes on without those that are due meanwhile; the last one waits."""
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
    """The step at which the job is to end is saved, also if the disk was too slow for it before."""
    go = threading.Event()

    def hanging(directory: Path, name: str, *rest: Any) -> Path:
        go.wait()
        return write(directory, name, *rest)

    class Ends(Checkpoint):  # not a hook of its own: other hooks come before a Checkpoint
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
    """The wait is said, after stall_seconds, twice as long, and so on; here for 3 s."""

    def hanging(directory: Path, name: str, *rest: Any) -> Path:
        time.sleep(3)
        return write(directory, name, *rest)

    monkeypatch.setattr("mpitrain.training.hooks.checkpoint.write", hanging)
    own = replace(world, config=read_config({"MPITRAIN_STALL_SECONDS": "0.3"}, {}))
    monkeypatch.setattr("mpitrain.training.trainer.init", lambda: own)
    Trainer(builder(20, 10), [StopAtStep(1), Checkpoint(shared, steps=2)]).run()
    said = [line for line in capfd.readouterr().err.splitlines() if "is the disk there?" in line]
    begin = f"mpitrain: {world.name()}: writing {shared}/step-00000001 has taken "
    assert all(line.startswith(begin) for line in said)
    assert len(said) >= 2 if world.is_root else not said


OTHERS: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "no step": (change_values(without("step")), {}, "has no entry 'step'"),
    "no data": (change_values(without("data")), {}, "has no entry 'data'"),
    "no optimizer": (change_values(without("adapter")), {}, r"missing \['step'\]"),
    "other model": (
        lambda _: None,
        {"hidden": 4},
        r"has float64 \(6, 5\) for dense1.weight, the model float64 \(6, 4\)",
    ),
    "other optimizer": (lambda _: None, {"optimizer": OPTIMIZERS["adam"]}, r"state for Adam: missing \['first'"),
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
    """Found before the first step, not after many of them."""
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


# -- nodes that share no directory ------------------------------------------------------------------------------------


def trainer_there(
    world: World, monkeypatch: pytest.MonkeyPatch, placement: str, hooks: list[Hook], compression: str = "none"
) -> Trainer:
    """A Trainer in a world whose ranks are on several nodes; float32, so that it may be compressed."""
    own = replace(placed(world, placement), config=read_config({"MPITRAIN_COMPRESSION": compression}, {}))
    monkeypatch.setattr("mpitrain.training.trainer.init", lambda: own)
    samples = [part.astype("float32") if part.dtype.kind == "f" else part for part in samples_of(90)]

    def build(world: World) -> Parts:
        parameters = mlp.initial(numpy.random.default_rng(1), numpy, inputs=6, hidden=(8,), classes=3)
        adapter = ArrayFunction(mlp.loss_and_gradients, parameters, Sgd(RATE, momentum=MOMENTUM))
        return Parts(adapter, Sync(), ArrayData(world, tuple(samples), global_batch=40))

    return Trainer(build, hooks)


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
    """Nodes 0 and 2, 1 and 3, ...: one rank writes into each directory."""
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


# -- what a codec has left out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_compressed_training_goes_on_bit_for_bit(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    if len({PLACEMENTS[placement](rank) for rank in range(world.size)}) == 1:
        pytest.skip("all ranks are on one node")
    whole = trainer_there(world, monkeypatch, placement, [StopAtStep(8)], "int4")
    whole.run()
    first = trainer_there(world, monkeypatch, placement, [StopAtStep(5), Checkpoint(shared, steps=2)], "int4")
    first.run()
    resumed = trainer_there(world, monkeypatch, placement, [StopAtStep(8), Checkpoint(shared, steps=9)], "int4")
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
    # The others' is not lost, though it is no longer theirs.
    carried = world.allgather(again.strategy.own_state().get("carried"))
    assert [its is None for its in carried] == [False] + [True] * (world.size - 1)
    for name, value in carried[0].items():
        expected = sum(its[name].astype(numpy.float64) for rank, its in enumerate(left) if rank != 1)
        numpy.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("compression", ["none", "int4"])
def test_what_other_ranks_had_left_to_send_is_sent(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    """Parts of more ranks than there are now: their sum is in the next means, once, whoever sends it."""
    size = world.size + 2
    random = numpy.random.default_rng(4)
    parameters = [Parameter("a", (3, 2), numpy.dtype("f4")), Parameter("b", (5,), numpy.dtype("f4"))]
    left = [{its.name: random.integers(-8, 8, its.shape).astype("f4") for its in parameters} for _ in range(size)]
    manifest = Manifest(7, "run", parts=size)
    if world.is_root:
        for rank, residual in enumerate(left):
            tensors, values = split({"place": "elsewhere", "residual": residual})
            write(shared, part_name(7, rank, size), replace(manifest, values=values), tensors)
    there = replace(placed(world, "alone on each node"), config=read_config({"MPITRAIN_COMPRESSION": compression}, {}))
    reducer = GradientReducer(there, parameters)
    place, read = reducer.state().get("place"), partial(read_part, shared, manifest)
    part = own_part(there, "step 7", manifest.parts, place, read, reads=there.is_root)
    assert bool(part) == world.is_root
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
        if compression == "none" or world.size == 1:
            numpy.testing.assert_allclose(first, 2.0 + sums, rtol=1e-6)
            numpy.testing.assert_allclose(second, 2.0, rtol=1e-6)
        else:  # what int4 leaves out of the first is in the second
            numpy.testing.assert_allclose(first, 2.0 + sums, atol=abs(sums + 2).max() * 2 * 0.51 / 7)
