"""Run the system's tools, with a deadline, and with the end of their output in the error."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mpitrain.errors import LaunchError

_POLL_SECONDS = 0.02


def execute(
    command: Sequence[str | Path],
    *,
    timeout_seconds: float = 120.0,
    input: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command, and return what it wrote to stdout.

    Raises:
        LaunchError: the command does not exist, ended with another code than 0, or took longer than `timeout_seconds`.
    """
    words = [str(word) for word in command]
    line = shlex.join(words)
    line = line if len(line) < 300 else f"{line[:300]}..."
    try:
        done = subprocess.run(
            words,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            env=env,
            cwd=cwd,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(f"there is no {words[0]} on this machine; mpitrain testbed build installs it") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"a command did not end within {timeout_seconds:g} s: {line}") from None
    if done.returncode != 0:
        raise LaunchError(
            f"a command ended with code {done.returncode}: {line}\n{last_lines(done.stderr or done.stdout)}"
        )
    return done.stdout


def start_in_background(command: Sequence[str | Path], log: Path) -> None:
    """Start a command that goes on when this process has ended. Its output goes to a file."""
    words = ["setsid", "--fork", *(str(word) for word in command)]
    with log.open("ab") as file:
        subprocess.run(words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=True)


def last_lines(text: str, count: int = 12) -> str:
    """Return the last lines of an output, indented, for the end of a message."""
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-count:])


def wait_until(condition: Callable[[], bool], *, timeout_seconds: float) -> bool:
    """Wait for `condition`. Return whether it became true in time."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
