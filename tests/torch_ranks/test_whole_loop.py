"""What a loop does besides training: metrics over all samples, one file for all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpitrain import World
from mpitrain.errors import DataError, MpitrainError
from tests.ranks.common import error_on_all

from .prepared import NUM_SAMPLES, loader, samples, torch

import mpitrain.torch  # isort: skip (the line above skips this file where there is no PyTorch)


def test_metrics_are_those_of_all_samples(world: World) -> None:
    """Also of the last batch, of one sample: most ranks compute with one that does not count."""
    x, y = samples()
    data = mpitrain.torch.shard(loader())
    right, means, sizes = 0.0, [], []
    for own_x, own_y in data:
        right += data.sum(own_y == 1)
        means.append(data.mean(own_x.mean()))
        sizes.append(data.share.total)
    assert right == int((y == 1).sum())
    expected = [float(x[begin : begin + 8].mean()) for begin in range(0, NUM_SAMPLES, 8)]
    assert means == pytest.approx(expected, rel=1e-14)
    assert sizes == [8, 8, 8, 8, 1]
    # Behind the loop they are of the last batch, whose sample is rank 0's.
    assert data.mean(float(world.rank)) == 0.0
    assert data.sum([5.0 + world.rank]) == 5.0


def test_metrics_that_cannot_be(world: World) -> None:
    data = mpitrain.torch.shard(loader())
    for call in (data.mean, data.sum):
        assert "there was no batch yet" in error_on_all(world, DataError, lambda call=call: call(1.0))
    batches = iter(data)
    x, _ = next(batches)
    assert f"the {len(x)} samples of this rank's part; it was given the shape ()" in error_on_own(lambda: data.sum(1.0))
    assert "it was given the shape (2,)" in error_on_own(lambda: data.mean([1.0, 2.0]))
    list(batches)
    assert world.sum(1) == world.size


def error_on_own(call: Any) -> str:
    with pytest.raises(DataError) as found:
        call()
    return str(found.value)


def test_a_file_of_all_ranks(world: World, shared: Path) -> None:
    path = shared / "state.pt"
    assert mpitrain.torch.load(path) is None
    for number in (1, 2):
        mpitrain.torch.save({"w": torch.full((3,), float(number + world.rank)), "epoch": number}, path)
        state = mpitrain.torch.load(path)
        assert state["epoch"] == number
        assert state["w"].tolist() == [number] * 3  # rank 0's
    assert [file.name for file in shared.iterdir()] == ["state.pt"]


def test_a_file_that_cannot_be_written_or_read(world: World, shared: Path) -> None:
    path = shared / "state.pt"
    mpitrain.torch.save({"epoch": 1}, path)
    text = error_on_all(world, MpitrainError, lambda: mpitrain.torch.save({"epoch": lambda: 2}, path))
    assert f"{world.name(0)}, save {path}: " in text
    assert mpitrain.torch.load(path) == {"epoch": 1}
    assert [file.name for file in shared.iterdir()] == ["state.pt"]
    text = error_on_all(world, MpitrainError, lambda: mpitrain.torch.save(1, shared / "missing" / "state.pt"))
    assert "No such file or directory" in text
    world.barrier()
    if world.is_root:
        path.write_bytes(path.read_bytes()[:-20])
    world.barrier()
    text = error_on_all(world, MpitrainError, lambda: mpitrain.torch.load(path))
    assert f"{world.name(0)}, load {path}: " in text
