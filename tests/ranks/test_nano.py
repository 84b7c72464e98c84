"""examples/nano.py, the package in one file, has the package's bits."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

import mpitrain as mt
from mpitrain import World
from mpitrain.reducer.exchange import make_exchange

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import nano

BATCH, BUCKET_BYTES, SEED = 16, 1024, 3


class Nano(nano.Trainer):
    global_batch, bucket_bytes, seed = BATCH, BUCKET_BYTES, SEED


def trainer_of(world: World, count: int) -> Nano:
    return Nano(world.comm, nano.network, nano.initial(24), *nano.spirals(count))


def trained_by_the_package(world: World, count: int, epochs: int) -> tuple[list[float], nano.Arrays]:
    """Losses, and the parameters at the end; with nano's order of samples."""
    orders = [numpy.random.default_rng((SEED, epoch)).permutation(count) for epoch in range(epochs)]
    x, y = (array[numpy.concatenate(orders)] for array in nano.spirals(count))

    def function(parameters: nano.Arrays, batch: tuple[numpy.ndarray, numpy.ndarray], ready: Any) -> float:
        if len(batch[0]):
            return nano.network(parameters, *batch, ready)
        for name, value in parameters.items():
            ready(name, numpy.zeros_like(value))
        return 0.0

    def build(world: World) -> mt.Parts:
        adapter = mt.ArrayFunction(function, nano.initial(24), mt.optim.SGD(Nano.rate, momentum=Nano.momentum))
        strategy = mt.Sync(lambda world: make_exchange(world, algorithm="ring"))
        return mt.Parts(adapter, strategy, mt.data.ArrayData(world, (x, y), global_batch=BATCH, shuffle=False))

    config = replace(world.config, bucket_mib=BUCKET_BYTES / 2**20)
    trainer = mt.Trainer(build, world=world.replaced(config=config))
    losses = [trainer.step().loss for _ in range(-(-len(x) // BATCH))]
    return losses, trainer.adapter.parameters()


@pytest.mark.parametrize(
    ("count", "epochs"),
    [(4 * BATCH, 3), (3 * BATCH + 9, 1), (3 * BATCH + 1, 1)],  # the last batch: full, uneven, fewer samples than ranks
)
def test_nano_has_the_bits_of_the_package(world: World, count: int, epochs: int) -> None:
    trainer = trainer_of(world, count)
    losses = [trainer.step() for _ in range(epochs * -(-count // BATCH))]
    expected_losses, expected = trained_by_the_package(world, count, epochs)
    assert len(trainer.reducer.buckets) > 1
    assert losses == expected_losses
    for name, value in expected.items():
        assert trainer.parameters[name].tobytes() == numpy.asarray(value).tobytes(), name


def test_nano_resumes_with_the_same_bits(world: World, tmp_path: Path) -> None:
    path = Path(world.allgather(str(tmp_path / "nano.npz"))[0])
    whole = trainer_of(world, 3 * BATCH + 9)
    losses = [whole.step() for _ in range(7)]
    trainer = trainer_of(world, 3 * BATCH + 9)
    first = [trainer.step() for _ in range(3)]
    trainer.save(path)
    trainer.step()  # what the checkpoint does not have
    again = trainer_of(world, 3 * BATCH + 9)
    again.load(path)
    assert first + [again.step() for _ in range(4)] == losses
    for name, value in whole.parameters.items():
        assert again.parameters[name].tobytes() == value.tobytes(), name


def test_nano_refuses_on_every_rank(world: World, tmp_path: Path) -> None:
    """What one rank cannot do is an error on all, and the next call is paired again."""
    trainer = trainer_of(world, 4 * BATCH)
    last = world.size - 1
    with pytest.raises(RuntimeError, match=r"rank 0: .*no_such_file"):
        trainer.load(tmp_path / "no_such_file")

    def without_gradients(*given: Any) -> float:
        return 1.0 if world.rank == last else nano.network(*given)

    def infinite(*given: Any) -> float:
        return nano.network(*given) if world.rank != last else nano.network(*given) + numpy.inf

    for model, text in ((without_gradients, "no gradient of bias0"), (infinite, "a loss of inf")):
        trainer.model, before = model, trainer.flat.copy()
        trainer.reducer.flat.view(numpy.uint32).fill(0x7F800001)  # unwritten memory may hold signalling NaNs
        with pytest.raises(RuntimeError, match=f"rank {last} has {text}; no rank has changed"):
            trainer.step()
        assert trainer.flat.tobytes() == before.tobytes()
    if world.size > 1:
        with pytest.raises(RuntimeError, match=f"rank {last}: save {last}; rank 0: save 0; all ranks must"):
            nano.agree(world.comm, f"save {last if world.rank == last else 0}")
    trainer.model = nano.network
    assert numpy.isfinite(trainer.step())
