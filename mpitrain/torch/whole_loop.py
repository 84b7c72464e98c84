"""What a loop around `prepare` does besides training, a line each: evaluate, save, resume."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mpitrain.job.start import init
from mpitrain.torch.sharded import ShardedData
from mpitrain.torch.uncompiled import uncompiled


@uncompiled
def shard(data: Iterable[Any]) -> ShardedData:
    """This rank's part of every batch, to evaluate a model with: as `prepare` gives it, without a model.

        test = mpitrain.torch.shard(test_loader)
        right = sum(test.sum(model(x).argmax(1) == y) for x, y in test)  # of all ranks, each sample once

    Every rank calls it with the same data, and takes the batches at the same time.

    Args:
        data: see `prepare`.

    Raises:
        ConfigError, MismatchError: see `prepare`.
    """
    return data if isinstance(data, ShardedData) else ShardedData(init(), data)


@uncompiled
def save(state: Any, path: Path | str) -> None:
    """Write rank 0's `state` with torch.save, whole or not at all: the file is replaced when the new one is complete.

    Every rank calls it, and returns when the file is there.

    Args:
        state: what torch.save takes, such as a dict of state_dict()s. The other ranks' is not looked at.
        path: on rank 0's machine; overwritten.

    Raises:
        MpitrainError: it cannot be written. On every rank; an older file is as it was.
    """
    path, world = Path(path), init()
    if world.observer:
        world.print(f"mpitrain verify: {path} is not saved")
        return
    with world.together(f"save {path}"):
        if world.is_root:
            part = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                with part.open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)


@uncompiled
def load(path: Path | str) -> Any:
    """What `save` wrote, on every rank; None where rank 0's machine has no such file.

    Rank 0 reads the file, so it need not be on a share. Every rank calls it. Tensors come to the CPU. It is read with
    weights_only=True, which runs no code of the file.

    Raises:
        MpitrainError: it cannot be read. On every rank.
    """
    path, world = Path(path), init()
    if world.observer:
        world.print(f"mpitrain verify: {path} is not loaded, as if there were none")
        return None
    content = None
    with world.together(f"load {path}"):
        if world.is_root and path.exists():
            content = path.read_bytes()
    content = world.broadcast(content)
    state = None
    with world.together(f"load {path}"):
        if content is not None:
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state
