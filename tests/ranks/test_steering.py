"""Orders to a training, on all ranks: only one rank has heard of an order, and all obey it after the same step."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpitrain import Checkpoint, Hook, Step, StopAtStep, Trainer, World
from mpitrain.errors import MismatchError
from mpitrain.job.start import the_job
from mpitrain.state.store import load, write
from mpitrain.training import steering
from mpitrain.training.steering import Outcomes
from mpitrain.training.tunable import Tunables
from mpitrain.watching.activity import own_activity
from mpitrain.watching.rank_record import read_record, write_order

from .common import error_on_all, skip_alone
from .trainings import RATE, Record, builder, ran


class Told(Hook):
    """After some steps, writes an order into the record of one rank, as its agent does."""

    def __init__(self, orders: dict[int, tuple[int, dict[str, Any]]]) -> None:
        self.orders = orders
        self.texts: list[str] = []

    def after_step(self, trainer: Trainer, step: Step) -> None:
        rank, order = self.orders.get(step.number, (-1, {}))
        activity = own_activity()
        if rank == trainer.world.rank and activity is not None:
            write_order(activity.descriptor, {"of": "1a2b", "teller": "ada on lab1", "at": 1.5, **order})
        trainer.world.barrier()  # the order is there before a rank begins the next vote

    def went_on(self, trainer: Trainer, event: Any) -> None:
        self.texts.append(f"{event.after_step} {event.source} {event.teller} {event.at}: {event.text}")


@pytest.fixture
def tunables(monkeypatch: pytest.MonkeyPatch, world: World) -> Tunables:
    """Those of this test; and records without the orders of another one."""
    own = Tunables()
    monkeypatch.setattr("mpitrain.training.steering.TUNABLES", own)
    monkeypatch.setattr("mpitrain.training.steering.OUTCOMES", Outcomes())
    if activity := own_activity():
        write_order(activity.descriptor, {"number": 0})
    world.barrier()
    return own


UNREADABLE: list[tuple[dict[str, Any], str]] = [
    ({"kind": "explode"}, "kind is 'explode'"),
    ({"kind": "rate", "value": 3}, "value is 3; it must be str"),
    ({"kind": "save", "at": 1e300}, "at is 1e+300; it must be float"),
    ({"kind": "save", "at": 1e20}, "it has the number 1 and the time 1e+20"),
    ({"kind": "save", "colour": "red"}, "it has 'colour', which is not known"),
]


@pytest.mark.parametrize(("order", "problem"), UNREADABLE)
def test_an_order_that_cannot_be_read(world: World, tunables: Tunables, order: dict[str, Any], problem: str) -> None:
    """The training continues, does nothing of it, and says what is wrong. A good one after it is obeyed."""
    skip_alone(world)
    last, record = world.size - 1, Record()
    told = Told({2: (last, {"number": 1, **order}), 4: (0, {"number": 2, "kind": "rate", "value": "2"})})
    Trainer(builder(60, 20), [StopAtStep(7), record, told]).run()
    assert [step.learning_rate for step in record.steps] == [RATE] * 5 + [RATE * 2] * 2
    refused, obeyed = steering.OUTCOMES.newest
    assert (refused[0], refused[3], obeyed[0], obeyed[3]) == (1, False, 2, True)
    assert f"{world.name(last)} cannot read it: " in refused[4]
    assert problem in refused[4]


def test_one_rank_hears_and_all_obey(world: World, tunables: Tunables) -> None:
    skip_alone(world)
    one = tunables.declare("dropout", 0.1)
    last = world.size - 1
    orders: dict[int, tuple[int, dict[str, Any]]] = {
        2: (last, {"number": 1, "kind": "rate", "value": "0.5x"}),
        4: (0, {"number": 2, "kind": "set", "name": "dropout", "value": "0.75"}),
        6: (last, {"number": 3, "kind": "set", "name": "dropped", "value": "0.5"}),
        8: (last // 2, {"number": 4, "kind": "rate", "value": "3"}),
    }
    told, record = Told(orders), Record()
    trainer = ran(builder(60, 20), [StopAtStep(11), record, told])
    rates = [RATE] * 3 + [RATE * 0.5] * 6 + [RATE * 1.5] * 2
    assert [step.learning_rate for step in record.steps] == rates
    assert one.value == 0.75
    assert told.texts == [
        "3 told ada on lab1 1.5: the learning rate is multiplied by 0.5, so by 0.5 in all",
        "5 told ada on lab1 1.5: dropout is 0.75",
        "9 told ada on lab1 1.5: the learning rate is multiplied by 3, so by 1.5 in all",
    ]
    state = trainer.state()["steering"]
    assert state == {"of": "1a2b", "number": 4, "rate_factor": 1.5, "pause": {}, "tunables": {"dropout": 0.75}}
    # A state that is restored has the factor, and a new Trainer without one has not.
    other = Trainer(builder(60, 20), [StopAtStep(12), again := Record()])
    other.restore(trainer.state())
    other.run()
    assert [step.learning_rate for step in again.steps] == [RATE * 1.5]
    # A value that the first Trainer was told holds in the next one. The factor of the rate does not.
    plain = ran(builder(60, 20), [StopAtStep(2), record := Record()])
    assert (one.value, [step.learning_rate for step in record.steps]) == (0.75, [RATE] * 2)
    state = plain.state()
    tunables.restore({})  # as in another process
    assert "steering" not in Trainer(builder(60, 20)).state()
    third = Trainer(builder(60, 20), [StopAtStep(3)])
    third.restore(state)
    third.run()
    assert one.value == 0.75


def test_orders_that_come_together_are_obeyed_in_their_order(world: World, tunables: Tunables) -> None:
    """Rank 0 has heard of the second one, and the last rank of the first one."""
    skip_alone(world)
    one = tunables.declare("dropout", 0.1)
    first, second = (
        {2: (rank, {"number": number, "kind": "set", "name": "dropout", "value": value})}
        for rank, number, value in ((world.size - 1, 1, "0.5"), (0, 2, "0.75"))
    )
    told = Told(second)
    Trainer(builder(60, 20), [StopAtStep(4), Told(first), told]).run()
    assert told.texts == ["3 told ada on lab1 1.5: dropout is 0.5", "3 told ada on lab1 1.5: dropout is 0.75"]
    assert one.value == 0.75


def test_what_was_told_before_a_restart(world: World, tunables: Tunables) -> None:
    """The launcher gives the orders of attempts before to the ranks: each is applied after the same step, once."""
    common = {"of": "1a2b", "kind": "rate", "teller": "ada on lab1", "at": 1.5}

    def orders(run: int) -> str:
        first = {**common, "number": 1, "value": "0.5", "after_step": 3, "run": run}
        second = {**common, "number": 2, "value": "4", "after_step": 5, "run": run}
        of_another_run = {**common, "number": 3, "value": "7", "after_step": 1, "run": run + 1000}
        return json.dumps([first, second, of_another_run])

    def rates(begin: Trainer | None, last: int, *hooks: Hook) -> tuple[list[float], Trainer]:
        record, run = Record(), the_job().num_runs + 1
        object.__setattr__(world.context, "orders", orders(run))
        trainer = Trainer(builder(60, 20), [StopAtStep(last), record, *hooks])
        if begin is not None:
            trainer.restore(begin.state())
        trainer.run()
        return [step.learning_rate for step in record.steps], trainer

    before = world.context.orders
    try:
        first, trainer = rates(None, 4)
        assert first == [RATE] * 3 + [RATE * 0.5]
        second, _ = rates(trainer, 7)  # the state has the first order already
        assert second == [RATE * 0.5] + [RATE * 2.0] * 2
        if world.size > 1:  # a new order waits for those that came before it
            order = {"number": 4, "kind": "rate", "value": "10"}
            third, _ = rates(None, 7, Told({1: (0, order)}))
            assert third == [RATE] * 3 + [RATE * 0.5] * 2 + [RATE * 20.0] * 2
    finally:
        object.__setattr__(world.context, "orders", before)


def test_ranks_that_declare_other_values(world: World, tunables: Tunables) -> None:
    skip_alone(world)
    tunables.declare("dropout", 0.1 if world.rank < world.size - 1 else 0.2)
    trainer = Trainer(builder(60, 20), [StopAtStep(2)])
    text = error_on_all(world, MismatchError, trainer.run)
    assert f"{world.name(world.size - 1)}: tunable('dropout', 0.2); {world.name(0)}: tunable('dropout', 0.1)" in text


def test_a_value_that_only_one_rank_has_declared_since(world: World, tunables: Tunables) -> None:
    """A declaration in the first step is compared when a value is set."""
    skip_alone(world)

    class Late(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            if world.rank == 0:
                tunables.declare("late", 1)

    order = {"number": 1, "kind": "set", "name": "late", "value": "2"}
    trainer = Trainer(builder(60, 20), [StopAtStep(9), Late(), Told({2: (0, order)})])
    text = error_on_all(world, MismatchError, trainer.run)
    assert "tunable('late', 1)" in text
    assert trainer.step_number == 3


def test_a_step_that_is_saved_again(
    world: World, tunables: Tunables, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pause, a save writes what has changed since the last one, and what could not be written."""
    names: list[str] = []
    seen: list[float] = []
    has_failed: list[bool] = []

    def failing(directory: Path, name: str, *rest: Any) -> Path:
        names.append(name)
        if len(names) == 3:
            raise OSError("no space is left")
        return write(directory, name, *rest)

    class InPause(Checkpoint):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            super().after_step(trainer, step)
            for factor in (1.0, 0.5, 0.25, 0.25, 0.25):
                if factor < 1.0:
                    about = {"of": "1a2b", "number": 1, "rate_factor": factor}
                    trainer.steering.restore(about)
                self.save_now(trainer, step)
                self._wait(trainer.world, float("inf"))
                has_failed.append(any(world.allgather(self._writer.failed is not None)))
                seen.append(load(shared / "step-00000001").get("steering", {}).get("rate_factor", 1.0))

    monkeypatch.setattr("mpitrain.training.hooks.checkpoint.write", failing)
    Trainer(builder(20, 10), [StopAtStep(1), InPause(shared, steps=1)]).run()
    assert seen == [1.0, 0.5, 0.5, 0.25, 0.25]
    assert has_failed == [False, False, True, False, False]
    assert len(names) == (4 if world.is_root else 0)


