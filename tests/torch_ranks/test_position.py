"""The position in the data: a loop that continues within an epoch gets the other samples, in the same order."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.fsdp import fully_shard

import mpitrain.torch
from mpitrain import World
from mpitrain.adapters.torch_random import random_state
from mpitrain.errors import CheckpointError, ConfigError, MismatchError
from mpitrain.job.worlds import make_world
from mpitrain.torch.keep import TorchRankState
from mpitrain.torch.sharded import ShardedData
from tests.ranks.common import error_on_all, named_ranks, skip_alone

from .common import nightly
from .prepared import mlp, sgd

NUM_SAMPLES, BATCH, EPOCHS = 33, 8, 3  # the last batch has one sample


NUM_BATCHES = 5


class EagerSampler(torch.utils.data.Sampler):
    """Draws its order at once, from NumPy's own random numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(numpy.random.permutation(NUM_SAMPLES).tolist())

    def __len__(self) -> int:
        return NUM_SAMPLES


class Augmented(torch.utils.data.Dataset):
    """Samples with noise, drawn where they are read."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[int, Any]:
        return number, torch.rand(1)


class Batches:
    """An iterable in an order of its own, with random numbers that are the same on every rank."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(NUM_SAMPLES, generator=self.generator)
        for begin in range(0, NUM_SAMPLES, BATCH):
            yield order[begin : begin + BATCH], order[begin : begin + BATCH] * 0.5


def loader(**options: Any) -> Any:
    return torch.utils.data.DataLoader(Augmented(), batch_size=BATCH, **options)


def shuffled(**options: Any) -> Any:
    return mpitrain.torch.shard(loader(shuffle=True, **options))


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def replaced() -> Any:
    return loader(sampler=torch.utils.data.RandomSampler(Augmented(), replacement=True, generator=seeded(2)))


SOURCES: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: loader(shuffle=True),
    "with a generator": lambda: loader(shuffle=True, generator=seeded(1)),
    "with replacement": replaced,
    "NumPy's numbers": lambda: loader(sampler=EagerSampler()),
    "not shuffled": loader,
    "an iterable": Batches,
}


def batches_of(data: Any, upto: int | None = None) -> list[Any]:
    """What this rank gets of the rest of the epochs, or of the first `upto` batches. A model draws numbers, too."""
    taken: list[Any] = []
    while data.epoch < EPOCHS:
        for numbers, noise in data:
            count = data.share.count
            taken.append((numbers.tolist()[:count], noise.tolist()[:count], torch.rand(1).item()))
            if len(taken) == upto:
                return taken
    return taken


def numbers_of(data: Any, count: int) -> list[list[int]]:
    """The samples of this rank in so many batches of one epoch."""
    return [batch[0].tolist()[: data.share.count] for _, batch in zip(range(count), data, strict=False)]


@pytest.mark.parametrize("num_used", [1, NUM_BATCHES, NUM_BATCHES + 3])
@pytest.mark.parametrize("source", SOURCES)
def test_a_loop_that_goes_on(world: World, source: str, num_used: int) -> None:
    """It has the bits of a loop without interruption, from the position and the random numbers of each rank."""

    def seed(number: int) -> None:
        torch.manual_seed(number)
        numpy.random.seed(number)

    seed(10 + world.rank)
    undisturbed = batches_of(mpitrain.torch.shard(SOURCES[source]()))
    seed(10 + world.rank)
    data = mpitrain.torch.shard(SOURCES[source]())
    first = batches_of(data, num_used)
    file = io.BytesIO()
    torch.save(data.state_dict(), file)  # as mpitrain.torch.save does
    position = {name: value for name, value in data.state_dict().items() if name != "random"}
    assert world.allgather(position) == [position] * world.size
    if source != "an iterable":  # where each rank reads with its own
        assert len(set(world.allgather(data.state_dict()["random"]["torch"].numpy().tobytes()))) == 1  # rank 0's
    random = random_state()
    seed(99)
    again = mpitrain.torch.shard(SOURCES[source]())
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    again.set_random_after(random)
    assert first + batches_of(again) == undisturbed


