"""SparseLoCo: by hand, against loops over all ranks, what it sends, what continues from it, and what it refuses."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy
import pytest
from mpi4py import MPI

from mpitrain import ArrayFunction, LocalSGD, SparseLoCo, Sync, World
from mpitrain.errors import ConfigError, MismatchError, NonFiniteError
from mpitrain.job.worlds import make_world
from mpitrain.optim import SGD
from mpitrain.reducer.exchange import make_exchange
from mpitrain.strategies import Strategy

from .common import added_up, assert_same_bits, error_on_all, first_ranks, skip_alone
from .placements import PLACEMENTS, placed
from .test_gathered import Counting
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


def sent_in_a_round(world: World, strategy: Strategy, width: int) -> int:
    """The bytes that this rank sends in an outer step for so many parameters, in one bucket."""
    walk = Walk(w=width)
    config = replace(world.config, bucket_mib=width / 2**18 + 1)
    strategy.begin(world.replaced(comm=Counting(world.comm), config=config), walk.model)
    for _ in range(EVERY):
        Counting.sent = 0
        walk.step(strategy, 1 + world.rank, w=numpy.linspace(1, 2, width))
    strategy.close()
    return Counting.sent


def test_what_is_sent(world: World) -> None:
    """With 2 % and 2 bits, at most a hundredth of what an outer step of DiLoCo sends, on up to three ranks."""
    skip_alone(world)
    width, there = 3 * 2**19, placed(world, "alone on each node")
    sparse = sent_in_a_round(world, SparseLoCo(EVERY, density=0.02), width)
    dense = sent_in_a_round(there, LocalSGD(EVERY, exchange=lambda its: make_exchange(its, "ring", "none")), width)
    assert dense == pytest.approx(2 * (world.size - 1) / world.size * 4 * width, rel=1e-5)
    # 106 bytes for each 4096 values; pieces are cut into blocks by themselves, so some blocks are short.
    assert sparse == pytest.approx((world.size - 1) * width / 4096 * 106, rel=0.02)
    assert (sparse <= dense / 100) is (world.size <= 3)


def resumed(world: World, strategy: SparseLoCo, walk: Walk, total: Any, state: Any, saved: Any) -> None:
    strategy.begin(world, walk.model)
    strategy.restore(state)
    walk.model.restore(saved)
    strategy.restore_own(total)


@pytest.mark.parametrize("steps", [3, 4])
def test_a_resume_has_the_same_bits(world: World, steps: int) -> None:
    """In the middle of a round, and with what was kept in two rounds."""

    def train(strategy: SparseLoCo, walk: Walk, numbers: range) -> None:
        for number in numbers:
            distance = numpy.random.default_rng((world.rank, number)).standard_normal(300)
            walk.step(strategy, 1 + world.rank, w=distance)

    whole, its = SparseLoCo(EVERY), Walk(w=300)
    whole.begin(world, its.model)
    train(whole, its, range(steps))
    again, other = SparseLoCo(EVERY), Walk(w=300)
    own, state, saved = whole.own_state(), whole.state(), its.model.state()
    resumed(world, again, other, own, state, saved)
    for strategy, walk in ((whole, its), (again, other)):
        train(strategy, walk, range(steps, 7))
        strategy.end_run()
    assert its["w"].tobytes() == other["w"].tobytes()
    if world.size > 1:
        assert kept(whole).tobytes() == kept(again).tobytes()
        assert kept(whole).any()
    whole.close()
    again.close()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_middle", [False, True])
def test_what_was_kept_goes_on_with_fewer_ranks(world: World, size: int, is_middle: bool) -> None:
    """The first rank takes it over undecayed: on one rank all of it goes into the next outer step, and none is left."""
    skip_alone(world)
    strategy, walk = SparseLoCo(EVERY, density=0.01, decay=1), Walk(w=500)
    strategy.begin(world, walk.model)
    distance = numpy.random.default_rng(world.rank).integers(-64, 64, 500) / 16
    walk.round(strategy, SAMPLES[world.rank], w=distance)
    mean = sum(part * one for part, one in zip(shares(world.size), world.allgather(distance), strict=True))
    gone = mean * (1.5 if is_middle else 1)
    if is_middle:
        walk.step(strategy, SAMPLES[world.rank], w=distance)
    total = added_up(world.allgather(strategy.own_state()))
    state, saved = world.broadcast_object((strategy.state(), walk.model.state()))
    strategy.close()
    there = first_ranks(world, size)
    if there is not None:
        again, other = SparseLoCo(EVERY, density=0.01, decay=1), Walk(w=500)
        resumed(there, again, other, total if there.is_root else {"carried": {}}, state, saved)
        while True:
            other.step(again, 2, w=numpy.zeros(500))
            if again.replicas_are_equal:
                break
        left = 0.0 if there.size == 1 else sum(there.allgather(kept(again).astype(numpy.float64)))
        # In the middle of a round, the steps since the last outer step count by the samples of both parts.
        if is_middle:
            count, more = sum(SAMPLES[: world.size]), 2 * there.size
            gone = mean + mean / 2 * count / (count + more)
        numpy.testing.assert_allclose(left - other["w"], gone, rtol=0, atol=1e-4)
        if there.size == 1:
            assert again.own_state() == {}
        again.close()
        there.free()
    world.barrier()


def test_one_rank_sends_what_a_codec_has_left_out(world: World) -> None:
    """In a round of its own, also for LocalSGD. Then it trains plainly again."""
    alone = make_world(MPI.COMM_SELF)
    strategy, walk = LocalSGD(EVERY), Walk(w=3)
    strategy.begin(alone, walk.model)
    strategy.restore_own({"carried": {"round/0/left out/w": numpy.array([1, -2, 4], numpy.float32)}})
    for expected in ([-8, -8, -8], [-17, -14, -20], [-25, -22, -28]):
        walk.step(strategy, 2, w=[16, 16, 16])
        assert walk["w"].tolist() == expected
    assert strategy.own_state() == {}
    strategy.close()
    alone.free()
    world.barrier()


def test_sync_goes_on_from_the_end_of_a_round(world: World) -> None:
    """It leaves out what was kept, which only an outer step could use."""
    strategy, walk = SparseLoCo(EVERY, density=0.5), Walk(w=2)
    strategy.begin(world, walk.model)
    walk.round(strategy, 1, w=[1, 2 + world.rank])
    own, state, saved = strategy.own_state(), strategy.state(), walk.model.state()
    strategy.close()
    sync, other = Sync(), Walk(w=2)
    sync.begin(world, other.model)
    sync.restore(state)
    other.model.restore(saved)
    sync.restore_own(own)
    assert other["w"].tobytes() == walk["w"].tobytes()
    other.step(sync, 1, w=[2, 2])
    assert other["w"].tolist() == (walk["w"] - numpy.float32(1)).tolist()
    sync.close()


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
    ("name", "values", "text"),
    [
        ("density", (0, 0.0002, 0.6, math.nan, "0.1"), "a number from 0.00024 (one of 4096 values) to 0.5"),
        ("bits", (0, 5, True, 2.0), "an int from 1 to 4"),
        ("decay", (-0.1, 1.1, math.nan, None), "a number from 0 to 1"),
        ("sync_every", (0,), "an int of at least 1"),
    ],
)
def test_numbers_that_are_refused(name: str, values: tuple[Any, ...], text: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=re.escape(f"SparseLoCo: {name}={value!r}; it must be {text}")):
            SparseLoCo(**{name: value})


def test_the_ends_of_what_is_allowed(world: World) -> None:
    """One of 4096, and a half; nothing is kept, and all. A parameter without elements goes along."""
    for given in ({"density": 1 / 4096, "decay": 0}, {"density": 0.5, "decay": 1, "bits": 4}):
        strategy, walk = SparseLoCo(EVERY, **given), Walk(w=1, nothing=0)  # type: ignore[arg-type]
        strategy.begin(world, walk.model)
        for number in (1, 2):
            walk.round(strategy, SAMPLES[world.rank], w=[4.0])
            assert walk["w"].tolist() == [-4.0 * number]
        strategy.close()
    if world.size > 1:  # without feedback, what is not sent is lost
        strategy, walk = SparseLoCo(EVERY, density=0.5, decay=0), Walk(w=2)
        strategy.begin(world, walk.model)
        for number in (1, 2, 3):
            walk.round(strategy, SAMPLES[world.rank], w=[8, 6 + world.rank / 4])
            assert walk["w"].tolist() == [-8 * number, 0]
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
    assert "compression=int8: it has its own wire format" in text


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
