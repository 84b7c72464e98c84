"""Pipeline with layers of arrays: exact against one process; checkpoints, activations, and cuts by cost."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from mpitrain import Checkpoint, Pipeline, StopAtStep, Sync, Trainer, World
from mpitrain.adapters import array_layers, staged
from mpitrain.errors import ConfigError, DataError, MpitrainError
from mpitrain.job.worlds import make_world
from mpitrain.strategies.passes import Activations

from .common import error_on_all, skip_alone
from .layered import LAYERS, WIDTHS, Dense, builder, layered, plain, samples
from .placements import placed
from .trainings import Record, ran

COUNT, BATCH = 45, 14  # the last batch of an epoch has 3 samples


def ways(world: World) -> list[dict[str, Any]]:
    """All cuts for these ranks, with each schedule that fits."""
    divisors = [stages for stages in range(1, world.size + 1) if world.size % stages == 0 and stages <= 6]
    found: list[dict[str, Any]] = []
    for stages in divisors:
        found += [
            {"stages": stages, "schedule": name, "micro_batches": m}
            for name in ("1f1b", "eager_1f1b", "gpipe")
            for m in (1, 5)
        ]
        if 2 <= stages <= 3:
            found.append({"stages": stages, "schedule": "interleaved", "micro_batches": 2 * stages})
    return found


def everything(trainer: Trainer) -> dict[str, Any]:
    trainer.own_state()
    return trainer.state()["adapter"]


@pytest.mark.parametrize("hosts", ["as they are", "alone on each node"])
def test_it_is_training_in_one_process(world: World, hosts: str) -> None:
    """With clipping in every step, momentum, batches that nothing divides, and fewer samples than micro-batches.

    Between nodes, arrays arrive while a rank computes.
    """
    expected, losses = plain(COUNT, BATCH, 9)
    there = world if hosts == "as they are" else placed(world, hosts)
    for way in ways(world):
        record = Record()
        trainer = ran(builder(COUNT, BATCH, partial(Pipeline, **way)), [StopAtStep(9), record], there)
        assert [step.loss for step in record.steps] == pytest.approx(losses, rel=1e-13), way
        assert [step.samples for step in record.steps] == [14, 14, 14, 3] * 2 + [14]
        found = everything(trainer)["parameters"]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            numpy.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-14)
        trainer.close()


class Seen(Dense):
    """Says when its backward pass begins."""

    def __init__(self, number: int, events: list[str]) -> None:
        super().__init__(number)
        self.events = events

    def backward(self, *arguments: Any) -> Any:
        self.events.append(f"backward {self.number}")
        return super().backward(*arguments)


def test_gradients_leave_as_soon_as_they_are_final(world: World) -> None:
    """Those of a layer after its last micro-batch, before that of the layer below, and each once."""
    for way in ways(world):
        strategy, events = Pipeline(**way), []
        model = layered([Seen(number, events) for number in range(LAYERS)])
        strategy.begin(world, model)
        names = [entry.name for entry in model.layout]

        def seen(index: int, gradient: Any) -> None:
            events.append(names[index])  # noqa: B023
            strategy.on_gradient(index, gradient)  # noqa: B023

        for count in (7, 2, 0):
            events.clear()
            strategy.begin_step(count)
            loss = model.loss_and_gradients(samples(count), seen)
            with nullcontext() if count else pytest.raises(DataError, match="is 0 on every rank"):
                strategy.finish_step(model, loss)
            assert sorted(event for event in events if "." in event) == sorted(names), way
            for number in {int(name[0]) for name in names} if count else ():
                assert events.count(f"backward {number}") == min(count, way["micro_batches"])
                end = len(events) - events[::-1].index(f"backward {number}")
                assert set(events[end : end + 2]) == {f"{number}.weight", f"{number}.bias"}, way
        strategy.close()


@pytest.mark.nightly
def test_200_steps(world: World) -> None:
    """The losses stay those of one process, to rounding: with all cuts, schedules and numbers of micro-batches."""
    _, losses = plain(COUNT, BATCH, 200)
    for way in ways(world):
        record = Record()
        trainer = ran(builder(COUNT, BATCH, partial(Pipeline, **way)), [StopAtStep(200), record])
        found = [step.loss for step in record.steps]
        largest = max(abs(one / other - 1) for one, other in zip(found, losses, strict=True))
        world.print(f"{way}: the largest relative difference is {largest:.1e}")
        assert found == pytest.approx(losses, rel=1e-12), way
        trainer.close()


def strategies(world: World) -> list[Any]:
    """All that continue from each other's checkpoints, with as many stages as there are ranks, and with fewer."""
    stages = {count for count in (1, 2, world.size) if world.size % count == 0 and count <= 6}
    return [Sync, *(partial(Pipeline, count, micro_batches=3) for count in sorted(stages))]


