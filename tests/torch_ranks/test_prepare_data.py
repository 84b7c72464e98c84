"""The data that a loop gets: the ranks' parts are disjoint, and together they are those of one process. Metrics."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import mpitrain.torch
from mpitrain import World
from mpitrain.errors import ConfigError, DataError, MismatchError, MpitrainError, TreeError
from tests.ranks.common import error_on_all, skip_alone

from .common import nightly
from .prepared import NUM_SAMPLES, batches, loader, mlp, samples, sgd


def prepared(data: Any, **options: Any) -> Any:
    model = mlp()
    return mpitrain.torch.prepare(model, sgd(model.parameters()), data, **options)[2]


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
    [{}, {"shuffle": True}, *nightly({"shuffle": True, "drop_last": True, "num_workers": 1})],
    ids=["in order", "shuffled", "shuffled, by a worker"],
)
def test_a_loader(world: World, options: dict[str, Any]) -> None:
    """Two epochs, in the order of one process, though the ranks' random numbers differ."""
    given, alone = loader(**options), loader(**options | {"num_workers": 0})
    data = prepared(given)
    torch.manual_seed(world.rank)
    mine = [together(world, data) for _ in range(2 - data.num_workers)]
    torch.manual_seed(0)
    for epoch in mine:
        expected = [x.numpy() for x, _ in alone]
        assert len(epoch) == len(expected) == len(data)
        for found, its in zip(epoch, expected, strict=True):
            numpy.testing.assert_array_equal(found, its)
    # All that is promised is that of the loader; all else is in `given`, and a wrong name is an error.
    names = "dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "num_workers", "collate_fn", "generator"
    for name in names:
        assert getattr(data, name) is getattr(given, name), name
    assert data.given is given
    with pytest.raises(AttributeError, match="batchsize"):
        _ = data.batchsize


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
    given: Any = {
        "list": batches,
        "stream": lambda: torch.utils.data.DataLoader(Stream(), batch_size=8),
        "without batches": lambda: torch.utils.data.DataLoader(Tables(), batch_size=None),
    }[kind]()
    data = prepared(given)
    for found, (x, _) in zip(together(world, data), batches(), strict=True):
        numpy.testing.assert_array_equal(found, x.numpy())
    if kind == "list":
        assert (data.given, data.dataset, data.batch_size, data.sampler) == (given, None, None, None)


@dataclass(frozen=True)
class Record:
    x: Any
    names: Any


class Encoding(UserDict[str, Any]):
    """As a tokenizer returns it."""


class Declared(list[Any]):
    batch_form = ("samples", "samples", "whole")


def test_batches_of_any_form(world: World) -> None:
    """Tensors and arrays are divided, in containers of any kind; the rest is whole, or what the form says."""
    kind = namedtuple("kind", "a b")
    count = world.size + 1
    array = numpy.arange(count)
    texts = [str(number) for number in array]
    batch = {
        "x": kind(torch.arange(count), array),
        "record": Record(array.astype(object), ["a"] * (count + 1)),
        "encoding": Encoding(ids=torch.arange(count)),
        "inputs": [torch.arange(count)] * (count + 1),
        "texts": texts,
        "classes": texts,
        "size": torch.Size([1] * count),
        "n": (3, None, 2.5) * count,
    }
    mine = [0, 1] if world.rank == 0 else [world.rank + 1]
    # In the second batch, all lengths fit. What the first one has shown holds.
    fitting = batch | {"record": Record(array, ["a"] * count), "inputs": [torch.arange(count)] * count}
    for found in prepared([batch, fitting], form={"texts": "samples", "classes": "whole"}):
        assert type(found["x"]) is kind
        columns = *found["x"], found["record"].x, found["encoding"]["ids"], *found["inputs"]
        assert all(column.tolist() == mine for column in columns)
        assert type(found["encoding"]) is Encoding
        assert found["texts"] == [texts[number] for number in mine]
        assert all(found[key] is batch[key] for key in ("classes", "size", "n"))
        assert set(found["record"].names) == {"a"}
        assert len(found["record"].names) >= count
    # One dict of boxes for each image, as detectors have them, which nothing but the form can tell from several inputs.
    images = [torch.zeros(3, 4, 4)] * count
    boxes = [{"boxes": torch.zeros(3, 4)}] * count
    (found,) = prepared(Declared([(images, boxes, ["cat"] * count)]))
    assert [len(part) for part in found] == [len(mine), len(mine), count]


class Texts(torch.utils.data.IterableDataset):
    """Samples with texts and boxes, in a stream."""

    def __iter__(self) -> Iterator[Any]:
        return iter([{"x": torch.tensor(float(n)), "text": str(n), "boxes": torch.zeros(n, 4)} for n in range(10)])


@pytest.mark.parametrize("num_workers", [0, *nightly(1)])
def test_samples_are_divided_before_they_are_collated(world: World, num_workers: int) -> None:
    """So a batch of a DataLoader may have any form: lists of texts, boxes of all images in one tensor, class names."""
    streamed = torch.utils.data.DataLoader(
        Texts(), batch_size=world.size, collate_fn=collated, num_workers=num_workers, drop_last=True
    )
    numbered = torch.utils.data.DataLoader(list(Texts()), batch_size=world.size, collate_fn=collated, drop_last=True)
    for given in (streamed, numbered):
        number = world.rank
        for found in prepared(given):
            assert found["x"].tolist() == [number]
            assert found["text"] == [str(number)]
            assert found["boxes"].shape == (number, 4)
            assert found["classes"] == ["cat"] * world.size
            number += world.size


