"""SyncBatchNorm equals BatchNorm of one process with the whole batch: unequal batches, and ranks without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mpitrain import World
from mpitrain.errors import DataError, MismatchError
from mpitrain.horovod.sync_batch_norm import SyncBatchNorm
from tests.ranks.common import error_on_all, named_ranks, skip_alone

ROWS = (3, 0, 1, 5, 2, 0, 4)  # of each rank


CHANNELS = 4


SHAPES = {(): nn.BatchNorm1d, (3,): nn.BatchNorm1d, (3, 2): nn.BatchNorm2d, (3, 2, 2): nn.BatchNorm3d}


def batch(world: World, step: int, rest: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The samples of each rank, far from 0, where a variance from sums of squares would lose all digits."""
    generator = torch.Generator().manual_seed(step)
    rows = list(ROWS[: world.size])
    samples = torch.randn(sum(rows), CHANNELS, *rest, generator=generator, dtype=torch.float64)
    return list((samples * (1 + step) + 1e4 * (dtype == torch.float64)).to(dtype).split(rows))


def loss_of(result: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """A sum over samples, in which each of them counts otherwise."""
    return (result.double() * torch.sin(samples.detach().double() * 7)).pow(3).sum()


CASES: list[tuple[tuple[int, ...], torch.dtype, dict[str, Any]]] = [
    *((rest, torch.float64, {}) for rest in SHAPES),
    ((3,), torch.float64, {"affine": False}),
    ((3,), torch.float64, {"momentum": None, "eps": 0.1}),
    ((3,), torch.float64, {"track_running_stats": False}),
    ((3,), torch.float64, {"momentum": 0.7}),
    *(((3,), dtype, {}) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize(("rest", "dtype", "options"), CASES, ids=str)
def test_it_is_that_of_one_process(
    world: World, rest: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Two steps of training, then evaluation, here on all ranks and there in one process."""
    unit = torch.finfo(dtype).eps
    close = {"rtol": 1e-8, "atol": 1e-8} if dtype == torch.float64 else {"rtol": 30 * unit, "atol": 60 * unit}
    ours = SyncBatchNorm(CHANNELS, **options).to(torch.float64 if dtype == torch.float64 else torch.float32)
    alone = SHAPES[rest](CHANNELS, **options).to(torch.float64)
    for layer in (ours, alone):
        for number, parameter in enumerate(layer.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    alone.load_state_dict({key: value.double() for key, value in ours.state_dict().items()})
    for step in range(3):
        for layer in (ours, alone):
            layer.train(step < 2)
            layer.zero_grad()
        of_ranks = batch(world, step, rest, dtype)
        own = of_ranks[world.rank].clone().requires_grad_()
        everyone = torch.cat(of_ranks).double().requires_grad_()
        result, expected = ours(own), alone(everyone)
        assert result.dtype == dtype
        loss_of(result, own).backward()
        loss_of(expected, everyone).backward()
        place = slice(sum(ROWS[: world.rank]), sum(ROWS[: world.rank + 1]))
        torch.testing.assert_close(result.double(), expected[place], **close)
        torch.testing.assert_close(own.grad.double(), everyone.grad[place], **close)
        for here, there in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(torch.from_numpy(world.sum(here.grad.double().numpy())), there.grad, **close)
        for here, there in zip(ours.buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(here.double(), there.double(), **close)


def test_a_layer_that_needs_no_gradient_of_its_samples(world: World) -> None:
    """As the first layer of a model; and no collective call in evaluation."""
    layer = SyncBatchNorm(CHANNELS)
    layer(torch.randn(3, CHANNELS)).sum().backward()
    assert layer.bias.grad.tolist() == [3.0] * CHANNELS
    layer.eval()
    if world.is_root:
        layer(torch.randn(3, CHANNELS))


def test_what_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"of 4 channels was given a batch of shape \(2, 3\)"):
        SyncBatchNorm(CHANNELS)(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        SyncBatchNorm(CHANNELS)(torch.ones(4))
    skip_alone(world)
    for total in (0, 1):
        with pytest.raises(DataError, match=f"has {total} values for each channel"):
            SyncBatchNorm(CHANNELS)(torch.ones(total * (world.rank == 1), CHANNELS))
    width = CHANNELS + (world.rank == world.size - 1)
    text = error_on_all(world, MismatchError, lambda: SyncBatchNorm(width)(torch.ones(3, width)))
    assert all(name in text for name in named_ranks(world, world.size - 1))
