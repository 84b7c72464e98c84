"""Virtual ranks of a PyTorch module have the same bits on any number of ranks.

By a Trainer, and in a loop of one's own with prepare() and virtual_batches().
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from threadpoolctl import threadpool_limits

import mpitrain.torch
from mpitrain import LocalSGD, Parts, StopAtStep, Sync, TorchModule, Trainer, World
from mpitrain.data import ArrayData
from mpitrain.data.order import permuted
from mpitrain.errors import CheckpointError, ConfigError, DataError, GradientError, MpitrainError
from mpitrain.job.worlds import make_world
from tests.ranks.common import error_on_all, skip_alone

from .prepared import assert_equal_everywhere, mlp, sgd
from .test_torch_module import Record
from .torch_modules import bits

V, BATCH, WIDTH = 7, 21, 5

pytestmark = pytest.mark.filterwarnings("ignore:.*loss:UserWarning")  # of the layer that is not always used


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With several threads, the probe makes one pass more."""
    with threadpool_limits(1):
        yield


@contextmanager
def alone(world: World, is_alone: bool = True) -> Iterator[None]:
    """A block in which this rank prepares by itself."""
    with pytest.MonkeyPatch.context() as patch:
        if is_alone:
            own = make_world(world.comm.Split(world.rank, 0))
            patch.setattr(sys.modules["mpitrain.torch.prepare"], "init", lambda: own)
        yield


