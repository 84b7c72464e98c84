"""A TorchModule under every strategy of the registry, beside tests/ranks/test_strategies.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from mpitrain import ArrayFunction, Checkpoint, Parts, SparseLoCo, StopAtStep, TorchModule, Trainer, World
from mpitrain.data import ArrayData
from mpitrain.errors import ConfigError
from mpitrain.optim import SGD
from mpitrain.strategies import STRATEGIES, ServedStrategy, Strategy, make_strategy
from tests.ranks.common import assert_same_bits, error_on_all
from tests.ranks.test_rounds_resumed import forget_last
from tests.ranks.test_strategies import CODED

from .loops import STRATEGIES as ROUNDS
from .torch_modules import Net, Normed, adam, bits, builder, sgd

pytestmark = pytest.mark.filterwarnings("ignore:.*spare")


def parts(make: Callable[[], Strategy], optimizer: Any, kind: Any = Net) -> Callable[[World], Parts]:
    return lambda world: replace(builder(kind, optimizer)(world), strategy=make())


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resume_has_the_same_bits(world: World, shared: Path, name: str) -> None:
    """With an optimizer that has state for each parameter; in rounds also with running means.

    What a strategy refuses on several ranks, it trains on one: equal ranks without a server, or buffers.
    """
    refused = f"{world.size} equal ranks were started" if isinstance(make_strategy(name), ServedStrategy) else ""
    refused = refused or ("the model has 2 buffers whose mean all ranks need" if name in CODED else "")
    if refused and world.size > 1:
        assert refused in error_on_all(world, ConfigError, lambda: Trainer(parts(lambda: make_strategy(name), adam)))
        return
    # Clipping of parts rounds the norm otherwise than clipping of the whole, but alike before and after the resume.
    makes = [parts(lambda: make_strategy(name), adam)]
    if name in ROUNDS:
        makes.append(parts(ROUNDS[name], sgd, Normed))
    for number, make in enumerate(makes):
        path = shared / str(number)
        whole = Trainer(make, [StopAtStep(7)])
        whole.run()
        Trainer(make, [StopAtStep(5), Checkpoint(path, steps=4)]).run()
        forget_last(world, path, 5)
        resumed = Trainer(make, [StopAtStep(7), Checkpoint(path, steps=100)])
        resumed.run()
        for trainer in (whole, resumed):
            trainer.own_state()  # a sharded optimizer comes together
        assert bits(resumed) == bits(whole)
        whole.close()
        resumed.close()


def test_a_module_in_sparse_rounds(world: World) -> None:
    """A module has the bits of a function with the same gradients, which are exact in float32 here."""
    count, per_rank = 10, 4
    rows = numpy.random.default_rng(5).integers(-40, 40, (6 * per_rank * world.size, count)).astype(numpy.float32) / 8

    def function(parameters: Any, batch: numpy.ndarray, on_gradient: Any) -> float:
        on_gradient("w", batch.mean(axis=0))
        return float((parameters["w"] * batch).sum() / len(batch))

    def module() -> TorchModule:
        made = torch.nn.Module()
        made.w = torch.nn.Parameter(torch.zeros(count))
        loss = lambda module, batch: (module.w * batch).sum(dim=1).mean()  # noqa: E731
        return TorchModule(made, loss, torch.optim.SGD(made.parameters(), lr=0.5))

    def trained(make: Callable[[], Any]) -> numpy.ndarray:
        def build(world: World) -> Parts:
            data = ArrayData(world, rows, global_batch=per_rank * world.size)
            return Parts(make(), SparseLoCo(2, density=0.3, decay=0.5), data)

        trainer = Trainer(build, [StopAtStep(6)])
        trainer.run()
        (value,) = trainer.adapter.parameters().values()
        assert_same_bits(world, value)
        found = value.copy()
        trainer.close()
        return found

    expected = trained(lambda: ArrayFunction(function, {"w": numpy.zeros(count, numpy.float32)}, SGD(0.5)))
    assert trained(module).tobytes() == expected.tobytes()
    assert numpy.count_nonzero(expected) >= 3
