"""A loop in rounds that resumes, on the same ranks and on others, and what it does not continue from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import mpitrain.torch
from mpitrain import DiLoCo, LocalSGD, SparseLoCo, StopAtStep, Sync, Trainer, World
from mpitrain.errors import CheckpointError
from mpitrain.optim import SGD
from mpitrain.strategies import Strategy
from mpitrain.torch.residuals import residuals_of
from tests.ranks.common import error_on_all, skip_alone

from .loops import EVERY, Loop
from .loops import STRATEGIES as ROUNDS
from .prepared import assert_equal_everywhere
from .torch_modules import CLASSES, INPUTS, Net, Normed, builder, sgd


class Plain(torch.nn.Sequential):
    """SparseLoCo takes a module without buffers."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(INPUTS, 40), torch.nn.Tanh(), torch.nn.Linear(40, CLASSES))


def adam(module: torch.nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    trained = [one for one in module.parameters() if one.requires_grad]
    return torch.optim.AdamW(trained, lr=0.05), {"schedule": lambda step: 0.05 / (1 + step)}


def sparse() -> Strategy:
    return SparseLoCo(EVERY, density=0.2)


def diloco() -> Strategy:
    return DiLoCo(EVERY, outer=SGD(0.5, momentum=0.5))


SPARSE = (sparse, Plain, sgd, torch.float32)


CASES = {
    **{
        f"{kind.__name__}-{name}": (make, kind, sgd, torch.float64)
        for name, make in ROUNDS.items()
        for kind in (Net, Normed)
    },
    "Net-diloco-AdamW": (diloco, Net, adam, torch.float64),
    "Plain-sparse_loco": SPARSE,
}


def test_sparse_loco_and_the_trainer(world: World) -> None:
    """The parameters have the same bits."""
    make = builder(Plain, sgd, dtype=torch.float32)
    trainer = Trainer(lambda world: replace(make(world), strategy=sparse()), [StopAtStep(8)])
    trainer.run()
    loop = Loop(world, *(sparse(), *SPARSE[1:])).prepare()
    loop.run()
    mpitrain.torch.end_round(loop.model)
    names = [name for name, _ in loop.model.named_parameters()]
    assert loop.bits() == [trainer.adapter.parameters()[name].tobytes() for name in names]
    assert_equal_everywhere(world, loop.model)
    trainer.close()


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumes_within_a_round(world: World, shared: Path, name: str) -> None:
    """Bit for bit with the residuals, which hold each rank's own parameters and momentum."""
    make, *given = CASES[name]
    whole, first, resumed = (Loop(world, make(), *given) for _ in range(3))
    whole.prepare().run()
    first.prepare().run(4)
    state = {"model": first.model.state_dict(), "residuals": mpitrain.torch.residuals(first.model)}
    mpitrain.torch.save(state, shared / "state.pt")
    first.run()  # undisturbed by the look at it, but what is under way has arrived
    assert first.bits() == whole.bits()
    read = mpitrain.torch.load(shared / "state.pt")
    resumed.model.load_state_dict(read["model"])
    resumed.prepare()
    mpitrain.torch.restore_residuals(resumed.model, read["residuals"])
    resumed.number = 4
    resumed.run()
    assert resumed.bits() == whole.bits()


def saved_by(world: World, loop: Loop) -> dict[str, Any]:
    """What every rank reads of a loop: its model, and the residuals of all ranks."""
    state = {"model": loop.model.state_dict(), "of_ranks": mpitrain.torch.residuals(loop.model)["of_ranks"]}
    read: dict[str, Any] = world.broadcast_object(state)
    return read


def test_a_run_resumes_on_other_ranks(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """All begin with the parameters of the last outer step, and its momentum."""
    skip_alone(world)
    first = Loop(world, diloco()).prepare()
    first.run(3)
    met = first.bits()
    first.run(5)
    state = saved_by(world, first)
    of_ranks = state["of_ranks"]
    other = Loop(world, diloco())
    other.model.load_state_dict(state["model"])
    other.prepare()
    capsys.readouterr()
    mpitrain.torch.restore_residuals(other.model, {"of_ranks": [*of_ranks, of_ranks[0]]})
    out = capsys.readouterr().out
    text = f"each rank's own state with local updates is not restored: it was saved by {world.size + 1} ranks"
    assert out.count(text) == world.is_root
    assert out.count("All ranks begin with the parameters of the last outer step") == world.is_root
    assert other.bits() == met
    kept = world.broadcast_object(residuals_of(other.model).state().get("common"))["outer"]
    for number, of_dtype in of_ranks[0]["common"]["outer"].items():
        for dtype, optimizer in of_dtype.items():
            momentum = [one for one in optimizer.values() if isinstance(one, torch.Tensor)]
            assert any(one.any() for one in momentum)
            found = [one for one in kept[number][dtype].values() if isinstance(one, torch.Tensor)]
            assert all(torch.equal(one, its) for one, its in zip(found, momentum, strict=True))
    other.number = 5
    other.run()
    mpitrain.torch.end_round(other.model)
    assert_equal_everywhere(world, other.model)


@pytest.mark.parametrize("make", [lambda: LocalSGD(EVERY), diloco, sparse], ids=["local_sgd", "diloco", "sparse_loco"])
def test_what_the_ranks_have_learned_is_not_lost(world: World, make: Callable[[], Strategy]) -> None:
    """On other nodes, the next outer step gets the sums over ranks. By SparseLoCo, they come over several ones."""
    skip_alone(world)
    given = SPARSE[1:] if make is sparse else (Net,)
    first = Loop(world, make(), *given).prepare()
    first.run(5)
    state = saved_by(world, first)
    mpitrain.torch.end_round(first.model)
    other = Loop(world, make(), *given)
    other.model.load_state_dict(state["model"])
    other.prepare()
    mpitrain.torch.restore_residuals(
        other.model, {"of_ranks": [{**one, "place": "elsewhere"} for one in state["of_ranks"]]}
    )
    carried = residuals_of(other.model).state()["own"]["carried"]
    before = [one["own"]["residual"] for one in state["of_ranks"]]
    assert any("/gone/" in name for name in before[0])
    assert any("/left out/" in name for name in before[0]) == (make is sparse)
    for name in before[0]:
        found, wanted = world.sum(carried[name].numpy()), [one[name].numpy().astype("float64") for one in before]
        rounding = world.size * 2**-24 * sum(map(abs, wanted)).max()
        numpy.testing.assert_allclose(found, sum(wanted), rtol=0, atol=rounding, err_msg=name)
    mpitrain.torch.end_round(other.model)
    assert_equal_everywhere(world, other.model)
    if make is not sparse:
        for name, value in other.model.named_parameters():
            wanted = first.model.get_parameter(name).detach().numpy()
            numpy.testing.assert_allclose(value.detach().numpy(), wanted, rtol=1e-12, atol=1e-14, err_msg=name)


def test_residuals_of_another_strategy(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Between Sync and rounds they are refused, in both directions. Of other rounds, a line says what is restored."""
    first = Loop(world, LocalSGD(3)).prepare()
    first.run(5)
    state = saved_by(world, first)
    other = Loop(world, Sync()).prepare()
    text = error_on_all(world, CheckpointError, lambda: mpitrain.torch.restore_residuals(other.model, state))
    assert "was trained with local updates, by LocalSGD(sync_every=3, " in text
    assert "and this one is trained without local updates. Train it as before, or continue" in text
    other.run(2)
    of_sync = {"of_ranks": [{"place": "here", "residual": {}, "factors": {}}] * world.size}
    text = error_on_all(world, CheckpointError, lambda: mpitrain.torch.restore_residuals(first.model, of_sync))
    assert "was trained without local updates, and this one is trained with local updates, by LocalSGD(" in text
    longer = Loop(world, LocalSGD(4))
    longer.model.load_state_dict(state["model"])
    longer.prepare()
    capsys.readouterr()
    mpitrain.torch.restore_residuals(longer.model, state)
    text = "is not restored: it was saved by LocalSGD(sync_every=3, "
    assert capsys.readouterr().out.count(text) == world.is_root
    mpitrain.torch.end_round(longer.model)
    mpitrain.torch.end_round(first.model)
    numpy.testing.assert_allclose(longer.model.last.weight.detach(), first.model.last.weight.detach(), rtol=1e-12)
