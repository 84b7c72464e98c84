"""The named calls of mpitrain.horovod.torch. Expected values come from NumPy in int64 or float64."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import numpy
import pytest
import torch

import mpitrain.horovod.numpy as hnp
import mpitrain.horovod.torch as hvd
from mpitrain import World
from mpitrain.errors import LostRankError
from mpitrain.horovod import process_sets
from mpitrain.horovod import process_sets as state
from mpitrain.world.shard import part_of
from tests.ranks.common import named_ranks, skip_alone
from tests.ranks.test_adasum import gradient, tree
from tests.ranks.test_frames import Watch, watched

from .common import FLOATS, INTEGERS, LONG, assert_equal, counts, factors, pattern, tensor

pytestmark = pytest.mark.usefixtures("horovod")


@pytest.fixture(autouse=True)
def works_on(horovod: None) -> Iterator[None]:
    """After each test."""
    yield
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


OPERATORS = {
    "sum": (hvd.Sum, pattern, numpy.add),
    "min": (hvd.Min, pattern, numpy.minimum),
    "max": (hvd.Max, pattern, numpy.maximum),
    "product": (hvd.Product, factors, numpy.multiply),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_allreduce(world: World, name: str) -> None:
    op, values, ufunc = OPERATORS[name]
    for dtype in [*INTEGERS, *FLOATS]:
        for count in [*counts(world), *([LONG] if dtype is torch.float32 else [])]:
            given = torch.from_numpy(values(count, world.rank)).to(dtype)
            kept = given.clone()
            wanted = torch.from_numpy(reduce(ufunc, (values(count, rank) for rank in range(world.size))))
            assert_equal(hvd.allreduce(given, op=op), wanted, (dtype, count))
            assert_equal(given, kept)
            assert hvd.allreduce_(given, op=op) is given
            assert_equal(given, wanted, (dtype, count))


def test_means_and_factors(world: World) -> None:
    """The mean is over ranks, and of integers toward zero. Factors come before and after the sum."""
    total = sum(range(world.size))
    assert hvd.allreduce(torch.tensor([float(world.rank)], dtype=torch.float64)).item() == total / world.size
    signed = torch.tensor([-world.rank, world.rank])
    assert hvd.allreduce(signed).tolist() == [-(total // world.size), total // world.size]
    assert hvd.allreduce(torch.tensor([world.rank]), average=False).tolist() == [total]
    given = torch.tensor([3, -3, 4]) + world.rank
    each = [[int((value + rank) * 0.5) for value in (3, -3, 4)] for rank in range(world.size)]
    wanted = [int(sum(column) * 1.5) for column in zip(*each, strict=True)]
    assert hvd.allreduce(given, op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5).tolist() == wanted
    halves = hvd.allreduce(torch.ones(3, dtype=torch.float16) * 60000, prescale_factor=1 / 64, postscale_factor=64)
    assert torch.isfinite(halves).all()  # the sum alone would be too large
    number = [2, 2.0, numpy.float32(2), torch.tensor(2)][world.rank % 4]  # each type is converted
    assert hvd.allreduce(torch.ones(()), prescale_factor=number) == 2
    root = [0, numpy.int64(0), torch.tensor(0)][world.rank % 3]
    assert hvd.broadcast(torch.tensor(world.rank), root) == 0
    assert hnp.allreduce(3.5) == 3.5


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_adasum(world: World, dtype: torch.dtype) -> None:
    """Within half a unit for each of at most three combinations, each of which may double what those before lost."""
    for count in (0, 1, 1001):
        of_ranks = [torch.from_numpy(gradient(count, rank, 1)).to(dtype) for rank in range(world.size)]
        vectors = [one.double().tolist() for one in of_ranks]
        most = float(numpy.abs(vectors).sum(axis=0).max(initial=0))
        found = hvd.allreduce(of_ranks[world.rank], op=hvd.Adasum)
        bound = (world.size > 1) * 4 * torch.finfo(dtype).eps * most
        numpy.testing.assert_allclose(found.double(), tree(vectors), rtol=0, atol=bound)
        assert len({bytes(one) for one in hvd.allgather_object(found.double().numpy().tobytes())}) == 1
    # Equal tensors stay and orthogonal ones are summed, each by itself; exactly, also with factors.
    equal, own = torch.tensor([3.0, -1.0, 0.5]), torch.zeros(7)
    own[world.rank] = 2.0**world.rank
    given = [equal.clone(), own]
    hvd.grouped_allreduce_(given, op=hvd.Adasum, prescale_factor=2.0, postscale_factor=4.0)
    assert given[0].tolist() == (8 * equal).tolist()
    assert own.tolist() == [8 * 2.0**rank * (rank < world.size) for rank in range(7)]


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        (torch.tensor([True]), {}, "bool"),
        (torch.tensor([True]), {"op": hvd.Sum, "prescale_factor": 0.5}, "no factors"),
        (torch.tensor([1j]), {"op": hvd.Max}, "no order"),
        (torch.tensor([1]), {"op": 7}, "op=7 is not an operator; give one of Average, Sum"),
        (torch.tensor([1]), {"op": hvd.Adasum}, "Adasum"),
    ],
)
def test_what_cannot_be_reduced(given: torch.Tensor, options: dict[str, Any], text: str) -> None:
    """The calls after it work, also if this rank is alone."""
    with pytest.raises(ValueError, match=text if text != "Adasum" else "Adasum of int64; it takes float16, float32"):
        hvd.allreduce(given, **options)
    if text != "Adasum":
        with pytest.raises(ValueError, match=text):
            hvd.reducescatter(given, **options)


def test_any_order_of_names(world: World) -> None:
    names = [f"tensor {number}" for number in range(20)]
    random.Random(world.rank).shuffle(names)
    handles = {
        name: hvd.allreduce_async(tensor(5, torch.float32, world.rank, int(name[7:])), None, name) for name in names
    }
    random.Random(world.rank + 99).shuffle(names)
    for name in names:
        wanted = sum(pattern(5, rank, int(name[7:])) for rank in range(world.size)) / numpy.float32(world.size)
        assert_equal(hvd.synchronize(handles[name]), torch.from_numpy(wanted).float(), name)
        assert hvd.poll(handles[name])


def test_a_handle_before_all_ranks_have_begun(world: World) -> None:
    """It is not complete, and its name is under way."""
    skip_alone(world)
    if world.is_root:
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
        assert not hvd.poll(handle)
        with pytest.raises(ValueError, match=r"rank 0 .* allreduce.twice is under way"):
            hvd.allreduce_async(torch.ones(1), name="twice")
    hvd.barrier()
    if not world.is_root:
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
    assert hvd.synchronize(handle).item() == 1
    assert hvd.poll(handle)


def test_broadcast(world: World) -> None:
    for root in range(world.size):
        for count in (0, 1, LONG):
            given = tensor(count, torch.float64, world.rank)
            assert_equal(hvd.broadcast(given, root), torch.from_numpy(pattern(count, root)))
            assert_equal(given, torch.from_numpy(pattern(count, world.rank)))
            hvd.broadcast_(given, root)
            assert_equal(given, torch.from_numpy(pattern(count, root)))


def test_what_moves(world: World) -> None:
    """Rows of which each rank has another number, splits, and shares of a sum."""
    for rows in (lambda rank: rank, lambda rank: 3, lambda rank: int(rank == 0), lambda rank: 0):
        given = torch.full((rows(world.rank), 2, 3), world.rank, dtype=torch.int16)
        wanted = [rank for rank in range(world.size) for _ in range(rows(rank))]
        found = hvd.allgather(given)
        assert found.shape == (len(wanted), 2, 3)
        assert found[:, 1, 2].tolist() == wanted
    splits = [(world.rank + rank) % 3 for rank in range(world.size)]
    pairs = [[world.rank, rank] for rank, number in enumerate(splits) for _ in range(number)]
    found, received = hvd.alltoall(torch.tensor(pairs).reshape(-1, 2), torch.tensor(splits))
    wanted = [(rank + world.rank) % 3 for rank in range(world.size)]
    assert received.tolist() == wanted
    assert found.tolist() == [[rank, world.rank] for rank in range(world.size) for _ in range(wanted[rank])]
    everyone = [world.rank + rank for rank in range(world.size)]
    assert hvd.alltoall(torch.arange(world.size) + world.rank).tolist() == everyone
    for rows in (0, 1, 2 * world.size + 1):
        given = tensor(rows * 3, torch.float32, world.rank).reshape(rows, 3)
        total = sum(pattern(rows * 3, rank) for rank in range(world.size)).reshape(rows, 3)
        own = torch.from_numpy(total[part_of(rows, world.rank, world.size)])
        assert_equal(hvd.reducescatter(given, op=hvd.Sum), own, rows)
        assert_equal(hvd.reducescatter(given), (own.double() / world.size).float(), rows)


def test_groups(world: World) -> None:
    """Of several dtypes; the tensors may come from a generator."""
    given = [tensor(count, dtype, world.rank) for count in (0, 1, 10) for dtype in (torch.float32, torch.int64)]
    of_all = [[pattern(one.numel(), rank) for rank in range(world.size)] for one in given]
    for call, combined in (
        (partial(hvd.grouped_allreduce, op=hvd.Sum), sum),
        (hvd.grouped_allgather, numpy.concatenate),
    ):
        for result, arrays in zip(call(one for one in given), of_all, strict=True):
            assert_equal(result, torch.from_numpy(combined(arrays)))
    shares = [torch.ones(world.size, 2), torch.ones(world.size)]
    assert [one.dim() for one in hvd.grouped_reducescatter(one for one in shares)] == [2, 1]


def test_gradients(world: World) -> None:
    given = torch.arange(4.0, dtype=torch.float64).requires_grad_()
    weight = world.rank + 1.0
    mean = (world.size + 1) / 2
    (hvd.allreduce(given) * weight).sum().backward()
    assert given.grad is not None
    assert given.grad.tolist() == [mean] * 4
    given.grad = None
    (hvd.allgather(given)[world.rank * 4] * weight).backward()
    assert given.grad is not None
    assert given.grad[0].item() == pytest.approx(weight / world.size)
    given.grad = None
    (hvd.broadcast(given, 0) * weight).sum().backward()
    assert given.grad is not None
    assert given.grad.tolist() == [mean if world.is_root else 0] * 4


def test_join(world: World) -> None:
    """Twice in a row, and calls without a name after it, of which the ranks have made different numbers."""
    for last in (world.size - 1, 0):
        steps = 0 if world.rank != last else 3
        for step in range(steps):
            assert hvd.allreduce(torch.tensor([6.0 + step]), op=hvd.Sum).item() == 6.0 + step
        assert hvd.join() in range(world.size)
        assert hvd.allreduce(torch.ones(1)).item() == 1


def test_only_sums_go_on_after_a_join(world: World) -> None:
    """A zero would change a product, and be the least of these numbers. The last one to join is named."""
    skip_alone(world)
    if world.rank:
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 on .* has joined"):
            hvd.allgather(torch.ones(1))
        for op in (hvd.Min, hvd.Max, hvd.Product):
            with pytest.raises(hvd.HorovodInternalError, match="only allreduce by Average, Sum or Adasum continues"):
                hvd.allreduce(torch.ones(1), op=op)
        assert hvd.allreduce(torch.ones(1), op=hvd.Adasum).item() == 1
    for _ in range(3 * (world.rank == world.size - 1)):
        hvd.allreduce(torch.ones(1))
    assert hvd.join() == world.size - 1


# What the last rank submits, and what the others do.
DIFFERENCES: dict[str, tuple[Any, Any, str]] = {
    "shape": (lambda: hvd.allreduce(torch.ones(2, 3)), lambda: hvd.allreduce(torch.ones(6)), r"\(2, 3\)"),
    "dtype": (lambda: hvd.allreduce(torch.ones(2).int()), lambda: hvd.allreduce(torch.ones(2)), "int32"),
    "operator": (lambda: hvd.allreduce(torch.ones(2), op=hvd.Max), lambda: hvd.allreduce(torch.ones(2)), "Max"),
    "factor": (
        lambda: hvd.allreduce(torch.ones(2), prescale_factor=2.0),
        lambda: hvd.allreduce(torch.ones(2)),
        "factors 2.0 and 1.0",
    ),
    "root": (lambda: hvd.broadcast(torch.ones(2), 1), lambda: hvd.broadcast(torch.ones(2), 0), "from rank 1"),
    "row": (lambda: hvd.allgather(torch.ones(2, 3)), lambda: hvd.allgather(torch.ones(2, 4)), r"\(any length, 3\)"),
    "process set": (lambda: hvd.add_process_set([0]), lambda: hvd.add_process_set([0, 1]), r"ranks \[0\]"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_all_get_the_error(world: World, what: str) -> None:
    skip_alone(world)
    of_last, of_others, word = DIFFERENCES[what]
    last = world.size - 1
    with pytest.raises(hvd.HorovodInternalError, match=word) as caught:
        (of_last if world.rank == last else of_others)()
    assert caught.value.known_everywhere
    assert all(name in str(caught.value) for name in named_ranks(world, last))


UNUSABLE: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "too many splits": (
        lambda: hvd.alltoall(torch.ones(hvd.size()), [1] * (hvd.size() + 1)),
        lambda: hvd.alltoall(torch.ones(hvd.size()), [1] * hvd.size()),
        "splits",
    ),
    "number": (lambda: hvd.allreduce(3.5), lambda: hvd.allreduce(X), "float in place of a tensor"),
    "array": (lambda: hvd.allgather(numpy.ones(2)), lambda: hvd.allgather(X), "ndarray in place of a tensor"),
    "number in a group": (lambda: hvd.grouped_allreduce([3]), lambda: hvd.grouped_allreduce([X]), "int in place"),
    "begun": (lambda: hvd.allreduce_async(None), lambda: hvd.allreduce(X), "NoneType in place"),
    "subclass": (lambda: hvd.allreduce(X.as_subclass(Labelled)), lambda: hvd.allreduce(X), "Labelled"),
    "op": (lambda: hvd.allreduce(X, op="Sum"), lambda: hvd.allreduce(X, op=hvd.Sum), "op='Sum' is not an operator"),
    "op 1.0": (lambda: hvd.allreduce(X, op=1.0), lambda: hvd.allreduce(X, op=hvd.Sum), "op=1.0; it must be a whole"),
    "factor": (lambda: hvd.allreduce(X, prescale_factor="2"), lambda: hvd.allreduce(X), "prescale_factor='2'"),
    "root 1.0": (lambda: hvd.broadcast(X, 1.0), lambda: hvd.broadcast(X, 1), "root_rank=1.0"),
    "root True": (lambda: hvd.broadcast_(X.clone(), True), lambda: hvd.broadcast_(X.clone(), 1), "root_rank=True"),
    "process set": (lambda: hvd.allreduce(X, process_set="x"), lambda: hvd.allreduce(X), "process_set='x'"),
    "barrier": (lambda: hvd.barrier("x"), hvd.barrier, "process_set='x'"),
    "splits": (lambda: hvd.alltoall(X, splits="ab"), lambda: hvd.alltoall(X, splits=[0] * hvd.size()), "splits='ab'"),
    "object": (lambda: hvd.allgather_object(lambda: 0), lambda: hvd.allgather_object(0), "cannot be pickled"),
    "root's object": (lambda: hvd.broadcast_object(lambda: 0), lambda: hvd.broadcast_object(0), "cannot be pickled"),
    "parameters": (lambda: hvd.broadcast_parameters(3, 0), lambda: hvd.broadcast_parameters({}, 0), "not int"),
    "masked": (lambda: hnp.allreduce(numpy.ma.ones(2)), lambda: hnp.allreduce(numpy.ones(2)), "MaskedArray"),
}


X = torch.ones(2)


class Labelled(torch.Tensor):
    """Has more than values."""


@pytest.mark.parametrize("what", UNUSABLE)
def test_an_argument_that_one_rank_cannot_use_is_an_error_on_all(world: World, what: str) -> None:
    """Also afterwards, calls without a name meet as before."""
    skip_alone(world)
    wrong, right, text = UNUSABLE[what]
    if world.is_root:
        with pytest.raises((TypeError, ValueError), match=text) as caught:
            wrong()
        assert str(caught.value).startswith(world.name(0))
    else:
        with pytest.raises(hvd.HorovodInternalError, match=f"rank 0.*refused: .*{text}"):
            right()
    assert hvd.allreduce(torch.tensor(float(world.rank)), op=hvd.Sum) == sum(range(world.size))


def test_process_sets_that_overlap(world: World) -> None:
    """The calls of two sets are begun in different orders by a rank that is in both."""
    last = world.size - 1
    if last < 2:
        pytest.skip("needs three ranks")
    left, right = hvd.add_process_set([0, last]), hvd.add_process_set([last, 1])
    assert right.ranks == [1, last]
    handles: dict[str, Any] = {}
    for key, process_set in sorted({"left": left, "right": right}.items(), reverse=world.rank == last):
        if process_set.included():
            handles[key] = hvd.allreduce_async(torch.tensor([world.rank]), op=hvd.Sum, process_set=process_set)
        else:
            with pytest.raises(ValueError, match="not in"):
                hvd.allreduce_async(torch.tensor([1]), process_set=process_set)
    sums = {"left": last, "right": last + 1}
    assert {key: hvd.synchronize(handle).item() for key, handle in handles.items()} == {
        key: sums[key] for key in handles
    }
    if left.included():
        assert hvd.broadcast(torch.tensor([world.rank]), last, process_set=left).item() == last
        assert left.rank() == (0 if world.is_root else 1)
    with pytest.raises(ValueError, match="exists already"):
        hvd.add_process_set([last, 0])
    with pytest.raises(ValueError, match=f"0 to {last}"):
        hvd.add_process_set([0, last + 1])
    assert hvd.remove_process_set(left)
    assert hvd.remove_process_set(right)
    assert not hvd.remove_process_set(left)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="not in use"):
        hvd.allreduce(torch.ones(1), process_set=left)


def test_init_again_and_a_name_that_does_not_exist(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second loss while the first one is mended: the next renewal begins again, as elastic.run does it."""
    with pytest.raises(AttributeError, match=r"nearest .* is broadcast_parameters"):
        _ = hvd.broadcast_parameter
    before = state.current()
    with monkeypatch.context() as patch, pytest.raises(LostRankError):
        patch.setattr(state, "_make_channel", lambda ranks, name: (_ for _ in ()).throw(LostRankError("the second")))
        state.renew()
    state.renew()
    assert state.current() is not before
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"hvd\.init"):
        hvd.rank()
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (world.rank, world.size, world.local_rank)


