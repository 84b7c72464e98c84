"""The end of a job when a rank fails: at once, and on all ranks.

An uncaught exception on one rank would leave the others waiting. Here it ends the whole job: the rank that failed first
prints its traceback last, and aborts.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from mpitrain.early import abort, exit_code_of, words_of_exit
from mpitrain.errors import MpitrainError, NonFiniteError, is_of_another_rank, text_of
from mpitrain.launch.shared_files import remove_mine
from mpitrain.shown import shown_report
from mpitrain.user_code import is_of_user
from mpitrain.waiting.notes import FAILED
from mpitrain.watching.activity import own_activity
from mpitrain.watching.rank_record import INTERRUPTED
from mpitrain.world.shard import newest_part, part_of
from mpitrain.world.world import World

# Ranks that fail for the same reason fail at about the same time. The first one waits this long to learn of the others'
# failures, so that it prints last.
_ARBITRATION_SECONDS = 0.5
# The time for the launcher to read a rank's output. (Open MPI's mpiexec ends a job at once, and drops the rest.)
_READING_SECONDS = 0.1
# A rank that was not the first waits this long to be killed, then ends by itself.
_LAST_RESORT_SECONDS = 10.0
_MOST_LINE = 2000  # characters
# Exceptions that code raises if it has too few samples.
_MAY_BE_OF_PART = RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError


# `mpitrain run` looks for these two lines, and repeats the first failure at the end of the output.
BEGIN, END = "mpitrain: {name} failed:", "mpitrain: end of the failure of {name}"


def end_job(world: World, error: BaseException, ending: threading.Lock) -> NoReturn:
    """Report `error` and end every process of the job with a non-zero code. Never returns.

    `ending` is one lock for all threads of this process: the first one that fails ends the job.
    """
    from mpi4py import MPI

    if not ending.acquire(blocking=False):
        time.sleep(2 * _LAST_RESORT_SECONDS)  # another thread of this rank failed before and ends the job
    is_first = is_news = True  # also if MPI itself is broken, so that the others cannot be asked
    failed_seconds = time.time()
    try:
        with suppress(ValueError):  # a thread may not do this
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the report
        with suppress(Exception):
            sys.stdout.flush()
        finalized = MPI.Is_finalized()  # after MPI_Finalize, a call would end this process silently
        with suppress(Exception):
            if not finalized:
                is_first, is_news, failed_seconds = _compare(world, error)
        with suppress(Exception):
            if activity := own_activity():
                activity.fail(_line(error), time.monotonic() - (time.time() - failed_seconds))
        if is_first:
            _write(_report(world, error))
        else:
            if is_news:
                _write(f"mpitrain: {world.control.name()} failed too: {_line(error)}\n")
            time.sleep(_LAST_RESORT_SECONDS)
        time.sleep(_READING_SECONDS)
        if not finalized:
            remove_mine()
            code = exit_code_of(error) if isinstance(error, SystemExit) else 1
            abort(MPI.COMM_WORLD, 130 if isinstance(error, KeyboardInterrupt) else code)
    finally:  # MPI's launcher ends the other ranks when it sees this code
        os._exit(1)


def remark_on_part(error: BaseException, world: World) -> str:
    """Return a remark if the error may be due to a part with one sample, while the whole batch has more; "" if it
    cannot."""
    kinds = (NonFiniteError,) if isinstance(error, MpitrainError) else _MAY_BE_OF_PART
    if not newest_part or not isinstance(error, kinds):
        return ""
    count, total = newest_part[0]
    if isinstance(error, NonFiniteError):  # all ranks raise it; the rank to blame is not always this one
        parts = [part_of(total, rank, world.size) for rank in range(world.size)]
        short = [world.name(rank) for rank, part in enumerate(parts) if part.stop - part.start == 1 < total]
        if error.gradient_of is not None:
            short = [name for name in short if name == error.gradient_of[0]]
    else:
        short = [world.name()] if count <= 1 < total else []
    if not short:
        return ""
    return (
        f"{', '.join(short)}: {'each' if len(short) > 1 else 'it'} computed with 1 sample of a batch of {total}, and "
        "one process computes with all. Code such as squeeze(), std(0) or batch_norm() fails with 1 sample, or "
        "gives NaN. If so, use a batch_size of at least 2 samples a rank, drop_last=True, or fewer ranks"
    )


def say_interrupts_in_a_line() -> None:
    """From now on, Ctrl-C ends this process without a traceback: for processes that users end this way, a server or
    worker."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            _write(f"mpitrain: {INTERRUPTED}\n")
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def end_as_lost(world: World, error: BaseException, lost: str) -> NoReturn:
    """Report `error`, and end this process as a lost rank: the others continue without it. Never returns."""
    with suppress(Exception):
        sys.stdout.flush()
    _write(
        f"{_traceback(error)}mpitrain: {world.control.name()}: {lost}. This rank ends; the others continue without it\n"
    )
    time.sleep(_READING_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)  # an exit code would count as a failure of the job
    os._exit(1)


