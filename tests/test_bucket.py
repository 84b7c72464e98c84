"""The layout of gradients in flat buffers, the buckets in which they travel, and the ranges that a rank owns."""

from __future__ import annotations

import math
from itertools import pairwise

import ml_dtypes
import numpy
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.optim.owned import cut, put, rest_of, size_of, within
from mpitrain.reducer.bucket import Bucket, Parameter, plan_buckets, plan_layout

DTYPES = [numpy.dtype(name) for name in ("float16", "float32", "float64")] + [numpy.dtype(ml_dtypes.bfloat16)]

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
parameter_lists = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=12).map(
    lambda kinds: [Parameter(f"p{index}", shape, dtype) for index, (shape, dtype) in enumerate(kinds)]
)


def bytes_of(parameter: Parameter) -> int:
    return math.prod(parameter.shape) * parameter.dtype.itemsize


@given(parameter_lists)
def test_every_flat_buffer_is_its_parameters_in_order_without_gaps(parameters: list[Parameter]) -> None:
    layout = plan_layout(parameters)
    assert layout.parameters == tuple(parameters)
    assert set(layout.counts) == {parameter.dtype for parameter in parameters}
    for dtype, count in layout.counts.items():
        end = 0
        for parameter, place in zip(parameters, layout.places, strict=True):
            if parameter.dtype == dtype:
                assert place == (end, end + math.prod(parameter.shape))
                end = place[1]
        assert count == end


@given(parameter_lists)
def test_views_are_the_parameters_in_the_buffers(parameters: list[Parameter]) -> None:
    layout = plan_layout(parameters)
    flats = {dtype: numpy.zeros(count, dtype) for dtype, count in layout.counts.items()}
    views = layout.views(flats)
    for index, (view, parameter) in enumerate(zip(views, parameters, strict=True)):
        assert (view.shape, view.dtype) == (parameter.shape, parameter.dtype)
        view[...] = index + 1
    for dtype, flat in flats.items():
        expected = [
            index + 1
            for index, parameter in enumerate(parameters)
            if parameter.dtype == dtype
            for _ in range(math.prod(parameter.shape))
        ]
        assert flat.tolist() == expected


@given(parameter_lists, st.integers(1, 500))
def test_buckets(parameters: list[Parameter], bucket_bytes: int) -> None:
    layout = plan_layout(parameters)
    buckets = plan_buckets(layout, bucket_bytes)
    # Every parameter once, from the last to the first.
    assert [index for bucket in buckets for index in bucket.members] == list(reversed(range(len(parameters))))
    for number, bucket in enumerate(buckets):
        mine = [parameters[index] for index in bucket.members]
        assert {parameter.dtype for parameter in mine} == {bucket.dtype}
        # One piece of the flat buffer: exactly its members.
        assert bucket.begin == layout.places[bucket.members[-1]][0]
        assert bucket.end == layout.places[bucket.members[0]][1]
        sizes = [bytes_of(parameter) for parameter in mine]
        assert (bucket.end - bucket.begin) * bucket.dtype.itemsize == sum(sizes)
        # It was not full before the last one came in.
        assert sum(sizes[:-1]) < bucket_bytes
        # It is full, or there was a reason to close it.
        follows = buckets[number + 1] if number + 1 < len(buckets) else None
        assert sum(sizes) >= bucket_bytes or follows is None or follows.dtype != bucket.dtype


@given(parameter_lists)
def test_sizes_at_both_ends(parameters: list[Parameter]) -> None:
    layout = plan_layout(parameters)
    for bucket in plan_buckets(layout, 1):
        assert sum(1 for index in bucket.members if bytes_of(parameters[index])) <= 1
    changes = sum(one.dtype != other.dtype for one, other in pairwise(parameters))
    assert len(plan_buckets(layout, 10**9)) == (changes + 1 if parameters else 0)


def test_an_example() -> None:
    f4, f8 = numpy.dtype("f4"), numpy.dtype("f8")
    kinds = [("a", (3, 2), f4), ("b", (2,), f8), ("c", (), f4), ("d", (5,), f4), ("e", (1,), f4)]
    layout = plan_layout([Parameter(*kind) for kind in kinds])
    assert layout.places == ((0, 6), (0, 2), (6, 7), (7, 12), (12, 13))
    assert layout.counts == {f4: 13, f8: 2}
    assert plan_buckets(layout, 24) == [
        Bucket(members=(4, 3), dtype=f4, begin=7, end=13),
        Bucket(members=(2,), dtype=f4, begin=6, end=7),
        Bucket(members=(1,), dtype=f8, begin=0, end=2),
        Bucket(members=(0,), dtype=f4, begin=0, end=6),
    ]


def test_a_parameter_tells_what_it_is() -> None:
    assert str(Parameter("dense.weight", (784, 256), numpy.dtype("f4"))) == "dense.weight float32 (784, 256)"
    assert Parameter("scalar", (), numpy.dtype("f4")).count == 1
    assert Parameter("nothing", (3, 0), numpy.dtype("f4")).count == 0


def test_ranges_of_a_flat_buffer() -> None:
    """`cut` and `put` are each other's reverse, and `within` finds a place in both."""
    whole = numpy.arange(20)
    ranges = [slice(2, 5), slice(7, 7), slice(9, 14)]
    part = cut(ranges, whole)
    assert part.tolist() == [2, 3, 4, 9, 10, 11, 12, 13]
    assert size_of(ranges) == 8
    assert sorted([*part, *cut(rest_of(ranges, 20), whole)]) == list(range(20))
    assert rest_of([], 3) == [slice(0, 3)]
    assert rest_of([slice(0, 3)], 3) == []
    back = numpy.full(20, -1)
    put(ranges, part, back)
    assert [place for place in range(20) if back[place] == place] == part.tolist()
    for begin in range(20):
        for end in range(begin, 20):
            got = [whole[slice(begin, end)][there].tolist() for there, _ in within(ranges, slice(begin, end))]
            mine = [part[here].tolist() for _, here in within(ranges, slice(begin, end))]
            assert got == mine
            assert [value for one in got for value in one] == [value for value in part.tolist() if begin <= value < end]
