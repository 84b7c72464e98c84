"""What the tests of `prepare` share: a loop, and the same one in plain PyTorch on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import mpitrain.torch  # noqa: E402 (only where there is PyTorch)
from mpitrain import World  # noqa: E402
from mpitrain.adapters.torch_arrays import array_of, tensor_of  # noqa: E402

NUM_SAMPLES = 33  # batches of 8 leave a last one of 1, so most ranks run out of samples
BATCH = 8

MakeOptimizer = Callable[[Iterable[Any]], Any]
Loop = Callable[[Any, Any, Any], None]


def samples(dtype: Any = None) -> tuple[Any, Any]:
    """Inputs (33, 5) and classes, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=dtype or torch.float64)
    return x, torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)


def loader(**options: Any) -> Any:
    """A DataLoader of them."""
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples()), **({"batch_size": BATCH} | options))


def batches(dtype: Any = None) -> list[tuple[Any, Any]]:
    """The batches as a list."""
    x, y = samples(dtype)
    return [(x[begin : begin + BATCH], y[begin : begin + BATCH]) for begin in range(0, NUM_SAMPLES, BATCH)]


def mlp(dtype: Any = None) -> Any:
    """A small model, with other parameters on every rank and at every call."""
    layers = torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
    return torch.nn.Sequential(*layers).to(dtype or torch.float64)


def sgd(parameters: Iterable[Any]) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loop(model: Any, optimizer: Any, data: Any) -> None:
    """Two epochs as everybody writes them."""
    for _ in range(2):
        for x, y in data:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def compare(
    world: World,
    model: Any,
    make_data: Callable[[], Any],
    *,
    make_optimizer: MakeOptimizer = sgd,
    run: Loop = loop,
    tolerance: float = 1e-13,
    **options: Any,
) -> Any:
    """Train by `run` with `prepare`, and rank 0's model again in plain PyTorch; the parameters must be equal.

    The random numbers are seeded differently on every rank. Returns the trained model and the one of one process.
    """
    alone = copy.deepcopy(model)
    torch.manual_seed(world.rank)
    model, optimizer, data = mpitrain.torch.prepare(model, make_optimizer(model.parameters()), make_data(), **options)
    run(model, optimizer, data)
    # What one process computes, from what was rank 0's.
    for mine, values in zip(alone.state_dict().values(), world.broadcast_object(tensors(alone)), strict=True):
        mine.copy_(tensor_of(values))
    torch.manual_seed(0)
    run(alone, make_optimizer(alone.parameters()), make_data())
    for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: name + text)
    assert_equal_everywhere(world, model)
    return model, alone


def tensors(model: Any) -> list[Any]:
    return [array_of(tensor) for tensor in model.state_dict().values()]


def assert_equal_everywhere(world: World, model: Any) -> None:
    """Parameters and buffers have the same bits on every rank."""
    assert len(set(world.allgather(b"".join(array.tobytes() for array in tensors(model))))) == 1