def test_checkpoints_load_with_any_stages(world: World, shared: Path) -> None:
    """Parameters and optimizer state go from each number of stages to each other one, and to Sync and back."""
    expected, losses = plain(COUNT, BATCH, 12)
    made = strategies(world)
    path = [*made, *reversed(made), made[-1], made[0]][:6]
    record = Record()
    for number, strategy in enumerate(path, 1):
        trainer = ran(builder(COUNT, BATCH, strategy), [StopAtStep(2 * number), Checkpoint(shared, 2), record])
        trainer.own_state()
        found = trainer.state()["adapter"]
        trainer.close()
    steps = 2 * len(path)
    assert [step.number for step in record.steps] == list(range(1, steps + 1))
    assert [step.loss for step in record.steps] == pytest.approx(losses[:steps], rel=1e-13)
    if steps == 12:
        for name, value in expected.items():
            numpy.testing.assert_allclose(found["parameters"][name], value, rtol=1e-12, atol=1e-14)
    assert found["optimizer"]["step"] == steps


def test_a_training_goes_on_in_another_world(world: World) -> None:
    """Where the ranks have other stages than before, and where there are other stages."""
    _, losses = plain(COUNT, BATCH, 6)
    record, made = Record(), strategies(world)
    then = iter([made[-1], made[-1], made[0], made[-1]])

    def following() -> Any:
        return next(then)()

    trainer = Trainer(builder(COUNT, BATCH, following), [StopAtStep(6), record])
    for steps in (2, 3, 4, 6):
        while trainer.step_number < steps:
            record.steps.append(trainer.step())
        if steps < 6:
            turned = trainer.world.comm.Split(0, -trainer.world.rank)
            before, after = trainer.world, make_world(turned, world.config, parent=world)
            turned.Free()
            trainer.rebuild(after)
            if before is not world:
                before.free()
    assert [step.loss for step in record.steps] == pytest.approx(losses, rel=1e-13)
    last = trainer.world
    trainer.close()
    last.free()


def test_only_the_own_layers_are_there(world: World) -> None:
    """Of parameters and optimizer state; the whole is there only after own_state, and until the next step."""
    stages = world.size if world.size <= 6 else 1
    strategy, model = Pipeline(stages, micro_batches=2), layered()
    strategy.begin(world, model)
    names = {name.split(".")[0] for name in model.parameters()}
    of_all = world.allgather(names)
    if stages > 1:
        assert sorted(number for one in of_all for number in one) == [str(number) for number in range(6)]
        (momentum,) = (one for one in model.own_state()["optimizer"].values() if isinstance(one, dict))
        assert momentum.keys() == model.parameters().keys()
        with pytest.raises(ConfigError, match="each has the state of its own"):
            model.state()
    strategy.own_state()
    assert {name.split(".")[0] for name in model.state()["parameters"]} == {str(number) for number in range(6)}
    strategy.close()


KEPT = [("1f1b", False), ("eager_1f1b", False), ("gpipe", False), ("1f1b", True)]


