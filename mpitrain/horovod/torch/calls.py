"""The start of named calls on tensors. Tensors may be on the CPU or on a GPU.

Each `begin_` function makes a call of a kind, for several tensors. Kind and name match the calls of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from mpitrain.allreduce.algorithm import Progress, in_phases
from mpitrain.arguments import real_number, shortened, whole_number
from mpitrain.collectives import moves
from mpitrain.errors import HorovodInternalError
from mpitrain.horovod.named_call import Details, NamedCall, Operator, Reduced, scale
from mpitrain.horovod.process_sets import ProcessSet, refused_by_all, submit
from mpitrain.torch import checks, reductions
from mpitrain.torch.flat_tensors import raw, values
from mpitrain.world.shard import part_of

Average = Operator.Average
Sum = Operator.Sum
Adasum = Operator.Adasum
Min = Operator.Min
Max = Operator.Max
Product = Operator.Product
Handle = NamedCall
Tensors = Sequence[torch.Tensor]

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Zeros of a rank that has joined would change a product, and could be the least or the largest value.
_TAKES_ZEROS = (Operator.Average, Operator.Sum, Operator.Adasum)


class How(NamedTuple):
    """How values are reduced, as given by a script: the arguments of allreduce_async."""

    op: Any = None
    average: Any = None
    prescale: Any = 1.0
    postscale: Any = 1.0

    def checked(self) -> How:
        """Return the same with an Operator and two floats. Raise TypeError or ValueError if there is no such call."""
        factors = real_number(self.prescale, "prescale_factor"), real_number(self.postscale, "postscale_factor")
        return How(operator_of(self.op, self.average), None, *factors)

    def __str__(self) -> str:
        return f"{self.op.name} with factors {self.prescale} and {self.postscale}"


def operator_of(op: Any, average: Any = None) -> Operator:
    """Return the operator of a call. `average` is Horovod's old argument for it."""
    if average is not None and op is not None:
        raise ValueError("both op and average are given; give op alone")
    if average is not None and not isinstance(average, bool):
        raise TypeError(f"average={shortened(average)}; give True or False, or op in its place")
    if op is None:
        return Sum if average is False else Average
    value: Any = op if isinstance(op, str) else whole_number(op, "op")  # Operator refuses a text with its own error
    return Operator(value)


def begin_allreduce(
    kind: str,
    tensors: Tensors,
    name: str | None,
    how: How,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    hurries: bool = True,
    detail: tuple[int, ...] = (),
) -> Handle:
    """Begin an allreduce of this kind. `detail` is for NamedCall.details; for `hurries`, see submit."""

    def make(call: NamedCall) -> None:
        check(tensors, new=not in_place)
        outputs = list(tensors) if in_place else [_empty(tensor.shape, tensor) for tensor in tensors]
        flats = []
        for tensor, output in zip(tensors, outputs, strict=True):
            flat = call.buffers.write(output, filled=in_place)
            if not in_place:
                flat.view(tensor.shape).copy_(tensor.detach())
            flats.append(values(flat))
        checked = _reduction(how, flats)
        op, _, prescale, postscale = checked
        arrays = ((flat.dtype.name, flat.size) for flat in flats)
        zeros = (op, prescale, postscale, *arrays) if op in _TAKES_ZEROS else None
        call.tell(str(checked), *map(_described, tensors), detail=detail, zeros=zeros)
        call.reduced = Reduced(op, prescale, postscale, flats)
        call.finish = lambda: _result(kind, outputs)

    return submit(kind, name, process_set, make, hurries=hurries)