def test_a_pause_ends_on_all_ranks(world: World, tunables: Tunables) -> None:
    """A state from a paused training continues where no launcher could resume it. Its values are those of the state."""
    trainer = Trainer(builder(60, 20), [StopAtStep(3), record := Record()])
    about = {"teller": "ada on lab1", "at": time.time(), "after_step": 0}
    state = {"of": "1a2b", "number": 1, "rate_factor": 0.25, "pause": about, "tunables": {}}
    trainer.restore({**trainer.state(), "steering": state})
    trainer.run()
    numpy.testing.assert_array_equal([step.learning_rate for step in record.steps], [RATE * 0.25] * 3)
    assert trainer.steering.pause == {}


def outcomes_of(world: World) -> list[list[Any]]:
    """What this rank has published of orders: number, step, and whether it was applied."""
    activity = own_activity()
    assert activity is not None
    record = read_record(f"/proc/self/fd/{activity.descriptor}", world.rank)
    assert record is not None
    return [[number, step, is_applied] for number, _, step, is_applied, _ in json.loads(record.steering)["outcomes"]]


def test_a_later_run_publishes_what_the_run_before_was_told(world: World, tunables: Tunables) -> None:
    """The launcher may not have read it yet. The last order comes too late for a step of that run."""
    skip_alone(world)
    orders: dict[int, tuple[int, dict[str, Any]]] = {
        2: (world.size - 1, {"number": 1, "kind": "rate", "value": "0.5"}),
        4: (0, {"number": 2, "kind": "rate", "value": "0.5"}),
    }
    Trainer(builder(60, 20), [StopAtStep(4), Told(orders)]).run()
    assert outcomes_of(world) == [[1, 3, True]]
    Trainer(builder(60, 20), [StopAtStep(2), record := Record()]).run()
    assert outcomes_of(world) == [[1, 3, True], [2, 0, False]]
    assert [step.learning_rate for step in record.steps] == [RATE] * 2