def test_later_epochs_of_ranks_that_are_placed_otherwise(world: World) -> None:
    """Ranks begin with other random numbers. Nothing else draws, so the orders are those of an undisturbed loop."""

    def begun() -> Any:
        given = torch.utils.data.TensorDataset(torch.arange(NUM_SAMPLES))
        return mpitrain.torch.shard(torch.utils.data.DataLoader(given, batch_size=BATCH, shuffle=True))

    def epochs_of(data: Any) -> list[Any]:
        return [numbers_of(data, NUM_BATCHES) for _ in range(EPOCHS)]

    torch.manual_seed(10)
    undisturbed = epochs_of(begun())
    torch.manual_seed(10)
    data = begun()
    first = numbers_of(data, 2)
    torch.manual_seed(99)
    again = begun()
    again.load_state_dict(data.state_dict())
    TorchRankState([again]).restore(None)
    rest = epochs_of(again)
    assert [first + rest[0], *rest[1:]] == undisturbed


@pytest.mark.parametrize("how", ["as drawn", "with random numbers", "as drawn, between two epochs"])
def test_what_was_said_of_an_earlier_position(world: World, how: str) -> None:
    """A loop that is sent to a second position leaves the random numbers of the rank alone, as if it were the first."""
    torch.manual_seed(10)
    data = shuffled()
    batches_of(data, 2)
    position = data.state_dict()
    torch.manual_seed(99 + world.rank)
    once = shuffled()
    once.load_state_dict(position)
    expected = numbers_of(once, 1), torch.rand(1).item()
    torch.manual_seed(7)
    twice = shuffled()
    twice.load_state_dict({**position, "batch": 0} if "epochs" in how else position)
    if "as drawn" in how:
        twice.go_on_as_drawn()
    else:
        twice.set_random_after(random_state())
    torch.manual_seed(99 + world.rank)
    twice.load_state_dict(position)
    assert (numbers_of(twice, 1), torch.rand(1).item()) == expected


def test_another_number_of_ranks(world: World) -> None:
    """All ranks but the last begin an epoch, and all continue with it: each sample comes once, in the same order."""
    skip_alone(world)
    comm = world.comm.Split(int(world.rank == world.size - 1), world.rank)
    used, state = [[], []], None
    if world.rank < world.size - 1:
        part = make_world(comm, parent=world)
        data = ShardedData(part, loader(shuffle=True, generator=seeded(1)))
        used, state = numbers_of(data, 2), data.state_dict()
        part.free()
    comm.Free()
    again = shuffled(generator=seeded(1))
    again.load_state_dict(world.broadcast_object(state))
    own = used + numbers_of(again, NUM_BATCHES)
    batches = [[number for part in parts for number in part] for parts in zip(*world.allgather(own), strict=True)]
    assert batches == [numbers.tolist() for numbers, _ in loader(shuffle=True, generator=seeded(1))]


@pytest.mark.parametrize("kind", ["generator", *nightly("workers")])
def test_between_two_epochs(world: World, kind: str) -> None:
    """The random numbers of the order continue, in a generator or in rank 0's own, from which the model draws, too.

    Workers have the order drawn to its end while the model still draws.
    """
    begun = lambda: shuffled(**({"generator": seeded(1)} if kind == "generator" else {"num_workers": 1}))  # noqa: E731
    torch.manual_seed(10 + world.rank)
    undisturbed = batches_of(begun())
    torch.manual_seed(10 + world.rank)
    data = begun()
    for _ in data:
        torch.rand(1)
    state = data.state_dict()
    torch.manual_seed(99)
    again = begun()
    again.load_state_dict(state)
    numbers = [numbers for numbers, _, _ in batches_of(again)]
    assert numbers == [numbers for numbers, _, _ in undisturbed[NUM_BATCHES:]]


def test_the_ranks_own_numbers(world: World) -> None:
    """Without those of the attempt before, they continue as seeded; drawing the order changes nothing."""
    data = shuffled()
    batches_of(data, 2)
    again = shuffled()
    again.load_state_dict(data.state_dict())
    torch.manual_seed(20 + world.rank)
    expected = torch.rand(1).item()  # the first sample's noise
    torch.manual_seed(20 + world.rank)
    _, noise = next(iter(again))
    assert noise[0].item() == expected


