"""The contract of exact sums: the correctly rounded sum, whatever the algorithm, the order and the number of ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy
import pytest

from mpitrain import SparseLoCo, World
from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce import accumulator as accumulators
from mpitrain.allreduce.exact import exact_sum
from mpitrain.allreduce.fixed_point import FORMS
from mpitrain.errors import ConfigError, MismatchError
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.exchange import make_exchange
from mpitrain.reducer.reducer import GradientReducer
from mpitrain.reducer.scattered import ScatteredExchange
from tests.exact_values import exact_sums, hard_values

from .common import error_on_all, named_ranks, skip_alone
from .placements import PLACEMENTS, placed
from .walks import Walk

FLOAT32 = numpy.dtype(numpy.float32)
LENGTHS = (0, 1, 2, 5, 523)
NUM_SUMMANDS = 210
SLOW = pytest.mark.nightly


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


def test_longer_than_a_chunk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.allreduce.exact._CHUNK_VALUES", 512)
    for name in ("ring", "shared_memory"):
        made = exact_sum(world, name)
        flat = made.allocate(1203, FLOAT32)
        flat[:] = hard_values(FLOAT32, 1203, world.rank)
        made.start(flat, others=()).wait()
        assert_bits(flat, hard_sum(FLOAT32, 1203, world.size))


def test_a_few_blocks_need_more_words(world: World) -> None:
    """They are summed apart: the second block has a large range, the fifth and short one an infinity."""
    normal = [numpy.random.default_rng(rank).standard_normal(1100) for rank in range(world.size)]
    summands = [(values * (1 + 2.0**-20)).astype(numpy.float32) for values in normal]
    for rank, values in enumerate(summands):
        values[300 + rank] = 2.0**-100
        values[301 + rank] = -(2.0**100)
    summands[-1][1090] = numpy.inf
    expected = exact_sums(summands)
    for name in ("ring", "shared_memory"):
        made = exact_sum(world, name)
        flat = made.allocate(1100, FLOAT32)
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
    there = world.replaced(config=replace(world.config, reduction="exact"))
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
    there = world.replaced(config=replace(world.config, reduction="exact"))
    parameters = [Parameter("a", (221,), FLOAT32), Parameter("b", (2,), FLOAT32), Parameter("c", (300,), FLOAT32)]
    reducer = GradientReducer(there, parameters, bucket_bytes=1024)
    values = hard_values(FLOAT32, 523, world.rank)
    values = numpy.where(numpy.isfinite(values) & (abs(values) < 2.0**100), values, 0).astype(numpy.float32)
    cuts = numpy.split(values, [221, 223])
    reducer.begin(1.0)
    for index, part in enumerate(cuts):
        reducer.ready(index, part)
    reducer.finish()
    share = 1.0 / world.size
    parts = [one * numpy.float32(share) for one in world.allgather(values)]
    assert_bits(numpy.concatenate(reducer.gradients), exact_sums(parts))
    reducer.close()


def test_too_many_summands(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.allreduce.exact.MOST_SUMMANDS", 3 * world.size - 1)
    made, flat = exact_sum(world), numpy.ones(3, numpy.float32)
    others = [flat.copy()] * (2 if world.rank == world.size - 1 else 0)
    text = error_on_all(world, ConfigError, made.start(flat, others=others).wait)
    assert "at least 3 summands on one of" in text
    assert accumulators.MOST_SUMMANDS == 2**20 - 1


def test_too_many_summands_of_a_rank(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.allreduce.exact._MOST_OF_A_RANK", 2)
    made, flat = exact_sum(world), numpy.ones(3, numpy.float32)
    others = [flat.copy()] * (2 if world.rank == world.size - 1 else 0)
    assert "allowed are 2 on a rank" in error_on_all(world, ConfigError, made.start(flat, others=others).wait)


def test_refusals(world: World) -> None:
    config = replace(world.config, reduction="exact")
    there = world.replaced(config=config)
    text = error_on_all(world, ConfigError, lambda: make_exchange(there, compression="int8"))
    assert text.startswith("reduction=exact and compression=int8: a codec rounds")
    text = error_on_all(world, ConfigError, lambda: ScatteredExchange(there))
    assert text.startswith("reduction=exact: a divided optimizer")
    with pytest.raises(ConfigError, match="no reduction 'exakt'; known: plain, exact"):
        make_exchange(world, reduction="exakt")
    made = exact_sum(world)
    with pytest.raises(ValueError, match="an exact sum of 3 int64 into 3 int64"):
        made.start(numpy.ones(3, numpy.int64))
    with pytest.raises(ValueError, match="an exact sum of 2 float32 into 3 float32"):
        made.start(numpy.ones(3, numpy.float32), others=[numpy.ones(2, numpy.float32)])


def test_ranks_that_differ(world: World) -> None:
    skip_alone(world)
    odd, even = named_ranks(world, 1)
    reduction = "exact" if world.rank == 1 else "plain"
    text = error_on_all(world, MismatchError, lambda: make_exchange(world, reduction=reduction))
    assert f"{odd}: reduction exact; {even}: reduction plain" in text
    made, flat = exact_sum(world), numpy.ones(3, numpy.float32)
    error_on_all(world, MismatchError, made.start(flat, others=() if world.rank == 1 else None).wait)


def test_sparse_loco_refuses(world: World) -> None:
    skip_alone(world)
    there = world.replaced(config=replace(world.config, reduction="exact"))
    text = error_on_all(world, ConfigError, lambda: SparseLoCo(2).begin(there, Walk(w=2).model))
    assert text.startswith("SparseLoCo: reduction=exact: it adds up what it keeps")