@pytest.mark.parametrize(("schedule", "recompute"), KEPT)
def test_how_many_activations_are_kept(
    world: World, monkeypatch: pytest.MonkeyPatch, schedule: str, *, recompute: bool
) -> None:
    """1F1B keeps those of num_stages - stage micro-batches, GPipe those of all; recomputed ones are inputs only.

    Eager 1F1B keeps those of one fewer than twice as many as 1F1B.
    """
    if world.size > 6:
        pytest.skip("there are 6 layers")
    most, kept_bytes = 0, 0
    forward = array_layers._ArrayPiece.forward

    def counted(self: Any, micro: int, inputs: Any) -> Any:
        nonlocal most, kept_bytes
        output = forward(self, micro, inputs)
        most = max(most, len(self._kept))
        kept = self._kept[micro][0]
        kept_bytes = kept.nbytes if recompute else sum(a.nbytes for pair in kept.values() for a in pair)
        assert kept is inputs if recompute else True
        return output

    monkeypatch.setattr(array_layers._ArrayPiece, "forward", counted)
    strategy = partial(Pipeline, world.size, schedule, 8, recompute=recompute)
    trainer = ran(builder(32, 16, strategy), [StopAtStep(2)])
    after = world.size - world.rank - 1
    assert most == {"gpipe": 8, "1f1b": after + 1, "eager_1f1b": min(2 * after + 1, 8)}[schedule]
    assert kept_bytes > 0
    trainer.close()


class Late:
    """A communicator to which every message seems to come late: each first look does not find it."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._looks = comm, 0

    def Improbe(self, *arguments: Any) -> Any:  # noqa: N802
        self._looks += 1
        return None if self._looks % 2 else self._comm.Improbe(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def test_arrays_of_one_tag_arrive_in_order(world: World) -> None:
    """The second of two that are expected is not taken for the first, which came in between two looks."""
    skip_alone(world)
    there = placed(world, "alone on each node")
    activations = Activations(there, narrow=False)
    own = activations.apart
    activations.apart = own.replaced(comm=Late(own.comm))
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    activations.expect([(before, 0)] * 6)
    for number in range(6):
        activations.send(numpy.full((2, 3000), number + world.rank / 100), after, 0)
    time.sleep(0.05)
    for number in range(6):
        assert (activations.receive(before, 0) == number + before / 100).all()
    activations.finish()
    activations.apart = own
    activations.close()


def test_activations_are_recomputed_exactly_and_rounded_to_bf16(world: World) -> None:
    """With recompute the same bits; with bf16 a loss that differs by about 2^-8, but not nothing."""
    if world.size > 6:
        pytest.skip("there are 6 layers")
    losses: list[list[float]] = []
    options: list[dict[str, Any]] = [{}, {"recompute": True}, {"activations": "bf16"}]
    for option in options:
        record = Record()
        trainer = Trainer(
            builder(COUNT, BATCH, partial(Pipeline, world.size, micro_batches=3, **option)), [StopAtStep(6), record]
        )
        trainer.run()
        losses.append([step.loss for step in record.steps])
        trainer.close()
    assert losses[1] == losses[0]
    if world.size > 1:
        assert losses[2][0] != losses[0][0]
        assert losses[2] == pytest.approx(losses[0], rel=2**-6)


class Clock:
    """Continues in passes of layers only."""

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
        trainer = ran(build, [StopAtStep(3 * number), Checkpoint(shared, 3), record])
        cuts.append(strategy.layers)
        trainer.close()
    assert [step.loss for step in record.steps] == pytest.approx(losses, rel=1e-13)
    assert (cuts[0] != cuts[1]) == (world.size < LAYERS)


def test_what_cannot_be_measured(world: World) -> None:
    """Fewer layers than stages, a sample without samples, and a layer that fails on one rank alone."""
    strategy = Pipeline(1)
    with pytest.raises(ConfigError, match="stages='auto' measures them"):
        strategy.table()
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