def begin_reducescatter(
    kind: str, tensors: Tensors, name: str | None, how: How, process_set: ProcessSet, *, hurries: bool = True
) -> Handle:
    """Begin a reducescatter of this kind; for `hurries`, see submit."""

    def make(call: NamedCall) -> None:
        check(tensors, rows=True)
        flats = [values(call.buffers.read(tensor)) for tensor in tensors]
        world = call.channel.world
        checked = _reduction(how, flats)
        if checked.op is Adasum:
            raise HorovodInternalError("reducescatter with Adasum does not exist; use Average or Sum, or allreduce")
        call.tell(str(checked), *map(_described, tensors))
        rows = [[part_of(len(tensor), rank, world.size) for rank in range(world.size)] for tensor in tensors]
        own_rows = [of_ranks[world.rank] for of_ranks in rows]
        outputs = [
            _empty((own.stop - own.start, *tensor.shape[1:]), tensor)
            for own, tensor in zip(own_rows, tensors, strict=True)
        ]
        results = [values(call.buffers.write(output)) for output in outputs]

        @in_phases
        def work(_: Details) -> Iterator[Progress]:
            for tensor, flat, of_ranks, own in zip(tensors, flats, rows, results, strict=True):
                scaled, row = flat.copy(), math.prod(tensor.shape[1:])
                scale(scaled, checked.prescale)
                pieces = [scaled[one.start * row : one.stop * row] for one in of_ranks]
                yield reductions.reduce_scatter(world, pieces, own, checked.op.reduction)
                scale(own, checked.postscale)

        call.work = work
        call.finish = lambda: _result(kind, outputs)

    return submit(kind, name, process_set, make, hurries=hurries)


def begin_allgather(
    kind: str, tensors: Tensors, name: str | None, process_set: ProcessSet, *, hurries: bool = True
) -> Handle:
    """Begin an allgather of this kind; for `hurries`, see submit. Its details are the lengths of the ranks' tensors."""

    def make(call: NamedCall) -> None:
        check(tensors, rows=True)
        flats = [raw(call.buffers.read(tensor)) for tensor in tensors]
        call.tell(*map(_of_any_length, tensors), detail=tuple(map(len, tensors)))
        outputs: list[torch.Tensor] = []
        world, buffers = call.channel.world, call.buffers

        @in_phases
        def work(details: Details) -> Iterator[Progress]:
            for place, (tensor, flat) in enumerate(zip(tensors, flats, strict=True)):
                lengths = [detail[place] for detail in details]
                outputs.append(_empty((sum(lengths), *tensor.shape[1:]), tensor))
                pieces = _by_rows(raw(buffers.write(outputs[-1])), lengths, tensor)
                pieces[world.rank][:] = flat
                yield moves.allgather(world, pieces)

        call.work = work
        call.finish = lambda: _result(kind, outputs)

    return submit(kind, name, process_set, make, hurries=hurries)


def begin_broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    hurries: bool = True,
) -> Handle:
    """Begin a broadcast; for `hurries`, see submit."""

    def make(call: NamedCall) -> None:
        check([tensor], new=not in_place)
        root, world = root_of(root_rank, process_set), call.channel.world
        output = tensor if in_place else _empty(tensor.shape, tensor)
        flat = call.buffers.write(output, filled=in_place and world.rank == root)
        if world.rank == root and not in_place:
            flat.view(tensor.shape).copy_(tensor.detach())
        content = raw(flat)
        call.tell(f"from {world.name(root)}", _described(tensor))
        if world.size > 1 and content.size:
            call.work = lambda _: moves.broadcast(world, content, root)
        call.finish = lambda: output

    return submit("broadcast", name, process_set, make, hurries=hurries)


def begin_alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
    *,
    hurries: bool = True,
) -> Handle:
    """Begin an alltoall; for `hurries`, see submit."""

    def make(call: NamedCall) -> None:
        check([tensor], rows=True)
        world, buffers = call.channel.world, call.buffers
        sent = _rows_of(splits, len(tensor), world.size)
        sends = _by_rows(raw(buffers.read(tensor)), sent, tensor)
        call.tell(_of_any_length(tensor), detail=tuple(sent))
        outputs: list[torch.Tensor] = []
        lengths: list[int] = []

        def work(details: Details) -> Progress:
            lengths.extend(detail[world.rank] for detail in details)
            outputs.append(_empty((sum(lengths), *tensor.shape[1:]), tensor))
            receives = _by_rows(raw(buffers.write(outputs[0])), lengths, tensor)
            receives[world.rank][:] = sends[world.rank]
            return moves.alltoall(world, sends, receives)

        def result() -> tuple[torch.Tensor, torch.Tensor]:
            like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)
            return outputs[0], torch.tensor(lengths, dtype=like.dtype, device=like.device)

        call.work, call.finish = work, result

    return submit("alltoall", name, process_set, make, hurries=hurries)


