"""What the tests of checkpoints share: optimizers, damage, and a training on several nodes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from models import mlp
from mpitrain import ArrayFunction, Hook, Parts, Sync, Trainer, World
from mpitrain.config import read_config
from mpitrain.data import ArrayData
from mpitrain.optim import SGD, Adam, warmup_cosine
from mpitrain.state.store import TENSORS

from .placements import placed
from .trainings import MOMENTUM, RATE, samples_of

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: SGD(RATE, momentum=MOMENTUM, nesterov=True),
    "adam": lambda: Adam(warmup_cosine(0.01, warmup_steps=3, total_steps=12), clip_norm=0.5),
}


def truncate(path: Path) -> None:
    file = path / TENSORS
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray((path / TENSORS).read_bytes())
    content[-9] ^= 1
    (path / TENSORS).write_bytes(content)


def trainer_there(
    world: World, monkeypatch: pytest.MonkeyPatch, placement: str, hooks: list[Hook], compression: str = "none"
) -> Trainer:
    """A Trainer in a world whose ranks are on several nodes. Its float32 gradients may be compressed."""
    own = placed(world, placement).replaced(config=read_config({"MPITRAIN_COMPRESSION": compression}, {}))
    monkeypatch.setattr("mpitrain.training.trainer.init", lambda: own)
    samples = [part.astype("float32") if part.dtype.kind == "f" else part for part in samples_of(90)]

    def build(world: World) -> Parts:
        parameters = mlp.initial(numpy.random.default_rng(1), numpy, inputs=6, hidden=(8,), classes=3)
        adapter = ArrayFunction(mlp.loss_and_gradients, parameters, SGD(RATE, momentum=MOMENTUM))
        return Parts(adapter, Sync(), ArrayData(world, tuple(samples), global_batch=40))

    return Trainer(build, hooks)
