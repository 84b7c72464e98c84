"""An agreement: every rank announces what it is about to do, and all compare before any data moves.

An agreement is one MPI_Iallgather of 48 bytes per rank. If the ranks disagree, every rank gets an error, not a hang or
a wrong sum. Ranks disagree if they make different calls, if the program makes them at different lines (place_of_call),
or if a rank cannot make its call. The agreement also carries the few numbers that a step needs from every rank (sample
weights, votes).
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import islice, zip_longest
from pathlib import PurePath
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import numpy

from mpitrain.errors import MismatchError, MpitrainError, error_of_kind, everywhere
from mpitrain.waiting.control import patient_naps, until
from mpitrain.waiting.transfer import gather_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.waiting.control import Control

RECORD = numpy.dtype(
    [("signature", "u8"), ("place", "u8"), ("value", "f8"), ("weight", "f8"), ("code", "i8"), ("detail", "i8")],
    align=True,
)


# The agreement with which a training step begins its exchange; other words may follow.
STEP = "step"
_LONGEST = 4000  # characters of an error that one rank tells the others


def signature(operation: str, lines: Sequence[str]) -> int:
    """64 bits that are equal on two ranks if the operation and the lines are equal. (Python's hash() is salted.)"""
    digest = hashlib.blake2b(operation.encode(), digest_size=8)
    for line in lines:
        digest.update(b"\n" + line.encode())
    return int.from_bytes(digest.digest(), "little")


class Agreement:
    """Every rank begins it, in the same order. Call `test()` until it is true; then `records` has one row per rank."""

    def __init__(
        self,
        comm: MPI.Comm,
        control: Control,
        operation: str,
        lines: Sequence[str] = (),
        *,
        signed: int | None = None,
        refusal: Exception | None = None,
        anywhere: bool = False,
        value: float = 0.0,
        weight: float = 0.0,
        code: int = 0,
        detail: int = 0,
    ) -> None:
        """Begin it.

        Args:
            lines: describe the data, one item a line.
            signed: their signature, if the caller has it already.
            refusal: why this rank cannot make the call, in place of lines. Then all ranks raise an error.
            anywhere: this rank alone may make the call at another line, as the root of a broadcast.
        """
        control.check()
        control.settle()
        control.count_call()
        self.operation = operation
        self._problem: MpitrainError | None = None
        self._refusal = refusal
        self._lines = lines if refusal is None else [" ".join(str(refusal).split())[:_LONGEST]]
        self._comm = comm
        self._control = control
        self._request: MPI.Request | None = None
        if control.size == 1:
            self.records = numpy.array([(0, 0, value, weight, code, detail)], RECORD)
            return
        from mpi4py import MPI

        if signed is None or refusal is not None:
            signed = signature(operation, lines if refusal is None else ["refused", *self._lines])
        number, self._called_at = (0, "") if anywhere else control.same_call or place_of_call()
        self._own = numpy.array([(signed, number, value, weight, code, detail)], RECORD)
        self.records = numpy.empty(control.size, RECORD)
        self._request = comm.Iallgather([self._own, MPI.BYTE], [self.records, MPI.BYTE])
        self._testing = threading.Lock()
        control.agreements.append(self)  # before a thread may look
        control.open_tests.append(self._look)

    def test(self) -> bool:
        """True when the records of all ranks have arrived, and all ranks are about to do the same.

        Raises:
            MismatchError: the ranks differ. Raised on every rank, names the first difference.
            MpitrainError: a rank cannot make the call. Raised on every rank, of the class of that rank's error.
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
        """Like `test`, for a rank that waits in another call. A mismatch here may be the reason for that wait."""
        if self._problem is None:
            self.test()

    def _test(self) -> bool:
        if self._request is None:
            return True
        if not self._request.Test():
            return False
        # Python is faster than NumPy with a few numbers.
        places = set(self.records["place"].tolist())
        differs = len(set(self.records["signature"].tolist())) > 1 or len(places - {0}) > 1
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
        """Gather texts of what every rank was about to do. All ranks call this or none: all saw the same records.

        The messages use a separate communicator, because ranks may get here at different points between calls.
        """
        refused = "" if self._refusal is None else type(self._refusal).__name__
        text = "\n".join([refused, self._called_at, self.operation, *self._lines]).encode(errors="replace")
        gathered = gather_bytes(self._control.disputes, text, self._control.wait)
        texts = [text.decode().split("\n") for text in gathered]
        for rank, (kind, _, operation, *lines) in enumerate(texts):
            if kind:
                name = self._control.name(rank)
                reason = lines[0].removeprefix(f"{name}: ")
                self._problem = everywhere(error_of_kind(kind, f"{name}: {operation}", reason))
                self._problem.is_repeated = rank != self._control.rank
                break
        else:
            self._problem = mismatch([text[2:] for text in texts], self._control.name, [text[1] for text in texts])
        raise self._problem


def mismatch(
    texts: Sequence[Sequence[str]], name: Callable[[int], str], places: Sequence[str] | None = None
) -> MismatchError:
    """The error for the first rank that differs from rank 0, with the first line that differs.

    `places` are those of the calls in the program, "" where a call may be anywhere.
    """
    places = places or [""] * len(texts)
    known = next((rank for rank, place in enumerate(places) if place), 0)
    for rank, lines in enumerate(texts):
        where, expected_where = _shown(places[rank], places[0])
        both = f" ({where}; {expected_where})" if where and expected_where and where != expected_where else ""
        if lines[0] != texts[0][0]:
            line, expected = lines[0], texts[0][0]
            hint = f"do all ranks make the same calls in the same order?{both}"
            if any(operation.partition(" ")[0] == STEP for operation in (line, expected)):
                hint = (
                    f"do all ranks make the same steps, with a backward pass for each?{both} Decide on break, "
                    "continue and skipping by a value that is equal on all ranks, such as world.mean(loss)"
                )
        elif lines != texts[0]:
            line, expected = _first_difference(lines[1:], texts[0][1:])
            hint = f"they must be equal in: {lines[0]}{both}"
        else:
            continue
        return everywhere(MismatchError(f"{name(rank)}: {line}; {name(0)}: {expected}; {hint}"))
    for rank, place in enumerate(places):
        if place and place != places[known]:
            where, expected_where = _shown(place, places[known])
            call = texts[0][0]
            return everywhere(
                MismatchError(
                    f"{name(rank)}: {call} at {where}; {name(known)}: {call} at {expected_where}; do all ranks make "
                    "the same calls in the same order? A call that depends on the rank is matched with "
                    "another call of the other "
                    'ranks. If these two are to meet, put each into: with world.same_call("name"):'
                )
            )
    raise AssertionError("equal texts with different signatures")


def _shown(place: str, other: str) -> tuple[str, str]:
    """Two places of calls, `train.py:14:9`, with columns only if the lines are equal."""
    lines = tuple(one.rpartition(":")[0] if one.count(":") > 1 else one for one in (place, other))
    return (place, other) if lines[0] == lines[1] else (lines[0], lines[1])


def _first_difference(lines: Sequence[str], expected: Sequence[str]) -> tuple[str, str]:
    for line, other in zip_longest(lines, expected, fillvalue="nothing more"):
        if line != other:
            return line, other
    raise AssertionError("equal lines in different texts")


# Where in the program a call stands. Two ranks that make a call at two places do not mean the same call. The place is
# the file and line of the program's own frame that called the library. It has no path, because hosts may have the
# program in different folders.

# Modules that only pass a program's call on. A call that begins in any other module of mpitrain is the library's own:
# a step of a Trainer may stand at another line on rank 0, such as in a profiler's block.
_DOORS = frozenset(
    f"mpitrain.{name}"
    for name in (
        "collectives",
        "collectives.trees",
        "jax.exchange",
        "world.layout",
        "waiting.agreement",
        "world.world",
    )
)
_PASS_ON = frozenset({"concurrent", "contextlib", "functools", "jax", "numpy", "optree", "threading", "torch"})
_OWN, _PASSES, _PROGRAM = range(3)
_MOST_PLACES = 4096  # a program that makes functions as it runs has new ones for ever

_kinds: dict[object, int] = {}  # by the name of the module
# By the code's id and the instruction in it: the code (so that no other has its id); the number and the text.
_places: dict[tuple[int, int], tuple[CodeType, tuple[int, str]]] = {}


def number_of(text: str) -> int:
    """Return a number of 64 bits, not 0, that is equal on two ranks if the text is."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little") or 1