def begin_sparse(
    kind: str, tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet
) -> Callable[[], torch.Tensor]:
    """Begin to add up a sparse tensor in a call of this kind. See sparse_allreduce_async."""
    with refused_by_all(kind, name, process_set):
        how = operator_of(op)
        if how not in (Average, Sum):
            raise ValueError(f"{how.name} of a sparse tensor; use Average or Sum")
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
            raise TypeError(f"a {getattr(tensor, 'layout', type(tensor).__name__)}; give a tensor of layout sparse_coo")
        whole = tensor.coalesce()
    handle = begin_allgather(kind, [whole.indices().t().contiguous(), whole.values()], name, process_set)

    def result() -> torch.Tensor:
        indices, values = handle.ended()
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True).coalesce()
        return total / len(process_set.ranks) if how is Average else total

    return result


def root_of(root_rank: Any, process_set: ProcessSet) -> int:
    """Return the number in the set of a rank of the job. Raise ValueError if the rank is not in the set."""
    root = whole_number(root_rank, "root_rank")
    if root not in process_set.ranks:
        raise ValueError(f"root_rank={root}; the process set has the ranks {process_set.ranks}")
    return process_set.ranks.index(root)


def check(tensors: Tensors, *, new: bool = True, rows: bool = False) -> None:
    """Raise TypeError or ValueError unless these are tensors that can be sent.

    `new`: the results are new tensors; `rows`: the call goes along the first dimension.
    """
    if isinstance(tensors, str | dict) or not isinstance(tensors, Sequence | torch.Tensor):
        raise TypeError(f"a {type(tensors).__name__} for the tensors of a group; give a list of tensors")
    checks.tensors(tensors, dtypes=False)
    for tensor in tensors:
        if new:
            checks.whole(tensor)
        if rows and not tensor.dim():
            raise ValueError("a scalar; the call goes along the first dimension: use reshape(1)")


def _reduction(how: How, flats: Sequence[numpy.ndarray]) -> How:
    checked = how.checked()
    for flat in flats:
        checked.op.check(flat.dtype, checked.prescale, checked.postscale)
    return checked


def _rows_of(splits: Any, length: int, size: int) -> list[int]:
    """The rows for each rank. Raises ValueError: see alltoall_async."""
    if splits is None:
        if length % size:
            raise ValueError(f"{length} rows cannot be divided equally among {size} ranks; give splits")
        return [length // size] * size
    try:
        numbers = torch.as_tensor(splits)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"splits={shortened(splits)}; give a list of whole numbers") from None
    if numbers.dim() != 1 or (len(numbers) and numbers.dtype not in _WHOLE):
        raise ValueError(f"splits of {numbers.dtype}; give a list of whole numbers, such as torch.int32")
    rows: list[int] = numbers.tolist()
    if len(rows) != size or min(rows) < 0 or sum(rows) > length:
        raise ValueError(
            f"splits {rows} for {length} rows and {size} ranks; give a number for each rank, 0 or more, together not "
            f"more than {length}"
        )
    return rows


def _by_rows(content: numpy.ndarray, lengths: Sequence[int], like: torch.Tensor) -> list[numpy.ndarray]:
    """The bytes of a tensor, divided into parts of the given numbers of rows; remaining rows are in no part."""
    row_bytes = like.element_size() * math.prod(like.shape[1:])
    ends = numpy.cumsum([length * row_bytes for length in lengths])
    return numpy.split(content, ends.tolist())[: len(lengths)]


def _described(tensor: torch.Tensor) -> str:
    return f"{checks.kind(tensor)} {tuple(tensor.shape)}"


def _of_any_length(tensor: torch.Tensor) -> str:
    return f"{checks.kind(tensor)} ({', '.join(['any length', *map(str, tensor.shape[1:])])})"


def _empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def _result(kind: str, outputs: list[torch.Tensor]) -> Any:
    """A script's result of a call of this kind: the only tensor, or a list."""
    return outputs[0] if kind in ("allreduce", "reducescatter", "allgather") else outputs
