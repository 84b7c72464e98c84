"""What PyTorch's flight recorder says of the ranks of a host: the last collective call of each in each group of NCCL.

A process with NCCL makes a pipe, PREFIX + RANK + ".pipe". Somebody writes to it, and a thread of PyTorch writes the
file PREFIX + RANK within about a second (struct DumpPipe of torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp). It does
the same at the end of the group's own timeout. The file is a pickle of dicts and lists
(torch/distributed/flight_recorder/components/loader.py reads it too); anything else in it is refused.

This module is sent to other hosts as text. It imports only modules that are sent with it, and runs with an old Python.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import time
from collections.abc import Iterable
from glob import escape, glob
from typing import Any

_PAUSE_SECONDS = 0.05
_ANSWER_SECONDS = 2.0  # the launcher waits for 3
_MOST_BYTES = 1 << 26
_MOST_NAME = 100
_INSTALLED = re.compile(r"/(site-packages|dist-packages|lib(64)?/python3[^/]*)/|^<")


class _PlainUnpickler(pickle._Unpickler):
    """In Python: the one in C makes room for as many objects as a number in the pickle says."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError("it has objects of other kinds than PyTorch writes")


def recorder_prefix(roll_call: str) -> str:
    """Return how the names of the files of an attempt begin; `roll_call` is its socket on this host."""
    return f"{roll_call}-recorder-"


def asked_calls(prefix: str, ranks: Iterable[int]) -> dict[int, list[dict[str, Any]]]:
    """Have the processes of these ranks write what they have called, and return it by rank (see `last_calls`).

    Ranks without NCCL, and those that do not answer in time, are left out.
    """
    asked = [rank for rank in ranks if _poke(f"{prefix}{rank}")]
    told: dict[int, list[dict[str, Any]]] = {}
    deadline = time.monotonic() + _ANSWER_SECONDS
    while len(told) < len(asked) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
        told = written_calls(prefix, asked)
    return told


def written_calls(prefix: str, ranks: Iterable[int]) -> dict[int, list[dict[str, Any]]]:
    """Return what the files of these ranks have, without those that are not there, or not complete yet."""
    told = {}
    for rank in ranks:
        with contextlib.suppress(OSError, ValueError), open(f"{prefix}{rank}", "rb") as file:  # noqa: PTH123
            told[rank] = last_calls(file.read(_MOST_BYTES))
    return told


def remove_written(prefix: str) -> None:
    """Remove the files and pipes of an attempt."""
    for path in glob(f"{escape(prefix)}*"):  # noqa: PTH207
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108


def _poke(path: str) -> bool:
    """Ask for the file. False: no process reads the pipe."""
    try:
        pipe = os.open(f"{path}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
        os.write(pipe, b"1")
    except OSError:
        return False
    finally:
        os.close(pipe)
    return True


def last_calls(data: bytes) -> list[dict[str, Any]]:
    """Return the last collective call in each process group, from a file of the flight recorder.

    Each has `group`, its name; `ranks` of the group, none where the file does not say; `number`, counted from 1 in the
    group; `call`, such as "all_reduce"; `state`: "scheduled", "started" or "completed"; `what` it is of, such as
    "Float [4096]"; and `place`, where the program has made it, or "".

    Raises:
        ValueError: it is no such file, or not all of it.
    """
    try:
        dump = _PlainUnpickler(io.BytesIO(data)).load()
        groups = {str(name): _ranks(known) for name, known in dump["pg_config"].items()}
        last: dict[str, dict[str, Any]] = {}
        for entry in dump["entries"]:
            name, description = entry["process_group"]
            number = int(entry["collective_seq_id"])
            if not entry["is_p2p"] and number >= last.get(name, {"number": 0})["number"]:
                last[name] = {
                    "group": str(description or name)[:_MOST_NAME],
                    "ranks": groups.get(str(name), []),
                    "number": number,
                    "call": str(entry["profiling_name"]).partition(":")[2][:_MOST_NAME],
                    "state": str(entry["state"])[:_MOST_NAME],
                    "what": _what(entry),
                    "place": _place(entry.get("frames") or []),
                }
    except ValueError:
        raise
    except Exception as error:  # what it can be depends on the bytes
        raise ValueError(f"not a file of the flight recorder: {type(error).__name__}") from None
    return list(last.values())


def _ranks(group: Any) -> list[int]:
    return [int(rank) for rank in re.findall(r"[0-9]{1,9}", str(group["ranks"]))]


def _what(entry: Any) -> str:
    parts = [f"{kind} {list(size)}" for kind, size in zip(entry["input_dtypes"], entry["input_sizes"])]  # noqa: B905
    return ", ".join(parts[:1] + ["..."] * (len(parts) > 1))[:_MOST_NAME]


def _place(frames: Any) -> str:
    """The innermost place that is the user's own."""
    for frame in frames:
        path = str(frame["filename"])
        if not _INSTALLED.search(path):
            return "{}:{} ({})".format(path.rpartition("/")[2], int(frame["line"]), frame["name"])[:_MOST_NAME]
    return ""
