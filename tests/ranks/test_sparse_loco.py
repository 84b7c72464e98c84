"""SparseLoCo: by hand, against loops over all ranks, and what it sends."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
from mpi4py import MPI

from mpitrain import LocalSGD, SparseLoCo, World
from mpitrain.reducer.exchange import make_exchange
from mpitrain.strategies import Strategy

from .common import assert_same_bits, skip_alone
from .placements import PLACEMENTS, placed
from .walks import EVERY, SAMPLES, Walk, kept, shares


def test_by_hand(world: World) -> None:
    """Two parameters, of which a rank sends one. Ranks 0, 2, 4 go 8, 6 in each round, and the others 2, -16.

    With the decay 0.5, times the share s of the rank:

        round        even ranks: e     sent    kept        odd ranks: e      sent    kept
        1             8    6            8 _     0  6        2   -16           _ -16   2  0
        2             8    9            _ 9     8  0        3   -16           _ -16   3  0
        3            12    6           12 _     0  6        3.5 -16           _ -16   3.5 0
    """
    strategy, walk = SparseLoCo(EVERY, density=0.5, decay=0.5), Walk(w=2)
    strategy.begin(world, walk.model)
    is_odd = world.rank % 2
    distance = [2, -16] if is_odd else [8, 6]
    parts = shares(world.size)
    own, even, odd = parts[world.rank], sum(parts[::2]), sum(parts[1::2])
    for number, (sent, its_kept) in enumerate(
        [
            ([8 * even, -16 * odd], [2, 0] if is_odd else [0, 6]),
            ([0, 9 * even - 16 * odd], [3, 0] if is_odd else [8, 0]),
            ([12 * even, -16 * odd], [3.5, 0] if is_odd else [0, 6]),
        ]
    ):
        before = walk["w"].copy()
        walk.round(strategy, SAMPLES[world.rank], w=distance)
        if world.size == 1:  # plain training
            assert walk["w"].tolist() == [-8 * (number + 1), -6 * (number + 1)]
            assert strategy.own_state() == {}
            continue
        assert (before - walk["w"]).tolist() == sent
        assert kept(strategy).tolist() == [own * value for value in its_kept]
        assert strategy.replicas_are_equal
        assert_same_bits(world, walk["w"])
    assert strategy.num_outer_steps == (3 if world.size > 1 else 0)
    strategy.close()


def test_without_feedback_what_is_not_sent_is_lost(world: World) -> None:
    skip_alone(world)
    strategy, walk = SparseLoCo(EVERY, density=0.5, decay=0), Walk(w=2)
    strategy.begin(world, walk.model)
    for number in (1, 2, 3):
        walk.round(strategy, SAMPLES[world.rank], w=[8, 6 + world.rank / 4])
        assert walk["w"].tolist() == [-8 * number, 0]
    strategy.close()


def test_a_tensor_of_small_values_waits(world: World) -> None:
    """Of two tensors of one value, the larger one is sent; what the other has gone waits until it is the larger one.

    Each rank goes a multiple of 4 and 1 in a round, so all ranks choose alike:

        round    1   2   3   4   5   6
        sent     4   4   4   4   .   8     large; of equal ones, the first is sent
                 .   .   .   .   5   .     small
    """
    skip_alone(world)
    strategy, walk = SparseLoCo(EVERY, density=0.5, decay=1), Walk(large=1, small=1)
    strategy.begin(world, walk.model)
    far = sum(part * (1 + rank % 2) for rank, part in enumerate(shares(world.size)))
    for large, small in [(4, 0), (8, 0), (12, 0), (16, 0), (16, 5), (24, 5)]:
        its = 1 + world.rank % 2
        walk.round(strategy, SAMPLES[world.rank], large=[4 * its], small=[its])
        assert (walk["large"].tolist(), walk["small"].tolist()) == ([-large * far], [-small * far])
    strategy.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_all_ranks_against_a_loop(world: World, placement: str) -> None:
    """Blocks of 4096 and of 904 values, in float32 and float64 without our code; the same wherever the ranks are."""
    skip_alone(world)
    width, density, decay = 5000, 0.02, 0.9
    strategy, walk = SparseLoCo(EVERY, density=density, decay=decay), Walk(w=width)
    strategy.begin(placed(world, placement), walk.model)
    counts = [1 + rank % 3 for rank in range(world.size)]
    common = numpy.zeros(width, numpy.float32)
    left = [numpy.zeros(width, numpy.float32) for _ in counts]
    for number in range(4):
        distances = [
            numpy.random.default_rng((rank, number)).standard_normal(width).astype(numpy.float32)
            for rank in range(world.size)
        ]
        mean = numpy.zeros(width)
        for rank, distance in enumerate(distances):
            own = common.copy()
            for _ in range(EVERY):
                own -= distance / numpy.float32(EVERY)
            part = (common - own) * numpy.float32(counts[rank] / sum(counts))
            left[rank] = part + numpy.float32(decay) * left[rank]
            for start in (0, 4096):
                block = left[rank][start : start + 4096]
                chosen = numpy.argsort(-numpy.abs(block), kind="stable")[: round(density * block.size)]
                sizes = numpy.abs(block[chosen]).astype(numpy.float64)
                upper = sizes > sizes.mean()
                for these in (chosen[upper], chosen[~upper]):
                    level = numpy.float32(numpy.abs(block[these]).astype(numpy.float64).mean())
                    sent = numpy.copysign(level, block[these])
                    mean[start + these] += sent
                    block[these] -= sent
        common = (common - mean).astype(numpy.float32)
        walk.round(strategy, counts[world.rank], w=distances[world.rank])
        # A sum in float32 of at most 7 numbers up to 3, and a level whose last bit depends on the order of a sum.
        numpy.testing.assert_allclose(walk["w"], common, rtol=0, atol=7 * 3 * 2.0**-23)
        numpy.testing.assert_allclose(kept(strategy), left[world.rank], rtol=0, atol=3 * 2.0**-23)
        assert (kept(strategy) == left[world.rank]).mean() > 0.97
        common = walk["w"].copy()
        left = world.allgather(kept(strategy))
    strategy.close()


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_nothing_is_lost_without_decay(world: World, bits: int) -> None:
    """What all ranks have sent and what they have kept is all they have gone, by samples; in float64."""
    skip_alone(world)
    strategy, walk = SparseLoCo(EVERY, density=0.01, bits=bits, decay=1), Walk(w=3000, v=7, u=1)
    strategy.begin(world, walk.model)
    gone = dict.fromkeys("wvu", 0.0)
    for number in range(6):
        counts = [0 if (rank + number) % world.size == 0 else 1 + rank for rank in range(world.size)]
        distances = []
        for rank in range(world.size):
            random = numpy.random.default_rng((rank, number))
            distances.append({name: random.integers(-64, 64, walk[name].size) / 16 for name in "wvu"})
        for name in "wvu":
            total = sum(count * distance[name] for count, distance in zip(counts, distances, strict=True))
            gone[name] += total / sum(counts)
        walk.round(strategy, counts[world.rank], **distances[world.rank])
        for name in "wvu":
            total = sum(one.astype(numpy.float64) for one in world.allgather(kept(strategy, name)))
            numpy.testing.assert_allclose(total - walk[name], gone[name], rtol=0, atol=1e-4)
    strategy.close()


class Counting(MPI.Intracomm):
    """A communicator that counts the bytes of its sends, also of its duplicates."""

    sent = 0

    def Isend(self, buf: numpy.ndarray, dest: int, tag: int = 0) -> MPI.Request:  # noqa: N802
        type(self).sent += buf.nbytes
        return super().Isend(buf, dest, tag)


def sent_in_a_round(world: World, strategy: Strategy, width: int) -> int:
    """The bytes that this rank sends in an outer step for so many parameters, in one bucket."""
    walk = Walk(w=width)
    config = replace(world.config, bucket_mib=width / 2**18 + 1)
    strategy.begin(world.replaced(comm=Counting(world.comm), config=config), walk.model)
    walk.step(strategy, 1 + world.rank, w=numpy.linspace(1, 2, width))
    Counting.sent = 0
    walk.step(strategy, 1 + world.rank, w=numpy.linspace(1, 2, width))
    strategy.close()
    return Counting.sent


def test_what_is_sent(world: World) -> None:
    """With 2 % and 2 bits, at most a hundredth of what an outer step of DiLoCo sends, on up to three ranks."""
    skip_alone(world)
    width = 3 * 2**20
    sparse = sent_in_a_round(world, SparseLoCo(EVERY, density=0.02), width)
    dense = sent_in_a_round(
        placed(world, "alone on each node"),
        LocalSGD(EVERY, exchange=lambda its: make_exchange(its, "ring", "none")),
        width,
    )
    assert dense == pytest.approx(2 * (world.size - 1) / world.size * 4 * width, rel=1e-5)
    # 106 bytes for each 4096 values; pieces are cut into blocks by themselves, so some blocks are short.
    assert sparse == pytest.approx((world.size - 1) * width / 4096 * 106, rel=0.01)
    assert (sparse <= dense / 100) is (world.size <= 3)
