"""The jobs of this user whose launcher is on this machine, as they can be watched: found, looked at.

Each launcher has a socket in a folder of this user. The folder is below /tmp and not in XDG_RUNTIME_DIR, which is
removed when the user logs out, while the job continues.

Only the standard library and this package are needed; nothing here writes into a job.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mpitrain.errors import LaunchError
from mpitrain.launch.control import SUFFIX, VERSION, folder_of_sockets
from mpitrain.launch.live_picture import of_ranks
from mpitrain.launch.processes import launcher_pid
from mpitrain.launch.roster import jobs
from mpitrain.reading import MessageLines, shown, shown_text
from mpitrain.watching.sockets import user_of
from mpitrain.watching.view import from_json


def live_folder(*, make: bool = False) -> Path | None:
    """Return the folder; None: it is not there. With `make`, it is made.

    Raises:
        LaunchError: the folder is not this user's alone, so who can read or replace what is in it is not known.
    """
    folder = folder_of_sockets()
    if make:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"{socket.gethostname()}: {folder} cannot be made: {error.strerror}") from None
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise LaunchError(
            f"{socket.gethostname()}: {folder} belongs to user {status.st_uid} and has mode "
            f"{stat.S_IMODE(status.st_mode):04o}; it must be a folder of user {os.geteuid()} with mode 0700. Remove "
            "it, or have its owner remove it"
        )
    return folder


def launcher_of(path: Path) -> str:
    """Return the name of the launcher whose socket this is."""
    return path.name.removesuffix(SUFFIX).replace("~", " ")


def sockets() -> list[Path]:
    """Return the sockets of all launchers of this user that are alive, oldest first. Remove those of others.

    Raises:
        LaunchError: see live_folder.
    """
    folder = live_folder()
    paths = []
    for path in folder.glob(f"*{SUFFIX}") if folder is not None else ():
        name = launcher_of(path)
        if launcher_pid(name) is not None or name.partition(" ")[0] != socket.gethostname():
            paths.append(path)
        elif _is_closed(path):  # it was killed; the name has the time of its start, so no other launcher has it
            path.unlink(missing_ok=True)
    return sorted(paths, key=_made)


def _is_closed(path: Path) -> bool:
    """True if nobody listens. A launcher of a container that has this folder too is no process that is seen here."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(0.0)
        try:
            line.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False


