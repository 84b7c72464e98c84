"""How servers will divide the parameters of a script. Only the script knows its model, so it runs up to its Trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mpitrain.errors import LaunchError
from mpitrain.job.context import JobContext
from mpitrain.launch.processes import end_with_parent
from mpitrain.launch.served import handed_over, path_of, variables
from mpitrain.launch.server_processes import how_ended, say

# Reading the data may take long.
_MOST_SECONDS = 300.0


def show_sizes(program: Sequence[str], names: Sequence[str]) -> None:
    """Print the part of each server; for one server, nothing. A process of this machine makes the model, and ends then.

    Args:
        program: arguments of the script's Python.
        names: of the servers.

    Raises:
        LaunchError: the script cannot be started, fails, makes no Trainer, or takes too long.
    """
    if len(names) < 2:
        return
    say(
        f"the script runs up to its Trainer, to see how {len(names)} servers divide the parameters; it has "
        f"{_MOST_SECONDS:.0f} s, and nothing is trained"
    )
    descriptor = handed_over("")
    try:
        context = JobContext(serves="server", servers=len(names), serve_division=path_of(descriptor))
        problem = _run([sys.executable, *program], context, descriptor)
        told = Path(path_of(descriptor)).read_text()
    finally:
        os.close(descriptor)
    if not told:
        raise LaunchError(
            f"how the servers divide the parameters is not known: the script {problem}. Once it runs, `mpitrain ps "
            "JOB` shows it"
        )
    for name, line in zip(names, json.loads(told), strict=True):
        print(f"{name}: {line}")


def _run(command: Sequence[str], context: JobContext, descriptor: int) -> str:
    """Return how the script has ended, in words. Its processes end with it. What it prints goes to stderr."""
    try:
        process = subprocess.Popen(
            command,
            env=variables(context),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,
            pass_fds=[descriptor],
            preexec_fn=end_with_parent(),  # noqa: PLW1509 (in the main thread, and no thread holds a lock)
        )
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        code = process.wait(_MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return f"has made no Trainer within {_MOST_SECONDS:.0f} s"
    finally:
        with suppress(ProcessLookupError):  # nothing is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code:
        return f"{how_ended(code)} before it had one with ParameterServer"
    return "has ended without a Trainer"
