"""Communication hooks of DistributedDataParallel: those of PyTorch, a function of a user's own, and codecs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import mpitrain.torch
from mpitrain import LocalSGD, TorchModule, World
from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.algorithm import Progress, Sequential
from mpitrain.allreduce.low_rank import _DIGITS
from mpitrain.compression import names
from mpitrain.errors import ConfigError
from mpitrain.reducer.low_rank import LowRankExchange
from mpitrain.strategies import STRATEGIES, make_strategy
from mpitrain.torch import compress
from mpitrain.torch.residuals import residuals_of
from tests.ranks.common import assert_same_bits, skip_alone
from tests.ranks.placements import placed

from .common import Model, part, samples

pytestmark = pytest.mark.usefixtures("group")


def ours_as_a_hook(state, bucket):  # type: ignore[no-untyped-def] - DDP takes no annotations that are strings
    """Twice the mean."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] * (2 / state))


HOOKS: list[tuple[Callable[..., Any], float, float]] = [
    (default_hooks.allreduce_hook, 1.0, 1e-12),
    (default_hooks.fp16_compress_hook, 1.0, 2e-3),
    (ours_as_a_hook, 2.0, 1e-12),
]


@pytest.mark.parametrize("number", range(len(HOOKS)))
def test_communication_hooks(world: World, number: int) -> None:
    hook, factor, close = HOOKS[number]
    inner = Model()
    model = DistributedDataParallel(inner, bucket_cap_mb=0.004)
    model.register_comm_hook(world.size if hook is ours_as_a_hook else None, hook)
    x, y = samples(world, 0)
    nn.functional.mse_loss(model(part(world, x)), part(world, y)).backward()
    alone = Model()
    nn.functional.mse_loss(alone(x), y).backward()
    for (name, one), other in zip(inner.named_parameters(), alone.parameters(), strict=True):
        if other.grad is not None:
            error = (one.grad - factor * other.grad).abs().max()
            assert error <= close * other.grad.abs().max(), name


@pytest.fixture
def apart(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Each rank is as if on its own node."""
    skip_alone(world)
    channel = dist.group.WORLD._channel
    there = placed(channel.world, "alone on each node")
    monkeypatch.setattr(channel, "world", there)
    return there


def thirty(values: numpy.ndarray) -> numpy.ndarray:
    """What top_k:0.05 sends of 600 values, which are one block and all differ: the largest."""
    sent = numpy.zeros_like(values)
    places = numpy.argsort(-abs(values))[:30]
    sent[places] = values[places]
    return sent


def test_the_values_of_a_hook(
    world: World,
    apart: World,
) -> None:
    """Three steps of all ranks in float64, each with what the ranks have left out of the steps before."""
    inner = nn.Linear(30, 20, bias=False)
    nn.init.constant_(inner.weight, 0)
    model = DistributedDataParallel(inner)
    model.register_comm_hook(None, compress("top_k:0.05"))
    left = [numpy.zeros(600) for _ in range(world.size)]
    for step in range(3):
        model.zero_grad()
        every = [
            numpy.random.default_rng((rank, step)).standard_normal((20, 30)).astype("f4") for rank in range(world.size)
        ]
        (model(torch.eye(30)) * torch.from_numpy(every[world.rank].T)).sum().backward()
        expected = numpy.zeros(600)
        for rank, own in enumerate(every):
            whole = own.ravel().astype("f8") / world.size + left[rank]
            sent = thirty(whole)
            expected, left[rank] = expected + sent, whole - sent
        # A value has been added up from three steps and all ranks, each rounded to 24 bits, at sizes of at most 8.
        bound = 8 * (3 + world.size) * 2**-24
        numpy.testing.assert_allclose(inner.weight.grad.numpy().ravel(), expected, rtol=0, atol=bound)
        kept = residuals_of(model).state()["residual"]["weight"]
        numpy.testing.assert_allclose(kept.numpy().ravel(), left[world.rank], rtol=0, atol=bound)


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_power_sgd_sums_by_the_algorithm_of_the_group(
    world: World, apart: World, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """Both sums, in each of two steps. The means have the bits of the same sums by a reducer."""
    made, lengths = ALGORITHMS[algorithm].make(apart), []

    def steps(flat: numpy.ndarray, residual: numpy.ndarray | None = None) -> Progress:
        lengths.append(flat.size)
        return made.steps(flat, residual)

    monkeypatch.setattr(dist.group.WORLD._channel, "sums", Sequential(apart, algorithm, steps, made.memory))
    inner = nn.Linear(30, 20, bias=False)
    nn.init.constant_(inner.weight, 0)
    model = DistributedDataParallel(inner)
    model.register_comm_hook(None, compress("power_sgd:2"))
    other = apart.apart()
    exchange = LowRankExchange(other, "power_sgd:2", algorithm)
    slot = exchange.allocate(600, numpy.dtype("f4"), tensors=[("weight", (20, 30))])
    for step in range(2):
        model.zero_grad()
        random = numpy.random.default_rng((world.rank, step))
        own = random.standard_normal((20, 30)).astype("f4")
        (model(torch.eye(30)) * torch.from_numpy(own.T)).sum().backward()
        # DDP divides before the sum.
        slot.flat[:] = (torch.from_numpy(own) / world.size).ravel().numpy()
        exchange.mean(slot, slice(None), 1.0).wait()
        numpy.testing.assert_array_equal(inner.weight.grad.numpy().ravel(), slot.flat)
        assert slot.flat.any()
    sums_of_a_step = [2 * 20 + 2 * _DIGITS, 2 * 30]
    assert lengths == 2 * sums_of_a_step
    other.free()


def test_what_a_codec_does_not_take(world: World) -> None:
    with pytest.raises(ConfigError, match=f"known: {', '.join(names())}"):
        compress("int3")
    model = DistributedDataParallel(Model())
    model.register_comm_hook(None, compress("bf16"))
    with pytest.raises(ConfigError, match=r"rank \d on .* takes float32 gradients, not torch.float64"):
        model(samples(world, 0)[0]).sum().backward()


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_no_hook(name: str) -> None:
    """In the place of a codec, or of a group."""
    strategy = make_strategy(name)
    said = r"\(.*\): DistributedDataParallel .* leave DistributedDataParallel out: mpitrain.torch.prepare\(module"
    with pytest.raises(ConfigError, match=f"compress{said}"):
        compress(strategy)  # type: ignore[arg-type]
    model = DistributedDataParallel(Model().float())
    model.register_comm_hook(strategy, compress("bf16"))
    with pytest.raises(ConfigError, match=f"register_comm_hook{said}"):
        model(torch.ones(2, 6)).sum().backward()


def test_a_model_of_ddp_is_not_prepared(world: World) -> None:
    """Nothing has changed afterwards: the model in it trains."""
    inner = Model()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    data = [samples(world, 0)]
    for strategy in (None, LocalSGD(2)):
        with pytest.raises(
            ConfigError, match=r"prepare\(\) has got a DistributedDataParallel, .* Give its inner module"
        ):
            mpitrain.torch.prepare(model, optimizer, data, strategy=strategy)
    with pytest.raises(ConfigError, match=r"TorchModule\(\) has got a DistributedDataParallel"):
        TorchModule(model, lambda module, batch: module(batch).sum(), optimizer)
    del model
    _, _, prepared = mpitrain.torch.prepare(inner, optimizer, data, strategy=LocalSGD(1))
    for x, y in prepared:
        (inner(x) - y).square().mean().backward()
        optimizer.step()
    assert_same_bits(world, *(one.detach().numpy() for one in inner.parameters()))
