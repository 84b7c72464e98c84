"""A named call of one rank, from its submission to its end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from mpitrain.allreduce.algorithm import Progress
from mpitrain.horovod.negotiation import Submission
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.torch.work import Call

if TYPE_CHECKING:
    from mpitrain.horovod.named_channel import NamedChannel

Details = Sequence[tuple[int, ...]]


class Reduced(NamedTuple):
    """Arrays that an allreduce replaces by their result.

    Attributes:
        op: the name of the operation, such as Sum.
        prescale, postscale: factors before and after.
        flats: the arrays: one-dimensional, on the host.
    """

    op: str
    prescale: float
    postscale: float
    flats: Sequence[numpy.ndarray]


@uncompiled
class NamedCall(Call):
    """A call that this rank has submitted. Horovod's users know it as a handle.

    Attributes:
        submission: what the other ranks are told.
        reduced: what an allreduce works on; None: `work` makes the steps of the call from what the ranks have told.
        output: the result, once the call has ended.
        finish: makes the result of a call that has ended; None: it is `output`.
        is_agreed: all ranks have submitted the call.
    """

    def __init__(
        self,
        channel: NamedChannel,
        submission: Submission,
        *,
        reduced: Reduced | None = None,
        work: Callable[[Details], Progress] | None = None,
    ) -> None:
        super().__init__(channel, submission.key, (), channel.timeout_seconds)
        self.submission = submission
        self.reduced = reduced
        self.work = work
        self.output: Any = None
        self.finish: Callable[[], Any] | None = None
        self.is_agreed = False

    def __str__(self) -> str:
        channel: Any = self.channel
        absent = "" if self.is_agreed else channel.absent(self.submission.key)
        return f"{self.submission.key} ({', '.join(self.submission.lines)}) in {self.channel}{absent}"


class WhileOpen(Collection[int]):
    """The other ranks, as long as not all of them have submitted a call. A rank that has ended will never do so."""

    def __init__(self, call: NamedCall) -> None:
        self._call = call
        world = call.channel.world
        self._others = [rank for rank in range(world.size) if rank != world.rank]

    def __contains__(self, rank: object) -> bool:
        return not self._call.is_agreed and rank in self._others

    def __iter__(self) -> Iterator[int]:
        return iter(() if self._call.is_agreed else self._others)

    def __len__(self) -> int:
        return 0 if self._call.is_agreed else len(self._others)
