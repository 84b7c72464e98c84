"""The named calls, on flat host arrays. Each function makes a call; a front end such as torch/ submits it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy

from mpitrain.allreduce.algorithm import Progress
from mpitrain.exchange import moves
from mpitrain.horovod.exceptions import HorovodInternalError
from mpitrain.horovod.named_call import Details, NamedCall, Reduced
from mpitrain.horovod.named_channel import NamedChannel
from mpitrain.horovod.negotiation import JOIN, Submission
from mpitrain.horovod.operators import Operator, check, reduction, scale
from mpitrain.shard import part_of
from mpitrain.torch import reductions


class Part(NamedTuple):
    """One array of a call.

    Attributes:
        flat: its values: one-dimensional and contiguous, on the host.
        shape: its shape.
        kind: its dtype and place, in words.
    """

    flat: numpy.ndarray
    shape: tuple[int, ...]
    kind: str

    @property
    def raw(self) -> numpy.ndarray:
        """The bytes."""
        return self.flat.view(numpy.uint8)

    @property
    def row_bytes(self) -> int:
        """The bytes of a step along the first dimension."""
        return self.flat.itemsize * math.prod(self.shape[1:])


# Makes the result of a call whose length is known late: takes its place in the list of results and its shape, and
# returns the bytes to fill.
Make = Callable[[int, tuple[int, ...]], numpy.ndarray]

_TAKES_ZEROS = (Operator.Average, Operator.Sum, Operator.Adasum)


def allreduce(
    channel: NamedChannel, key: str, parts: Sequence[Part], op: Operator, prescale: float, postscale: float
) -> NamedCall:
    """Make a call that replaces the parts by the result of all ranks.

    Raises:
        ValueError: the operator does not fit the dtype of a part.
    """
    _check_operator(parts, op, prescale, postscale)
    arrays = ((part.flat.dtype.name, part.flat.size) for part in parts)
    submission = Submission(
        key,
        (_factors(op, prescale, postscale), *(f"{part.kind} {part.shape}" for part in parts)),
        # Zeros of a rank that has joined would change a product, and could be the least or the largest value.
        zeros=(op.name, prescale, postscale, *arrays) if op in _TAKES_ZEROS else None,
    )
    return NamedCall(channel, submission, reduced=Reduced(op.name, prescale, postscale, [part.flat for part in parts]))


def allgather(channel: NamedChannel, key: str, parts: Sequence[Part], make: Make) -> NamedCall:
    """Make a call that joins each part with those of the other ranks along the first dimension.

    Raises:
        ValueError: a part has no dimension.
    """
    _check_dimensions(parts)
    world = channel.world
    lengths = tuple(part.shape[0] for part in parts)

    def work(details: Details) -> Progress:
        for place, part in enumerate(parts):
            rows = [detail[place] for detail in details]
            whole = make(place, (sum(rows), *part.shape[1:]))
            pieces = _divided(whole, [length * part.row_bytes for length in rows])
            pieces[world.rank][:] = part.raw
            yield from moves.allgather(world, pieces)

    return NamedCall(channel, Submission(key, tuple(map(_of_any_length, parts)), lengths), work=work)


def broadcast(channel: NamedChannel, key: str, part: Part, root: int) -> NamedCall:
    """Make a call that replaces the part by that of `root`, a rank of the channel's World."""
    world = channel.world

    def work(_: Details) -> Progress:
        return moves.broadcast(world, part.raw, root) if world.size > 1 and part.flat.size else iter(())

    lines = (f"from {world.name(root)}", f"{part.kind} {part.shape}")
    return NamedCall(channel, Submission(key, lines), work=work)


