"""mpitrain.horovod.numpy. Expected values come from NumPy in int64 or float64."""

from __future__ import annotations

from functools import reduce

import numpy
import pytest

import mpitrain.horovod.numpy as hvd
from mpitrain import World

from .common import counts, pattern

pytestmark = pytest.mark.usefixtures("horovod")


def total(count: int, size: int) -> numpy.ndarray:
    return reduce(numpy.add, (pattern(count, rank) for rank in range(size)))


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16", "float32", "float64", "complex128"])
def test_allreduce(world: World, dtype: str) -> None:
    for count in counts(world):
        given, wanted = pattern(count, world.rank).astype(dtype), total(count, world.size).astype(dtype)
        found = hvd.allreduce(given, op=hvd.Sum)
        assert found.dtype == dtype
        numpy.testing.assert_array_equal(found, wanted)
        numpy.testing.assert_array_equal(given, pattern(count, world.rank).astype(dtype))
        (found,) = hvd.grouped_allreduce([given], op=hvd.Sum)
        numpy.testing.assert_array_equal(found, wanted)
    numpy.testing.assert_array_equal(hvd.allreduce(numpy.float64(world.rank)), (world.size - 1) / 2)


def test_parts_of_arrays(world: World) -> None:
    """In place, and where a tensor cannot share the memory."""
    whole = numpy.full((6, 4), -1.0)
    part = whole[::2, 1:3]
    part[...] = pattern(6, world.rank).reshape(3, 2)
    assert hvd.allreduce_(part, op=hvd.Sum) is part
    wanted = numpy.full((6, 4), -1.0)
    wanted[::2, 1:3] = total(6, world.size).reshape(3, 2)
    numpy.testing.assert_array_equal(whole, wanted)
    given = pattern(5, world.rank).astype("float64")
    arrays = [given.copy()]
    assert hvd.grouped_allreduce_(arrays, op=hvd.Sum) is arrays
    numpy.testing.assert_array_equal(arrays[0], total(5, world.size))
    given.flags.writeable = False
    handle = hvd.allreduce_async(given[::-1], op=hvd.Sum)
    numpy.testing.assert_array_equal(hvd.synchronize(handle), total(5, world.size)[::-1])
    assert hvd.poll(handle)


def test_moves(world: World) -> None:
    rows = numpy.full((world.rank, 2), world.rank)
    wanted = numpy.repeat(numpy.arange(world.size), numpy.arange(world.size))
    numpy.testing.assert_array_equal(hvd.allgather(rows), numpy.stack([wanted, wanted], axis=1))

    splits = numpy.arange(world.size)  # rank r gets r rows of each
    found, received = hvd.alltoall(numpy.full(splits.sum(), world.rank), splits)
    numpy.testing.assert_array_equal(found, numpy.repeat(numpy.arange(world.size), world.rank))
    assert received.tolist() == [world.rank] * world.size

    summed = hvd.reducescatter(pattern(2 * world.size, world.rank), op=hvd.Sum)
    numpy.testing.assert_array_equal(summed, total(2 * world.size, world.size)[2 * world.rank :][:2])


def test_parameters_and_objects(world: World) -> None:
    root = world.size - 1
    numpy.testing.assert_array_equal(hvd.broadcast(pattern(4, world.rank), root), pattern(4, root))
    values = {"weight": numpy.full((2, 3), float(world.rank)), "bias": numpy.full(3, world.rank, "int32")}
    arrays = dict(values)
    hvd.broadcast_parameters(values, root)
    for name, array in arrays.items():
        assert values[name] is array
        assert (array == root).all()
    assert hvd.broadcast_object({"rank": world.rank}, root) == {"rank": root}
    assert hvd.allgather_object(world.rank) == list(range(world.size))


def test_refusals(world: World) -> None:
    """Of arguments, on the rank that has them; a call follows that works."""
    fixed = numpy.ones(3)
    fixed.flags.writeable = False
    for call, given, text in (
        (hvd.allreduce, numpy.array(["a"]), "<U1"),
        (hvd.allreduce_, fixed, "cannot be written"),
        (hvd.allreduce_, 3.0, "a float, whose values cannot be replaced"),
        (hvd.allreduce_, numpy.ones(4)[::-1], "strides"),
    ):
        with pytest.raises(TypeError, match=f"rank {world.rank} .*{text}"):
            call(given)
    most = numpy.iinfo(numpy.int64).max // world.size
    assert hvd.allreduce(most, op=hvd.Sum) == most * world.size
    with pytest.raises(ValueError, match=f"rank {world.rank} .* may not fit into int64; give a float, or add Python's"):
        hvd.grouped_allreduce([1, -most - 2], op=hvd.Sum)
    with pytest.raises(AttributeError, match="the nearest name of Horovod's interface that it has is allreduce"):
        _ = hvd.all_reduce
    assert hvd.allreduce(numpy.ones(2), op=hvd.Sum).tolist() == [world.size] * 2


def test_ranks_that_differ(world: World) -> None:
    if world.size == 1:
        pytest.skip("needs two ranks")
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(numpy.ones(2 + (world.rank == world.size - 1)), name="shape")