def test_nothing_is_kept_of_a_call_that_has_ended(world: World) -> None:
    """Its tensors may be large, and they do not hasten Python's search for cycles."""
    given = torch.ones(world.size, requires_grad=True)
    handles = (hvd.allgather_async, hvd.alltoall_async, hvd.allreduce_async, hvd.reducescatter_async)
    gc.disable()
    try:
        kept = {}
        for begin in handles:
            handle = begin(given.detach())
            hvd.synchronize(handle)
            kept[begin.__name__] = weakref.ref(handle)
            del handle
        for call in (hvd.allgather, hvd.allreduce, hvd.reducescatter):
            kept[call.__name__] = weakref.ref(call(given))
        deadline = time.monotonic() + 20
        while any(one() is not None for one in kept.values()) and time.monotonic() < deadline:
            time.sleep(0.01)  # the engine's thread may be about to let go of the last one
        assert [name for name, one in kept.items() if one() is not None] == []
    finally:
        gc.enable()


# -- how many frames of mpitrain lie between a call and the MPI calls that it makes --


MOST_FRAMES = 12


@pytest.fixture
def watch(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Horovod's interface, whose MPI calls are noted."""
    watch, make = Watch(), process_sets.world_of

    def world_of(ranks: Sequence[int], name: str, seconds: float) -> Any:
        engine, made = make(ranks, name, seconds)
        made.background.comm = watched(made.background.comm, watch)
        made.background.mover = type(made.background.mover)(made.background.comm, 1)
        return engine, made.replaced(comm=watched(made.comm, watch), objects=watched(made.objects, watch))

    monkeypatch.setattr(process_sets, "world_of", world_of)
    hvd.shutdown()
    hvd.init()
    yield watch


@pytest.mark.parametrize("count", [10, 300_000])
@pytest.mark.parametrize(
    ("call", "options"),
    [
        (hvd.allreduce, {}),
        (hvd.allreduce, {"op": hvd.Max}),
        (hvd.allreduce, {"op": hvd.Adasum}),
        (hvd.allreduce_, {}),
        (hvd.broadcast, {"root_rank": 0}),
        (hvd.allgather, {}),
        (hvd.alltoall, {}),
        (hvd.reducescatter, {}),
    ],
)
def test_from_a_call_to_mpi(
    world: World, watch: Watch, count: int, call: Callable[..., torch.Tensor], options: dict[str, Any]
) -> None:
    watch.function = call.__code__
    for number in range(4):
        if number == 1:  # memory that the ranks share is made in the first call
            watch.chains.clear()
        found = call(torch.full((world.size * count,), float(world.rank + number)), **options)
        assert len(found)
    assert bool(watch.chains) == (world.size > 1)
    for chain in watch.chains:
        assert len(chain) <= MOST_FRAMES, " > ".join(chain)
