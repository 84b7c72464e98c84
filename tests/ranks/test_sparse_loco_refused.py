"""What SparseLoCo refuses, the ends of what it allows, and a step that cannot be made."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy
import pytest

from mpitrain import ArrayFunction, SparseLoCo, World
from mpitrain.errors import ConfigError, MismatchError, NonFiniteError
from mpitrain.optim import SGD

from .common import error_on_all, skip_alone
from .walks import EVERY, SAMPLES, Walk, kept


def test_what_is_not_finite_is_named_and_not_spread(world: World) -> None:
    """The step before the outer step is not made, and what was kept stays as it was."""
    skip_alone(world)
    strategy, walk = SparseLoCo(EVERY, density=0.5), Walk(v=2, w=2)
    strategy.begin(world, walk.model)
    walk.round(strategy, 1 + world.rank, v=[1, 2], w=[3, 1 + world.rank])
    walk.step(strategy, 1 + world.rank, v=[1, 2], w=[3, 5])
    before = walk["w"].tobytes(), kept(strategy).tobytes(), repr(strategy.state())
    odd = world.size - 1
    largest = float(numpy.finfo(numpy.float32).max)
    walk["w"][:] = -largest / 16 if world.rank == odd else walk["w"]
    poisoned = walk["w"].tobytes()
    walk.gradients["w"][:] = largest
    with numpy.errstate(over="ignore"):
        text = error_on_all(world, NonFiniteError, lambda: walk.step(strategy, 1 + world.rank))
    assert f"{world.name(odd)}: w has become NaN or infinity in the steps of this round" in text
    assert walk["w"].tobytes() == poisoned
    assert kept(strategy).tobytes() == before[1]
    assert repr(strategy.state()) == before[2]
    strategy.close()
    assert world.sum(1) == world.size


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"density": 0}, "density=0; it must be a number from 0.00024 (one of 4096 values) to 0.5"),
        ({"density": 0.0002}, "density=0.0002; it must be"),
        ({"density": 0.6}, "density=0.6; it must be"),
        ({"density": float("nan")}, "density=nan; it must be"),
        ({"density": "0.1"}, "density='0.1'; it must be"),
        ({"bits": 0}, "bits=0; it must be an int from 1 to 4"),
        ({"bits": 5}, "bits=5; it must be"),
        ({"bits": True}, "bits=True; it must be"),
        ({"bits": 2.0}, "bits=2.0; it must be"),
        ({"decay": -0.1}, "decay=-0.1; it must be a number from 0 to 1"),
        ({"decay": 1.1}, "decay=1.1; it must be"),
        ({"decay": float("nan")}, "decay=nan; it must be"),
        ({"decay": None}, "decay=None; it must be"),
        ({"sync_every": 0}, "sync_every=0; it must be an int of at least 1"),
    ],
)
def test_numbers_that_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"SparseLoCo: {text}")):
        SparseLoCo(**given)


def test_the_ends_of_what_is_allowed(world: World) -> None:
    """One of 4096, and a half; nothing is kept, and all. A parameter without elements goes along."""
    for given in ({"density": 1 / 4096, "decay": 0}, {"density": 0.5, "decay": 1, "bits": 4}, {"density": 0.5}):
        strategy, walk = SparseLoCo(EVERY, **given), Walk(w=1, nothing=0)  # type: ignore[arg-type]
        strategy.begin(world, walk.model)
        for number in (1, 2):
            walk.round(strategy, SAMPLES[world.rank], w=[4.0])
            assert walk["w"].tolist() == [-4.0 * number]
        strategy.close()


def test_what_it_does_not_take(world: World) -> None:
    skip_alone(world)
    model = ArrayFunction(Walk(w=2), {"w": numpy.zeros(2), "v": numpy.zeros(2)}, SGD(1.0))
    text = error_on_all(world, ConfigError, lambda: SparseLoCo().begin(world, model))
    assert text == "SparseLoCo: it sends float32, and w is float64. Make all parameters float32, or use mt.DiLoCo"
    walk = Walk(w=2, mean=3)
    walk.model.num_buffers = 1  # type: ignore[attr-defined]
    text = error_on_all(world, ConfigError, lambda: SparseLoCo().begin(world, walk.model))
    assert "the model has 1 buffers whose mean all ranks need, such as mean" in text
    coded = world.replaced(config=replace(world.config, compression="int8"))
    text = error_on_all(world, ConfigError, lambda: SparseLoCo().begin(coded, Walk(w=2).model))
    assert "compression=int8: it has a form of its own" in text


@pytest.mark.parametrize("given", [{"density": 0.25}, {"bits": 3}, {"decay": 0.5}, {"sync_every": 3}])
def test_ranks_that_differ(world: World, given: dict[str, Any]) -> None:
    skip_alone(world)
    mine = given if world.rank == world.size - 1 else {}
    text = error_on_all(world, MismatchError, lambda: SparseLoCo(**mine).begin(world, Walk(w=2).model))
    assert f"{world.name(world.size - 1)}: SparseLoCo(" in text


def test_the_choice_of_auto_is_said(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """By rank 0. What is sent is that of no setting."""
    there, walks = world.replaced(config=replace(world.config, compression="auto")), []
    for its in (there, world):
        strategy, walk = SparseLoCo(EVERY, density=0.5), Walk(w=2)
        strategy.begin(its, walk.model)
        walk.round(strategy, SAMPLES[world.rank], w=[8, 6 + world.rank])
        walks.append(walk["w"].tobytes())
        strategy.close()
    assert walks[0] == walks[1]
    said = "mpitrain: compression auto: none; SparseLoCo sends its values as top_k:0.5:2\n"
    assert capsys.readouterr().out.count(said) == (world.rank == 0 and world.size > 1)
