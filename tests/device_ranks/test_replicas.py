"""Replicas on GPUs that are no longer equal: the hash and the repair are those of the host."""

from __future__ import annotations

import numpy
import pytest

from mpitrain import CompareReplicas, Hook, Step, StopAtStep, Trainer, World
from mpitrain.errors import ReplicaError
from mpitrain.training.hooks.replicas import checksum
from tests.ranks.common import error_on_all, skip_alone

from .test_training import builder

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


class Negate(Hook):
    """Flips the bit of the sign of one element on the last rank, after step 2."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        value = trainer.adapter.parameters()["dense1.bias"]
        if step.number == 2 and trainer.world.rank == trainer.world.size - 1:
            value[1] = -value[1]


def trained(*hooks: Hook) -> dict[str, numpy.ndarray]:
    trainer = Trainer(builder(cupy), [StopAtStep(4), *hooks])
    trainer.run()
    return {name: value.get() for name, value in trainer.adapter.parameters().items()}


def test_a_sign_that_flips_on_a_gpu(world: World) -> None:
    skip_alone(world)
    text = error_on_all(world, ReplicaError, lambda: trained(Negate(), CompareReplicas(1)))
    assert text.startswith("after step 2 the parameters are not those of rank")
    assert f"on: {world.name(world.size - 1)}: dense1.bias in 1 of " in text
    expected = trained()
    found = trained(Negate(), CompareReplicas(2, repair="majority"))
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


def test_the_checksum_does_not_depend_on_the_place(world: World) -> None:
    array = numpy.arange(12, dtype="float32").reshape(3, 4)
    assert checksum(cupy.asarray(array)) == checksum(array)
