"""Pipeline with layers of arrays: exact against one process, for every schedule, cut, and number of samples."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy
import pytest

from mpitrain import Pipeline, StopAtStep, Trainer, World

from .layered import builder, plain
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


@pytest.mark.slow
def test_200_steps(world: World) -> None:
    """The losses stay those of one process, to rounding."""
    _, losses = plain(COUNT, BATCH, 200)
    stages = world.size if world.size <= 6 else 1
    record = Record()
    trainer = Trainer(builder(COUNT, BATCH, partial(Pipeline, stages, micro_batches=5)), [StopAtStep(200), record])
    trainer.run()
    assert [step.loss for step in record.steps] == pytest.approx(losses, rel=1e-12)
    trainer.close()
