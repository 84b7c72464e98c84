"""Memory that the ranks of a node share: found, mapped and freed; and buffers beyond numbers of 32 bits."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy
import pytest

from mpitrain import World
from mpitrain.allreduce import ALGORITHMS, make_algorithm
from mpitrain.errors import MismatchError, MpitrainError
from mpitrain.forecast.rounds import TILE, count_wrong, fill, sum_tile, tile
from mpitrain.reducer.exchange import CompressedExchange

from .common import error_on_all, skip_alone
from .placements import placed

FLOAT32 = numpy.dtype(numpy.float32)
SHARING = ("auto", "hierarchical", "shared_memory")


def num_maps() -> int:
    """The number of pieces of such memory that this process sees."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:mpitrain")


@pytest.mark.parametrize("name", SHARING)
def test_it_is_freed_with_the_last_array_in_it(world: World, name: str) -> None:
    algorithm = make_algorithm(world, name)
    before = num_maps()
    flat = algorithm.allocate(100_000, FLOAT32)
    part = flat[50_000:]
    each = world.size if world.size > 1 else 0
    assert num_maps() == before + each
    del flat
    assert num_maps() == before + each
    part[:] = world.rank + 1  # it still is where the others find it
    algorithm.start(part).wait()
    assert (part == world.size * (world.size + 1) / 2).all()
    del part
    assert num_maps() == before


def test_it_is_freed_with_its_algorithm(world: World) -> None:
    before = num_maps()
    for _ in range(3):
        algorithm = make_algorithm(world, "auto")
        algorithm.start(numpy.ones(100_000)).wait()  # through the slab
        del algorithm
        assert num_maps() == before


def test_arrays_may_come_and_go_in_any_order(world: World) -> None:
    algorithm = make_algorithm(world, "shared_memory")
    dice = numpy.random.default_rng(0)  # the same on every rank
    flats: list[numpy.ndarray] = []
    for number in range(60):
        if len(flats) > 5:
            del flats[dice.integers(len(flats))]
        flats.append(algorithm.allocate(int(dice.integers(0, 5000)), FLOAT32))
        flat = flats[dice.integers(len(flats))]
        begin = int(dice.integers(0, flat.size + 1))
        flat[:] = number
        flat[begin:] = world.rank
        algorithm.start(flat[begin:]).wait()
        assert (flat[:begin] == number).all()
        assert (flat[begin:] == world.size * (world.size - 1) / 2).all()


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_ranks_may_allocate_before_or_after_they_wait(world: World, name: str) -> None:
    algorithm = make_algorithm(world, name)
    first = numpy.ones(70_000)
    handle = algorithm.start(first)
    if world.rank % 2:
        handle.wait()
    second = algorithm.allocate(1000, FLOAT32)
    handle.wait()
    second[:] = 1
    algorithm.start(second).wait()
    assert (first == world.size).all()
    assert (second == world.size).all()


def test_other_sizes_on_other_ranks(world: World) -> None:
    skip_alone(world)
    algorithm = make_algorithm(world, "shared_memory")
    count = 1000 if world.rank == 1 else 2000
    text = error_on_all(world, MismatchError, lambda: algorithm.allocate(count, FLOAT32))
    assert "rank 1 allocates 4000 bytes" in text
    assert "rank 0 on the same node allocates 8000" in text


def test_a_rank_that_cannot_map(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_alone(world)
    algorithm = make_algorithm(world, "shared_memory")
    before = num_maps()
    if world.rank == 1:

        def refused(*_: object) -> numpy.ndarray:
            raise PermissionError(13, "no")

        monkeypatch.setattr("mpitrain.allreduce.node_memory._map", refused)
    text = error_on_all(world, MpitrainError, lambda: algorithm.allocate(1000, FLOAT32))
    assert text.startswith("rank 1 cannot map the memory of the ranks on its node: Permission denied.")
    assert "MPITRAIN_ALGORITHM=ring" in text
    assert num_maps() == before


UINT8 = numpy.dtype(numpy.uint8)
LOOK = 1024 * TILE  # at so many elements at a time: to compare takes memory


@pytest.fixture
def room(world: World) -> None:
    if world.size != 2:
        pytest.skip("for 2 ranks: takes 3 GiB for each")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if world.broadcast_object(free) < 8 * 2**30:
        pytest.skip(f"needs 8 GiB of free memory, there are {free / 2**30:.1f}")


@pytest.mark.nightly
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize(
    "name", ["direct", "halving_doubling", "native", "recursive_doubling", "ring", "shared_memory"]
)
@pytest.mark.parametrize(("count", "dtype"), [(2**31 + 5, UINT8), (2**29 + 5, FLOAT32)], ids=str)
def test_more_than_numbers_of_32_bits(world: World, name: str, count: int, dtype: numpy.dtype) -> None:
    algorithm = make_algorithm(world, name)
    flat = algorithm.allocate(count, dtype)
    fill([flat], tile(world.rank, world.size, dtype))
    algorithm.start(flat).wait()
    expected = sum_tile(world.size, dtype)
    assert sum(count_wrong(flat[begin : begin + LOOK], expected) for begin in range(0, count, LOOK)) == 0


@pytest.mark.nightly
@pytest.mark.usefixtures("room")
def test_more_than_2_gib_compressed(world: World) -> None:
    """Values of 2 GiB and more; int8, whose wire has two parts. 127 in every block makes it exact."""
    exchange = CompressedExchange(placed(world, "alone on each node"), "int8")
    slot = exchange.allocate(2**29 + 5, FLOAT32)
    flat = slot.flat
    flat[:] = 127
    flat[-1] = 50
    exchange.mean(slot, slice(None), 1.0).wait()
    assert (flat[:-1] == 127 * world.size).all()
    assert abs(flat[-1] - 50 * world.size) <= 2
