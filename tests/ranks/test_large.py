"""More than 2^31 elements and bytes: where numbers of 32 bits end."""

from __future__ import annotations

import os

import numpy
import pytest

from mpitrain import World
from mpitrain.allreduce import make_algorithm
from mpitrain.forecast.rounds import TILE, count_wrong, fill, sum_tile, tile
from mpitrain.reducer.exchange import CompressedExchange

from .placements import placed

pytestmark = pytest.mark.nightly

UINT8, FLOAT32 = numpy.dtype(numpy.uint8), numpy.dtype(numpy.float32)
LOOK = 1024 * TILE  # at so many elements at a time: to compare takes memory


@pytest.fixture(autouse=True)
def _is_room(world: World) -> None:
    if world.size != 2:
        pytest.skip("for 2 ranks: takes 3 GiB for each")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if world.broadcast_object(free) < 8 * 2**30:
        pytest.skip(f"needs 8 GiB of free memory, there are {free / 2**30:.1f}")


@pytest.mark.parametrize(
    "name", ["direct", "halving_doubling", "native", "recursive_doubling", "ring", "shared_memory"]
)
@pytest.mark.parametrize(("count", "dtype"), [(2**31 + 5, UINT8), (2**29 + 5, FLOAT32)], ids=str)
def test_sum(world: World, name: str, count: int, dtype: numpy.dtype) -> None:
    algorithm = make_algorithm(world, name)
    flat = algorithm.allocate(count, dtype)
    fill([flat], tile(world.rank, world.size, dtype))
    algorithm.start(flat).wait()
    expected = sum_tile(world.size, dtype)
    assert sum(count_wrong(flat[begin : begin + LOOK], expected) for begin in range(0, count, LOOK)) == 0


def test_compressed(world: World) -> None:
    """Values of 2 GiB and more; int8, whose wire has two parts. 127 in every block makes it exact."""
    exchange = CompressedExchange(placed(world, "alone on each node"), "int8")
    slot = exchange.allocate(2**29 + 5, FLOAT32)
    flat = slot.flat
    flat[:] = 127
    flat[-1] = 50
    exchange.mean(slot, slice(None), 1.0).wait()
    assert (flat[:-1] == 127 * world.size).all()
    assert abs(flat[-1] - 50 * world.size) <= 2
