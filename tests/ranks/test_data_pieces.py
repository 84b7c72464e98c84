"""Accumulate: a batch in several pieces has the gradients of the whole batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest

from models import mlp
from mpitrain import Accumulate, ArrayFunction, Parts, StopAtStep, Trainer, World
from mpitrain.errors import ConfigError, GradientError, MissingGradientError, MpitrainError
from mpitrain.optim import SGD

from .common import assert_same_bits
from .trainings import RATE, Record, bare_numpy, bits, builder, initial_parameters


def in_pieces(per_rank_batch: int, function: Any = mlp.loss_and_gradients) -> Callable[[World], Parts]:
    def build(world: World) -> Parts:
        parts = builder(71, 23, function=function)(world)
        return replace(parts, adapter=Accumulate(parts.adapter, per_rank_batch=per_rank_batch))

    return build


@pytest.mark.parametrize("per_rank_batch", [1, 2, 5, "by rank", 1000])
def test_gradients_in_pieces_are_those_of_the_batch(world: World, per_rank_batch: Any) -> None:
    largest = []

    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        largest.append(len(batch[0]))
        return mlp.loss_and_gradients(parameters, batch, on_gradient)

    most = 1 + world.rank if per_rank_batch == "by rank" else per_rank_batch
    record = Record()
    trainer = Trainer(in_pieces(most, function), [StopAtStep(10), record])
    trainer.run()
    parameters, losses, sizes = bare_numpy(71, 23, 10)
    assert max(largest) <= most
    assert [step.samples for step in record.steps] == sizes
    numpy.testing.assert_allclose([step.loss for step in record.steps], losses, rtol=1e-12)
    for name, value in trainer.adapter.parameters().items():
        numpy.testing.assert_allclose(value, parameters[name], rtol=1e-12, atol=1e-14)
    assert_same_bits(world, *trainer.adapter.parameters().values())


def test_one_piece_has_the_same_bits(world: World) -> None:
    plain = Trainer(builder(71, 23), [StopAtStep(5)])
    plain.run()
    trainer = Trainer(in_pieces(23), [StopAtStep(5)])
    trainer.run()
    assert bits(trainer) == bits(plain)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("missing", MissingGradientError, "dense1.bias"),
        ("twice", GradientError, "the gradient of dense1.bias was handed in twice for the same samples"),
        ("missing, then twice", GradientError, "the gradient of dense1.bias was handed in twice for the same samples"),
        ("shape", GradientError, r"the gradient of dense1.bias is float64 \(1, 5\); the parameter is float64 \(5,\)"),
    ],
)
def test_a_gradient_that_is_wrong_in_one_piece(world: World, what: str, kind: type[MpitrainError], text: str) -> None:
    pieces = 0

    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        nonlocal pieces
        pieces += 1

        def pass_on(name: str, gradient: Any) -> None:
            if name != "dense1.bias" or pieces > 2 or (what == "twice" and pieces == 1):
                on_gradient(name, gradient)
            elif what.startswith("missing") and pieces == 1:
                return
            elif what == "missing":
                on_gradient(name, gradient)
            elif what == "shape":
                on_gradient(name, gradient[None])
            else:
                on_gradient(name, gradient)
                on_gradient(name, gradient)

        return mlp.loss_and_gradients(parameters, batch, pass_on)

    trainer = Trainer(in_pieces(2, function))
    before = {name: value.tobytes() for name, value in trainer.adapter.parameters().items()}
    with pytest.raises(kind, match=text):
        trainer.step()
    assert {name: value.tobytes() for name, value in trainer.adapter.parameters().items()} == before


@pytest.mark.parametrize("per_rank_batch", [0, -1, 2.0, True], ids=repr)
def test_pieces_start_at_1(world: World, per_rank_batch: Any) -> None:
    adapter = ArrayFunction(mlp.loss_and_gradients, initial_parameters(), SGD(RATE))
    with pytest.raises(ConfigError, match=re.escape(f"Accumulate: per_rank_batch={per_rank_batch!r}; it must be a")):
        Accumulate(adapter, per_rank_batch=per_rank_batch)