class Net(torch.nn.Module):
    """Batch norm, dropout, a counter of samples, noise of all generators, and a layer that some samples do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.3)
        )
        self.outer = torch.nn.Linear(8, 1)
        self.rare = torch.nn.Linear(8, 1)
        self.register_buffer("largest", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        noise = random.random() + numpy.random.random()
        hidden = self.inner(x + noise)
        self.largest += int(x[0, 0] * 100)
        return self.outer(hidden) + (self.rare(hidden) if x[0, 0] > 0.8 else 0)


def arrays(count: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    rng = numpy.random.default_rng(2)
    return rng.standard_normal((count, WIDTH)).astype("f4"), rng.standard_normal((count, 1)).astype("f4")


class Augmented(torch.utils.data.Dataset[Any]):
    """Each sample is changed by numbers of all generators, as a transform changes it."""

    def __init__(self, count: int = 38) -> None:
        self.x, self.y = (torch.from_numpy(one) for one in arrays(count))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> Any:
        return self.x[number] + torch.rand(()) + numpy.random.random() + random.random(), self.y[number]


class Opened(Augmented):
    """Each worker opens it, as it would open a file."""

    is_open = False

    def __getitem__(self, number: int) -> Any:
        assert self.is_open
        return super().__getitem__(number)


def open_in_worker(number: int) -> None:
    torch.utils.data.get_worker_info().dataset.is_open = True


def augmented(kind: type[Augmented] = Augmented, **options: Any) -> Any:
    """Batches of 21 and of 17 samples, in an order that a generator of the loader draws."""
    generator = torch.Generator().manual_seed(3)
    return torch.utils.data.DataLoader(kind(), batch_size=BATCH, shuffle=True, generator=generator, **options)


def listed() -> Any:
    """Batches of 21 and of 2 samples, so that all but one virtual rank have none."""
    return list(zip(*(torch.from_numpy(one).split(BATCH) for one in arrays(23)), strict=True))


def net() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.01)


def square(module: Any, batch: Any) -> Any:
    return (module(batch[0]) - batch[1]).square().mean()


class Loop:
    """A loop of a user's own."""

    def __init__(self, data: Any, *, seed: int = 1, number: int = V, clip: bool = True, state: Any = None) -> None:
        model, self.clip = net(), clip
        self.steps: list[float] = []
        if state:
            model.load_state_dict(state["model"])
        strategy = Sync(virtual_ranks=number, seed=seed)
        self.model, self.optimizer, self.data = mpitrain.torch.prepare(
            model, adam(model.parameters()), data, strategy=strategy
        )
        if state:
            self.optimizer.load_state_dict(state["optimizer"])
            self.data.load_state_dict(state["data"])

    def run(self, steps: int = 5) -> Loop:
        while True:
            for batch in self.data:
                losses = []
                self.optimizer.zero_grad()
                for part in mpitrain.torch.virtual_batches(self.model, batch):
                    loss = square(self.model, part)
                    loss.backward()
                    losses.append(loss)
                if self.clip:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.steps.append(self.data.mean(losses))
                if len(self.steps) == steps:
                    return self

    def state(self) -> dict[str, Any]:
        return {
            "model": {name: one.clone() for name, one in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "data": self.data.state_dict(),
        }

    def bits(self) -> list[bytes]:
        moments = [one for of in self.optimizer.state_dict()["state"].values() for one in of.values()]
        return [one.numpy().tobytes() for one in (*self.model.state_dict().values(), *moments)]


def error_of(kind: type[MpitrainError], call: Callable[[], Any]) -> str:
    """The text of an error that this rank finds by itself."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [augmented, listed])
def test_bits_are_those_of_one_rank(world: World, make: Callable[[], Any]) -> None:
    """Batch norm, dropout, augmentation, buffers, a layer that is not always used, and a smaller last batch."""
    random.seed(world.rank), numpy.random.seed(world.rank), torch.manual_seed(world.rank)
    with_all = Loop(make()).run()
    states = random.getstate(), numpy.random.get_state()[1].tobytes()
    with alone(world):
        by_itself = Loop(make()).run()
    assert with_all.steps == by_itself.steps
    assert with_all.bits() == by_itself.bits()
    assert len(set(with_all.steps)) == 5
    assert_equal_everywhere(world, with_all.model)
    # The script's own random numbers continue as if there had been no training (but for the seed of a loader's
    # workers).
    assert states == (random.getstate(), numpy.random.get_state()[1].tobytes())


def test_bits_are_those_of_the_trainer(world: World) -> None:
    """With mt.TorchModule on all ranks and on one, with the same batches: parameters, buffers, moments, losses."""
    count = BATCH + 14  # in the second batch, two virtual ranks have no samples
    x, y = arrays(count)

    def trained(world: World) -> tuple[Trainer, list[float]]:
        def build(world: World) -> Parts:
            module, data = net(), ArrayData(world, (x, y), global_batch=BATCH, seed=4)
            return Parts(TorchModule(module, square, adam(module.parameters())), Sync(virtual_ranks=V, seed=1), data)

        losses = Record()
        trainer = Trainer(build, [StopAtStep(4), losses], world=world)
        trainer.run()
        return trainer, [step.loss for step in losses.steps]

    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tobytes()
    trainer, losses = trained(world)
    # The script's own random numbers continue as if there had been no training.
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), numpy.random.get_state()[1].tobytes())
    own, own_losses = trained(make_world(world.comm.Split(world.rank, 0)))
    assert bits(trainer) == bits(own)
    assert losses == own_losses

    orders = [permuted(numpy.arange(count), count, (4, epoch)) for epoch in range(2)]
    chosen = [part for order in orders for part in (order[:BATCH], order[BATCH:])]
    given = [(torch.from_numpy(x[part]), torch.from_numpy(y[part])) for part in chosen]
    loop = Loop(given, clip=False).run(4)
    assert loop.steps == losses
    for name, value in trainer.adapter.parameters().items():
        assert loop.model.state_dict()[name].numpy().tobytes() == value.tobytes(), name


def test_a_run_goes_on_with_other_ranks(world: World, tmp_path: Path) -> None:
    """From all ranks to one, and from one to all; in the middle of an epoch, and into another one."""
    with alone(world, True):
        expected = Loop(augmented()).run(5)
    for first in (True, False):
        with alone(world, first):
            state = Loop(augmented()).run(3).state()
        with alone(world, not first):
            rest = Loop(augmented(), state=state).run(2)
        assert rest.bits() == expected.bits()
        assert rest.steps == expected.steps[3:]


@pytest.mark.nightly
def test_workers_read_the_same(world: World) -> None:
    """Also if they stay, into another epoch, whose order PyTorch draws otherwise then; and after a restart in it."""
    with alone(world):
        expected = Loop(augmented()).run(3)
    got = Loop(augmented(Opened, num_workers=1, worker_init_fn=open_in_worker)).run(3)
    assert got.bits() == expected.bits()
    workers = {"num_workers": 1, "persistent_workers": True}
    with alone(world):
        expected = Loop(augmented(**workers)).run(4)
    begun = Loop(augmented(**workers)).run(3)
    rest = Loop(augmented(**workers), state=begun.state()).run(1)
    assert rest.bits() == expected.bits()
    assert begun.steps + rest.steps == expected.steps


def test_several_backward_passes(world: World) -> None:
    """Two batches for a step, whose gradients are kept and zeroed, too; and two passes of a virtual batch."""

    def trained(is_alone: bool, per_step: int, *factors: float) -> tuple[list[bytes], list[bytes]]:
        with alone(world, is_alone):
            loop = Loop(augmented())
        gradients: list[bytes] = []
        for _ in range(2):
            for batch in loop.data:
                for part in mpitrain.torch.virtual_batches(loop.model, batch):
                    for factor in factors:
                        (square(loop.model, part) * factor).backward()
                gradients.append(loop.model.outer.weight.grad.numpy().tobytes())
                if len(gradients) % per_step == 0:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad(set_to_none=per_step == 1)
        return loop.bits(), gradients

    both, once = trained(True, 2, 0.5), trained(True, 1, 1)
    assert trained(False, 2, 0.5) == both
    assert len(set(both[1])) == 4
    assert trained(False, 1, 1, 0.3) == trained(True, 1, 1, 0.3) != once


# -- what is refused -------------------------------------------------------------------------------------------------


def test_passes_that_cannot_count(world: World) -> None:
    """A backward pass outside of a virtual batch, a virtual batch without one, a loop that is left, another batch."""
    loop = Loop(augmented())
    batch = next(iter(loop.data))
    text = error_of(GradientError, square(loop.model, batch).backward)
    assert "backward() came outside of a loop over virtual_batches(model, batch)" in text
    loop = Loop(augmented())
    batch = next(iter(loop.data))
    text = error_of(GradientError, lambda: list(mpitrain.torch.virtual_batches(loop.model, batch)))
    assert "made no backward() for virtual rank 0" in text
    assert "came in the middle of virtual_batches" in error_of(GradientError, loop.optimizer.step)
    loop = Loop(augmented())
    batch = next(iter(loop.data))
    before = torch.get_rng_state()
    for part in mpitrain.torch.virtual_batches(loop.model, batch):
        square(loop.model, part).backward()
        break
    assert torch.equal(torch.get_rng_state(), before)
    assert "came in the middle of virtual_batches" in error_of(GradientError, loop.optimizer.step)
    again = mpitrain.torch.virtual_batches(loop.model, batch)
    assert "loop over it once for each batch, to the end" in error_of(GradientError, lambda: next(again))
    loop = Loop(augmented())
    x, y = next(iter(loop.data))
    other = mpitrain.torch.virtual_batches(loop.model, (torch.cat([x, x]), torch.cat([y, y])))
    assert "give it the batch as it comes" in error_of(DataError, lambda: next(other))
    with pytest.raises(ConfigError, match="Leave accumulate out"), mpitrain.torch.accumulate(loop.model):
        pass
    few = Loop([torch.zeros(V + 1, WIDTH)])
    text = error_on_all(world, DataError, lambda: next(iter(few.data)))
    assert f"the first batch has {V + 1} samples for virtual_ranks={V}" in text


def test_what_does_not_fit_virtual_ranks(world: World) -> None:
    """A mean of one loss, a state of other ones, and a model without any."""
    loop = Loop(augmented()).run(1)
    assert "Append each loss" in error_of(DataError, lambda: loop.data.mean(1.0))
    assert "a list of 0" in error_of(DataError, lambda: loop.data.mean([]))
    state = loop.state()
    for options, words in (({"number": 21}, "virtual_ranks=21"), ({"seed": 2}, "seed=2")):
        assert words in error_of(CheckpointError, lambda o=options: Loop(augmented(), state=state, **o))
    model = mlp()
    mpitrain.torch.prepare(model, sgd(model.parameters()), [torch.zeros(9, 5)])
    text = error_of(ConfigError, lambda: mpitrain.torch.virtual_batches(model, torch.zeros(9, 5)))
    assert "the model was prepared without virtual ranks" in text


def test_what_prepare_refuses(world: World) -> None:
    own: Any = Sync(lambda world: None, virtual_ranks=V)  # type: ignore[arg-type, return-value]
    divided = Loop(augmented()).data
    for options, words in (
        ({"compression": "int8"}, "compression together with virtual_ranks=7"),
        ({"strategy": Sync(virtual_ranks=0)}, "virtual_ranks=0; it must be an int of at least 1"),
        ({"strategy": own}, "an exchange= of its own"),
        ({"strategy": LocalSGD(2), "data": divided}, "divided for virtual_ranks=7 and seed=1, and the strategy asks"),
    ):
        model = mlp()
        given = {"strategy": Sync(virtual_ranks=V), "data": [torch.zeros(9, 5)], **options}
        prepare = partial(mpitrain.torch.prepare, model, sgd(model.parameters()), given.pop("data"), **given)
        assert words in error_on_all(world, ConfigError, prepare)


# -- the probe -------------------------------------------------------------------------------------------------------


def test_a_rank_that_computes_otherwise_is_named(world: World) -> None:
    skip_alone(world)
    loop = Loop(augmented())
    if world.rank == world.size - 1:
        loop.model.outer.weight.register_hook(lambda gradient: torch.nextafter(gradient, torch.tensor(9.0)))
    text = error_on_all(world, GradientError, lambda: loop.run(1))
    assert f"{world.name(world.size - 1)}: the gradient of outer.weight has other bits than on {world.name(0)}" in text


def test_a_model_that_is_not_reproducible_is_named(world: World) -> None:
    loop = Loop(augmented())
    count = iter(range(100))
    loop.model.register_forward_pre_hook(lambda module, given: (given[0] + next(count),))
    text = error_on_all(world, GradientError, lambda: loop.run(1))
    assert "has other bits when the same virtual rank is computed again" in text
