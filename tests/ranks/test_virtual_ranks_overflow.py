"""Virtual ranks: where one of them overflows and a loss scale may skip the step, all numbers of ranks do the same."""

from __future__ import annotations

import math
from typing import Any

import numpy

from mpitrain import Hook, Step, StopAtStep, Trainer, World
from mpitrain.data.samples import random_of
from mpitrain.optim import LossScale
from mpitrain.strategies.virtual_ranks import VirtualRanks

from .trainings import bits
from .virtual_trainings import alone, builder, model, noisy, samples

LIMIT = 4.0  # at this loss scale and above, something overflows
MARKED, OTHER = samples()[1][[11, 40]]  # the labels of two samples


def gradients_overflow(parameters: Any, batch: Any, on_gradient: Any, random: Any, loss_scale: float) -> float:
    """Those of one sample."""
    added = numpy.float32(math.inf if loss_scale >= LIMIT and MARKED in batch[1] else 0)
    return noisy(parameters, batch, lambda name, value: on_gradient(name, value + added), random, loss_scale)


def losses_overflow(parameters: Any, batch: Any, on_gradient: Any, random: Any, loss_scale: float) -> float:
    """That of one sample to one side, and that of another to the other side."""
    loss = noisy(parameters, batch, on_gradient, random, loss_scale)
    if loss_scale >= LIMIT:
        loss += (math.inf if MARKED in batch[1] else 0.0) - (math.inf if OTHER in batch[1] else 0.0)
    return loss


class Steps(Hook):
    """Keeps the loss of each step, and whether it was skipped."""

    def __init__(self) -> None:
        self.made: list[tuple[str, bool]] = []

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.made.append((step.loss.hex(), step.skipped))


def trained(world: World, function: Any, global_batch: int) -> tuple[dict[str, bytes], list[tuple[str, bool]]]:
    def build(world: World) -> Any:
        scale = LossScale(2 * LIMIT, growth_interval=2)
        return builder(global_batch, adapter=lambda: model(function, loss_scale=scale))(world)

    steps = Steps()
    trainer = Trainer(build, [StopAtStep(12), steps], world=world)
    trainer.run()
    return bits(trainer), steps.made


def test_gradients_of_one_sample_that_overflow(world: World) -> None:
    with_all, made = trained(world, gradients_overflow, 21)
    assert (with_all, made) == trained(alone(world), gradients_overflow, 21)
    assert {skipped for _, skipped in made} == {True, False}
    assert all(math.isfinite(float.fromhex(loss)) for loss, _ in made)


def test_losses_of_both_signs_that_overflow(world: World) -> None:
    """In a batch of nearly all samples, so that both are in one step. Their sum is NaN."""
    with_all, made = trained(world, losses_overflow, 77)
    assert (with_all, made) == trained(alone(world), losses_overflow, 77)
    assert "nan" in {loss for loss, _ in made}


def test_random_numbers_are_not_those_of_augment() -> None:
    key = VirtualRanks(7, 5).key(2, 3)
    own = numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence(key)))
    assert own.random(4).tolist() != random_of(5, 2, 3).random(4).tolist()
