"""Sums of codecs that are gathered: by hand, in the order of ranks, and what is really sent."""

from __future__ import annotations

from itertools import pairwise

import numpy
import pytest
from mpi4py import MPI

from mpitrain import World
from mpitrain.compression import CODECS, factory_of
from mpitrain.reducer.exchange import CompressedExchange

from .common import assert_same_bits
from .placements import placed

FLOAT32 = numpy.dtype(numpy.float32)
GATHERED = [name for name in sorted(CODECS) if CODECS[name](False).gathered]


@pytest.fixture
def alone(world: World) -> World:
    return placed(world, "alone on each node")


def summed(there: World, codec: str, values: numpy.ndarray, steps: int = 1) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The last of so many sums of the same values, and what is left out after it."""
    exchange = CompressedExchange(there, codec)
    slot = exchange.allocate(values.size, FLOAT32)
    for _ in range(steps):
        slot.flat[:] = values
        exchange.mean(slot, slice(None), 1.0).wait()
    left_out = slot.left_out()
    assert left_out is not None
    return slot.flat.copy(), left_out


def test_the_largest_by_hand(alone: World) -> None:
    """Rank r keeps 2 of 8: its own 10 + r in place r, and of the others, all 1, the first."""
    values = numpy.ones(8, numpy.float32)
    values[alone.rank] = 10 + alone.rank
    found, left_out = summed(alone, "top_k:0.25", values)
    if alone.size == 1:
        assert found.tolist() == values.tolist()
        return
    expected = [10.0 + rank if rank < alone.size else 0.0 for rank in range(8)]
    expected[0] += alone.size - 1  # every other rank's 1 in place 0
    expected[1] += 1  # rank 0's 1: its first one is in place 1
    assert found.tolist() == expected
    sent = {alone.rank, 1 if alone.rank == 0 else 0}
    assert left_out.tolist() == [0.0 if place in sent else 1.0 for place in range(8)]


@pytest.mark.parametrize("codec", [*GATHERED, "top_k:0.3", "top_k:0.3:2"])
@pytest.mark.parametrize("length", [1, 5, 4097, 200_003])
def test_parts_are_added_in_the_order_of_ranks(alone: World, codec: str, length: int) -> None:
    """In NumPy: encode each piece of each rank's values, decode it, and add in float32, rank 0 first."""
    parts = [numpy.random.default_rng(rank).standard_normal(length).astype(numpy.float32) for rank in range(alone.size)]
    found, left_out = summed(alone, codec, parts[alone.rank])
    assert_same_bits(alone, found)
    if alone.size == 1:
        assert found.tobytes() == parts[0].tobytes()
        return
    coder, expected, errors = factory_of(codec)(False), numpy.zeros(length, numpy.float32), []
    longest = min(max(3 * 2**18 // (alone.size - 1), 2**14), 2**18) // 1024 * 1024 // 4
    number = -(-length // longest)
    edges = [0]
    for piece in range(number):
        edges.append(edges[-1] + length // number + (piece < length % number))
    for values in parts:
        errors.append(numpy.empty_like(values))
        for begin, end in pairwise(edges):
            wire = numpy.empty(coder.wire_bytes(end - begin), numpy.uint8)
            coder.encode(values[begin:end], wire, errors[-1][begin:end])
            coder.add(wire, expected[begin:end])
    assert (found == expected).all()
    assert left_out.tobytes() == errors[alone.rank].tobytes()


class Counting(MPI.Intracomm):
    """A communicator that counts the bytes of its sends."""

    sent = 0

    def Isend(self, buf: numpy.ndarray, dest: int, tag: int = 0) -> MPI.Request:  # noqa: N802
        type(self).sent += buf.nbytes
        return super().Isend(buf, dest, tag)


@pytest.mark.parametrize(("codec", "nbytes"), [("top_k", 41 * 6), ("top_k:0.1", 410 * 6), ("top_k:0.02:2", 106)])
def test_what_is_sent(alone: World, codec: str, nbytes: int) -> None:
    """Of three blocks of 4096 values: what the codec makes of them goes to every other rank, and nothing else."""
    Counting.sent = 0
    summed(alone.replaced(comm=Counting(alone.comm)), codec, numpy.ones(3 * 4096, numpy.float32))
    assert Counting.sent == (alone.size - 1) * 3 * nbytes