def _made(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


_READ_BYTES = 1 << 20
_ANSWER_SECONDS = 5.0


class LiveSource(Protocol):
    """A job that is watched.

    Attributes:
        is_closed: nothing more will come.
    """

    is_closed: bool

    def fileno(self) -> int:
        """A descriptor for select, readable when `receive` has something; -1: there is none, so ask by time."""

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Return the newest answer that has come, and wait for it for so long; None: none has come."""

    def close(self) -> None:
        """Stop watching."""


@dataclass(frozen=True)
class LiveJob:
    """A job that can be watched.

    Attributes:
        path: the socket of its launcher; None: a job of `mpitrain serve`, which has none.
        answer: what it has said when it was found, as docs/reference/formats-and-protocols.md describes it.
    """

    path: Path | None
    answer: Mapping[str, Any]

    def has_id(self, token: str) -> bool:
        """True if this is the id of one of its attempts."""
        return token in self.answer["ids"]

    def watch(self, seconds: float) -> LiveSource:
        """Watch it: a look every `seconds`.

        Raises:
            LaunchError: its launcher has ended, or belongs to somebody else.
        """
        return ServedLine(self.answer["job"], seconds) if self.path is None else LiveLine(self.path, {"watch": seconds})


def find() -> tuple[list[LiveJob], list[str]]:
    """Return the jobs of this user that can be watched from this machine, oldest first; and what went wrong, in lines.

    Takes 5 s if a launcher does not answer, because it is stopped.

    Raises:
        LaunchError: the folder of the sockets is not this user's alone.
    """
    lines: dict[Path, LiveLine] = {}
    for path in sockets():
        try:
            lines[path] = LiveLine(path, {"look": 1})
        except LaunchError:  # it has just ended
            continue
    live, wrong = _answers(lines)
    known = {token for job in live for token in job.answer["ids"]}
    live += [LiveJob(None, answer) for answer in _served() if answer["job"] not in known]
    return sorted(live, key=lambda job: float(job.answer["since"])), wrong


def _answers(lines: Mapping[Path, LiveLine]) -> tuple[list[LiveJob], list[str]]:
    live, wrong = [], []
    deadline = time.monotonic() + _ANSWER_SECONDS
    with selectors.DefaultSelector() as ways:
        for path, line in lines.items():
            ways.register(line, selectors.EVENT_READ, path)
        while ways.get_map() and time.monotonic() < deadline:
            for key, _ in ways.select(max(0.0, deadline - time.monotonic())):
                line, path = lines[key.data], key.data
                answer = line.receive(0.0)
                if answer is None and not line.is_closed:
                    continue
                ways.unregister(key.fileobj)
                if answer is not None and "error" in answer:
                    wrong.append(f"{path.name}: {shown_text(str(answer['error']))}")
                elif answer is not None and not _is_look(answer):
                    wrong.append(f"{path.name}: its answer is no look, but {shown(answer)}")
                elif answer is not None:
                    live.append(LiveJob(path, answer))
        silent = [key.data.name for key in ways.get_map().values()]
        wrong += [f"{name}: no answer within {_ANSWER_SECONDS:g} s; is this launcher stopped?" for name in silent]
    for line in lines.values():
        line.close()
    return live, wrong


def _is_look(answer: Mapping[str, Any]) -> bool:
    """True if it has what every look has, so that the others can be shown beside it."""
    kinds = {"job": str, "ids": list, "since": (int, float), "at": (int, float), "ranks": list, "hosts": dict}
    return all(isinstance(answer.get(name), kind) for name, kind in kinds.items())  # type: ignore[arg-type]


def output_of(path: Path, ranks: str, text: str) -> dict[str, Any]:
    """Return the newest lines that the ranks of a job have printed, as formats-and-protocols.md describes `output`.

    Args:
        path: the socket of its launcher.
        ranks: of which ranks, such as "0-2,5"; "": of all.
        text: which the lines have; "": any.

    Raises:
        LaunchError: the launcher has ended, does not answer in time, or refuses the request.
    """
    line = LiveLine(path, {"output": {"ranks": ranks, "text": text}})
    try:
        answer = line.receive(_ANSWER_SECONDS)
    finally:
        line.close()
    if answer is None:
        how = "has ended" if line.is_closed else f"has not answered within {_ANSWER_SECONDS:g} s; is it stopped?"
        raise LaunchError(f"the launcher {how}")
    if "output" not in answer:
        raise LaunchError(str(answer.get("error")))
    return dict(answer["output"])


class LiveLine:
    """A connection to the socket of a launcher. See LiveSource."""

    def __init__(self, path: Path, request: Mapping[str, Any]) -> None:
        """Make a request, as docs/reference/formats-and-protocols.md has them; `version` is added.

        Raises:
            LaunchError: the launcher has ended, or belongs to somebody else.
        """
        self.is_closed = False
        self._received = MessageLines()
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._line.settimeout(_ANSWER_SECONDS)
            self._line.connect(str(path))
            if user_of(self._line) != os.geteuid():
                raise LaunchError(f"{path} belongs to user {user_of(self._line)}, not to {os.geteuid()}")
            self._line.sendall(json.dumps({**request, "version": VERSION}).encode() + b"\n")
            self._line.setblocking(False)
        except (OSError, LaunchError) as error:
            self._line.close()
            if isinstance(error, LaunchError):
                raise
            raise LaunchError(f"the launcher at {path} does not answer: {error}") from None

    def fileno(self) -> int:
        """See LiveSource."""
        return self._line.fileno()

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """See LiveSource. An answer may have only `error`."""
        deadline = time.monotonic() + seconds
        while not self.is_closed:
            if answers := self._read():
                return answers[-1]
            if self.is_closed or (left := deadline - time.monotonic()) <= 0:
                return None
            with selectors.DefaultSelector() as ways:
                ways.register(self._line, selectors.EVENT_READ)
                ways.select(left)
        return None

    def _read(self) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        try:
            while data := self._line.recv(_READ_BYTES):
                answers += self._received.take(data)
            self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:  # the launcher was killed
            self.is_closed = True
        return answers

    def close(self) -> None:
        """See LiveSource."""
        self._line.close()


class ServedLine:
    """A job of `mpitrain serve`, looked at by its processes on this machine. See LiveSource."""

    def __init__(self, token: str, seconds: float) -> None:
        self.is_closed = False
        self._token, self._seconds = token, seconds
        self._due = time.monotonic()

    def fileno(self) -> int:
        """See LiveSource."""
        return -1

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """See LiveSource."""
        now = time.monotonic()
        if self._due > now + seconds:
            time.sleep(seconds)
            return None
        time.sleep(max(0.0, self._due - now))
        self._due = time.monotonic() + self._seconds
        answer = next((answer for answer in _served() if answer["job"] == self._token), None)
        self.is_closed = answer is None
        return answer

    def close(self) -> None:
        """See LiveSource."""
        self.is_closed = True


def _served() -> list[dict[str, Any]]:
    """Return an answer for each job of `mpitrain serve` whose server is on this machine."""
    return [_answer_of(entry) for entry in jobs() if entry["is_served"] and entry["ranks"]]


def _answer_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a launcher would answer, from what roster.jobs says of a job."""
    host = socket.gethostname()
    views = [from_json(fields, host) for fields in entry["ranks"]]
    picture = of_ranks(views, {host: [view.record.rank for view in views]}, {host: 0.0})
    facts = entry["served"]
    if picture["metrics"] and "all" in facts:  # updates come in bursts, so its speed is that of its answers
        picture["metrics"]["samples/s"] = facts["all"]["samples_per_second"]
    is_over = facts.get("stage", "runs") != "runs"
    has_begun = any(view.record.step for view in views)
    return {
        "version": VERSION,
        "at": time.time(),
        "job": entry["id"],
        "ids": [entry["id"]],
        "script": entry["script"][0] if entry["script"] else "",
        "arguments": entry["script"][1:],
        "since": entry["since"],
        "state": "ends" if is_over else "trains" if has_begun else "starts",
        "tries": 1,
        "events": [],
        "served": facts or None,
        **picture,
    }
