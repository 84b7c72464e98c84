"""The calls of a world, and clipping, with arrays on the GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from mpitrain import World
from mpitrain.cuda.device import bind
from mpitrain.errors import DeviceError, MismatchError, MpitrainError
from mpitrain.optim import clip_by_global_norm
from tests.ranks.common import error_on_all, skip_alone

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.mark.parametrize("count", [0, 1, 1001])
def test_sync_sum_and_mean_of_device_arrays(world: World, count: int) -> None:
    mine = {
        "a": cupy.arange(count, dtype=numpy.float32) + world.rank,
        "b": [cupy.full((2, 3), world.rank, numpy.float64), numpy.full(count, world.rank)],
        "n": world.rank,
    }
    ranks = world.size * (world.size - 1) // 2
    synced = world.broadcast(mine, root=world.size - 1)
    summed = world.sum(mine)
    assert all(isinstance(tree["a"], cupy.ndarray) for tree in (synced, summed))
    assert isinstance(summed["b"][1], numpy.ndarray)
    assert (synced["a"].get() == numpy.arange(count) + world.size - 1).all()
    assert (synced["b"][0].get() == world.size - 1).all()
    assert (summed["a"].get() == numpy.arange(count) * world.size + ranks).all()
    assert (summed["b"][0].get() == ranks).all()
    assert (summed["b"][1] == ranks).all()
    assert summed["n"] == ranks
    mean = world.mean(cupy.full(count, 2.0**world.rank), weight=2.0**-world.rank)
    weights = sum(2.0**-rank for rank in range(world.size))
    numpy.testing.assert_allclose(mean.get(), world.size / weights, rtol=1e-15 * world.size)


def test_a_leaf_on_the_gpu_of_some_ranks_only(world: World) -> None:
    skip_alone(world)
    for odd in range(world.size):
        xp = numpy if world.rank == odd else cupy
        text = error_on_all(world, MismatchError, lambda xp=xp: world.sum({"a": xp.zeros(3)}))
        assert "['a'] float64 (3,) on a GPU" in text
    # It sends values only, so the places may differ.
    synced = world.broadcast({"a": (cupy if world.is_root else numpy).zeros(3)})
    assert isinstance(synced["a"], cupy.ndarray) == world.is_root


def elsewhere(world: World, count: int) -> object:
    """An array on another GPU than this rank's."""
    num_gpus = cupy.cuda.runtime.getDeviceCount()
    if num_gpus == 1:
        pytest.skip("there is one GPU")
    with cupy.cuda.Device((bind(world).number + 1) % num_gpus):
        return cupy.zeros(count)


@pytest.mark.parametrize("call", ["sum", "mean"])
def test_a_leaf_on_another_gpu_than_the_ranks(world: World, call: str) -> None:
    """On one rank, and on every rank. It is refused on all of them, and they can continue."""
    skip_alone(world)
    wrong, right = elsewhere(world, 3), cupy.ones(3)
    for odd in range(world.size):
        tree = {"a": wrong if world.rank == odd else right}
        text = error_on_all(world, MismatchError, lambda tree=tree: getattr(world, call)(tree))
        assert f"{world.name(odd)}: ['a'] float64 (3,) on GPU " in text
    both = {"a": right, "b": wrong}
    with pytest.raises(MpitrainError, match=r"\['b'\] .* on GPU \d, and this rank has GPU ") as caught:
        getattr(world, call)(both)
    assert caught.value.known_everywhere
    assert (world.sum(right).get() == world.size).all()


def test_another_gpu_is_current(world: World) -> None:
    """What counts is where the array is. Only the first sum of a world makes the rank's GPU current."""
    other = elsewhere(world, 1).device
    mine = cupy.full(5, 2.0)
    world.sum(mine)
    for call, expected in (("sum", 2.0 * world.size), ("mean", 2.0)):
        with other:
            result = getattr(world, call)(mine)
            assert cupy.cuda.runtime.getDevice() == other.id
        assert result.device == mine.device
        assert (result.get() == expected).all()


def test_sums_leave_what_they_are_given(world: World) -> None:
    """The sums run on the current stream, without a wait in between."""
    with cupy.cuda.Stream(non_blocking=True):
        mine = cupy.full(70_001, world.rank + 1, numpy.float32)
        total = world.sum(mine)
        mine *= 2
        mean = world.mean(mine)
        mine.fill(0)
        assert (total.get() == world.size * (world.size + 1) // 2).all()
        numpy.testing.assert_allclose(mean.get(), world.size + 1, rtol=2.0**-20)


def exact(world: World, **settings: str) -> World:
    return world.replaced(config=replace(world.config, reduction="exact", **settings))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_exact_sums_have_the_bits_of_the_host(world: World, dtype: str) -> None:
    """In one piece and in several, with -0, NaN and infinity, and on one rank."""
    there = exact(world)
    for count in (0, 1, 3, 150_001):
        rng = numpy.random.default_rng((world.rank, count))
        values = numpy.ldexp(rng.standard_normal(count), rng.integers(-12, 9, count)).astype(dtype)
        values[:1] = -0.0
        values[1:2] = numpy.nan if world.is_root else numpy.inf
        tree = {"f": values, "n": numpy.full(count, world.rank)}
        on_device = {name: cupy.asarray(one) for name, one in tree.items()}
        summed, expected = there.sum(on_device), there.sum(tree)
        assert all(isinstance(one, cupy.ndarray) for one in summed.values())
        assert {name: one.get().tobytes() for name, one in summed.items()} == {
            name: one.tobytes() for name, one in expected.items()
        }
        mean = there.mean(on_device["f"], weight=world.rank + 1)
        assert mean.get().tobytes() == there.mean(values, weight=world.rank + 1).tobytes()
        assert on_device["f"].get().tobytes() == values.tobytes()


def test_exact_sums_by_a_transport_that_does_not_go_through_the_host(world: World) -> None:
    there = exact(world, transport="nccl")
    text = error_on_all(world, DeviceError, lambda: there.sum(cupy.zeros(3)))
    assert "nccl is not possible here" in text and "use auto or staged with reduction=exact" in text


@pytest.mark.parametrize("count", [1, 100_003])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_clipping(world: World, count: int, dtype: str) -> None:
    values = numpy.random.default_rng(count).standard_normal(count).astype(dtype)
    norm = float(numpy.sqrt((values.astype("float64") ** 2).sum()))
    for limit in (norm / 3, norm * 3):
        gradients = cupy.asarray(values)
        assert clip_by_global_norm(gradients, limit) == pytest.approx(norm, rel=1e-13)
        expected = values.astype("float64") * min(1, limit / norm)
        numpy.testing.assert_allclose(gradients.get(), expected, rtol=4 * numpy.finfo(dtype).eps)
