"""How a job ends: all ranks together, or at once when one fails.

An uncaught exception on one rank would leave the others waiting for it. Here it ends the whole job: the rank that
failed first prints its traceback last, and aborts. A rank that ends normally says so and waits for the others.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import NoReturn

from mpitrain.control import FAILED, FINISHED, Control
from mpitrain.errors import MpitrainError
from mpitrain.world import World

# Ranks that fail for one reason fail at about the same time. The first one waits this long, so that it hears of the
# others' failures and speaks last.
_ARBITRATION_SECONDS = 0.5
# A rank that was not the first waits this long to be ended, then ends by itself.
_LAST_RESORT_SECONDS = 10.0

# `mpitrain run` looks for these two lines to repeat the first failure as a job's last words.
BEGIN, END = "mpitrain: {name} failed:", "mpitrain: end of the failure of {name}"


def guard(world: World) -> None:
    """From now on an uncaught exception, also in a thread, ends the whole job. Called once by `init`."""
    if world.size == 1:
        return  # Python's own behaviour is right for one process

    def uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> NoReturn:
        end_job(world, error or kind(), trace)

    def uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:
            uncaught(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    sys.excepthook = uncaught
    threading.excepthook = uncaught_in_thread
    atexit.register(farewell, world)


def end_job(world: World, error: BaseException, trace: TracebackType | None) -> NoReturn:
    """Report `error` and end every process of the job with a non-zero code. Never returns."""
    try:
        if _is_first(world.control, world.rank, world.size):
            sys.stdout.flush()
            _write(_report(world, error, trace))
        else:
            if not _is_known_everywhere(error):
                _write(f"mpitrain: {world.name()} failed too: {_one_line(error)}\n")
            time.sleep(_LAST_RESORT_SECONDS)
        world.comm.Abort(130 if isinstance(error, KeyboardInterrupt) else 1)
    finally:  # MPI itself may be what is broken; its launcher ends the others when it sees this code
        os._exit(1)


def _is_first(control: Control, rank: int, size: int) -> bool:
    """Whether no other rank failed before this one did (the lower rank at a tie)."""
    mine = control.tell_all(FAILED)
    deadline = time.monotonic() + _ARBITRATION_SECONDS
    while time.monotonic() < deadline:
        control.look()
        failures = [note for note in control.notes.values() if note.kind == FAILED]
        if any((note.sent_seconds, note.rank) < (mine.sent_seconds, rank) for note in failures):
            return False
        if len(failures) == size - 1:
            break
        time.sleep(0.005)
    return True


def _is_known_everywhere(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, MpitrainError) and error.known_everywhere)


def _report(world: World, error: BaseException, trace: TracebackType | None) -> str:
    text = "".join(traceback.format_exception(type(error), error, trace))
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted\n"
    name = world.name()
    return f"{BEGIN.format(name=name)}\n{text}{END.format(name=name)}\n"


def _one_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def _write(text: str) -> None:
    """One write, so that the output of different ranks does not mix."""
    os.write(2, text.encode(errors="backslashreplace"))


def farewell(world: World) -> None:
    """Say that this rank makes no more calls, and wait for the others to say so too.

    Without it, a rank that leaves early sits in MPI_Finalize while the others wait for it for ever.
    """
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    control = world.control
    try:
        control.tell_all(FINISHED)
        request = world.objects.Ibarrier()
        while not request.Test():
            control.look()
            time.sleep(0.001)  # another rank may work on alone for long: wait without using a core
    except KeyboardInterrupt as error:
        end_job(world, error, None)
