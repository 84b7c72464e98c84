"""Sparse tensors: sums, and the gradients of an embedding. gloo has both."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from mpitrain import World
from mpitrain.errors import MismatchError, ProcessGroupError
from tests.ranks.common import named_ranks, skip_alone
from tests.torch_ranks.common import pattern

pytestmark = pytest.mark.usefixtures("group")

ROWS = 11


def of_rank(rank: int, dtype: torch.dtype, dense: tuple[int, ...] = (), each: int = 3) -> torch.Tensor:
    """With `each` elements a rank number: rank 0 has none. From rank 2 on places come several times."""
    count = each * rank
    places = torch.from_numpy(pattern(2 * count, rank)).view(2, count) % torch.tensor([[ROWS], [5]])
    places[:, 1:2] = places[:, :1]
    values = torch.from_numpy(pattern(count * max(1, sum(dense)), rank, salt=1)).view(count, *dense).to(dtype)
    return torch.sparse_coo_tensor(places, values, (ROWS, 5, *dense), check_invariants=True)


@pytest.mark.parametrize("dense", [(), (4,)], ids=["all dimensions sparse", "rows of 4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_sum(world: World, dtype: torch.dtype, dense: tuple[int, ...]) -> None:
    for each in (3, 5000 if dtype == torch.float64 else 0):  # short, long, and nothing anywhere
        mine = of_rank(world.rank, dtype, dense, each)
        wanted = torch.zeros(mine.shape, dtype=torch.float64)
        for rank in range(world.size):
            wanted += of_rank(rank, dtype, dense, each).to_dense().double()
        assert dist.all_reduce(mine) is None
        assert mine.layout == torch.sparse_coo
        assert mine.dtype == dtype
        assert torch.equal(mine.to_dense().double(), wanted), each


def test_a_sum_that_is_waited_for_later(world: World) -> None:
    mine = of_rank(world.rank, torch.float32)
    work = dist.all_reduce(mine, async_op=True)
    dense = torch.ones(3)
    dist.all_reduce(dense)
    assert work.wait()
    wanted = sum(of_rank(rank, torch.float32).to_dense() for rank in range(world.size))
    assert torch.equal(mine.to_dense(), wanted)
    assert (dense == world.size).all()


def test_gradients_of_an_embedding(world: World) -> None:
    """Against one process that has every rank's samples. Ranks look up different rows, and as many as they like."""
    inner, alone = (nn.Embedding(ROWS, 3, sparse=True, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        for one in (inner, alone):
            one.weight.copy_(torch.arange(3.0 * ROWS).view(ROWS, 3))
    model = DistributedDataParallel(inner)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.03) for one in (inner, alone)]
    looked_up = [torch.from_numpy(pattern(2 + 3 * rank, rank) % ROWS) for rank in range(world.size)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(looked_up[world.rank]).square().sum().backward()
        sum(alone(rows).square().sum() / world.size for rows in looked_up).backward()
        assert inner.weight.grad.is_sparse
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(inner.weight, alone.weight, rtol=1e-12, atol=0)


def test_sparse_tensors_of_different_shapes(world: World, ours: None) -> None:
    skip_alone(world)
    group = dist.new_group()  # its first calls are compared
    odd = world.size - 1
    mine = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1), (8 - (world.rank == odd),), check_invariants=True
    )
    with pytest.raises(MismatchError, match=r"\(7,\), of which 1 sparse") as caught:
        dist.all_reduce(mine, group=group)
    for name in named_ranks(world, odd):
        assert name in str(caught.value)
    dist.destroy_process_group(group)


def test_complex_numbers(world: World, ours: None) -> None:
    """gloo returns at once and leaves such a tensor as it is."""
    places, values = torch.tensor([[world.rank, world.size]]), torch.tensor([1 + world.rank * 1j, 2.0])
    mine = torch.sparse_coo_tensor(places, values, (world.size + 2,), check_invariants=True)
    dist.all_reduce(mine)
    wanted = [complex(1, rank) for rank in range(world.size)] + [complex(2 * world.size), 0j]
    assert torch.equal(mine.to_dense(), torch.tensor(wanted))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_what_sparse_tensors_cannot(world: World, ours: None) -> None:
    sparse = torch.ones(3).to_sparse()
    with pytest.raises(ProcessGroupError, match=r"ReduceOp.MAX of a sparse tensor; it can be SUM") as caught:
        dist.all_reduce(sparse, ReduceOp.MAX)
    assert world.name() in str(caught.value)
    dist.barrier()  # and the group works on
    with pytest.raises(TypeError, match="to_dense"):
        dist.all_reduce(torch.ones(3, 3).to_sparse_csr())
    dist.barrier()
    with pytest.raises(TypeError, match="to_dense"):
        dist.reduce(sparse, 0)
    dist.barrier()
