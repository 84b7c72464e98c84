"""The processes of a job with servers: what a server and its workers are told, and how this process becomes one.

How servers will divide the parameters of a script only the script can say, which knows its model. So it runs up to its
Trainer (`show_sizes`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mpitrain import facts as common
from mpitrain.config import KEY
from mpitrain.context import PREFIX, JobContext, ServeTask
from mpitrain.errors import LaunchError
from mpitrain.launch.facts import environment
from mpitrain.launch.processes import start_child
from mpitrain.reading import parsed

# Nobody waits for this process, so it need not give up on a busy machine.
_MOST_SECONDS = 600.0


def environment_here(script: str) -> dict[str, Any]:
    """Return what the script would find here, as facts.environment does: it is compared between server and workers.

    A line says every 30 s that it takes long.

    Raises:
        LaunchError: it cannot be found out.
    """
    probe = Path(common.__file__).read_text()
    facts = environment(sys.executable, str(Path(script).absolute()), {}, probe, _MOST_SECONDS, _tell)
    if "error" in facts:
        raise LaunchError(f"the packages of {sys.executable} cannot be compared: {facts['error']}")
    return facts


def _tell(waited: float) -> None:
    print(
        f"mpitrain: {socket.gethostname()} has waited {waited:.0f} s for {sys.executable}, which looks up code and "
        f"packages and loads MPI; the machine is busy, or a folder of the script or of Python does not answer. It has "
        f"{_MOST_SECONDS:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def handed_over(text: str) -> int:
    """Return the descriptor of a file in memory, which only this process and those that inherit it can open."""
    descriptor = os.memfd_create("mpitrain", os.MFD_CLOEXEC)
    os.set_inheritable(descriptor, True)
    os.write(descriptor, text.encode())
    return descriptor


def path_of(descriptor: int) -> str:
    """Return the path by which a process that has inherited a descriptor opens its file."""
    return f"/proc/self/fd/{descriptor}"


def told(context: JobContext, facts: Mapping[str, Any]) -> tuple[JobContext, int]:
    """Return the context with what environment_here has found, and the descriptor that the process must inherit."""
    descriptor = handed_over(json.dumps(facts))
    return replace(context, serve=replace(context.serve, environment=path_of(descriptor))), descriptor


def variables(context: JobContext) -> dict[str, str]:
    """Return the environment of the script: this one, without the key and what another launcher has told."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) and name != KEY}
    return own | context.variables()


def become(context: JobContext, program: Sequence[str]) -> NoReturn:
    """Become the script, which runs as the context says. `program`: the arguments of Python."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *program], variables(context))


def how_ended(code: int) -> str:
    """Return how a process has ended, in words."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def say(text: str) -> None:
    """Print a line to stderr, if anybody reads it."""
    with suppress(BrokenPipeError):
        print(f"mpitrain: {text}", file=sys.stderr, flush=True)


# Reading the data may take long.
_MOST_SIZES_SECONDS = 300.0


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
        f"{_MOST_SIZES_SECONDS:.0f} s, and nothing is trained"
    )
    descriptor = handed_over("")
    try:
        context = JobContext(servers=len(names), serve=ServeTask("server", division=path_of(descriptor)))
        problem = _run_to_trainer([sys.executable, *program], context, descriptor)
        told = Path(path_of(descriptor)).read_text()
    finally:
        os.close(descriptor)
    if not told:
        raise LaunchError(
            f"how the servers divide the parameters is not known: the script {problem}. Once it runs, `mpitrain ps "
            "JOB` shows it"
        )
    called = "what the script says of how the servers divide the parameters"
    lines = parsed(lambda: [*zip(names, json.loads(told), strict=True)], LaunchError, called, "is damaged")
    for name, line in lines:
        print(f"{name}: {line}")


def _run_to_trainer(command: Sequence[str], context: JobContext, descriptor: int) -> str:
    """Return how the script has ended, in words. Its processes end with it. What it prints goes to stderr."""
    try:
        process = start_child(command, env=variables(context), stdout=sys.stderr, pass_fds=[descriptor])
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        code = process.wait(_MOST_SIZES_SECONDS)
    except subprocess.TimeoutExpired:
        return f"has made no Trainer within {_MOST_SIZES_SECONDS:.0f} s"
    finally:
        with suppress(ProcessLookupError):  # nothing is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code:
        return f"{how_ended(code)} before it had one with ParameterServer"
    return "has ended without a Trainer"
