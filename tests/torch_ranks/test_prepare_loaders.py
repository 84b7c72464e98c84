"""DataLoaders with an __iter__ of their own: they give what they give one process, or are refused."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mpitrain import World
from mpitrain.errors import DataError, MismatchError
from tests.ranks.common import error_on_all, skip_alone

from .prepared import BATCH, NUM_SAMPLES, compare, loop, mlp, samples, sgd, torch

import mpitrain.torch  # isort: skip (the line above skips this file where there is no PyTorch)

DataLoader = torch.utils.data.DataLoader


class Mover(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield [each.to("cpu") for each in batch]


class Normalizer(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            yield x / 2, y.clone()


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


class Ahead(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        ahead = next(batches, None)
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            yield batch


class InBackground:
    """As prefetch_generator has it."""

    def __init__(self, batches: Any) -> None:
        self.read: queue.Queue[Any] = queue.Queue(3)
        threading.Thread(target=lambda: [self.read.put(each) for each in (*batches, None)], daemon=True).start()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read.get, None)


class Background(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        return iter(InBackground(super().__iter__()))


class EverySecond(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        return iter(list(super().__iter__())[::2])


class Twice(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield from (batch, batch)


class OtherOrder(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        first, *others = super().__iter__()
        return iter([first, *reversed(others)])


class Merged(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        batches = list(super().__iter__())
        return iter([[torch.cat(pair) for pair in zip(*batches, strict=True)]])


class Slices(DataLoader):
    """Each as long as the part of a rank, or longer: of one process's batch, there are several."""

    def __iter__(self) -> Iterator[Any]:
        size = -(-BATCH // mpitrain.init().size)
        return (
            part for batch in super().__iter__() for part in zip(*(each.split(size) for each in batch), strict=True)
        )


class Trimmed(DataLoader):
    """Cuts columns of padding; here there are none to cut."""

    def __iter__(self) -> Iterator[Any]:
        return ([each[:, : each.shape[1]] for each in batch] for batch in super().__iter__())


class MadeUp(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        yield [each[:BATCH].clone() for each in samples()]


class Chosen(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        return (batch for number, batch in enumerate(super().__iter__()) if number or mpitrain.init().is_root)


class Samples(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return zip(*samples(), strict=True)


def made(kind: Any, dataset: Any = None, **options: Any) -> Any:
    return kind(dataset or torch.utils.data.TensorDataset(*samples()), batch_size=BATCH, **options)


@pytest.mark.parametrize(
    "kind",
    [Mover, Normalizer, Infinite, Ahead, Background, EverySecond, Twice, OtherOrder],
    ids=lambda kind: kind.__name__,
)
def test_loaders(world: World, kind: Any) -> None:
    """Shuffled, two epochs. The last batch has another weight than the others, and comes where the loader puts it."""
    compare(world, mlp(), lambda: made(kind, shuffle=True))


@pytest.mark.parametrize("kind", [Mover, Ahead, Twice], ids=lambda kind: kind.__name__)
def test_loaders_of_streams(world: World, kind: Any) -> None:
    compare(world, mlp(), lambda: made(kind, Samples()))


@pytest.mark.parametrize("kind", [Mover, Infinite, Background], ids=lambda kind: kind.__name__)
def test_workers(world: World, kind: Any) -> None:
    if world.size != 2:
        pytest.skip("each worker loads PyTorch; two ranks will do")
    compare(world, mlp(), lambda: made(kind, num_workers=1))


@pytest.mark.parametrize("kind", [Mover, Infinite, Ahead], ids=lambda kind: kind.__name__)
def test_going_on(world: World, kind: Any) -> None:
    """From a state within an epoch: the same batches as without the interruption."""

    def prepared() -> Any:
        return mpitrain.torch.shard(made(kind, shuffle=True, generator=torch.Generator().manual_seed(3)))

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
        (Merged, "has taken 5 batches of DataLoader.__iter__ for the one it yields, with new tensors"),
        (MadeUp, "has taken 0 batches"),
        (Slices, "yields slices of a batch"),
    ):
        assert text in error_on_all(world, DataError, lambda kind=kind: trained(kind))
    skip_alone(world)
    assert "batch 1; " in error_on_all(world, MismatchError, lambda: trained(Chosen))


def test_columns_that_are_cut_are_no_slices(world: World) -> None:
    x, _ = samples()
    data = mpitrain.torch.shard(made(Trimmed, torch.utils.data.TensorDataset(x, x)))
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
