"""An agreement: every rank says what it is about to do, and all compare before any data moves.

An agreement is one MPI_Iallgather of 40 bytes a rank. If the ranks disagree, every rank gets an error, not a hang or a
wrong sum. The agreement also carries the few numbers that a step needs from every rank (sample weights, votes).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy

from mpitrain.errors import MismatchError, everywhere
from mpitrain.waiting.control import until
from mpitrain.waiting.pace import patient_naps
from mpitrain.waiting.transfer import gather_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.waiting.control import Control

RECORD = numpy.dtype(
    [("signature", "u8"), ("value", "f8"), ("weight", "f8"), ("code", "i8"), ("detail", "i8")], align=True
)


def signature(operation: str, lines: Sequence[str]) -> int:
    """64 bits that are equal on two ranks if the operation and the lines are equal. (Python's hash() is salted.)"""
    digest = hashlib.blake2b(operation.encode(), digest_size=8)
    for line in lines:
        digest.update(b"\n" + line.encode())
    return int.from_bytes(digest.digest(), "little")


class Agreement:
    """Every rank begins it, in the same order. Call `test()` until it is true; then `records` has one row a rank."""

    def __init__(
        self,
        comm: MPI.Comm,
        control: Control,
        operation: str,
        lines: Sequence[str] = (),
        *,
        signed: int | None = None,
        value: float = 0.0,
        weight: float = 0.0,
        code: int = 0,
        detail: int = 0,
    ) -> None:
        """`lines` describe the data, one item a line. `signed` is their signature, if the caller has it already."""
        control.check()
        control.settle()
        control.count_call()
        self.operation = operation
        self._problem: MismatchError | None = None
        self._lines = lines
        self._comm = comm
        self._control = control
        self._request: MPI.Request | None = None
        if control.size == 1:
            self.records = numpy.array([(0, value, weight, code, detail)], RECORD)
            return
        from mpi4py import MPI

        signed = signature(operation, lines) if signed is None else signed
        self._own = numpy.array([(signed, value, weight, code, detail)], RECORD)
        self.records = numpy.empty(control.size, RECORD)
        self._request = comm.Iallgather([self._own, MPI.BYTE], [self.records, MPI.BYTE])
        self._testing = threading.Lock()
        control.agreements.append(self)  # before a thread may look
        control.open_tests.append(self._look)

    def test(self) -> bool:
        """True when the records of all ranks have arrived, and all ranks are about to do the same.

        Raises:
            MismatchError: the ranks differ. Raised on every rank, names the first difference.
        """
        if self._problem is not None:
            raise self._problem
        if self._request is None:
            return True
        # If the lock is taken, another thread is here, or this one is in _explain, whose wait looks at all open tests.
        if not self._testing.acquire(blocking=False):
            return False
        try:
            return self._test()
        finally:
            self._testing.release()

    def _look(self) -> None:
        """What `test` does, for a rank that waits in another call. A mismatch here may be the reason for that wait."""
        if self._problem is None:
            self.test()

    def _test(self) -> bool:
        if self._request is None:
            return True
        if not self._request.Test():
            return False
        differs = bool((self.records["signature"] != self.records["signature"][0]).any())
        if differs and self._control.agreements[0] is not self:
            return False  # ranks that disagree twice explain one thing after the other, all in the same order
        self._control.open_tests.remove(self._look)
        try:
            if differs:
                self._explain()
        finally:
            self._control.agreements.remove(self)
        self._request = None  # not before: until then nobody may take it for agreed
        return True

    def wait(self) -> numpy.ndarray:
        """Wait for the records, and return them: shape (size,), dtype RECORD. Raises as `test` does."""
        self._control.wait(until(self.test, patient_naps()), self.operation)
        return self.records

    def _explain(self) -> None:
        """Gather what every rank was about to do, in words. All ranks come here or none, as all saw the same records.

        The messages have a communicator of their own, because ranks may come here at different points between calls.
        """
        text = "\n".join([self.operation, *self._lines]).encode()
        texts = gather_bytes(self._control.disputes, text, self._control.wait)
        self._problem = mismatch([text.decode().split("\n") for text in texts], self._control.name)
        raise self._problem


def mismatch(texts: Sequence[Sequence[str]], name: Callable[[int], str]) -> MismatchError:
    """The error for the first rank that differs from rank 0, with the first line that differs."""
    for rank, lines in enumerate(texts):
        if lines == texts[0]:
            continue
        if lines[0] != texts[0][0]:
            line, expected = lines[0], texts[0][0]
            hint = "do all ranks make the same calls in the same order?"
        else:
            line, expected = _first_difference(lines[1:], texts[0][1:])
            hint = f"they must be equal in: {lines[0]}"
        return everywhere(MismatchError(f"{name(rank)}: {line}; {name(0)}: {expected}; {hint}"))
    raise AssertionError("equal texts with different signatures")


def _first_difference(lines: Sequence[str], expected: Sequence[str]) -> tuple[str, str]:
    for line, other in zip_longest(lines, expected, fillvalue="nothing more"):
        if line != other:
            return line, other
    raise AssertionError("equal lines in different texts")
