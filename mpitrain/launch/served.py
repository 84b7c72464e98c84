"""The processes of a job with servers: what a server and its workers are told, and how this process becomes one."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mpitrain.config import KEY
from mpitrain.errors import LaunchError
from mpitrain.job.context import PREFIX, JobContext
from mpitrain.launch.facts import environment

# Nobody waits for this process, so it need not give up on a busy machine.
_MOST_SECONDS = 600.0


def environment_here(script: str) -> dict[str, Any]:
    """Return what the script would find here, as facts.environment does: it is compared between server and workers.

    A line says every 30 s that it takes long.

    Raises:
        LaunchError: it cannot be found out.
    """
    probe = (Path(__file__).parent / "probe.py").read_text()
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
    return replace(context, serve_environment=path_of(descriptor)), descriptor


def variables(context: JobContext) -> dict[str, str]:
    """Return the environment of the script: this one, without the key and what another launcher has told."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) and name != KEY}
    return own | context.variables()


def become(context: JobContext, program: Sequence[str]) -> NoReturn:
    """Become the script, which runs as the context says. `program`: the arguments of Python."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *program], variables(context))
