"""The calls of a process group in which each rank has a tensor for every other rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from mpitrain.allreduce.algorithm import Progress
from mpitrain.collectives import moves
from mpitrain.torch import checks
from mpitrain.torch.bare_group import BareGroup, Tensors
from mpitrain.torch.flat_tensors import raw
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.torch.work import Call


@uncompiled
class AllToAllCalls(BareGroup):
    """all_to_all and all_to_all_single. torch calls these methods."""

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Call:
        """See torch. Tensors may differ in size."""
        name = "all_to_all"
        for tensors, role in ((outputs, "outputs"), (inputs, "inputs")):
            self._list_of(name, [tensors], self.size(), role)
        self._check(name, [*outputs, *inputs])
        call = self._call(name, outputs, opts)
        receives = [raw(call.buffers.write(tensor)) for tensor in outputs]
        sends = [raw(call.buffers.read(tensor)) for tensor in inputs]
        return self._alltoall(call, sends, receives, inputs[0], opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Call:
        """See torch."""
        name = "all_to_all_single"
        self._check(name, [output, input])
        ends = []
        for tensor, sizes, role in ((output, output_split_sizes, "output"), (input, input_split_sizes, "input")):
            try:
                ends.append(checks.splits(tensor, sizes, self.size(), role))
            except ValueError as error:
                self._refuse(name, error)
        call = self._call(name, [output], opts)
        into, own = raw(call.buffers.write(output)), raw(call.buffers.read(input))
        if numpy.may_share_memory(into, own):
            own = own.copy()  # data that is still to be sent must not be overwritten
        receives, sends = numpy.split(into, ends[0]), numpy.split(own, ends[1])
        return self._alltoall(call, sends, receives, input, opts)

    def _alltoall(
        self, call: Call, sends: list[numpy.ndarray], receives: list[numpy.ndarray], like: torch.Tensor, opts: Any
    ) -> Call:
        # Each size concerns one pair of ranks, and the ranks' sizes may all differ. So all of them are compared at
        # once.
        sizes = checks.Sizes(self._world, call, sends, receives) if self._channel.compares else None

        def work() -> Progress:
            if sizes is not None:
                yield from sizes.compare()
            receives[self.rank()][:] = sends[self.rank()]
            yield from moves.alltoall(self._world, sends, receives)

        return self._begin(call, work, lambda: [checks.kind(like)], opts)
