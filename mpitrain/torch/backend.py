"""The process group of torch.distributed: it checks torch's calls and passes them to the channel."""

# torch declares each call twice, for lists of tensors and for one tensor. It calls the first.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy
import torch
import torch.distributed as dist

from mpitrain.allreduce.algorithm import Progress
from mpitrain.collectives import moves
from mpitrain.torch import checks, reductions
from mpitrain.torch.all_to_all_calls import AllToAllCalls
from mpitrain.torch.bare_group import Tensors
from mpitrain.torch.flat_tensors import raw, values
from mpitrain.torch.pair_calls import PairCalls
from mpitrain.torch.short_forms import with_short_forms
from mpitrain.torch.sparse_calls import SparseCalls
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.torch.versions import with_old_names
from mpitrain.torch.work import Call
from mpitrain.waiting.control import until


@with_old_names
@with_short_forms
@uncompiled
class MpiProcessGroup(AllToAllCalls, PairCalls, SparseCalls):
    """The group that `init_process_group("mpitrain")` and `new_group` make. torch calls its methods."""

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Call:
        """See torch."""
        tensor = self._one("broadcast", tensors)
        root = int(opts.rootRank)
        self._check_rank("broadcast", root)
        call = self._call("broadcast", [tensor], opts)
        flat = raw(call.buffers.write(tensor, filled=self.rank() == root))

        def work() -> Progress:
            return moves.broadcast(self._world, flat, root) if self._moves(flat) else iter(())

        return self._begin(call, work, lambda: [checks.count(tensor)], opts, root)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Call:
        """See torch."""
        opts = opts or dist.AllreduceOptions()
        if len(tensors) == 1 and tensors[0].layout == torch.sparse_coo:
            return self._allreduce_sparse(tensors[0], opts)
        return self._allreduce("all_reduce", [self._one("all_reduce", tensors)], opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Call:
        """See torch."""
        self._check("all_reduce_coalesced", tensors)
        return self._allreduce("all_reduce_coalesced", tensors, opts or dist.AllreduceCoalescedOptions())

    def _allreduce(self, name: str, tensors: Tensors, opts: Any) -> Call:
        how = self._reduction(name, opts, tensors[0])
        call = self._call(name, tensors, opts)
        flats = [values(call.buffers.write(tensor, filled=True)) for tensor in tensors]
        world, sums = self._world, self._channel.sums

        def work() -> Progress:
            return chain.from_iterable(reductions.allreduce(world, sums, flat, how) for flat in flats)

        return self._begin(call, work, lambda: [how.name, *map(checks.count, tensors)], opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Call:
        """See torch."""
        tensor = self._one("reduce", tensors)
        root = int(opts.rootRank)
        self._check_rank("reduce", root)
        how = self._reduction("reduce", opts, tensor)
        call = self._call("reduce", [tensor], opts)
        is_root = self.rank() == root
        flat = values(call.buffers.write(tensor, filled=True) if is_root else call.buffers.read(tensor))

        def work() -> Progress:
            return reductions.reduce(self._world, flat, root, how)

        return self._begin(call, work, lambda: [how.name, checks.count(tensor)], opts, root)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Call:
        """See torch. Tensors of the ranks may differ in size."""
        tensor = self._one("all_gather", inputs)
        parts = self._list_of("all_gather", outputs, self.size())
        self._check("all_gather", [*parts, tensor])
        self._check_fits("all_gather", tensor, parts[self.rank()], "its place in the list of outputs")
        return self._allgather("all_gather", [parts], [tensor], opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Call:
        """See torch: one list of outputs per rank, and in it one tensor per input."""
        name = "all_gather_coalesced"
        lengths = [len(of_rank) for of_rank in outputs]
        if lengths != [len(inputs)] * self.size():
            allowed = f"{self.size()} lists, one per rank, each with {len(inputs)} tensors, one per input"
            self._refuse(name, ValueError(f"lists of {lengths} outputs; allowed: {allowed}"))
        by_input = [[of_rank[number] for of_rank in outputs] for number in range(len(inputs))]
        for parts, tensor in zip(by_input, inputs, strict=True):
            self._check(name, [*parts, tensor])
            self._check_fits(name, tensor, parts[self.rank()], "its place in the lists of outputs")
        return self._allgather(name, by_input, inputs, opts)

    def _allgather(self, name: str, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Call:
        call = self._call(name, [part for parts in outputs for part in parts], opts)
        flats = [[raw(call.buffers.write(part)) for part in parts] for parts in outputs]
        own_flats = [raw(call.buffers.read(tensor)) for tensor in inputs]

        def work() -> Progress:
            for parts, own in zip(flats, own_flats, strict=True):
                parts[self.rank()][:] = own
                yield from moves.allgather(self._world, parts)

        return self._begin(call, work, lambda: [checks.count(part) for parts in outputs for part in parts], opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Call:
        """See torch."""
        return self._all_gather_single("all_gather_into_tensor", [output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Call:
        """See torch."""
        return self._all_gather_single("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    def _all_gather_single(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Call:
        self._check(name, [*outputs, *inputs], dtypes=len(outputs) == 1)
        self._check_lengths(name, outputs, inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_parts(name, output, tensor, "the output", "the input")
        call = self._call(name, outputs, opts)
        wholes = [raw(call.buffers.write(output)) for output in outputs]
        own_flats = [raw(call.buffers.read(tensor)) for tensor in inputs]

        def work() -> Progress:
            for whole, own in zip(wholes, own_flats, strict=True):
                parts = numpy.split(whole, self.size())
                parts[self.rank()][:] = own
                yield from moves.allgather(self._world, parts)

        return self._begin(call, work, lambda: [checks.count(tensor) for tensor in inputs], opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Call:
        """See torch."""
        tensor, root = self._one("gather", inputs), int(opts.rootRank)
        self._check_rank("gather", root)
        is_root = self.rank() == root
        parts = self._list_of("gather", outputs, self.size()) if is_root else []
        self._check("gather", [*parts, tensor])
        for part in parts:
            self._check_fits("gather", tensor, part, "each output")
        call = self._call("gather", parts, opts)
        flats = [raw(call.buffers.write(part)) for part in parts]
        own = raw(call.buffers.read(tensor))

        def work() -> Progress:
            if is_root:
                flats[root][:] = own
            return moves.gather(self._world, own, flats, root)

        return self._begin(call, work, lambda: [checks.count(tensor)], opts, root)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Call:
        """See torch."""
        tensor, root = self._one("scatter", outputs), int(opts.rootRank)
        self._check_rank("scatter", root)
        is_root = self.rank() == root
        parts = self._list_of("scatter", inputs, self.size()) if is_root else []
        self._check("scatter", [tensor, *parts])
        for part in parts:
            self._check_fits("scatter", tensor, part, "each input")
        call = self._call("scatter", [tensor], opts)
        own = raw(call.buffers.write(tensor))
        flats = [raw(call.buffers.read(part)) for part in parts]

        def work() -> Progress:
            if is_root:
                own[:] = flats[root]
            return moves.scatter(self._world, own, flats, root)

        return self._begin(call, work, lambda: [checks.count(tensor)], opts, root)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Call:
        """See torch. Tensors for the ranks may differ in size."""
        name = "reduce_scatter"
        tensor = self._one(name, outputs)
        parts = self._list_of(name, inputs, self.size())
        self._check(name, [tensor, *parts])
        self._check_fits(name, tensor, parts[self.rank()], "its place in the list of inputs")
        how = self._reduction(name, opts, tensor)
        call = self._call(name, [tensor], opts)
        own = values(call.buffers.write(tensor))
        flats = [values(call.buffers.read(part)) for part in parts]

        def work() -> Progress:
            return reductions.reduce_scatter(self._world, flats, own, how)

        return self._begin(call, work, lambda: [how.name, *map(checks.count, parts)], opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Call:
        """See torch."""
        return self._reduce_scatter_single("reduce_scatter_tensor", [output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Call:
        """See torch."""
        return self._reduce_scatter_single("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def _reduce_scatter_single(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Call:
        opts = opts or dist.ReduceScatterOptions()
        self._check(name, [*outputs, *inputs], dtypes=len(outputs) == 1)
        self._check_lengths(name, outputs, inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_parts(name, tensor, output, "the input", "the output")
        hows = [self._reduction(name, opts, output) for output in outputs]
        call = self._call(name, outputs, opts)
        own_flats = [values(call.buffers.write(output)) for output in outputs]
        wholes = [values(call.buffers.read(tensor)) for tensor in inputs]

        def work() -> Progress:
            for whole, own, how in zip(wholes, own_flats, hows, strict=True):
                yield from reductions.reduce_scatter(self._world, numpy.split(whole, self.size()), own, how)

        return self._begin(call, work, lambda: [hows[0].name, *map(checks.count, outputs)], opts)

    def barrier(self, opts: Any = None) -> Call:
        """See torch."""
        call = self._call("barrier", [], opts)

        def work() -> Progress:
            yield from until(self._world.background.comm.Ibarrier().Test)

        return self._begin(call, work, list, opts)

    def call_of_ours(self, name: str, tensor: torch.Tensor, work: Callable[[numpy.ndarray], Progress]) -> Call:
        """Begin a call that torch does not have: `work` replaces the tensor's values, flat and on the CPU."""
        call = self._call(name, [tensor], None)
        flat = values(call.buffers.write(tensor, filled=True))
        return self._begin(call, lambda: work(flat), lambda: [checks.count(tensor)], None)

    def start_coalescing(self, device: Any) -> None:
        """Make all calls begun from now on end together."""
        self._together = []

    def end_coalescing(self, device: Any) -> Call:
        """Return one work for all calls begun since `start_coalescing`."""
        calls, self._together = self._together or [], None
        call = self._call("coalesced calls", [result for begun in calls for result in begun.results], None)

        def work() -> Progress:
            yield from until(lambda: all(begun.is_done for begun in calls))
            for begun in calls:
                if begun.error is not None:
                    raise begun.error

        return self._channel.begin(call, work, None, is_awaited=False)

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing
