"""The processes of a job with servers: what a server and its workers are told, and how this process becomes one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mpitrain.config import KEY
from mpitrain.errors import LaunchError
from mpitrain.job.context import PREFIX, JobContext
from mpitrain.launch.facts import environment


def environment_here(script: str) -> dict[str, Any]:
    """Return what the script would find here, as facts.environment does: it is compared between server and workers.

    Raises:
        LaunchError: it cannot be found out.
    """
    probe = (Path(__file__).parent / "probe.py").read_text()
    facts = environment(sys.executable, str(Path(script).absolute()), {}, probe)
    if "error" in facts:
        raise LaunchError(f"the packages of {sys.executable} cannot be compared: {facts['error']}")
    return facts


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
