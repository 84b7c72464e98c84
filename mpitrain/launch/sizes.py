"""How servers will divide the parameters of a script. Only the script knows its model, so it runs up to its Trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
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
        lines = Path(path_of(descriptor)).read_text().splitlines()
    finally:
        os.close(descriptor)
    if not lines:
        raise LaunchError(
            f"how the servers divide the parameters is not known: the script {problem}. Once it runs, `mpitrain ps "
            "JOB` shows it"
        )
    for name, line in zip(names, lines, strict=True):
        print(f"{name}: {line}")


def _run(command: Sequence[str], context: JobContext, descriptor: int) -> str:
    """Return how the script has ended, in words. What it prints goes to stderr."""
    try:
        done = subprocess.run(
            command,
            env=variables(context),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=[descriptor],
            preexec_fn=end_with_parent(),
            timeout=_MOST_SECONDS,
            check=False,
        )
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        return f"has made no Trainer within {_MOST_SECONDS:.0f} s"
    if done.returncode:
        return f"{how_ended(done.returncode)} before it had one with ParameterServer"
    return "has ended without a Trainer"
