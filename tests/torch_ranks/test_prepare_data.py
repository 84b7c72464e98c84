"""The data that a loop gets: the ranks' parts are disjoint, and together they are the batches of one process."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from mpitrain import World
from mpitrain.errors import ConfigError, DataError, MismatchError
from tests.ranks.common import error_on_all, skip_alone

from .prepared import NUM_SAMPLES, batches, loader, mlp, samples, sgd, torch

import mpitrain.torch  # isort: skip (the line above skips this file where there is no PyTorch)


def prepared(data: Any) -> Any:
    model = mlp()
    return mpitrain.torch.prepare(model, sgd(model.parameters()), data)[2]


def together(world: World, data: Any) -> list[Any]:
    """The inputs of all batches, put together from all ranks, without those that do not count."""
    found = []
    for x, y in data:
        assert len(x) == len(y) == max(data.share.count, 1)
        parts = world.allgather(x[: data.share.count].numpy())
        assert sum(len(part) for part in parts) == data.share.total
        assert max(len(part) for part in parts) - min(len(part) for part in parts) <= 1
        found.append(numpy.concatenate(parts))
    assert data.share is None
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": True}, {"shuffle": True, "drop_last": True, "num_workers": 1}],
    ids=["in order", "shuffled", "shuffled, by a worker"],
)
def test_a_loader(world: World, options: dict[str, Any]) -> None:
    """Two epochs, by a worker one, in the order of one process, though the ranks' random numbers differ."""
    workers = "num_workers" in options
    if workers and world.size != 2:
        pytest.skip("each worker loads PyTorch; two ranks will do")
    data = prepared(loader(**options))
    torch.manual_seed(world.rank)
    mine = [together(world, data) for _ in range(1 if workers else 2)]
    alone = loader(**options | {"num_workers": 0})
    torch.manual_seed(0)
    for epoch in mine:
        expected = [x.numpy() for x, _ in alone]
        assert len(epoch) == len(expected) == len(data)
        for found, its in zip(epoch, expected, strict=True):
            numpy.testing.assert_array_equal(found, its)


def test_what_a_loop_asks_a_loader_for(world: World) -> None:
    """All that is promised is that of the loader; all else is in `given`, and a wrong name is an error."""
    given = loader(shuffle=True, drop_last=True)
    data = prepared(given)
    for name in (
        "dataset",
        "batch_size",
        "sampler",
        "batch_sampler",
        "drop_last",
        "num_workers",
        "collate_fn",
        "generator",
    ):
        assert getattr(data, name) is getattr(given, name), name
    assert len(data) == len(given)
    assert len(data.dataset) == NUM_SAMPLES
    assert data.given is given
    with pytest.raises(AttributeError, match="batchsize"):
        _ = data.batchsize
    listed = batches()
    data = prepared(listed)
    assert (data.given, data.dataset, data.batch_size, data.sampler) == (listed, None, None, None)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*samples(), strict=True))


class Tables(torch.utils.data.Dataset):
    """A data set whose items are batches."""

    def __len__(self) -> int:
        return len(batches())

    def __getitem__(self, number: int) -> Any:
        if number >= len(self):
            raise IndexError
        return batches()[number]


@pytest.mark.parametrize("kind", ["list", "stream", "without batches"])
def test_what_every_rank_reads(world: World, kind: str) -> None:
    given = {
        "list": batches,
        "stream": lambda: torch.utils.data.DataLoader(Stream(), batch_size=8),
        "without batches": lambda: torch.utils.data.DataLoader(Tables(), batch_size=None),
    }[kind]()
    for found, (x, _) in zip(together(world, prepared(given)), batches(), strict=True):
        numpy.testing.assert_array_equal(found, x.numpy())


def test_batches_of_any_form(world: World) -> None:
    """Texts are divided, what is not of a sample stays; a rank's part may be of another kind of tuple."""
    kind = namedtuple("kind", "a b")
    count = world.size + 1
    array = numpy.arange(count)
    batch = {"x": kind(torch.arange(count), array), "texts": [str(number) for number in range(count)], "n": (3, None)}
    (found,) = prepared([batch])
    mine = [0, 1] if world.rank == 0 else [world.rank + 1]
    assert type(found["x"]) is kind
    assert found["x"].a.tolist() == found["x"].b.tolist() == mine
    assert found["texts"] == [str(number) for number in mine]
    assert found["n"] == (3, None)


