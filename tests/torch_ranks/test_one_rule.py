"""TorchModule and prepare() follow one rule for unused parameters and buffers: that of PyTorch in one process.

Both train one model, and PyTorch alone trains it in one process with every batch in as many parts as there are ranks:
each part goes through a copy of the module, and the gradients and floating buffers of the copies are averaged by hand.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import mpitrain.torch
from mpitrain import Parts, StopAtStep, Sync, TorchModule, Trainer, World
from mpitrain.adapters.torch_buffers import ModuleBuffers
from mpitrain.data import ArrayData
from mpitrain.world.shard import part_of
from tests.ranks.common import assert_same_bits

from .prepared import BATCH, NUM_SAMPLES, batches, samples

EPOCHS = 2


STEPS = EPOCHS * -(-NUM_SAMPLES // BATCH)


class Odd(torch.nn.Module):
    """Layers that all, some, one and no ranks use, and buffers of all kinds. `part` is the rank that computes."""

    def __init__(self, part: int, num_parts: int) -> None:
        super().__init__()
        self.part, self.num_parts = part, num_parts
        self.norm = torch.nn.BatchNorm1d(5)
        self.all = torch.nn.Linear(5, 3)
        self.some = torch.nn.Linear(5, 3)
        self.one = torch.nn.Linear(5, 3)
        self.none = torch.nn.Linear(5, 3)
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("table", torch.tensor([0.1, -math.inf, math.nan, -0.0]))
        self.double()
        self.register_buffer("single", torch.full((2,), 1 / 3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int16))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("state", torch.tensor(2**62 + 1))
        self.register_buffer("called", torch.tensor(False))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: Any) -> Any:
        self.norm(torch.stack([x, x + 1], dim=2))  # of one sample it could not take the variance
        self.average.mul_(0.5).add_(x.detach().mean())
        self.single.add_(x.detach().mean().float())
        self.steps = self.steps + 1
        self.seen[1] += len(x)
        self.state.mul_(6364136223846793005).add_(1442695040888963407)
        self.called.fill_(True)
        self.scratch.fill_(self.part)
        out = self.all(x)
        if (x[:, 0] > 1).any():
            out = out + self.some(x)
        if self.part == self.num_parts - 1:
            # With several ranks this one has no samples in the last batch: what it computes there does not count.
            out = out + self.one(x)
        return out


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer that would change a parameter whose gradient is zero."""
    return torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)


def made(part: int, num_parts: int, seed: int = 1) -> Odd:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Odd(part, num_parts)


def by_prepare(world: World) -> Odd:
    module = made(world.rank, world.size, seed=1 + world.rank)  # the others get rank 0's
    model, optimizer, data = mpitrain.torch.prepare(module, optimizer_of(module), batches())
    for _ in range(EPOCHS):
        for x, y in data:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return module


def by_trainer(world: World) -> Odd:
    module = made(world.rank, world.size, seed=1 + world.rank)
    optimizer = optimizer_of(module)

    def build(world: World) -> Parts:
        adapter = TorchModule(module, lambda module, batch: cross_entropy(module(batch[0]), batch[1]), optimizer)
        arrays = tuple(tensor.numpy() for tensor in samples())
        return Parts(adapter, Sync(), ArrayData(world, arrays, global_batch=BATCH, shuffle=False))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that parameters are not used
        Trainer(build, [StopAtStep(STEPS)]).run()
    return module


