"""Functions for the other parts of a loop with `prepare`: evaluate, save, resume."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mpitrain.job.start import init
from mpitrain.torch.batch_weight import MeanNumber
from mpitrain.torch.sharded import ShardedData
from mpitrain.torch.uncompiled import uncompiled


@uncompiled
def shard(data: Iterable[Any], *, form: Any = None) -> ShardedData:
    """Return this rank's part of every batch, for evaluating a model. This is `prepare` for data alone.

        test = mpitrain.torch.shard(test_loader)
        right = sum(test.sum(model(x).argmax(1) == y) for x, y in test)  # of all ranks, each sample once

    Every rank calls this with the same data, and the ranks take the batches together.

    Args:
        data, form: see `prepare`.

    Raises:
        ConfigError, MismatchError: see `prepare`.
    """
    return data if isinstance(data, ShardedData) else ShardedData(init(), data, form=form)


@uncompiled
def save(state: Any, path: Path | str) -> None:
    """Write rank 0's `state` with torch.save, completely or not at all.

    Every rank calls this, and returns when the file is complete. An old file is replaced only by a complete one.

    Args:
        state: an object for torch.save, such as a dict of state_dict()s. Other ranks' `state` is ignored.
        path: the file on rank 0's machine. It is overwritten.

    Raises:
        MpitrainError: the file cannot be written. Raised on every rank; an old file is unchanged.
    """
    path, world = Path(path), init()
    if world.rehearsal:
        world.print(f"{world.rehearsal}: {path} is not saved")
        return
    with world.together(f"save {path}"):
        if world.is_root:
            part = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                with part.open("wb") as file:
                    torch.save(_plain(state), file)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)


def _plain(state: Any) -> Any:
    """Return a state in which the results of `mean` are plain numbers, so that programs without mpitrain can load
    it."""
    if isinstance(state, MeanNumber):
        return state.item()
    if type(state) is dict:
        return {key: _plain(value) for key, value in state.items()}
    return type(state)(map(_plain, state)) if type(state) in (list, tuple) else state


@uncompiled
def load(path: Path | str) -> Any:
    """Return on every rank what `save` wrote, or None if rank 0's machine has no such file.

    Every rank calls this. Rank 0 reads the file, so it need not be in a shared folder. Tensors are loaded to the CPU.
    The file is read with weights_only=True, which runs no code from the file.

    Args:
        path: the file on rank 0's machine.

    Raises:
        MpitrainError: the file cannot be read. Raised on every rank.
    """
    path, world = Path(path), init()
    if world.rehearsal:
        world.print(f"{world.rehearsal}: {path} is not loaded, as if the file did not exist")
        return None
    content = None
    with world.together(f"load {path}"):
        if world.is_root and path.exists():
            content = path.read_bytes()
    content = world.broadcast_object(content)
    state = None
    with world.together(f"load {path}"):
        if content is not None:
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state
