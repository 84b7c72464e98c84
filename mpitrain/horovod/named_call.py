"""A named call of one rank, from its submission to its end; and Horovod's operators on flat CPU arrays."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from mpitrain.allreduce.algorithm import BFLOAT16, FLOATS, Progress, Sequential, in_phases
from mpitrain.allreduce.group import Group
from mpitrain.errors import HorovodInternalError, MpitrainError, everywhere
from mpitrain.horovod.adasum import adasum_steps
from mpitrain.horovod.negotiation import Submission
from mpitrain.torch import reductions
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.torch.work import Call
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpitrain.horovod.named_channel import NamedChannel


class Operator(enum.IntEnum):
    """The operators of a reduction. The numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"op={value!r} is not an operator; give one of {', '.join(op.name for op in cls)}")

    def check(self, dtype: numpy.dtype, *factors: float) -> None:
        """Raise ValueError unless the operator with these factors can be applied to values of a dtype."""
        if self is Operator.Adasum and dtype not in FLOATS:
            allowed = ", ".join(str(one) for one in FLOATS)
            raise ValueError(f"Adasum of {dtype}; it takes {allowed}: convert the tensor, or use Sum")
        if dtype.kind == "b" and (self is Operator.Average or any(factor != 1.0 for factor in factors)):
            raise ValueError(
                f"{self.name} of bool: booleans have no mean and no factors; use Max or Min, or convert them"
            )
        if dtype.kind == "c" and self in (Operator.Min, Operator.Max):
            raise ValueError(f"{self.name} of {dtype}: complex numbers have no order")

    @property
    def reduction(self) -> reductions.Reduction:
        """The reduction of an operator other than Adasum. Average divides by the number of ranks."""
        return reductions.Reduction(self.name, _UFUNCS[self], self is Operator.Average)


_UFUNCS = {
    Operator.Average: numpy.add,
    Operator.Sum: numpy.add,
    Operator.Min: numpy.minimum,
    Operator.Max: numpy.maximum,
    Operator.Product: numpy.multiply,
}


class Reduced(NamedTuple):
    """Arrays that an allreduce replaces by their result.

    Attributes:
        op: the operator.
        prescale, postscale: factors before and after.
        flats: the arrays: one-dimensional, on the CPU.
    """

    op: Operator
    prescale: float
    postscale: float
    flats: Sequence[numpy.ndarray]

    @in_phases
    def steps(self, world: World, sums: Sequential) -> Iterator[Progress]:
        """The steps. Several arrays go in one buffer."""
        flat = self.flats[0] if len(self.flats) == 1 else numpy.concatenate(self.flats)
        scale(flat, self.prescale)
        if self.op is not Operator.Adasum:
            yield reductions.allreduce(world, sums, flat, self.op.reduction)
        elif world.size > 1 and flat.size:
            group = Group(world.background.comm, tuple(range(world.size)), world.rank)
            yield adasum_steps(group, [slice(0, flat.size)])(flat)
        scale(flat, self.postscale)
        if len(self.flats) > 1:
            begin = 0
            for part in self.flats:
                part[:] = flat[begin : begin + part.size]
                begin += part.size


def scale(flat: numpy.ndarray, factor: float) -> None:
    """Multiply in place: integers in float64, rounded toward zero; 16-bit floats in float32; others in their own
    dtype."""
    if factor == 1.0:
        return
    if flat.dtype.kind in "iu":
        flat[:] = (flat.astype(numpy.float64) * factor).astype(flat.dtype)
    elif flat.dtype == numpy.float16 or flat.dtype == BFLOAT16:
        flat[:] = (flat.astype(numpy.float32) * numpy.float32(factor)).astype(flat.dtype)
    else:
        numpy.multiply(flat, flat.dtype.type(factor), out=flat)


Details = Sequence[tuple[int, ...]]


def no_steps(_: Details) -> Progress:
    """The steps of a call that moves nothing."""
    return iter(())


@uncompiled
class NamedCall(Call):
    """A call of this rank. In Horovod's API it is a handle.

    Attributes:
        submission: what the other ranks are told.
        reduced: what an allreduce works on; None: `work` makes the steps of the call from its details.
        finish: makes the result of a call that has ended. Neither function refers to the call: a reference cycle would
            keep memory until Python's garbage collection.
        is_agreed: all ranks have submitted the call.
        details: of the submissions, in rank order, once the call is agreed.
    """

    def __init__(self, channel: NamedChannel, key: str) -> None:
        super().__init__(channel, key, (), channel.timeout_seconds)
        self.submission = Submission(key, ())
        self.reduced: Reduced | None = None
        self.work: Callable[[Details], Progress] = no_steps
        self.finish: Callable[[], Any] = lambda: None
        self.is_agreed = False
        self.details: Details = ()

    def __str__(self) -> str:
        channel: Any = self.channel
        absent = "" if self.is_agreed else channel.absent(self.name)
        return f"{self.name} ({', '.join(self.submission.lines)}) in {self.channel}{absent}"

    def tell(self, *lines: str, detail: tuple[int, ...] = (), zeros: tuple[Any, ...] | None = None) -> None:
        """Set what the other ranks are told. See Submission."""
        self.submission = Submission(self.name, lines, detail, zeros)

    def ended(self) -> Any:
        """Wait until the call has ended, and return its result.

        Raises:
            HorovodInternalError: the call has failed.
        """
        try:
            if not self.is_done:
                self.channel.engine.wait(self)
            if self.error is not None:
                raise self.error
        except HorovodInternalError:
            raise
        except MpitrainError as error:
            raise everywhere(HorovodInternalError(str(error)), error.known_everywhere) from error
        except Exception as error:  # MPI's own: a rank is lost
            raise HorovodInternalError(f"{self.channel.world.name()}: {self} ended by {error!r}") from error
        return self.finish()


class WhileOpen(Collection[int]):
    """The other ranks, as long as some have not submitted a call. A rank that has ended never will."""

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
