"""A training with virtual ranks that goes on with other threads, or on other processors, says so."""

from __future__ import annotations

import pytest

from mpitrain import World

from .virtual_trainings import alone, builder, one_thread, trained

__all__ = ["one_thread"]

OTHER = "this training goes on where kernels may round otherwise"


@pytest.mark.parametrize("where", ["here", "on another processor"])
def test_a_run_that_goes_on(
    world: World, where: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _, _, begun = trained(world, builder(), 2)
    if where != "here":
        monkeypatch.setattr("mpitrain.strategies.virtual_ranks._processor", lambda: "Abacus 3000")
    capfd.readouterr()
    _, _, resumed = trained(world, builder(), 4, state=begun.state())
    said = capfd.readouterr().out
    assert (OTHER in said) == (world.is_root and where != "here")
    assert ("Now it is computed on: Abacus 3000, " in said) == (world.is_root and where != "here")
    # Later runs know both places, and say nothing on either.
    _, _, third = trained(world, builder(), 5, state=resumed.state())
    monkeypatch.undo()
    _, _, fourth = trained(world, builder(), 6, state=third.state())
    assert OTHER not in capfd.readouterr().out
    assert len(fourth.strategy.places.state()) == (1 if where == "here" else 2)


def test_the_places_do_not_depend_on_the_number_of_ranks(world: World) -> None:
    _, _, with_all = trained(world, builder(), 1)
    _, _, by_itself = trained(alone(world), builder(), 1)
    assert with_all.strategy.places.state() == by_itself.strategy.places.state() != []