def alltoall(channel: NamedChannel, key: str, part: Part, splits: Sequence[int] | None, make: Make) -> NamedCall:
    """Make a call that sends each rank its rows. The output is the number of rows that came from each rank.

    Args:
        splits: the rows for each rank; None: the same for all.

    Raises:
        ValueError: the splits do not fit the part.
    """
    _check_dimensions([part])
    world = channel.world
    length = part.shape[0]
    if splits is None:
        if length % world.size:
            raise ValueError(f"{length} rows cannot be divided equally among {world.size} ranks; give splits")
        splits = [length // world.size] * world.size
    if len(splits) != world.size or min(splits) < 0 or sum(splits) > length:
        raise ValueError(
            f"splits {list(splits)} for {length} rows and {world.size} ranks; give a number for each rank, 0 or more, "
            f"together not more than {length}"
        )
    sent = list(splits)

    def work(details: Details) -> Progress:
        rows = [detail[world.rank] for detail in details]
        receives = _divided(make(0, (sum(rows), *part.shape[1:])), [length * part.row_bytes for length in rows])
        sends = _divided(part.raw, [length * part.row_bytes for length in sent])
        receives[world.rank][:] = sends[world.rank]
        yield from moves.alltoall(world, sends, receives)
        call.output = rows

    call = NamedCall(channel, Submission(key, (_of_any_length(part),), tuple(sent)), work=work)
    return call


def reducescatter(
    channel: NamedChannel,
    key: str,
    parts: Sequence[Part],
    op: Operator,
    prescale: float,
    postscale: float,
    make: Make,
) -> NamedCall:
    """Make a call whose result is this rank's rows of the reduced parts. The first ranks get the rows that are over.

    Raises:
        ValueError: a part has no dimension, or the operator does not fit its dtype.
        HorovodInternalError: the operator is Adasum.
    """
    _check_dimensions(parts)
    if op is Operator.Adasum:
        raise HorovodInternalError("reducescatter with Adasum does not exist; use Average or Sum, or allreduce")
    _check_operator(parts, op, prescale, postscale)
    world = channel.world

    def work(_: Details) -> Progress:
        for place, part in enumerate(parts):
            rows = [part_of(part.shape[0], rank, world.size) for rank in range(world.size)]
            own_rows = rows[world.rank].stop - rows[world.rank].start
            flat = part.flat.copy()
            scale(flat, prescale)
            row = math.prod(part.shape[1:])
            own = make(place, (own_rows, *part.shape[1:])).view(flat.dtype)
            pieces = [flat[one.start * row : one.stop * row] for one in rows]
            yield from reductions.reduce_scatter(world, pieces, own, reduction(op.name))
            scale(own, postscale)

    lines = (_factors(op, prescale, postscale), *(f"{part.kind} {part.shape}" for part in parts))
    return NamedCall(channel, Submission(key, lines), work=work)


def barrier(channel: NamedChannel, key: str, lines: Iterable[str] = ()) -> NamedCall:
    """Make a call that ends when all ranks have made it, with the same lines."""
    return NamedCall(channel, Submission(key, tuple(lines)), work=lambda _: iter(()))


def join(channel: NamedChannel) -> NamedCall:
    """Make a call that ends when all ranks have joined. The output is the last of them."""
    return NamedCall(channel, Submission(JOIN, ()))


def _check_operator(parts: Sequence[Part], op: Operator, *factors: float) -> None:
    for part in parts:
        check(op, part.flat.dtype, *factors)


def _factors(op: Operator, prescale: float, postscale: float) -> str:
    return f"{op.name} with factors {prescale} and {postscale}"


def _of_any_length(part: Part) -> str:
    return f"{part.kind} ({', '.join(['any length', *map(str, part.shape[1:])])})"


def _check_dimensions(parts: Sequence[Part]) -> None:
    if any(not part.shape for part in parts):
        raise ValueError("a scalar; the call goes along the first dimension: use reshape(1)")


def _divided(flat: numpy.ndarray, lengths: Sequence[int]) -> list[numpy.ndarray]:
    return numpy.split(flat, numpy.cumsum(lengths)[: len(lengths)].tolist())[: len(lengths)]
