"""Exact sums: the correctly rounded sum, whatever the algorithm, the order and the number of ranks; who refuses."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from types import SimpleNamespace

import numpy
import pytest

import mpitrain as mt
from mpitrain import LocalSGD, Sync, World, evaluate
from mpitrain.allreduce import ALGORITHMS, make_algorithm
from mpitrain.allreduce import accumulator as accumulators
from mpitrain.allreduce.exact import exact_sum
from mpitrain.allreduce.fixed_point import FORMS
from mpitrain.allreduce.select import choices
from mpitrain.collectives.shares import exact_total, rounded_sum
from mpitrain.errors import ConfigError, MismatchError
from mpitrain.forecast.operations import OPERATIONS
from mpitrain.job.start import _common_config
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.exchange import CompressedExchange, PlainExchange, make_exchange
from mpitrain.reducer.low_rank import LowRankExchange
from mpitrain.reducer.reducer import GradientReducer
from mpitrain.reducer.scattered import ScatteredExchange
from mpitrain.strategies import Strategy
from mpitrain.world.shard import part_of
from tests.exact_values import exact_sums, hard_values

from .common import assert_equal, error_on_all, expected_sum, named_ranks, pattern, skip_alone
from .placements import PLACEMENTS, placed
from .test_bench import options_of
from .trainings import builder, ran
from .walks import Walk

FLOAT32 = numpy.dtype(numpy.float32)
LENGTHS = (0, 1, 2, 5, 523)
NUM_SUMMANDS = 210
SLOW = pytest.mark.nightly


def exact(world: World, **settings: str) -> World:
    return world.replaced(config=replace(world.config, reduction="exact", **settings))


@lru_cache
def hard_sum(dtype: numpy.dtype, length: int, num_summands: int) -> numpy.ndarray:
    return exact_sums([hard_values(dtype, length, number) for number in range(num_summands)])


def assert_bits(found: numpy.ndarray, expected: numpy.ndarray) -> None:
    numpy.testing.assert_array_equal(found.view(expected.dtype), expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{dtype}", marks=() if dtype == FLOAT32 or name == "auto" else SLOW)
        for name in sorted(ALGORITHMS)
        for dtype in FORMS
    ],
)
def test_the_sum_is_the_nearest_value(world: World, name: str, dtype: numpy.dtype) -> None:
    """By the way that the algorithm has, and by the way in words; in memory of its own and in other memory."""
    made = exact_sum(world, name)
    for length in LENGTHS:
        expected = hard_sum(dtype, length, world.size)
        for flat in (made.allocate(length, dtype), numpy.empty(length, dtype)):
            for others in (None, ()):
                flat[:] = hard_values(dtype, length, world.rank)
                made.start(flat, others=others).wait()
                assert_bits(flat, expected)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["auto", "hierarchical"])
def test_between_nodes(world: World, name: str, placement: str) -> None:
    made = exact_sum(placed(world, placement), name)
    for length in LENGTHS:
        flat = made.allocate(length, FLOAT32)
        flat[:] = hard_values(FLOAT32, length, world.rank)
        made.start(flat).wait()
        assert_bits(flat, hard_sum(FLOAT32, length, world.size))


@pytest.mark.parametrize("dtype", [numpy.float32, pytest.param(numpy.float64, marks=SLOW)])
def test_summands_may_lie_on_any_rank(world: World, dtype: type) -> None:
    """So the sum of 210 is the same on any number of ranks: it is always the nearest value."""
    length, made = 153, exact_sum(world)
    expected = hard_sum(numpy.dtype(dtype), length, NUM_SUMMANDS)
    for turn in range(2):
        # Uneven: the first rank in turn has most of them, and with many ranks the next one has none of its own.
        owner = [(max(number - 100, 0) // 7 + turn) % world.size for number in range(NUM_SUMMANDS)]
        mine = [hard_values(numpy.dtype(dtype), length, n) for n in range(NUM_SUMMANDS) if owner[n] == world.rank]
        flat = numpy.zeros(length, dtype)
        made.start(flat, others=mine).wait()
        assert_bits(flat, expected)


def test_a_summand_may_be_split_exactly(world: World) -> None:
    """Into two numbers whose sum is the value: here its upper 12 bits and the rest."""
    made, length = exact_sum(world), 523
    whole = hard_values(FLOAT32, length, world.rank)
    upper = (whole.view(numpy.uint32) & 0xFFFFF000).view(numpy.float32)
    with numpy.errstate(invalid="ignore"):
        rest = numpy.where(numpy.isfinite(whole), whole - upper, 0).astype(numpy.float32)
    upper = numpy.where(numpy.isnan(whole), whole, upper)
    made.start(upper, others=[rest]).wait()
    assert_bits(upper, hard_sum(FLOAT32, length, world.size))


def test_blocks_of_their_own_and_chunks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second block has a large range, the fifth and short one an infinity: they need more words.

    Then the same in chunks of 512 values.
    """
    normal = [numpy.random.default_rng(rank).standard_normal(1203) for rank in range(world.size)]
    summands = [(values * (1 + 2.0**-20)).astype(numpy.float32) for values in normal]
    for rank, values in enumerate(summands):
        values[300 + rank] = 2.0**-100
        values[301 + rank] = -(2.0**100)
    summands[-1][1090] = numpy.inf
    expected = exact_sums(summands)
    for chunk in (None, 512):
        if chunk is not None:
            monkeypatch.setattr("mpitrain.allreduce.exact._CHUNK_VALUES", chunk)
        for name in ("ring", "shared_memory"):
            made = exact_sum(world, name)
            flat = made.allocate(1203, FLOAT32)
            flat[:] = summands[world.rank]
            made.start(flat, others=()).wait()
            assert_bits(flat, expected)


