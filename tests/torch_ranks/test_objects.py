"""Python objects over torch.distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpitrain import World
from tests.ranks.common import skip_alone

pytestmark = pytest.mark.usefixtures("group")


def of(rank: int) -> dict[str, Any]:
    """An object of another length on every rank."""
    return {"rank": rank, "text": "x" * (rank * 1000), "none": None}


def test_objects(world: World) -> None:
    everybody = range(world.size)
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, of(world.rank))
    assert gathered == [of(rank) for rank in everybody]
    for root in everybody:
        ours: list[Any] = [of(root), "two"] if world.rank == root else [None, None]
        dist.broadcast_object_list(ours, root)
        assert ours == [of(root), "two"]
        to_root: list[Any] | None = [None] * world.size if world.rank == root else None
        dist.gather_object(of(world.rank), to_root, root)
        assert to_root == ([of(rank) for rank in everybody] if world.rank == root else None)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [of(rank + 1) for rank in everybody] if world.rank == root else None, root)
        assert mine == [of(world.rank + 1)]


def test_objects_to_one_rank(world: World) -> None:
    skip_alone(world)
    if world.rank == 0:
        for rank in range(1, world.size):
            dist.send_object_list([of(rank), torch.arange(rank)], rank)
    else:
        received: list[Any] = [None, None]
        assert dist.recv_object_list(received, 0) == 0
        assert received[0] == of(world.rank)
        assert torch.equal(received[1], torch.arange(world.rank))
