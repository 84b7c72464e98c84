"""Commands run on a node: each in a session of its own, with a deadline, and none left when the agent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# It opens the program, not we: Popen stands still with all our threads until that is done, and a dead NFS server never
# says where a program is.
_ENV = "/usr/bin/env"
_QUOTES = "'`\u2018\u2019"

# Where more wants to run than there are processors, a command gets a part of one, and so many times its deadline.
MOST_PATIENCE = 3.0
_SUDO_SECONDS = 8.0
_REMOVE_SECONDS = 3.0
_KILL_SECONDS = 0.5

_running: set[subprocess.Popen[bytes]] = set()
_lock = threading.Lock()
# Everything is asked at once. So many commands run at a time, that each has its deadline to itself on a slow machine,
# and that some which hang do not hold up the others.
_slots = threading.Semaphore(5)
_sudo_lock = threading.Lock()
_sudo: dict[str, bool] = {}  # "hangs", once it was asked
_folders: set[str] = set()
_ending = threading.Event()


class SlowError(Exception):
    """A command did not end in time: in so many `seconds`."""

    def __init__(self, words: str, seconds: float = 0.0) -> None:
        super().__init__(words)
        self.seconds = seconds


class EndingError(Exception):
    """The agent ends, and starts nothing more."""


def patience() -> float:
    """How many times its deadline a command may take on this machine now: it may be busy, and everything slow."""
    return min(MOST_PATIENCE, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def run(
    command: list[str],
    seconds: float = 6.0,
    input: str | None = None,
    env: dict[str, str] | None = None,
    cwd: str = "/",
) -> tuple[int, str, str]:
    """Run a command; returns (exit code, stdout, stderr). 127 where there is no such program.

    `seconds` is the deadline on a machine that is not busy.

    Raises:
        SlowError: it did not end in time. What waits for a dead NFS server may not die either; it is left then.
        EndingError: all were ended.
    """
    with _slots:
        return _run(command, seconds, input, env, cwd)


def _run(
    command: list[str], seconds: float, input: str | None, env: dict[str, str] | None, cwd: str
) -> tuple[int, str, str]:
    environment = dict(os.environ)
    environment["PATH"] = environment.get("PATH", "") + ":" + _SYSTEM_PATH
    environment["LC_ALL"] = "C"
    environment.update(env or {})
    with _lock:
        if _ending.is_set():
            raise EndingError
        try:
            child = subprocess.Popen(
                [_ENV, "--", *command],
                stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=environment,
                cwd=cwd,
            )
        except OSError as error:
            return 127, "", f"{command[0]}: {error.strerror}"
        _running.add(child)
    seconds *= patience()
    try:
        out, err = child.communicate(None if input is None else input.encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(child)
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=0.5)
        raise SlowError(f"`{' '.join(command)[:80]}` did not end within {seconds:.0f} s", seconds) from None
    finally:
        with _lock:
            _running.discard(child)
    words = err.decode(errors="replace")
    if child.returncode in (126, 127) and words.startswith(f"{_ENV}: "):
        # A script may begin with `#!/usr/bin/env X`: then X is what is missing.
        program, _, why = words.splitlines()[0][len(_ENV) + 2 :].rpartition(": ")
        return 127, "", f"{program.strip(_QUOTES)}: {why}"
    return child.returncode, out.decode(errors="replace"), words


def output(*command: str, seconds: float = 6.0) -> str:
    """What a command writes to stdout; empty where it fails or is not there."""
    code, out, _ = run(list(command), seconds)
    return out if code == 0 else ""


def as_root(*command: str, seconds: float = 6.0) -> str | None:
    """The same as root, by sudo that must not ask; None where it may not, or sudo hangs."""
    if os.geteuid() != 0:
        if sudo_hangs():
            return None
        command = ("sudo", "-n", *command)
    code, out, err = run(list(command), seconds)
    return None if code != 0 and ("sudo:" in err or "password is required" in err) else out


def sudo_hangs() -> bool:
    """Whether sudo says neither yes nor no; it is asked once."""
    with _sudo_lock:
        if not _sudo:
            try:
                run(["sudo", "-n", "true"], _SUDO_SECONDS)
                _sudo["hangs"] = False
            except SlowError:
                _sudo["hangs"] = True
        return _sudo["hangs"]


def makes(folder: str) -> None:
    """A folder of our own comes to be, which must not outlive us."""
    _folders.add(folder)


def removed(folder: str) -> None:
    """It is gone."""
    _folders.discard(folder)


def kill(child: subprocess.Popen[bytes]) -> None:
    """End a command with all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def end_all() -> None:
    """End every command that runs, start no other, and remove our folders."""
    with _lock:
        _ending.set()
        for child in _running:
            kill(child)
        until = time.monotonic() + _KILL_SECONDS
        for child in _running:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))
    if _folders:
        # A server that is dead keeps what touches its share.
        with suppress(subprocess.TimeoutExpired, OSError):
            subprocess.run(["rm", "-rf", "--", *_folders], timeout=_REMOVE_SECONDS, check=False)


def text(path: str) -> str:
    """A file's content; empty where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
