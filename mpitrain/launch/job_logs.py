"""The output of a job in files, which outlive its launcher, for `mpitrain logs`.

    FOLDER/JOB/output.log  what a terminal shows: the lines of all ranks, and the launcher's
    FOLDER/JOB/rank-3.log  what rank 3 has printed, with a line where each attempt begins
    FOLDER/JOB/job.json    the ids of the attempts, the hosts, the launcher, and how the job has ended

JOB is the id of the first attempt. FOLDER is that of --log-dir, where files grow as they must. Without the option it is
~/.local/state/mpitrain/logs: there a job has at most 16 MiB, because a file that is full becomes NAME.1 in place of the
one before, and of the jobs that have ended the newest 20 stay.

A thread writes, because a disk that does not answer must not hold up the job. What it cannot write is left out.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.errors import DataError
from mpitrain.launch.output import MPIEXEC, OutputPiece, Stream
from mpitrain.launch.placement import Place
from mpitrain.launch.processes import launcher_pid
from mpitrain.reading import json_of, read_file
from mpitrain.state_files import replace_json, state_folder
from mpitrain.watching.ranges import rank_ranges

OUTPUT, DOCUMENT = "output.log", "job.json"
VERSION = 1
_MOST_FILE_BYTES = 1 << 22  # of output.log, and of the files of all ranks together; twice, with NAME.1
_LEAST_FILE_BYTES = 1 << 12
_MOST_JOBS = 20
_MOST_DOCUMENT_BYTES = 1 << 20
_OLD_SECONDS = 7 * 86400.0  # of a job whose launcher is on another machine
_MOST_WAITING_BYTES = 1 << 23
_NAP_SECONDS = 0.2
_CLOSE_SECONDS = 5.0


def logs_folder() -> Path:
    """Return the folder of the logs without --log-dir.

    Raises:
        DataError: this user has no home folder, and XDG_STATE_HOME is not set.
    """
    return state_folder() / "logs"


def rank_file(rank: int) -> str:
    """Return the name of the file of a rank."""
    return f"rank-{rank}.log"


class JobLogs:
    """The files of the job of this process. Any thread may call; outside of `open` and `close` nothing is written."""

    def __init__(self) -> None:
        self._writer: _Writer | None = None
        self._job = ""  # the id of the first attempt
        self._about: dict[str, Any] = {}
        self._ids: list[str] = []
        self._headers: dict[int, bytes] = {}  # by rank, until it prints something in this attempt
        self._unfinished: dict[int, Stream] = {}  # by rank, the stream in which it has begun a line
        self._is_at_margin = True  # of output.log

    def open(
        self,
        folder: Path | None,
        script: Sequence[str],
        launcher: str,
        say: Callable[[str], None],
        ids: Sequence[str] = (),
    ) -> None:
        """A job begins.

        Args:
            folder: that of --log-dir; None: it was not given.
            script: with its arguments.
            launcher: as roster.launcher_name names it.
            say: prints a line of the launcher. It is called in a thread.
            ids: of the attempts that another launcher has made.
        """
        self.__init__()  # type: ignore[misc]  # nothing stays of the job before
        self._ids = list(ids)
        self._job = ids[0] if ids else ""
        self._about = {"version": VERSION, "script": list(script), "launcher": launcher, "cwd": str(Path.cwd())}
        self._about |= {"began": time.time(), "ended": None}
        try:
            base = logs_folder()
        except DataError as error:  # the job needs no logs
            if folder is None:
                say(f"this job has no logs: {error}")
                return
            base = None
        self._writer = _Writer(folder, base, say)

    def begin(self, job: str, places: Sequence[Place]) -> None:
        """An attempt with this id begins on these hosts."""
        if self._writer is None:
            return
        self._job = self._job or job
        self._ids.append(job)
        self._about |= {"job": self._job, "ids": list(self._ids), "hosts": [place.host for place in places]}
        self._about["num_ranks"] = sum(place.num_ranks for place in places)
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        self._headers = {
            rank: f"--- rank {rank} on {place.host}, attempt {len(self._ids)} (job {job}), {when}\n".encode()
            for place in places
            for rank in place.ranks
        }
        self._unfinished.clear()
        self._writer.begin(self._job, self._about["num_ranks"], dict(self._about))

    def take(self, rank: int, stream: Stream, piece: OutputPiece) -> None:
        """Take in a piece of what a rank has printed. What is drawn again and again, as a progress bar, is left out."""
        writer = self._writer
        if writer is None or rank == MPIEXEC or piece.end == b"\r":
            return
        begun = self._unfinished.pop(rank, stream)
        text = self._headers.pop(rank, b"") + (b"\n" if begun != stream else b"") + piece.text + piece.end
        if not piece.end:
            self._unfinished[rank] = stream
        writer.write(rank_file(rank), text)

    def show(self, text: bytes) -> None:
        """Take in what a terminal shows."""
        writer = self._writer
        if writer is not None and text:
            self._is_at_margin = text.endswith(b"\n")
            writer.write(OUTPUT, text)

    def end_line(self) -> None:
        """End a line that a terminal shows unfinished."""
        if not self._is_at_margin:
            self.show(b"\n")

    def close(self, ended: Mapping[str, Any]) -> None:
        """The job has ended; `ended` is as in the last answer of live.py. Wait some seconds for the disk."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close({**self._about, "ended": {**ended, "at": time.time()}} if self._ids else None)


