"""A function on the rank where it runs: from the frames of a call to the frames of its result or failure."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from mpitrain.cuda.device import bound, open_gpu
from mpitrain.errors import DeviceError, RemoteError, text_of
from mpitrain.remote.frames import FAILURE, RESULT, Frames, Message, name_of, pack, unpack
from mpitrain.world.world import World


@dataclass(frozen=True)
class Failure:
    """A rank's report on a function that has failed there.

    Attributes:
        text: what happened, after the name of the rank.
        kind: the name of the exception's class.
        trace: the traceback on that rank, from the function on; "" if the function has not begun.
    """

    text: str
    kind: str
    trace: str = ""

    def error(self, rank: str) -> RemoteError:
        """The error for the leader. `rank` is the name of the rank, with its host."""
        error = RemoteError(f"{rank}: {self.text}" + (f"\nThe traceback there:\n{self.trace}" if self.trace else ""))
        error.kind = self.kind
        return error


def own_device(world: World) -> str:
    """This rank's GPU as `--hosts` names it, such as "cuda:0"; "" if it has none or has not asked for it."""
    given = world.context.device(world.rank)
    if given:
        return given if given.startswith("cuda:") else ""
    gpu = bound()
    return f"cuda:{gpu.number}" if gpu else ""


def execute(world: World, frames: Frames, device: str) -> Message:
    """Run the function of a call on this rank, with its GPU current. Return the answer; the arrays are not copied.

    Ctrl-C is not caught: it ends the job, as anywhere.
    """
    try:
        function, arguments = unpack(frames)
    except Exception as error:
        return _failure(
            f"the function or an argument cannot be made there: {type(error).__name__}: {error}. Define the function "
            "at the top level of a module, or of the script above `with mt.workers(...)`, where every rank defines it",
            error,
        )
    name = name_of(function)
    try:
        gpu = (bound() or open_gpu(world.context.device(world.rank), world.local_rank)) if device else None
    except DeviceError as error:
        return _failure(f"{name} has not begun: {device} cannot be used: {error}", error)
    try:
        with world.control.busy(f"{name}, for run_on"), gpu.current() if gpu else nullcontext():
            value = function(*arguments)
    except (Exception, SystemExit) as error:
        trace = "".join(traceback.format_exception(error.with_traceback(_below(error))))
        return _failure(f"{name} raised {_words(error)}", error, trace)
    try:
        return RESULT, pack(value)
    except Exception as error:
        return _failure(
            f"the result of {name}, of type {type(value).__name__}, cannot be sent: {type(error).__name__}: {error}. "
            "Return arrays, numbers, text and nestings of them",
            error,
        )


def _words(error: BaseException) -> str:
    """The name of the class, and the text without notes."""
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")


def _below(error: BaseException) -> Any:
    """The traceback without the frame of `execute`."""
    return error.__traceback__ and error.__traceback__.tb_next


def _failure(text: str, error: BaseException, trace: str = "") -> Message:
    return FAILURE, pack(Failure(text, type(error).__name__, trace))