def test_several_in_flight(world: World) -> None:
    made = exact_sum(world)
    lengths = (523, 1, 0, 153, 523)
    flats = [hard_values(FLOAT32, length, world.rank) for length in lengths]
    handles = [made.start(flat, others=() if index % 2 else None) for index, flat in enumerate(flats)]
    handles[-1].wait()
    for flat in flats:
        assert_bits(flat, hard_sum(FLOAT32, flat.size, world.size))


def test_the_setting_makes_sums_and_means_exact(world: World) -> None:
    there = exact(world)
    values = hard_values(FLOAT32, 523, world.rank)
    result = there.sum({"a": values, "b": numpy.array([world.rank]), "c": 1.5})
    assert_bits(result["a"], hard_sum(FLOAT32, 523, world.size))
    assert (int(result["b"][0]), result["c"]) == (sum(range(world.size)), 1.5 * world.size)
    finite = numpy.where(numpy.isfinite(values) & (abs(values) < 2.0**100), values, 0).astype(numpy.float32)
    shares = [numpy.float32((rank + 1) / sum(range(world.size + 1))) for rank in range(world.size)]
    parts = [one * share for one, share in zip(world.allgather(finite), shares, strict=True)]
    assert_bits(there.mean(finite, weight=world.rank + 1), exact_sums(parts))


def test_gradients(world: World) -> None:
    """A training with means whose sum is exact: each bucket is the nearest value to the sum of the parts."""
    there = exact(world)
    parameters = [Parameter(name, (count,), FLOAT32) for name, count in (("a", 221), ("b", 2), ("c", 300))]
    reducer = GradientReducer(there, parameters, bucket_bytes=1024)
    values = hard_values(FLOAT32, 523, world.rank)
    values = numpy.where(numpy.isfinite(values) & (abs(values) < 2.0**100), values, 0).astype(numpy.float32)
    reducer.begin(1.0)
    for index, part in enumerate(numpy.split(values, [221, 223])):
        reducer.ready(index, part)
    reducer.finish()
    parts = [one * numpy.float32(1.0 / world.size) for one in world.allgather(values)]
    assert_bits(numpy.concatenate(reducer.gradients), exact_sums(parts))
    reducer.close()


