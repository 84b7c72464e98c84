"""A Python value as frames, and messages of frames between two ranks of a World.

    frames[0]    the pickle (protocol 5): the nesting, and shape, dtype and order of each array
    frames[1:]   the bytes of the arrays, as they lie in memory; an array that occurs twice is there once

A contiguous array that can be written to, in C or Fortran order, is not copied. Source: PEP 574, Pickle protocol 5 with
out-of-band data.

    leader ── header: kind, lengths of the frames ──> worker      one message of 8-byte numbers
           ── frames, in pieces of at most 256 KiB ──>            by a Mover

Each direction has one message under way at a time.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy

from mpitrain.waiting.control import Control, patient_naps, until
from mpitrain.waiting.pieces import Mover
from mpitrain.watching.activity import count_moved

if TYPE_CHECKING:
    from mpi4py import MPI


# Flat byte arrays.
Frames: TypeAlias = list[numpy.ndarray]


def pack(value: Any) -> Frames:
    """Return the frames of `value`. They share the memory of its arrays.

    Raises:
        Exception: `value` cannot be pickled. The class is that of pickle, or of the class of a value in it.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _ArrayPickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return [numpy.asarray(stream.getbuffer()), *(numpy.asarray(buffer.raw()) for buffer in buffers)]


def unpack(frames: Frames) -> Any:
    """Return the value. Its arrays are the frames' memory."""
    return pickle.loads(frames[0].data, buffers=frames[1:])


def copied(frames: Frames) -> Frames:
    """Return the frames in new memory, as if they had come from another rank."""
    return [frame.copy() for frame in frames]


class _ArrayPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # NumPy itself leaves out-of-band only what is contiguous and has a dtype that the buffer protocol knows.
        if type(value) is numpy.ndarray and not value.dtype.hasobject and value.dtype.itemsize:
            order: Literal["C", "F"] = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
            # pickle would make the copy of a read-only array read-only too.
            whole = value if value.flags.forc and value.flags.writeable else value.copy(order)
            flat = whole.reshape(-1, order=order).view(numpy.uint8)
            return _array_from, (pickle.PickleBuffer(flat.data), value.dtype, value.shape, order)
        return NotImplemented


def _array_from(buffer: Any, dtype: numpy.dtype, shape: Sequence[int], order: Literal["C", "F"]) -> numpy.ndarray:
    return numpy.ndarray(tuple(shape), dtype, buffer, order=order)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in messages."""
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


def why_not(function: Callable[..., Any], arguments: Sequence[Any]) -> str:
    """Describe which of these cannot be pickled, and what to do; "" if each of them can."""
    if problem := _problem(function):
        return (
            f"the function {name_of(function)} cannot be sent: {problem}. A rank finds a function by its name: define "
            "it at the top level of a module or of the script, and give it what it needs as arguments"
        )
    for number, argument in enumerate(arguments, 1):
        if problem := _problem(argument):
            return (
                f"argument {number} of {name_of(function)}, of type {type(argument).__name__}, cannot be sent: "
                f"{problem}. Give the function values from which it makes that itself"
            )
    return ""


def _problem(value: Any) -> str:
    try:
        pack(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Kinds of messages. To a worker: a call; the end of the block, with or without freeing its communicator. Back: a result
# or a failure.
CALL, END, END_AS_IT_IS, RESULT, FAILURE = range(5)

_HEADER_TAG, _FRAMES_TAG = 1, 2
# A call waits for two naps, one on each side. With the usual naps that is more than 1 ms.
LONGEST_NAP_SECONDS = 100e-6

Message: TypeAlias = tuple[int, Frames]
Result = TypeVar("Result")


class RankLink:
    """This rank's end of the line to another rank."""

    def __init__(self, comm: MPI.Comm, peer: int) -> None:
        """`comm` is used by links alone. `peer` is the other rank."""
        self._comm = comm
        self._peer = peer
        self._mover = Mover(comm, _FRAMES_TAG)

    def send(self, kind: int, frames: Frames) -> Iterator[float | None]:
        """Steps that send a message. Until their end the frames must not change."""
        header = numpy.array([kind, *(frame.nbytes for frame in frames)], numpy.int64)
        yield from until(self._comm.Isend(header, self._peer, _HEADER_TAG).Test)
        yield from self._mover.move([(self._peer, frame) for frame in frames], [])

    def receive(self) -> Generator[float | None, None, Message]:
        """Steps that receive the next message, into new memory."""
        from mpi4py import MPI

        nap = patient_naps(LONGEST_NAP_SECONDS)
        while (message := self._comm.Improbe(self._peer, _HEADER_TAG, status := MPI.Status())) is None:
            yield nap()
        header = numpy.empty(status.Get_count(MPI.INT64_T), numpy.int64)
        message.Recv(header)
        count_moved()  # the frames follow at once: a waiting rank stops napping
        kind, *lengths = header.tolist()
        frames = [numpy.empty(length, numpy.uint8) for length in lengths]
        yield from self._mover.move([], [(self._peer, frame) for frame in frames])
        return kind, frames


def driven(
    control: Control,
    steps: Generator[float | None, None, Result],
    doing: str,
    peers: Collection[int],
) -> Result:
    """Wait for the end of `steps`, and return their result. Arguments and errors are those of Control.wait."""
    results: list[Result] = []

    def kept() -> Iterator[float | None]:
        results.append((yield from steps))

    control.wait(kept(), doing, peers)
    return results[0]
