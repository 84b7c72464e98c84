"""The error file of a rank: what its program writes when it fails, in the form of torchrun's.

torchrun names each rank a file in TORCHELASTIC_ERROR_FILE, and torch's decorator `@record` writes the exception there
(torch/distributed/elastic/multiprocessing/errors). Where the program has no such decorator, mpitrain/early.py writes
the same. The agent reads it once the rank has ended, so the launcher knows which rank failed first, and why.

A rank whose neighbour has gone fails too: its connection has broken. Such an error is a consequence, not the cause
(`is_of_neighbour`).

The text of this module is sent to other hosts. It imports only modules that are sent with it, and runs with an old
Python.
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any, NamedTuple

from mpitrain.reading import message_of

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_MOST_BYTES = 1 << 16
_MOST_LINE = 400
# Messages of Gloo, of torch's store, of NCCL, of the kernel and of JAX's coordinator, in this order.
_OF_NEIGHBOUR = re.compile(
    r"Connection closed by peer|Connect(ion)? timeout|Application timeout caused pair closure"
    r"|[Cc]onnection was likely closed|failed to recv, got 0 bytes|wait timeout after"
    r"|ncclRemoteError|remote process exited|NCCL communicator was aborted|Watchdog caught collective"
    r"|Connection reset by peer|Connection refused|Broken pipe|Socket closed"
    r"|coordination service|Coordination Service"
)


class WrittenError(NamedTuple):
    """How a program failed: in one line, as a traceback, and when, by time.monotonic() of its host."""

    line: str
    traceback: str
    seconds: float


def write_error(path: str, line: str, traceback: str) -> None:
    """Write how this program fails, unless that is written already. Raises OSError if there is no such file."""
    with open(path, "a+") as file:  # noqa: PTH123 (pathlib costs the start of a rank some ms)
        if not file.tell():
            extra = {"py_callstack": traceback, "timestamp": str(int(time.time()))}
            json.dump({"message": {"message": line, "extraInfo": extra}}, file)


def note_error(line: str, traceback: str) -> bool:
    """Write how this rank fails. False: it has no error file, or cannot write it; the failure itself is what counts."""
    try:
        write_error(os.environ[ERROR_FILE], line, traceback)
    except Exception:
        return False
    return True


def read_error(descriptor: int) -> WrittenError | None:
    """Read an error file; None: the program has written none."""
    data = os.pread(descriptor, _MOST_BYTES, 0)
    if not data.strip():
        return None
    seconds = time.monotonic() - max(0.0, time.time() - os.fstat(descriptor).st_mtime)
    line, traceback = parse_error(data)
    return WrittenError(line, traceback, seconds)


def parse_error(data: bytes) -> tuple[str, str]:
    """Return the error in one line, and its traceback. Text in an unknown form is taken as the error itself."""
    text = data.decode(errors="replace")
    try:
        message = message_of(text).get("message")
    except ValueError:
        message = text
    found: Any = ""
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        found = extra.get("py_callstack") if isinstance(extra, dict) else ""
        message = message.get("message")
    traceback = found if isinstance(found, str) else ""
    lines = message.strip().splitlines() if isinstance(message, str) else []
    return (lines[0] if lines else "an error without words")[:_MOST_LINE], traceback


def is_of_neighbour(line: str) -> bool:
    """True if such an error says that another rank has gone, so that one is to blame."""
    return bool(_OF_NEIGHBOUR.search(line))