@pytest.mark.parametrize("limit", ["MOST_SUMMANDS", "_MOST_OF_A_RANK"])
def test_too_many_summands(world: World, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all, or of one rank."""
    assert accumulators.MOST_SUMMANDS == 2**20 - 1
    of_all = limit == "MOST_SUMMANDS"
    monkeypatch.setattr(f"mpitrain.allreduce.exact.{limit}", 3 * world.size - 1 if of_all else 2)
    made, flat = exact_sum(world), numpy.ones(3, numpy.float32)
    others = [flat.copy()] * (2 if world.rank == world.size - 1 else 0)
    text = error_on_all(world, ConfigError, made.start(flat, others=others).wait)
    assert ("at least 3 summands on one of" if of_all else "allowed are 2 on a rank") in text


LENGTH = 200_003  # several pieces


def test_made_while_another_sum_is_under_way(world: World) -> None:
    """Its memory is made after that sum: on the same communicator, their messages would mix."""
    plain = make_algorithm(world, "shared_memory")
    flat = pattern(LENGTH, world.rank).astype(FLOAT32)
    if world.rank == world.size - 1:
        time.sleep(0.3)  # the others have begun
    handle = plain.start(flat)
    handle.test()
    made = exact_sum(world, "shared_memory")
    handle.wait()
    assert_equal(flat, expected_sum(LENGTH, world.size))
    flat = pattern(LENGTH, world.rank).astype(FLOAT32)
    made.start(flat).wait()
    assert_equal(flat, expected_sum(LENGTH, world.size))


def test_the_first_sum_while_another_one_is_under_way(world: World) -> None:
    there, flat = exact(world), pattern(LENGTH, world.rank).astype(FLOAT32)
    if world.rank == world.size - 1:
        time.sleep(0.3)
    handle = make_algorithm(there, "shared_memory").start(flat)
    handle.test()
    assert there.sum(1.5) == 1.5 * world.size
    handle.wait()
    assert_equal(flat, expected_sum(LENGTH, world.size))


def trained(world: World, strategy: Callable[[], Strategy]) -> str:
    """The hash of the parameters after six steps, whose gradients have all bits in use."""
    trainer = ran(builder(60, 4 * world.size, strategy=strategy), [mt.StopAtStep(6)], world=world)
    values = trainer.adapter.parameters()
    return hashlib.sha256(b"".join(values[name].tobytes() for name in sorted(values))).hexdigest()


@pytest.mark.parametrize("strategy", [Sync, lambda: LocalSGD(2)], ids=["sync", "rounds"])
def test_a_training_has_the_same_bits_by_every_way(world: World, strategy: Callable[[], Strategy]) -> None:
    found = {
        trained(exact(placed(world, placement), algorithm=name), strategy)
        for name in ("auto", "ring")
        for placement in ("dealt out over 2 nodes", "alone on each node")
    }
    assert len(found) == 1, found
    assert len(set(world.allgather(found.pop()))) == 1


def test_ranks_whose_settings_differ(world: World) -> None:
    skip_alone(world)
    odd, even = named_ranks(world, 1)
    mine = "exact" if world.rank == 1 else "plain"
    text = error_on_all(world, MismatchError, lambda: _common_config(world, {"reduction": mine}))
    assert f"{odd}: reduction='exact'; {even}: reduction='plain'" in text
    text = error_on_all(world, ConfigError, lambda: _common_config(world, {"reduction": f"exakt{world.rank}"}))
    assert "there is no reduction 'exakt0'; known: plain, exact" in text
    text = error_on_all(world, MismatchError, lambda: make_exchange(world, reduction=mine))
    assert f"{odd}: reduction exact; {even}: reduction plain" in text
    made, flat = exact_sum(world), numpy.ones(3, numpy.float32)
    error_on_all(world, MismatchError, made.start(flat, others=() if world.rank == 1 else None).wait)
    error_on_all(world, MismatchError, lambda: exact_sum(world, "rong" if world.rank == 1 else "ring"))


def refusals(there: World) -> list[tuple[Callable[[], object], str]]:
    adapter = builder(60, 4 * there.size)(there).adapter
    return [
        (lambda: make_exchange(there, compression="int8"), "reduction=exact and compression=int8: a codec rounds"),
        (lambda: CompressedExchange(there, "int8"), "reduction=exact and compression="),
        (lambda: LowRankExchange(there, "power_sgd"), "reduction=exact and compression="),
        (lambda: ScatteredExchange(there), "reduction=exact: a sharded optimizer"),
        (
            lambda: mt.ParameterServer().begin(there, adapter),
            "reduction=exact: a server adds up gradients in the order",
        ),
        (lambda: mt.SparseLoCo(2).begin(there, Walk(w=2).model), "SparseLoCo: reduction=exact: it accumulates each"),
    ]


def test_what_adds_up_in_another_way_refuses(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = SimpleNamespace(role=SimpleNamespace(kind="worker", num_servers=1, division=""))
    monkeypatch.setattr("mpitrain.strategies.parameter_server.the_job", lambda: job)
    for make, text in refusals(exact(world)):
        if world.size > 1 or not text.startswith("SparseLoCo"):
            assert error_on_all(world, ConfigError, make).startswith(text)
    with pytest.raises(ConfigError, match="no reduction 'exakt'; known: plain, exact"):
        make_exchange(world, reduction="exakt")
    with pytest.raises(ConfigError, match="no allreduce algorithm 'rong'"):
        exact_sum(world, "rong")
    made, flat = exact_sum(world), numpy.ones(3, numpy.float32)
    with pytest.raises(ValueError, match="an exact sum of 3 int64 into 3 int64"):
        made.start(numpy.ones(3, numpy.int64))
    with pytest.raises(ValueError, match="an exact sum of 2 float32 into 3 float32"):
        made.start(flat, others=[numpy.ones(2, numpy.float32)])


def test_an_exchange_takes_the_setting(world: World) -> None:
    there = exact(world)
    exchange = PlainExchange(there, "ring")
    slot = exchange.allocate(3, FLOAT32)
    slot.flat[:] = (2.0**30, 1.0, -(2.0**30)) if world.rank == 0 else 0
    handle = exchange.mean(slot, slice(0, 3), 1.0)
    assert str(handle) == "allreduce exact ring of 3 float32"
    handle.wait()
    assert slot.flat.tolist() == [2.0**30, 1.0, -(2.0**30)]
    plain = PlainExchange(there, "ring", reduction="plain")
    handle = plain.mean(plain.allocate(3, FLOAT32), slice(0, 3), 0.0)
    assert str(handle) == "allreduce ring of 3 float32"
    handle.wait()


def test_what_is_said(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    there = exact(placed(world, "alone on each node"), compression="auto")
    capsys.readouterr()
    assert isinstance(make_exchange(there), PlainExchange)
    said = "compression auto: none; reduction=exact sends gradients as they are"
    assert (said in capsys.readouterr().out) == world.is_root
    assert said in choices(there)
    for its in (world, exact(world)):  # the bench's sums are plain
        OPERATIONS["allreduce"].set_up(its, options_of("--algorithms", "native"))
        assert ("# plain sums" in capsys.readouterr().out) == (world.is_root and its is not world)


@pytest.mark.parametrize(
    ("placement", "algorithm", "way", "ran"),
    [
        ("", "auto", "shared_memory", "shared_memory"),
        ("alone on each node", "auto", "direct", "direct"),
        ("dealt out over 2 nodes", "auto", "hierarchical, in words of 64 bits", "hierarchical"),
        ("", "ring", "ring, in words of 64 bits", "ring"),
    ],
)
def test_what_is_said_is_what_runs(world: World, placement: str, algorithm: str, way: str, ran: str) -> None:
    if world.size < 3:
        pytest.skip("needs three ranks, so that all placements differ")
    there = exact(placed(world, placement) if placement else world, algorithm=algorithm)
    assert f"floats of all sizes, as reduction is exact: {way}; integers:" in choices(there)
    handle = exact_sum(there).start(numpy.ones(3, FLOAT32))
    handle.wait()
    assert str(handle) == f"allreduce exact {ran} of 3 float32"


HUGE, TINY = 1e308, 5e-324  # twice the first is beyond float64; nothing is smaller than the second


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0.0),
        ([1.0, 2.0**-80, -1.0], 2.0**-80),
        ([1.0, 2.0**-53, TINY], 1.0 + 2.0**-52),  # above a tie by the smallest number
        ([TINY] * 7, 7 * TINY),
        ([HUGE, HUGE, -HUGE, -HUGE, TINY], TINY),
        ([HUGE, HUGE, -HUGE], HUGE),
        ([-HUGE, -HUGE, 1.0], -math.inf),
        ([HUGE, HUGE, -math.inf], -math.inf),
        ([HUGE, math.inf, HUGE], math.inf),
        ([math.inf, 1.0, -math.inf], math.nan),
        ([math.inf, math.nan], math.nan),
    ],
    ids=str,
)
def test_a_sum_is_the_same_on_any_number_of_ranks(world: World, values: list[float], expected: float) -> None:
    own = values[part_of(len(values), world.rank, world.size)]
    for total in (exact_total(world, own), rounded_sum(values), rounded_sum(values[::-1])):
        assert total == expected or (math.isnan(total) and math.isnan(expected))
    on_the_last = values if world.rank == world.size - 1 else []
    assert repr(exact_total(world, on_the_last)) == repr(exact_total(world, own))


def test_many_numbers_of_any_size(world: World) -> None:
    rng = numpy.random.default_rng(4)
    values = numpy.ldexp(rng.standard_normal(301), rng.integers(-1074, 1020, 301)).tolist()
    own = values[part_of(len(values), world.rank, world.size)]
    assert exact_total(world, own) == float(sum(map(Fraction, values)))


def test_an_evaluation_with_infinite_values(world: World) -> None:
    """Of both signs, in different calls."""

    def metrics(batch: numpy.ndarray) -> dict[str, float]:
        return {"both": float(batch.mean()), "one": abs(float(batch.mean()))}

    samples = numpy.array([math.inf] * 4 + [-math.inf] * 4)
    means = evaluate(world, metrics, samples, samples_at_once=1, virtual_ranks=4)
    assert math.isnan(means["both"])
    assert means["one"] == math.inf
