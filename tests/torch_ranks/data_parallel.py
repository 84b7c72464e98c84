"""What the tests of DistributedDataParallel and FSDP share: a model in float64, the samples of each rank, a loop."""

from __future__ import annotations

import torch
from torch import nn

from mpitrain import World

EACH = 3  # samples of each rank
# Both sides add the same float64 numbers in different orders. The bound is far above the rounding, and far below
# any error.
CLOSE = {"rtol": 1e-12, "atol": 1e-14}


class Model(nn.Module):
    """Two layers, one of which `forward` may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 40, dtype=torch.float64)
        self.sometimes = nn.Linear(40, 40, dtype=torch.float64)
        self.never = nn.Linear(2, 2, dtype=torch.float64)
        self.last = nn.Linear(40, 3, dtype=torch.float64)
        self.never.requires_grad_(False)

    def forward(self, x: torch.Tensor, whole: bool = True) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.sometimes(x) if whole else x)


def samples(world: World, step: int, each: int = EACH) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step. The samples of rank r begin at r * each."""
    made = torch.Generator().manual_seed(step)
    count = each * world.size
    return (
        torch.randn(count, 6, dtype=torch.float64, generator=made),
        torch.randn(count, 3, dtype=torch.float64, generator=made),
    )


def part(world: World, batch: torch.Tensor) -> torch.Tensor:
    each = len(batch) // world.size
    return batch[world.rank * each : (world.rank + 1) * each]


def train(world: World, net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, whole: bool) -> None:
    """On whole batches without communication, or on this rank's part of each."""
    for step in steps:
        x, y = (batch if whole else part(world, batch) for batch in samples(world, step))
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