def test_data_that_cannot_be_used(world: World) -> None:
    sampler = torch.utils.data.DistributedSampler(range(NUM_SAMPLES), num_replicas=2, rank=0)
    assert "DistributedSampler" in error_on_all(world, ConfigError, lambda: prepared(loader(sampler=sampler)))
    for bad, text in (
        ([(torch.zeros(8), torch.zeros(7))], "found 7, 8"),
        ([object()], "none in a object"),
        ([{"x": torch.zeros(8), "y": {1, 2}}], "a set, which cannot be divided"),
    ):
        with pytest.raises(DataError, match=text):
            list(prepared(bad))
    if world.size > 1:
        data = prepared(loader(batch_size=world.size - 1))
        with pytest.raises(DataError, match=f"has {world.size - 1} samples for {world.size} ranks"):
            list(data)


def test_data_sets_that_are_compared_and_equal(world: World) -> None:
    """Split by the same seed, joined, and of samples that are other ones at each reading."""
    x, y = samples()
    whole = torch.utils.data.TensorDataset(x, y)

    class Noisy(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, number: int) -> Any:
            return x[number] + world.rank, y[number]

    split = torch.utils.data.random_split(whole, [16, len(x) - 16], torch.Generator().manual_seed(3))[0]
    rounded = torch.utils.data.TensorDataset(x + 1e-9 * world.rank, y)  # on another CPU
    odd_numbers = torch.utils.data.Subset(whole, torch.arange(1, 32, 2))
    lazy = torch.utils.data.TensorDataset((x[:, :2].to(torch.complex128)).conj().imag, y)
    for dataset in (split, torch.utils.data.ConcatDataset([split, whole]), Noisy(), rounded, odd_numbers, lazy):
        data = prepared(torch.utils.data.DataLoader(dataset, batch_size=8))
        assert sum(data.share.total for _ in data) == len(dataset)


def test_ranks_with_other_data(world: World) -> None:
    skip_alone(world)
    odd = world.rank == world.size - 1
    text = error_on_all(world, MismatchError, lambda: prepared(loader(batch_size=9 if odd else 8)))
    assert "batches of 9 samples" in text
    own = torch.Generator().manual_seed(int(odd))
    x, y = samples()
    halves = [len(x) // 2, len(x) - len(x) // 2]
    tensors = torch.utils.data.TensorDataset
    for dataset, said in (
        (torch.utils.data.random_split(tensors(x, y), halves, own)[0], "choose them with the same seed on every rank"),
        (torch.utils.data.ConcatDataset([tensors(x[: 5 + odd]), tensors(x[: 6 - odd])]), "TensorDataset of 6 samples"),
        (torch.utils.data.Subset(tensors(x, y + int(odd)), range(20)), "of the first and the last one"),
        (tensors(x, y.float() if odd else y), "torch.float32, checksum"),
    ):
        other = torch.utils.data.DataLoader(dataset, batch_size=8)
        assert said in error_on_all(world, MismatchError, lambda other=other: prepared(other))
    drawn = torch.utils.data.RandomSampler(x) if odd else None
    assert "drawn by RandomSampler" in error_on_all(world, MismatchError, lambda: prepared(loader(sampler=drawn)))
    data = prepared((x + odd, y) for x, y in batches())
    assert "batch 0: 8 samples, checksum" in error_on_all(world, MismatchError, lambda: next(iter(data)))
    data = prepared(iter(batches()[: 2 if odd else 3]))
    assert "no more batches" in error_on_all(world, MismatchError, lambda: list(data))

    class Failing(torch.utils.data.SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            raise ValueError("no numbers today")

    data = prepared(loader(sampler=Failing(range(NUM_SAMPLES))))
    text = error_on_all(world, mpitrain.errors.MpitrainError, lambda: list(data))
    assert "no numbers today" in text
