"""Commands on a node. Each runs in its own session, with a deadline, and none is left when the agent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress

from mpitrain import facts

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# env opens the program, because Popen blocks all threads of this process until that is done, and a dead NFS server
# never answers.
_ENV = "/usr/bin/env"
_QUOTES = "'`\u2018\u2019"

# If more processes want to run than there are processors, a command gets only a part of one. Its deadline is extended
# by at most this factor.
MOST_PATIENCE = 3.0
_SUDO_SECONDS = 8.0
_REMOVE_SECONDS = 3.0
_KILL_SECONDS = 0.5

_running: set[subprocess.Popen[bytes]] = set()
_lock = threading.Lock()
# All questions come at once. This number of commands runs at a time: few enough that each meets its deadline on a slow
# machine, and enough that hanging ones do not delay the others.
_slots = threading.Semaphore(5)
_sudo_lock = threading.Lock()
_sudo: dict[str, bool] = {}  # "hangs", after the first attempt
_folders: set[str] = set()
_ending = threading.Event()


class SlowError(Exception):
    """A command did not end within `seconds`."""

    def __init__(self, words: str, seconds: float = 0.0) -> None:
        super().__init__(words)
        self.seconds = seconds


class EndingError(Exception):
    """The agent is ending, and starts no more commands."""


def patience() -> float:
    """Return the factor by which deadlines of commands are extended on this machine now."""
    return facts.patience(MOST_PATIENCE)


def run(
    command: list[str],
    seconds: float = 6.0,
    input: str | None = None,
    env: dict[str, str] | None = None,
    cwd: str = "/",
) -> tuple[int, str, str]:
    """Run a command. Return (exit code, stdout, stderr); the code is 127 if there is no such program.

    `seconds` is the deadline on a machine that is not busy.

    Raises:
        SlowError: the command did not end in time. A process that waits for a dead NFS server cannot be killed, and
            remains.
        EndingError: all commands were ended.
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
        # A script may begin with `#!/usr/bin/env X`; then X is missing.
        program, _, why = words.splitlines()[0][len(_ENV) + 2 :].rpartition(": ")
        return 127, "", f"{program.strip(_QUOTES)}: {why}"
    return child.returncode, out.decode(errors="replace"), words


def output(*command: str, seconds: float = 6.0) -> str:
    """Return what a command writes to stdout; empty if it fails or does not exist."""
    code, out, _ = run(list(command), seconds)
    return out if code == 0 else ""


def as_root(*command: str, seconds: float = 6.0) -> str | None:
    """Return the same as root, with a sudo that must not ask; None if that is not allowed, or sudo hangs."""
    if os.geteuid() != 0:
        if sudo_hangs():
            return None
        command = ("sudo", "-n", *command)
    code, out, err = run(list(command), seconds)
    return None if code != 0 and ("sudo:" in err or "password is required" in err) else out


def sudo_hangs() -> bool:
    """True if sudo does not answer. It is tried once."""
    with _sudo_lock:
        if not _sudo:
            try:
                run(["sudo", "-n", "true"], _SUDO_SECONDS)
                _sudo["hangs"] = False
            except SlowError:
                _sudo["hangs"] = True
        return _sudo["hangs"]


def makes(folder: str) -> None:
    """Note that the agent makes a folder, which must not outlive the agent."""
    _folders.add(folder)


def removed(folder: str) -> None:
    """Note that the folder is gone."""
    _folders.discard(folder)


def kill(child: subprocess.Popen[bytes]) -> None:
    """End a command with all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def end_all() -> None:
    """End all running commands, start no others, and remove the agent's folders."""
    with _lock:
        _ending.set()
        for child in _running:
            kill(child)
        until = time.monotonic() + _KILL_SECONDS
        for child in _running:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))
    if _folders:
        # A dead server blocks every process that uses its files.
        with suppress(subprocess.TimeoutExpired, OSError):
            subprocess.run(["rm", "-rf", "--", *_folders], timeout=_REMOVE_SECONDS, check=False)