def collated(samples: Any) -> Any:
    x, text, boxes = ([sample[key] for sample in samples] for key in ("x", "text", "boxes"))
    return {"x": torch.stack(x), "text": text, "boxes": torch.cat(boxes), "classes": ["cat"] * mpitrain.init().size}


def test_data_that_cannot_be_used(world: World) -> None:
    sampler = torch.utils.data.DistributedSampler(range(NUM_SAMPLES), num_replicas=2, rank=0)
    assert "DistributedSampler" in error_on_all(world, ConfigError, lambda: prepared(loader(sampler=sampler)))
    for bad, text in (
        ([(torch.zeros(8), torch.zeros(7))], "found [0] 8, [1] 7"),
        ([{}], "none in a dict"),
        ([object()], "a batch is a object, which cannot be divided"),
        ([{"x": torch.zeros(8), "y": {1, 2}}], "['y'] is a set, which cannot be divided"),
        ([(torch.zeros(8), torch.eye(8).to_sparse())], "[1] is a Tensor (torch.sparse_coo), which"),
        ([torch.nn.utils.rnn.pack_sequence([torch.zeros(1)] * 8)], "a PackedSequence, which"),
        ([(torch.zeros(8), list("abcdefgh"))], "[1] is a list of 8 (str) in a batch of 8 samples: it may have"),
        ([(torch.zeros(2, 8), (480, 640))], "[1] is a tuple of 2 (int) in a batch of 2 samples: it may have"),
        ([(torch.zeros(8), [{"boxes": torch.zeros(8, 4)}] * 8)], "[1] is a list of 8 (dict)"),
        ([(torch.zeros(8), [torch.Size((480, 640))] * 8)], "[1] is a list of 8 (Size)"),
        ([(torch.zeros(2), [["a cat", "a pet"], ["a dog"]])], "[1] is a list of 2 (list)"),
        ([([torch.zeros(3, 4, 4)] * 8, [torch.zeros(3)] * 8)], "the batch is a tuple of 2 (list) in a batch of 3"),
    ):
        assert text in error_on_all(world, DataError, lambda bad=bad: list(prepared(bad)))
    pair = [(torch.zeros(8), 3)]
    assert "has 3 entries for the batch, which has 2" in error_on_all(
        world, DataError, lambda: list(prepared(pair, form=("samples", None, None)))
    )
    both = ("samples", "samples")
    assert "'samples' for [1], a int" in error_on_all(world, DataError, lambda: list(prepared(pair, form=both)))
    with pytest.raises(ConfigError, match="has 'sample'; a form has"):
        prepared(pair, form=("sample", None))
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


# -- metrics over all samples, and one file for all ranks -------------------------------------------------------------


def test_metrics_are_those_of_all_samples(world: World) -> None:
    """Also of the last batch, of one sample: most ranks compute with one that does not count."""
    x, y = samples()
    data = mpitrain.torch.shard(loader())
    right, means, sizes = 0.0, [], []
    for own_x, own_y in data:
        right += data.sum(own_y == 1)
        means.append(data.mean(own_x.mean()))
        sizes.append(data.share.total)
    assert right == int((y == 1).sum())
    expected = [float(x[begin : begin + 8].mean()) for begin in range(0, NUM_SAMPLES, 8)]
    assert means == pytest.approx(expected, rel=1e-14)
    assert sizes == [8, 8, 8, 8, 1]
    # Behind the loop they are of the last batch, whose sample is rank 0's.
    assert data.mean(float(world.rank)) == 0.0
    assert data.sum([5.0 + world.rank]) == 5.0


def test_metrics_that_cannot_be(world: World) -> None:
    data = mpitrain.torch.shard(loader())
    for call in (data.mean, data.sum):
        assert "there was no batch yet" in error_on_all(world, DataError, lambda call=call: call(1.0))
    batches = iter(data)
    x, _ = next(batches)
    with pytest.raises(DataError, match=rf"the {len(x)} samples of this rank's part; it was given the shape \(\)"):
        data.sum(1.0)
    with pytest.raises(DataError, match=r"it was given the shape \(2,\)"):
        data.mean([1.0, 2.0])
    for call, given in ((data.sum, numpy.ma.masked_all(len(x))), (data.mean, numpy.ma.masked)):
        with pytest.raises((DataError, TreeError), match=r"a (numpy )?Masked"):
            call(given)
    list(batches)
    assert world.sum(1) == world.size


def test_a_file_of_all_ranks(world: World, shared: Path) -> None:
    path = shared / "state.pt"
    assert mpitrain.torch.load(path) is None
    for number in (1, 2):
        mpitrain.torch.save({"w": torch.full((3,), float(number + world.rank)), "epoch": number}, path)
        state = mpitrain.torch.load(path)
        assert state["epoch"] == number
        assert state["w"].tolist() == [number] * 3  # rank 0's
    assert [file.name for file in shared.iterdir()] == ["state.pt"]


def test_a_file_that_cannot_be_written_or_read(world: World, shared: Path) -> None:
    path = shared / "state.pt"
    mpitrain.torch.save({"epoch": 1}, path)
    text = error_on_all(world, MpitrainError, lambda: mpitrain.torch.save({"epoch": lambda: 2}, path))
    assert f"{world.name(0)}, save {path}: " in text
    assert mpitrain.torch.load(path) == {"epoch": 1}
    assert [file.name for file in shared.iterdir()] == ["state.pt"]
    text = error_on_all(world, MpitrainError, lambda: mpitrain.torch.save(1, shared / "missing" / "state.pt"))
    assert "No such file or directory" in text
    world.barrier()
    if world.is_root:
        path.write_bytes(path.read_bytes()[:-20])
    world.barrier()
    text = error_on_all(world, MpitrainError, lambda: mpitrain.torch.load(path))
    assert f"{world.name(0)}, load {path}: " in text
