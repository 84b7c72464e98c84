"""Commands run on a node: each in a session of its own, with a deadline, and none left when the agent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_running: set[subprocess.Popen[bytes]] = set()
_lock = threading.Lock()


class SlowError(Exception):
    """A command did not end in time."""


def run(
    command: list[str],
    seconds: float = 3.0,
    input: str | None = None,
    env: dict[str, str] | None = None,
    cwd: str = "/",
) -> tuple[int, str, str]:
    """Run a command; returns (exit code, stdout, stderr). 127 where there is no such program.

    Raises:
        SlowError: it did not end in time. What waits for a dead NFS server may not die either; it is left then.
    """
    environment = dict(os.environ)
    environment["PATH"] = environment.get("PATH", "") + ":" + _SYSTEM_PATH
    environment["LC_ALL"] = "C"
    environment.update(env or {})
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=environment,
            cwd=cwd,
        )
    except OSError as error:
        return 127, "", f"{command[0]}: {error.strerror}"
    with _lock:
        _running.add(child)
    try:
        out, err = child.communicate(None if input is None else input.encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(child)
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=0.5)
        raise SlowError(f"`{' '.join(command)[:80]}` did not end within {seconds:g} s") from None
    finally:
        with _lock:
            _running.discard(child)
    return child.returncode, out.decode(errors="replace"), err.decode(errors="replace")


def output(*command: str, seconds: float = 3.0) -> str:
    """What a command writes to stdout; empty where it fails or is not there."""
    code, out, _ = run(list(command), seconds)
    return out if code == 0 else ""


def as_root(*command: str, seconds: float = 3.0) -> str | None:
    """The same as root, by sudo that must not ask; None where it may not."""
    if os.geteuid() != 0:
        command = ("sudo", "-n", *command)
    code, out, err = run(list(command), seconds)
    return None if code != 0 and ("sudo:" in err or "password is required" in err) else out


def kill(child: subprocess.Popen[bytes]) -> None:
    """End a command with all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def kill_all() -> None:
    """End every command that runs."""
    with _lock:
        for child in _running:
            kill(child)


def text(path: str) -> str:
    """A file's content; empty where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