def by_pytorch_alone(num_parts: int) -> Odd:
    module = made(0, num_parts)
    optimizer = optimizer_of(module)
    for x, y in batches() * EPOCHS:
        replicas = []
        for part in range(num_parts):
            chosen = part_of(len(x), part, num_parts)
            if share := (chosen.stop - chosen.start) / len(x):
                replica = copy.deepcopy(module)
                replica.zero_grad()
                replica.part = part
                (share * cross_entropy(replica(x[chosen]), y[chosen])).backward()
                replicas.append((share, replica))
        for name, parameter in module.named_parameters():
            gradients = [replica.get_parameter(name).grad for _, replica in replicas]
            used = [gradient for gradient in gradients if gradient is not None]
            parameter.grad = sum(used) if used else None
        for name, buffer in module.named_buffers():
            if name in ("scratch", "table"):
                continue
            if buffer.is_floating_point():
                buffer.copy_(sum(share * replica.get_buffer(name).double() for share, replica in replicas))
            else:
                buffer.copy_(replicas[0][1].get_buffer(name))
        optimizer.step()
    return module


@pytest.mark.parametrize("train", [by_prepare, by_trainer])
def test_unused_parameters_and_buffers(world: World, train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trained, expected, initial = train(world), by_pytorch_alone(world.size), made(0, world.size)
    for name, tensor in trained.state_dict().items():
        wanted = expected.state_dict()[name]
        if tensor.dtype == torch.float64 and name != "table":
            torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: name + text)
        elif name == "single":  # float32, of order 1: rounded in each step, and in TorchModule's change
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=4 * STEPS * 2.0**-23)
        else:
            assert tensor.numpy().tobytes() == wanted.numpy().tobytes(), name
    if train is by_prepare:
        out = capsys.readouterr().out
        assert out.count("so the optimizer skips them: none.bias, none.weight") == world.is_root, out
        assert ("zeros count there: " in out) == (world.is_root and world.size > 1), out
    assert torch.equal(trained.none.weight, initial.none.weight)
    assert trained.none.weight.grad is None
    assert not torch.equal(trained.some.weight, initial.some.weight)
    assert not torch.equal(trained.one.weight, initial.one.weight)
    assert trained.scratch.item() == world.rank
    assert trained.steps.item() == STEPS
    assert_same_bits(world, *(tensor.numpy() for tensor in trained.state_dict().values()))


class Marked(torch.nn.Module):
    """With a buffer that changes only where `marks` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 3, dtype=torch.float64)
        self.register_buffer("mark", torch.zeros(2))
        self.marks = False

    def forward(self, x: Any) -> Any:
        if self.marks:
            self.mark.add_(1)
        return self.layer(x)


def test_a_buffer_that_only_a_rank_without_samples_changes(world: World) -> None:
    """Its replica stays like the others, and the value does not count in a later step, in which it has samples."""
    x, y = samples()
    whole = x[: 2 * world.size], y[: 2 * world.size]
    module = Marked()
    model, _, data = mpitrain.torch.prepare(
        module, torch.optim.SGD(module.parameters(), lr=0.1), [whole, (x[:1], y[:1]), whole]
    )
    for step, (inputs, targets) in enumerate(data):
        module.marks = step == 1 and world.rank == world.size - 1
        cross_entropy(model(inputs), targets).backward()
        # Of one rank it is the one with samples.
        expected = 1.0 if world.size == 1 and step >= 1 else 0.0
        assert module.mark.tolist() == [expected] * 2, step


def large(value: int) -> Any:
    """Memory of this size comes from the system, which gives out an address again at once."""
    return torch.full((40 * 2**20,), value, dtype=torch.uint8)


@pytest.mark.parametrize("what", ["a new tensor", "new memory"])
def test_a_new_buffer_in_the_memory_of_the_old_one(world: World, what: str) -> None:
    """The second of two new tensors would get the memory that the first one has made free. It is a change."""
    if not world.is_root:  # one rank's memory is enough
        return
    module = Marked()
    module.mark = large(0)
    buffers = ModuleBuffers(module)
    for step in range(1, 4):
        for value in (100, step):
            if what == "a new tensor":
                module.mark = large(value)
            else:
                module.mark.data = large(value)
        assert buffers.changed_others() == (("mark", large(step).numpy().tobytes()),), step
        buffers.settle_others([buffers.changed_others()])
        assert torch.equal(module.mark, large(step)), step