def test_a_stop_holds_after_a_restart(world: World, tunables: Tunables, shared: Path) -> None:
    """The try that follows continues from an earlier step, or from the one of the stop."""
    stop = {"of": "1a2b", "number": 1, "kind": "stop", "teller": "ada on lab1", "at": 1.5, "after_step": 3}
    before = world.context.orders
    try:
        for made in (3, 0):
            object.__setattr__(world.context, "orders", json.dumps([{**stop, "run": the_job().num_runs + 1}]))
            hooks = [StopAtStep(9), Checkpoint(shared, steps=100), record := Record()]
            trainer = ran(builder(60, 20), hooks)
            assert (trainer.step_number, len(record.steps)) == (3, made)
    finally:
        object.__setattr__(world.context, "orders", before)
    assert [path.name for path in shared.glob("step-*")] == ["step-00000003"]


def test_a_refused_order_is_refused_again(world: World, tunables: Tunables) -> None:
    """The state to continue from is taken after it, and the launcher, which has not heard of it, repeats it."""
    skip_alone(world)
    trainer = None
    for last in (3, 6):
        told = Told({last - 2: (0, {"number": 1, "kind": "resume"})})
        begun, trainer = trainer, Trainer(builder(60, 20), [StopAtStep(last), told])
        if begun is not None:
            trainer.restore(begun.state())
        trainer.run()
        assert outcomes_of(world)
        assert not any(is_applied for _, _, is_applied in outcomes_of(world))
        assert "steering" not in trainer.state()