def test_workers_read_on(world: World) -> None:
    """They have read ahead, which does not count."""
    data = shuffled(num_workers=1)
    used = numbers_of(data, 2)
    again = shuffled(num_workers=1)
    again.load_state_dict(data.state_dict())
    rest = numbers_of(again, NUM_BATCHES)
    everywhere = [number for of_rank in world.allgather(used + rest) for batch in of_rank for number in batch]
    assert sorted(everywhere) == list(range(NUM_SAMPLES))


def test_other_samples_than_before(world: World) -> None:
    """On all ranks, and on one of them."""
    for source in ("shuffled", "an iterable"):
        data, other, short = (mpitrain.torch.shard(SOURCES[source]()) for _ in range(3))
        batches_of(data, 2)
        state = data.state_dict()
        other.load_state_dict({**state, "checksum": state["checksum"] ^ 1})
        text = error_on_all(world, CheckpointError, lambda other=other: next(iter(other)))
        assert "the loop continues after 2 batches of an epoch, but these are not the batches it used before: " in text
        short.load_state_dict({**state, "batch": 9})
        assert "there are only 5" in error_on_all(world, CheckpointError, lambda short=short: next(iter(short)))
    skip_alone(world)
    batches = [(torch.full((BATCH,), number), torch.zeros(BATCH)) for number in range(3)]
    data = mpitrain.torch.shard(batches)
    batches_of(data, 2)
    again = mpitrain.torch.shard(batches if world.rank < world.size - 1 else batches[::-1])
    again.load_state_dict(data.state_dict())
    text = error_on_all(world, MismatchError, lambda: next(iter(again)))
    assert all(name in text for name in named_ranks(world, world.size - 1))


# -- keep() ----------------------------------------------------------------------------------------------------------


def refusal(*parts: Any, **values: Any) -> str:
    """What keep() says of these parts and values, on every rank."""
    with pytest.raises(ConfigError) as refused:
        mpitrain.torch.keep(*parts, **values)
    assert refused.value.known_everywhere
    return str(refused.value)


@pytest.mark.usefixtures("group")
def test_what_cannot_be_kept(world: World) -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    for part, text in (
        (loader(), "a DataLoader, which does not know its position; give it the data of"),
        (model.parameters(), "a generator without state_dict() and load_state_dict()"),
    ):
        assert text in refusal(model, optimizer, part)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "keep(scheduler=...) was given a StepLR" in refusal(model, optimizer, scheduler=scheduler)
    divided = fully_shard(mlp(torch.float32))
    for part in (divided, torch.optim.AdamW(divided.parameters())):
        assert "each rank has another part of the state of this " in refusal(part)
    assert world.sum(1) == world.size


def test_keep_before_prepare(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """The first copy would be incomplete. Whoever forgets the data is told."""
    model = mlp()
    optimizer = sgd(model.parameters())
    kept = mpitrain.torch.keep(model, optimizer)
    kept.own_state()
    model, optimizer, data = mpitrain.torch.prepare(model, optimizer, loader())
    with pytest.raises(ConfigError, match=r"keep\(\) came before prepare\(\)"):
        kept.own_state()
    mpitrain.torch.keep(model, optimizer, data)
    assert capfd.readouterr().out == ""
    mpitrain.torch.keep(model, optimizer)
    assert ("keep() was not given the data of prepare()" in capfd.readouterr().out) == world.is_root


@pytest.mark.parametrize("schedule", ["StepLR", "OneCycleLR"])
def test_a_scheduler_that_is_not_kept(world: World, capfd: pytest.CaptureFixture[str], schedule: str) -> None:
    """Without it, the schedule of the next attempt would begin again, and nobody would notice."""
    model = mlp()
    optimizer = sgd(model.parameters())
    scheduler: Any = (
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if schedule == "StepLR"
        else torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    )
    model, optimizer, data = mpitrain.torch.prepare(model, optimizer, loader())
    mpitrain.torch.keep(model, optimizer, data, scheduler)
    assert capfd.readouterr().out == ""
    mpitrain.torch.keep(model, optimizer, data)
    assert ("keep() was not given the scheduler of the optimizer" in capfd.readouterr().out) == world.is_root
