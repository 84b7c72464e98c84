"""The call of a process group that takes sparse tensors, such as the gradients of nn.Embedding(sparse=True)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy
import torch
import torch.distributed as dist

from mpitrain.allreduce.algorithm import Progress
from mpitrain.collectives import moves
from mpitrain.errors import ProcessGroupError
from mpitrain.torch import checks
from mpitrain.torch.bare_group import BareGroup
from mpitrain.torch.flat_tensors import raw
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.torch.work import Call
from mpitrain.waiting.control import until
from mpitrain.world.world import World


@uncompiled
class SparseCalls(BareGroup):
    """The calls that backend.py makes for tensors of layout torch.sparse_coo."""

    def _allreduce_sparse(self, tensor: torch.Tensor, opts: Any) -> Call:
        name = "all_reduce"
        if tensor.device.type != "cpu":
            text = f"a sparse tensor on {tensor.device}; it can be on cpu: use tensor.cpu(), or tensor.to_dense()"
            self._refuse(name, TypeError(text))
        if tensor._base is not None and tensor._base.is_complex():
            tensor = tensor._base  # torch passes its view of real numbers, which cannot be filled
        if opts.reduceOp.op != dist.ReduceOp.SUM:
            text = f"ReduceOp.{opts.reduceOp.op.name} of a sparse tensor; it can be SUM: use that, or tensor.to_dense()"
            self._refuse(name, ProcessGroupError(text))
        call = self._call(name, [tensor], opts)
        # A copy, so that the caller may change its tensor in the meantime.
        own = tensor.detach().coalesce().clone()

        def work() -> Progress:
            total = yield from _total(self._world, own)
            with torch.no_grad():
                tensor.copy_(total)

        shape = f"{tuple(tensor.shape)}, of which {tensor.sparse_dim()} sparse"
        return self._begin(call, work, lambda: ["SUM", f"{shape}: {checks.kind(tensor)}"], opts)


def _total(world: World, own: torch.Tensor) -> Generator[float | None, None, torch.Tensor]:
    """Return the sum of all ranks' tensors. Every rank adds all of them, in rank order."""
    num_elements = numpy.empty(world.size, numpy.int64)
    own_number = numpy.array([own.values().shape[0]])
    yield from until(world.background.comm.Iallgather(own_number, num_elements).Test)
    indices = [torch.empty(own.sparse_dim(), count, dtype=torch.int64) for count in num_elements.tolist()]
    values = [own.values().new_empty(count, *own.values().shape[1:]) for count in num_elements.tolist()]
    indices[world.rank], values[world.rank] = own.indices().contiguous(), own.values().contiguous()
    for parts in (indices, values):
        yield from moves.allgather(world, [raw(part.view(-1)) for part in parts])
    # Check the indices: one beyond the shape, from a rank with a tensor of another shape, would write out of bounds.
    whole = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), own.shape, check_invariants=True)
    return whole.coalesce()
