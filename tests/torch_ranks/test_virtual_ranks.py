"""Virtual ranks of a PyTorch module: batch norm, dropout and buffers do not depend on the number of ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest

from mpitrain import Parts, StopAtStep, Sync, Trainer, World
from mpitrain.data import ArrayData
from mpitrain.job.worlds import make_world

from .prepared import torch

from mpitrain import TorchModule  # isort: skip (the line above skips this file where there is no PyTorch)
from mpitrain.state.names import split  # isort: skip

V, COUNT, WIDTH = 7, 36, 5  # batches of 21 and 15: in the second one, two virtual ranks have no samples


class Net(torch.nn.Module):
    """Batch norm, dropout, a counter of samples, noise of all generators, and a layer that some samples do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.3)
        )
        self.outer = torch.nn.Linear(8, 1)
        self.rare = torch.nn.Linear(8, 1)
        self.register_buffer("largest", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        noise = random.random() + numpy.random.random()
        hidden = self.inner(x + noise)
        self.largest += int(x[0, 0] * 100)
        return self.outer(hidden) + (self.rare(hidden) if x[0, 0] > 0.8 else 0)


def build(world: World) -> Parts:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Net()
    rng = numpy.random.default_rng(2)
    arrays = rng.standard_normal((COUNT, WIDTH)).astype("f4"), rng.standard_normal((COUNT, 1)).astype("f4")
    adapter = TorchModule(
        module,
        lambda module, batch: (module(batch[0]) - batch[1]).square().mean(),
        torch.optim.Adam(module.parameters(), lr=0.01),
        clip_norm=0.5,
    )
    return Parts(adapter, Sync(virtual_ranks=V, seed=1), ArrayData(world, arrays, global_batch=21, seed=4))


def trained(world: World, steps: int = 7) -> dict[str, bytes]:
    trainer = Trainer(build, [StopAtStep(steps)], world=world)
    trainer.run()
    return bits(trainer)


def bits(trainer: Trainer) -> dict[str, bytes]:
    tensors, values = split(trainer.state())
    return {name: its.tobytes() for name, its in tensors.items()} | {
        name: repr(its).encode() for name, its in values.items()
    }


@pytest.mark.filterwarnings("ignore:.*loss:UserWarning")  # of the layer that is not always used
def test_bits_are_those_of_one_rank(world: World) -> None:
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tobytes()
    with_all = trained(world)
    # The script's own random numbers go on as if there had been no training.
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), numpy.random.get_state()[1].tobytes())
    by_itself = trained(make_world(world.comm.Split(world.rank, 0)))
    assert with_all == by_itself
    running = next(value for name, value in with_all.items() if name.endswith("running_mean"))
    assert numpy.frombuffer(running, "f4").all()
