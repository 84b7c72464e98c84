"""DataLoaders with an __iter__ of their own: they give what they give one process, or are refused."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

import mpitrain.torch
from mpitrain import World
from mpitrain.errors import DataError, MismatchError
from tests.ranks.common import error_on_all, skip_alone

from .prepared import BATCH, NUM_SAMPLES, compare, loop, mlp, samples, sgd

DataLoader = torch.utils.data.DataLoader


Iterated = Callable[[Iterator[Any]], Iterable[Any]]


def own(iterate: Iterated) -> Any:
    """A class of DataLoaders that iterates over what DataLoader does."""
    return type("Own", (DataLoader,), {"__iter__": lambda self: iter(iterate(DataLoader.__iter__(self)))})


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


class InBackground:
    """As prefetch_generator has it."""

    def __init__(self, batches: Any) -> None:
        self.read: queue.Queue[Any] = queue.Queue(3)
        threading.Thread(target=lambda: [self.read.put(each) for each in (*batches, None)], daemon=True).start()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read.get, None)


def other_order(batches: Iterator[Any]) -> Iterable[Any]:
    first, *others = batches
    return [first, *reversed(others)]


def slices(batches: Iterator[Any]) -> Iterator[Any]:
    """Each as long as the part of a rank, or longer: of one process's batch, there are several."""
    size = -(-BATCH // mpitrain.init().size)
    return (part for batch in batches for part in zip(*(each.split(size) for each in batch), strict=True))


KINDS: dict[str, Any] = {
    "mover": own(lambda batches: ([each.to("cpu") for each in batch] for batch in batches)),
    "normalizer": own(lambda batches: ((x / 2, y.clone()) for x, y in batches)),
    "ahead": own(ahead),
    "in background": own(InBackground),
    "every second": own(lambda batches: list(batches)[::2]),
    "twice": own(lambda batches: (batch for batch in batches for _ in range(2))),
    "other order": own(other_order),
}
UNKNOWN: dict[str, Any] = {
    "merged": own(lambda batches: [[torch.cat(pair) for pair in zip(*batches, strict=True)]]),
    "slices": own(slices),
    "made up": own(lambda _: [[each[:BATCH].clone() for each in samples()]]),
    "chosen": own(lambda batches: (one for number, one in enumerate(batches) if number or mpitrain.init().is_root)),
    "filtered": own(lambda batches: ((x[1:].clone(), y[1:].clone()) for x, y in batches)),
    # By their length, which is that of a rank's part.
    "full": own(lambda batches: (batch for batch in batches if len(batch[0]) == BATCH)),
    # Cuts columns of padding; here there are none to cut.
    "trimmed": own(lambda batches: ([each[:, : each.shape[1]] for each in batch] for batch in batches)),
}


class ItsOwnIterator(DataLoader):
    def __iter__(self) -> Any:
        self.batches = super().__iter__()
        return self

    def __next__(self) -> Any:
        return next(self.batches)


class Repeated:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Infinite(DataLoader):
    """As in yolov5 and timm: one iterator for all epochs, made at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


class Samples(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return zip(*samples(), strict=True)


def made(kind: Any, dataset: Any = None, **options: Any) -> Any:
    return kind(dataset or torch.utils.data.TensorDataset(*samples()), batch_size=BATCH, **options)


KINDS |= {"infinite": Infinite, "its own iterator": ItsOwnIterator}


@pytest.mark.parametrize("kind", KINDS)
def test_loaders(world: World, kind: str) -> None:
    """Shuffled, two epochs. The last batch has another weight than the others, and comes where the loader puts it."""
    compare(world, mlp(), lambda: made(KINDS[kind], shuffle=True))
    if kind in ("mover", "ahead", "twice"):
        compare(world, mlp(), lambda: made(KINDS[kind], Samples()))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["mover", "infinite", "in background"])
def test_workers(world: World, kind: str) -> None:
    compare(world, mlp(), lambda: made(KINDS[kind], num_workers=1))


@pytest.mark.parametrize("kind", ["mover", "infinite", "ahead"])
def test_going_on(world: World, kind: str) -> None:
    """From a state within an epoch: the same batches as without the interruption."""

    def prepared() -> Any:
        return mpitrain.torch.shard(made(KINDS[kind], shuffle=True, generator=torch.Generator().manual_seed(3)))

    data = prepared()
    expected = [(x.tolist(), y.tolist()) for _ in range(2) for x, y in data]
    data, found = prepared(), []
    for number, (x, y) in enumerate(data):
        found.append((x.tolist(), y.tolist()))
        state = data.state_dict()
        if number == 2:
            break
    data = prepared()
    data.load_state_dict(state)
    found += [(x.tolist(), y.tolist()) for _ in range(2) for x, y in data]
    assert found == expected
    assert data.turn == len(expected) - 3


def trained(kind: Any) -> None:
    model = mlp()
    loop(*mpitrain.torch.prepare(model, sgd(model.parameters()), made(kind)))


def test_loaders_whose_batches_are_not_known(world: World) -> None:
    for kind, text in (
        (UNKNOWN["merged"], "has taken 5 batches of DataLoader.__iter__ for the one it yields, with new tensors"),
        (UNKNOWN["made up"], "has taken 0 batches"),
        (UNKNOWN["slices"], "yields slices of a batch"),
    ):
        assert text in error_on_all(world, DataError, lambda kind=kind: trained(kind))
    skip_alone(world)
    sizes = "and".join(f" {size} " for size in sorted({BATCH, NUM_SAMPLES % BATCH}))
    assert f"yields no batch of{sizes}samples" in error_on_all(world, DataError, lambda: trained(UNKNOWN["full"]))
    text = "yields fewer samples than a rank's part has"
    assert text in error_on_all(world, DataError, lambda: trained(UNKNOWN["filtered"]))
    assert "batch 1; " in error_on_all(world, MismatchError, lambda: trained(UNKNOWN["chosen"]))


def test_columns_that_are_cut_are_no_slices(world: World) -> None:
    x, _ = samples()
    data = mpitrain.torch.shard(made(UNKNOWN["trimmed"], torch.utils.data.TensorDataset(x, x)))
    assert sum(data.sum(part[:, 0]) for part, _ in data) == pytest.approx(float(x[:, 0].sum()))


def test_data_that_is_read_in_another_thread(world: World) -> None:
    """In a thread that also trains, it may be."""
    model = mlp()
    model, optimizer, data = mpitrain.torch.prepare(model, sgd(model.parameters()), made(DataLoader))
    thread = threading.Thread(target=loop, args=(model, optimizer, data))
    thread.start()
    thread.join()
    assert data.epoch == 2
    with pytest.raises(DataError, match="read in one thread and used in another one, MainThread"):
        loop(model, optimizer, InBackground(data))
    evaluated = mpitrain.torch.shard(made(DataLoader))
    with pytest.raises(DataError, match="read in one thread"):
        assert [evaluated.mean(x.mean()) for x, _ in InBackground(evaluated)] == NUM_SAMPLES
