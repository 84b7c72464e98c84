"""What runs together: small allreduces in one buffer, any other call by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy

from mpitrain.allreduce.algorithm import Progress, Sequential
from mpitrain.horovod.named_call import Details, NamedCall, Reduced
from mpitrain.horovod.negotiation import Agreed
from mpitrain.horovod.operators import allreduce
from mpitrain.world import World

# Horovod's default of HOROVOD_FUSION_THRESHOLD.
FUSED_BYTES = 128 * 2**20
# A longer array runs by itself, without a copy into the common buffer.
ALONE_BYTES = 4 * 2**20


@dataclass
class Batch:
    """What runs at once.

    Attributes:
        reduced: for an allreduce, of the arrays of one or of several calls; None: the only call has its own steps.
        ends: this rank's calls that end with it.
        details: what the ranks have told, for a call with its own steps.
    """

    reduced: Reduced | None
    ends: list[NamedCall] = field(default_factory=list)
    details: Details = ()

    def __str__(self) -> str:
        if not self.ends:
            return "allreduce for the ranks that have not joined"
        more = f" and {len(self.ends) - 1} more" if len(self.ends) > 1 else ""
        return f"{self.ends[0]}{more}"


def batches(calls: Iterable[tuple[NamedCall | None, Agreed]]) -> Iterator[Batch]:
    """Divide calls into batches. All ranks come to the same ones, because they know the same of each array."""
    current: Batch | None = None
    flats: list[numpy.ndarray] = []
    num_bytes = 0
    for call, agreed in calls:
        reduced = call.reduced if call is not None else _zeros(agreed)
        if reduced is None:
            if current is not None:
                yield current
            assert call is not None
            current = None
            yield Batch(None, [call], agreed.details)
            continue
        for flat in reduced.flats:
            if current is not None and num_bytes + flat.nbytes <= FUSED_BYTES and _fits(current, reduced, flat):
                flats.append(flat)
                num_bytes += flat.nbytes
                continue
            if current is not None:
                yield current
            flats, num_bytes = [flat], flat.nbytes
            current = Batch(reduced._replace(flats=flats))
        assert current is not None  # a call has at least one array
        if call is not None:
            current.ends.append(call)
    if current is not None:
        yield current


def run_batch(world: World, sums: Sequential, batch: Batch) -> Progress:
    """The steps of a batch."""
    reduced = batch.reduced
    if reduced is None:
        (call,) = batch.ends
        assert call.work is not None
        yield from call.work(batch.details)
    elif len(reduced.flats) == 1:
        yield from allreduce(world, sums, reduced.flats[0], reduced)
    else:
        flat = numpy.concatenate(reduced.flats)
        yield from allreduce(world, sums, flat, reduced)
        _divide(flat, reduced.flats)


def _fits(batch: Batch, reduced: Reduced, flat: numpy.ndarray) -> bool:
    if batch.reduced is None or batch.reduced[:3] != reduced[:3] or reduced.op == "Adasum":
        return False
    first = batch.reduced.flats[0]
    return first.dtype == flat.dtype and max(first.nbytes, flat.nbytes) <= ALONE_BYTES


def _zeros(agreed: Agreed) -> Reduced:
    """What a rank that has joined contributes."""
    assert agreed.zeros is not None
    op, prescale, postscale, *arrays = agreed.zeros
    return Reduced(op, prescale, postscale, [numpy.zeros(count, dtype) for dtype, count in arrays])


def _divide(flat: numpy.ndarray, parts: Sequence[numpy.ndarray]) -> None:
    begin = 0
    for part in parts:
        part[:] = flat[begin : begin + part.size]
        begin += part.size