def _compare(world: World, error: BaseException) -> tuple[bool, bool, float]:
    """Return whether this rank failed first (in a tie: the lower rank), and whether no other rank has its error.

    The third value is the time of this failure, for that comparison.
    """
    notes = world.control.notes
    is_repeated = is_of_another_rank(error)
    own = first = notes.tell_all(FAILED, _cause(world, error), last=is_repeated)
    deadline = time.monotonic() + _ARBITRATION_SECONDS
    while time.monotonic() < deadline:
        notes.look()
        failures = [note for note in tuple(notes.read.values()) if note.kind == FAILED]
        first = min([own, *failures], key=lambda note: (note.sent_seconds, note.rank))
        if first is not own:
            break
        if len(failures) == notes.size - 1:
            time.sleep(_READING_SECONDS)  # all have failed, and may still be printing
            break
        time.sleep(0.005)
    is_known = is_repeated or _is_known_everywhere(error) or first.cause == own.cause
    return first is own, not is_known, own.sent_seconds


def _cause(world: World, error: BaseException) -> int:
    """Return a number that is equal for the same error on different ranks, ignoring the rank's own name in it."""
    text = _text(error).replace(world.control.name(), "this rank")
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=6).digest(), "little")


def _is_known_everywhere(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, MpitrainError) and error.known_everywhere)


def _report(world: World, error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        text = f"{INTERRUPTED}{_place_of(error)}\n"
    elif isinstance(error, SystemExit):
        text = f"{words_of_exit(error)}, and another rank waits for this one\n"
    else:
        text = _traceback(error)
    name = world.control.name()
    return f"{BEGIN.format(name=name)}\n{text}{END.format(name=name)}\n"


def _place_of(error: BaseException) -> str:
    """The line of the program, as in ` in train.py:9`: the program itself may have raised the interrupt."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if is_of_user(one.filename)]
    return f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _traceback(error: BaseException) -> str:
    """The traceback as Python prints it. If mpitrain raised the error, it ends at the line of the program: the frames
    inside mpitrain do not help to find the cause."""
    try:
        whole = traceback.TracebackException.from_exception(error)
        if isinstance(error, MpitrainError):
            of_user = [number for number, frame in enumerate(whole.stack) if is_of_user(frame.filename)]
            if of_user:
                del whole.stack[of_user[-1] + 1 :]
        text = "".join(whole.format())
    except BaseException:  # the class may have failing attributes; the report must not fail too
        text = "".join(traceback.format_tb(error.__traceback__)) + _text(error)
    text = shown_report(text)  # a launcher that ends the job drops unread output, so the end would be lost
    return text if text.endswith("\n") else f"{text}\n"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}"


def _line(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return (words_of_exit(error) if isinstance(error, SystemExit) else _text(error)).splitlines()[0][:_MOST_LINE]


def _write(text: str) -> None:
    """Write all at once, so that the output of different ranks does not mix."""
    os.write(2, text.encode(errors="backslashreplace"))
