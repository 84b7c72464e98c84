"""mt.keep: what differs between the ranks is an error on all of them; and in-memory checkpoints of several hosts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy
import pytest

import mpitrain as mt
from keeping import keeper
from mpitrain import World
from mpitrain.errors import CheckpointError, ConfigError, MismatchError, MpitrainError
from mpitrain.launch.kept import KeeperLine
from mpitrain.state.copies import KeptCopies, state_name
from mpitrain.state.memory_slot import MemorySlot
from mpitrain.state.names import split

from .common import error_on_all, named_ranks, skip_alone
from .placements import placed


class Scheduler:
    """An object with a state, as in PyTorch."""

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError(state)


def refused(kind: type[MpitrainError], call: Callable[[], Any]) -> str:
    """`call` must raise this error on every rank; each says its own name."""
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.known_everywhere
    return str(caught.value)


def test_equal_values_in_other_objects(world: World) -> None:
    """Equal values need not be the same objects, and what differs without meaning may differ."""
    text = "".join(["te", "xt"])
    same = {"w": numpy.arange(3.0), "set": {"a", "b", "c"}, object: 1, "pair": (text, text if world.rank else "text")}
    kept = mt.keep(same=same, count=numpy.int64(3) if world.rank else 3, step=0)
    kept.update(step=1)
    kept.update()
    assert (kept["step"], kept.step_number) == (1, 2)


def test_values_that_differ(world: World) -> None:
    skip_alone(world)
    odd, first = named_ranks(world, world.size - 1)
    is_odd = world.rank == world.size - 1
    cases: list[tuple[dict[str, Any], str]] = [
        ({"w": numpy.zeros(3), ("v" if is_odd else "u"): 1}, "v (value)"),
        ({"w": numpy.zeros(4 if is_odd else 3)}, "w is float64 (4,)"),
        ({"w": numpy.full(3, -0.0 if is_odd else 0.0)}, "w is float64 (3,), checksum"),
        ({"options": {"rate": [0.1, 0.2 if is_odd else 0.3]}}, "options['rate'][1] is 0.2"),
    ]
    for values, text in cases:
        message = error_on_all(world, MismatchError, lambda values=values: mt.keep(**values))
        assert odd in message, message
        assert first in message, message
        assert text in message, message


def test_one_rank_updates_something_else(world: World) -> None:
    skip_alone(world)
    is_odd = world.rank == world.size - 1
    kept = mt.keep(w=numpy.zeros(3), step=0)
    for good, wrong in (({"step": 1}, {"stop": 1}), ({}, {"step": 1}), ({"w": numpy.ones(3)}, {"w": numpy.ones(2)})):
        error_on_all(world, MismatchError, lambda values=wrong if is_odd else good: kept.update(**values))
    assert (kept["step"], kept["w"].tolist(), kept.step_number) == (0, [0, 0, 0], 0)


def test_all_ranks_update_what_is_not_kept(world: World) -> None:
    kept = mt.keep(w=numpy.zeros(3), step=0)
    assert "kept are w, step. Give it to keep()" in refused(ConfigError, lambda: kept.update(stop=1))
    refused(CheckpointError, lambda: kept.update(w=numpy.zeros(2)))
    assert world.sum(kept.step_number) == 0


@pytest.mark.parametrize("on_all", [True, False])
def test_an_object_with_a_state_is_no_value(world: World, on_all: bool) -> None:
    """Even on one rank."""
    value = Scheduler() if on_all or world.rank == world.size - 1 else 1
    text = refused(ConfigError, lambda: mt.keep(scheduler=value, step=0))
    assert "keep(scheduler=...) was given a Scheduler" in text
    assert "give it without a name to mpitrain.torch.keep" in text
    assert world.sum(1) == world.size


def test_hosts_that_have_counted_alike_with_other_states(world: World) -> None:
    """Each host counts the copies of a step by itself, so equal numbers do not prove equal copies."""
    with keeper() as name, closing(KeeperLine(name, "try")) as line:
        slot = MemorySlot()
        line.keep(state_name(1), [slot.descriptor])
        slot.write(3, 1, 0, *split({"rank": world.rank, "w": numpy.full(world.rank + 1, world.rank)}))
        slot.close()
        copies = KeptCopies(placed(world, "alone on each node"), line, 1)
        assert copies.version == (3, 1)
        state = copies.read().state
    assert world.allgather((state["rank"], state["w"].tolist())) == [(0, [0])] * world.size
