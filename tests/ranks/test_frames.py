"""How many frames of mpitrain lie between Trainer.step and the MPI calls of the exchange."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import numpy
import pytest
from mpi4py import MPI

import mpitrain as mt
from mpitrain import World
from mpitrain.allreduce import ALGORITHMS
from mpitrain.reducer.exchange import Exchange, make_exchange

from .placements import placed

MOST_FRAMES = 8
PACKAGE = str(Path(mt.__file__).parent)
STEP = mt.Trainer.step.__code__
Chain = tuple[str, ...]


class Watch:
    """Collects, for each MPI call within a function, the functions of mpitrain from that function to the call."""

    def __init__(self, function: CodeType = STEP) -> None:
        self.function = function
        self.chains: set[Chain] = set()

    def note(self) -> None:
        """An MPI call is made by the caller of the caller."""
        frame, chain = sys._getframe(2), []
        while frame.f_back is not None and frame.f_code is not self.function:
            code = frame.f_code
            # A comprehension is a frame up to Python 3.11 only (PEP 709).
            if code.co_filename.startswith(PACKAGE) and code.co_name not in ("<listcomp>", "<dictcomp>", "<setcomp>"):
                chain.append(f"{Path(code.co_filename).stem}.{code.co_name}")
            frame = frame.f_back
        if frame.f_code is self.function:
            self.chains.add((f"{Path(self.function.co_filename).stem}.{self.function.co_name}", *reversed(chain)))


def watched(comm: MPI.Intracomm, watch: Watch) -> MPI.Intracomm:
    """The same communicator; `watch` notes its calls that return a request, and the tests of these requests."""

    class Request(MPI.Request):
        def Test(self, status: MPI.Status | None = None) -> bool:  # noqa: N802
            watch.note()
            return super().Test(status)

    def noted(method: Callable[..., MPI.Request]) -> Callable[..., Request]:
        def call(self: MPI.Intracomm, *arguments: Any, **named: Any) -> Request:
            watch.note()
            return Request(method(self, *arguments, **named))

        return call

    names = ("Isend", "Irecv", "Iallreduce", "Iallgather", "Ialltoall", "Ibarrier", "Ibcast", "Ireduce_scatter")
    calls = {name: noted(getattr(MPI.Intracomm, name)) for name in names}
    return type("Watched", (MPI.Intracomm,), calls)(comm)


def train(exchange: Callable[[World], Exchange], steps: int = 3) -> numpy.ndarray:
    """A model whose gradients are the rank's number plus 1, in two sizes; the parameters after these steps."""

    def function(parameters: Any, batch: Any, on_gradient: Callable[[str, numpy.ndarray], None]) -> float:
        for name, value in reversed(parameters.items()):
            on_gradient(name, numpy.full(value.shape, world.rank + 1, numpy.float32))
        return 0.0

    def build(world: World) -> mt.Parts:
        values = {"small": numpy.zeros(5, numpy.float32), "large": numpy.zeros(300_000, numpy.float32)}
        data = mt.data.ArrayData(world, (numpy.zeros((world.size, 1)),), global_batch=world.size)
        return mt.Parts(mt.ArrayFunction(function, values, mt.optim.SGD(1.0)), mt.Sync(exchange), data)

    world = mt.init()
    trainer = mt.Trainer(build)
    for _ in range(steps):
        trainer.step()
    return numpy.concatenate(list(trainer.adapter.parameters().values()))


@pytest.mark.parametrize("placement", ["one node", "dealt out over 2 nodes"])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_from_the_trainer_to_mpi(world: World, name: str, placement: str) -> None:
    if name == "shared_memory" and placement != "one node":
        pytest.skip("shared_memory is for one node")
    watch = Watch()

    def exchange(own: World) -> Exchange:
        there = own if placement == "one node" else placed(own, placement)
        return make_exchange(there.replaced(comm=watched(there.comm, watch)), name)

    parameters = train(exchange)
    # On 5 and 7 ranks a gradient's share of the mean is rounded to float32.
    numpy.testing.assert_allclose(parameters, -3 * (world.size + 1) / 2, rtol=5e-7)
    assert bool(watch.chains) == (world.size > 1)
    for chain in watch.chains:
        assert len(chain) <= MOST_FRAMES, " > ".join(chain)