class _Writer:
    """The thread that writes."""

    def __init__(self, folder: Path | None, base: Path | None, say: Callable[[str], None]) -> None:
        """`base` is logs_folder()."""
        self._base = base
        self._folder, self._is_bounded = folder or base or Path(), folder is None
        self._say = say
        self._path = self._folder
        self._num_ranks = 1
        self._waiting: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_waiting = 0  # bytes
        self._num_left_out = 0  # bytes, since the last that was written
        self._fault = ""
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def begin(self, job: str, num_ranks: int, about: dict[str, Any]) -> None:
        self._path, self._num_ranks = self._folder / job, num_ranks
        self._waiting.put((DOCUMENT, about))
        if self._thread.ident is None:
            self._thread.start()

    def write(self, name: str, text: bytes) -> None:
        with self._lock:
            is_left_out = self._num_waiting + len(text) > _MOST_WAITING_BYTES
            self._num_waiting += 0 if is_left_out else len(text)
            self._num_left_out += len(text) if is_left_out else 0
        if not is_left_out:
            self._waiting.put((name, text))

    def close(self, about: dict[str, Any] | None) -> None:
        self._waiting.put(("", about))
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        is_new, is_over = True, False
        while not is_over:
            texts: dict[str, list[bytes]] = {}
            about, is_over = self._gather(texts)
            try:
                if about is not None and is_new:
                    self._make_folder()
                    is_new = False
                self._note_gap(texts)
                for name, parts in texts.items():
                    self._append(name, b"".join(parts))
                if about is not None:
                    replace_json(self._path / DOCUMENT, about)
            except OSError as error:
                with self._lock:
                    self._num_left_out += sum(len(part) for parts in texts.values() for part in parts)
                self._report(error)
            time.sleep(0 if is_over else _NAP_SECONDS)

    def _gather(self, texts: dict[str, list[bytes]]) -> tuple[dict[str, Any] | None, bool]:
        """Wait for something, and take all that is there. Return what job.json shall say, and if this is the end."""
        about, is_over = None, False
        with contextlib.suppress(queue.Empty):
            name, content = self._waiting.get()
            while True:
                if isinstance(content, bytes):
                    texts.setdefault(name, []).append(content)
                    with self._lock:
                        self._num_waiting -= len(content)
                else:
                    about, is_over = content or about, is_over or not name
                name, content = self._waiting.get_nowait()
        return about, is_over

    def _note_gap(self, texts: dict[str, list[bytes]]) -> None:
        """Write to output.log how much is missing."""
        with self._lock:
            num_left_out, self._num_left_out = self._num_left_out, 0
        if num_left_out:
            texts.setdefault(OUTPUT, []).insert(0, f"--- {num_left_out} bytes of output are missing here\n".encode())

    def _report(self, error: OSError) -> None:
        if self._fault != str(error.strerror):
            self._fault = str(error.strerror)
            self._say(f"the logs in {self._path} are not complete: {self._fault}. The job continues without them")

    def _make_folder(self) -> None:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._base is None:
            return
        if self._is_bounded:
            _drop_old(self._base, self._path)
            return
        with contextlib.suppress(OSError):  # then `mpitrain logs` needs --log-dir
            self._base.mkdir(mode=0o700, parents=True, exist_ok=True)
            _drop_old(self._base, self._path)
            (self._base / self._path.name).symlink_to(self._path.absolute())

    def _append(self, name: str, text: bytes) -> None:
        path = self._path / name
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            most = _MOST_FILE_BYTES // (1 if name == OUTPUT else self._num_ranks)
            if self._is_bounded and (size := os.fstat(descriptor).st_size) and size + len(text) > most:
                path.replace(path.with_name(f"{name}.1"))
                full, descriptor = descriptor, os.open(path, flags, 0o600)
                os.close(full)
            rest = memoryview(text if not self._is_bounded else text[-max(most, _LEAST_FILE_BYTES) :])
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)


def _drop_old(base: Path, but: Path) -> None:
    """Remove the logs of the oldest jobs that have ended. A link to those of --log-dir goes alone."""
    over = [path for path, about in _jobs(base) if path.name != but.name and _is_over(path, about)]
    for path in over[: max(0, len(over) - _MOST_JOBS + 1)]:
        if path.is_symlink():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _jobs(base: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the folders of jobs, the oldest first, with what their job.json says; {}: it cannot be read."""
    found = []
    for path in base.iterdir() if base.is_dir() else ():
        with contextlib.suppress(OSError):  # another job has just removed it
            found.append((path.lstat().st_mtime, path, read_about(path)))
    return [(path, about) for _, path, about in sorted(found, key=lambda one: one[:2])]


def _is_over(path: Path, about: Mapping[str, Any]) -> bool:
    if about.get("ended"):
        return True
    if about and is_here(about):
        return launcher_pid(str(about["launcher"])) is None
    newest = 0.0  # what is appended to a file does not change the time of its folder
    for name in (path, path / DOCUMENT, path / OUTPUT):
        with contextlib.suppress(OSError):  # another job has just removed it
            newest = max(newest, name.lstat().st_mtime)
    return time.time() - newest > _OLD_SECONDS


def is_here(about: Mapping[str, Any]) -> bool:
    """True if the launcher is, or was, on this machine."""
    return str(about.get("launcher")).partition(" ")[0] == socket.gethostname()


def read_about(path: Path) -> dict[str, Any]:
    """Return what the job.json of a job says; {}: there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        text = read_file(path / DOCUMENT, ValueError, most_bytes=_MOST_DOCUMENT_BYTES)
        return json_of(text, ValueError, DOCUMENT, any_text=True)
    return {}


def find_logs(job: str | None, folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder of the logs of a job (None: the newest) and what its job.json says; None: there are none."""
    found = [(path, about) for path, about in _jobs(folder) if about and (job is None or job in about.get("ids", ()))]
    return found[-1] if found else None


def ranks_of(about: Mapping[str, Any]) -> str:
    """Return the ranks of the last attempt as text."""
    return rank_ranges(range(int(about.get("num_ranks", 0))))


# Of the job of this process.
LOGS = JobLogs()