def place_of_call() -> tuple[int, str]:
    """Return where the program has made the call that is being made: its `number_of`, and `train.py:14:9` (file, line,
    column); (0, "") if the library makes it by itself."""
    frame: FrameType | None = sys._getframe(3)  # past Agreement and World.begin_agreement
    while frame is not None:
        kind = _kinds.get(module := frame.f_globals.get("__name__"))
        if kind is None:
            kind = _kinds[module] = _kind_of(str(module))
        if kind is _PASSES:
            frame = frame.f_back
            continue
        if kind is _OWN:
            break
        code = frame.f_code
        known = _places.get((id(code), frame.f_lasti))
        return known[1] if known else _add(code, frame.f_lasti)
    return 0, ""


def _kind_of(module: str) -> int:
    package = module.partition(".")[0]
    if module in _DOORS or package in _PASS_ON:
        return _PASSES
    return _OWN if package == "mpitrain" else _PROGRAM


def _add(code: CodeType, instruction: int) -> tuple[int, str]:
    if len(_places) >= _MOST_PLACES:
        _places.clear()
    line, _, column, _ = next(islice(code.co_positions(), instruction // 2, None), (None, None, None, None))
    # <ipython-input-7-1f2e> and the like have numbers of the process.
    is_file = not code.co_filename.startswith("<")
    name = PurePath(code.co_filename).name if is_file else "<code>"
    text = f"{name}:{line or code.co_firstlineno}" + ("" if column is None else f":{column + 1}")
    place = number_of(text), text
    _places[id(code), instruction] = code, place
    return place
