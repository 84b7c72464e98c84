"""Pipeline with layers of arrays: exact against one process, for every schedule, cut, and number of samples."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy
import pytest

from mpitrain import Pipeline, StopAtStep, Trainer, World
from mpitrain.errors import DataError

from .layered import LAYERS, Dense, builder, layered, plain, samples
from .trainings import Record

COUNT, BATCH = 45, 14  # the last batch of an epoch has 3 samples


def ways(world: World) -> list[dict[str, Any]]:
    """All cuts for these ranks, with each schedule that fits."""
    divisors = [stages for stages in range(1, world.size + 1) if world.size % stages == 0 and stages <= 6]
    found: list[dict[str, Any]] = []
    for stages in divisors:
        found += [
            {"stages": stages, "schedule": name, "micro_batches": m} for name in ("1f1b", "gpipe") for m in (1, 5)
        ]
        if 2 <= stages <= 3:
            found.append({"stages": stages, "schedule": "interleaved", "micro_batches": 2 * stages})
    return found


def everything(trainer: Trainer) -> dict[str, Any]:
    trainer.own_state()
    return trainer.state()["adapter"]


def test_it_is_training_in_one_process(world: World) -> None:
    """With clipping in every step, momentum, batches that nothing divides, and fewer samples than micro-batches."""
    expected, losses = plain(COUNT, BATCH, 9)
    for way in ways(world):
        record = Record()
        trainer = Trainer(builder(COUNT, BATCH, partial(Pipeline, **way)), [StopAtStep(9), record])
        trainer.run()
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
        trainer = Trainer(builder(COUNT, BATCH, partial(Pipeline, **way)), [StopAtStep(200), record])
        trainer.run()
        found = [step.loss for step in record.steps]
        largest = max(abs(one / other - 1) for one, other in zip(found, losses, strict=True))
        world.print(f"{way}: the largest relative difference is {largest:.1e}")
        assert found == pytest.approx(losses, rel=1e-12), way
        trainer.close()
