"""world.where: how a value lies over the ranks."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from mpitrain import World
from mpitrain.errors import MismatchError, TreeError


def test_equal_values(world: World) -> None:
    for value in (numpy.arange(6.0).reshape(2, 3), numpy.zeros((0, 2)), numpy.array(1), 2.5, numpy.array([numpy.nan])):
        layout = world.where(value, "equal")
        assert layout.kind == "equal"
        assert layout.groups == (tuple(range(world.size)),)
        assert layout.shapes == (numpy.shape(value),) * world.size
        world.where(value, "sum")
    # The order in memory does not count.
    mixed = numpy.arange(6.0).reshape(2, 3)
    assert world.where(numpy.asfortranarray(mixed) if world.rank else mixed).kind == "equal"


def test_zeros_of_other_signs_differ(world: World) -> None:
    if world.size == 1:
        pytest.skip("one rank is equal to itself")
    layout = world.where(-0.0 if world.rank == world.size - 1 else 0.0)
    assert layout.kind == "differs"
    assert layout.groups == (tuple(range(world.size - 1)), (world.size - 1,))
    with pytest.raises(MismatchError, match=rf"rank {world.size - 1} on .*: other bits; rank 0 on .*: float64 \(\)"):
        world.where(-0.0 if world.rank == world.size - 1 else 0.0, "equal")


@pytest.mark.parametrize("samples", [0, 1, 2, 7, 60])
def test_parts_of_a_batch(world: World, samples: int) -> None:
    batch = numpy.arange(2.0 * samples).reshape(samples, 2)
    ends = [samples * rank // world.size for rank in range(world.size + 1)]
    layout = world.where(batch[ends[world.rank] : ends[world.rank + 1]], "parts")
    assert sum(shape[0] for shape in layout.shapes) == samples
    lengths = {shape[0] for shape in layout.shapes}
    assert layout.kind == ("parts" if len(lengths) > 1 else "equal" if world.size == 1 or samples == 0 else "differs")
    if layout.kind == "parts":
        with pytest.raises(MismatchError, match=r"dtype and shape of summands of a sum are equal on all ranks"):
            world.where(batch[ends[world.rank] : ends[world.rank + 1]], "sum")
    if world.size > 1:
        other = batch.astype(numpy.float32) if world.rank == 1 else batch
        with pytest.raises(
            MismatchError, match=r"rank 1 on .*: float32 .*; rank 0 on .*: float64 .*all dimensions but"
        ):
            world.where(other, "parts")
        assert world.where(other).kind == "unlike"
        assert "rank 1 has float32" in str(world.where(other))
        with pytest.raises(MismatchError, match=r"rank 1 on .*: float64 \(\)"):
            world.where(numpy.array(1.0) if world.rank == 1 else numpy.ones(1), "parts")


def test_summands(world: World) -> None:
    layout = world.where(numpy.full(3, world.rank // 2), "sum")
    assert layout.groups == tuple(tuple(range(first, min(first + 2, world.size))) for first in range(0, world.size, 2))


@pytest.mark.parametrize("value", ["text", None, [1, 2], numpy.array([None])])
def test_what_has_no_layout(world: World, value: Any) -> None:
    with pytest.raises(TreeError, match=r"rank \d on .*: where takes"):
        world.where(value)
    with pytest.raises(ValueError, match="'equal', 'parts', 'sum'"):
        world.where(1, "part")  # type: ignore[arg-type]  # that is the point


def test_ranks_that_expect_different_layouts(world: World) -> None:
    if world.size == 1:
        pytest.skip("one rank expects one layout")
    with pytest.raises(MismatchError, match=r"where, expected='sum'"):
        world.where(1, "sum" if world.rank == world.size - 1 else "equal")


def test_a_number_is_no_part(world: World) -> None:
    with pytest.raises(MismatchError, match="a number is no part of a batch"):
        world.where(1.0, "parts")
