"""A job over several hosts, from their facts to its end: asked, compared, pinned, started, watched.

guards connect ─> facts ─> compare, or refuse ─> pin interfaces ─> mpiexec ─> watch ─> guards end what is left
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mpitrain.errors import LaunchError
from mpitrain.launch.arrival import diagnosis, misplaced, problem
from mpitrain.launch.compare import differences
from mpitrain.launch.dialects import Command, Request, command_for, ssh_agent_variable
from mpitrain.launch.guard import MARK
from mpitrain.launch.hosts import Layout
from mpitrain.launch.interfaces import Pinning, pin
from mpitrain.launch.job import run_job
from mpitrain.launch.roll_call import ROLL_CALL
from mpitrain.launch.watch import GUARD_SILENCE_SECONDS, Guards

# Variables that say what this machine or this login is; Open MPI passes on those with its own prefixes by itself.
_NOT_CARRIED = re.compile(
    r"(SSH|XDG|DBUS|OMPI_MCA|PRTE|PMIX)_.*|HOME|USER|LOGNAME|SHELL|HOSTNAME|HOST|DISPLAY|PWD|OLDPWD|SHLVL|MAIL|TERM|_"
)

# Variables that say which code and libraries Python finds.
_FOR_PYTHON = ("PYTHON", "LD_", "MPI4PY_")

# What mpiexec takes for ssh: ssh, and the job's mark is in the environment of what it starts, so that the guard there
# knows it. ssh itself joins the words of a command with spaces, as "$*" does.
_MARKING_SSH = """#!/bin/sh
options=
while :; do
    case $1 in
    -[BbcDEeFIiJLlmOoPpQRSWw]) options="$options $1 $2"; shift 2 ;;
    -*) options="$options $1"; shift ;;
    *) break ;;
    esac
done
host=$1; shift
exec {ssh} $options "$host" "export {mark}; $*"
"""


@dataclass(frozen=True)
class Plan:
    """A job that can be started: `request` is without what its guards add."""

    layout: Layout
    request: Request
    pinning: Pinning
    differences: list[str]


class WatchedJob:
    """What run_job needs to know of the other hosts."""

    def __init__(self, plan: Plan, guards: Guards, path: Path, start_seconds: float) -> None:
        self.path = path
        self.is_gone = False
        self._plan, self._guards, self._start_seconds = plan, guards, start_seconds
        self._since = 0.0

    def begin(self) -> None:
        """mpiexec has been started."""
        self._since = time.monotonic()
        self._guards.start()

    def trouble(self) -> list[str]:
        """Why the job must be ended now, a line each; nothing while all is well."""
        if self._guards.trouble:
            return self._guards.trouble.splitlines()
        layout, when = self._plan.layout, self._guards.signatures.when
        if stray := misplaced(layout.places, self._guards.reports):
            return [stray]
        gone = {rank: since for report in self._guards.reports.values() for rank, since in report.gone.items()}
        now = time.monotonic()
        found = problem(layout.places, when, gone, since=self._since, now=now, start_seconds=self._start_seconds)
        if found is None:
            return []
        self._guards.look()
        return [f"the job has not started: {found}", *diagnosis(layout.places, when, gone, self._guards.reports)]

    def missing(self) -> list[int]:
        """The ranks that began and did not come to their end."""
        return self._guards.signatures.missing()

    def end(self, linger_seconds: float) -> tuple[list[str], list[str]]:
        """End what is left on all hosts: what that was, and what could not be ended or asked, a line each."""
        self._guards.end(linger_seconds)
        left: list[str] = []
        beyond: list[str] = []
        for host, report in self._guards.reports.items():
            if report.left is None:
                beyond.append(f"{host} has not said that nothing of the job is left there; `ssh {host} ps -fu $USER`")
            left += [f"{host}: {pid} {line}" for pid, line in report.left or []]
            beyond += [f"{host}: process {pid} could not be killed: {line}" for pid, line in report.immortal]
        return left, beyond


@contextmanager
def planned(
    layout: Layout, request: Request, script: str, roll_call: Path, token: str
) -> Iterator[tuple[Plan, Guards]]:
    """Ask every host; the guards live as long as `with`.

    Raises:
        LaunchError: names every host that cannot be reached.
    """
    wish = {
        "python": sys.executable,
        "paths": [str(Path.cwd()), sys.executable, str(Path(script).absolute())],
        "script": str(Path(script).absolute()),
        "variables": {name: value for name, value in os.environ.items() if name.startswith(_FOR_PYTHON)},
        "token": token,
        "roll_call": str(roll_call),
        "silence_seconds": GUARD_SILENCE_SECONDS,
    }
    wishes = {
        host: {**wish, "peers": {peer: address for peer, address in layout.addresses.items() if peer != host}}
        for host in layout.addresses
    }
    hosts = [place.host for place in layout.places]
    with Guards(layout.own, layout.addresses, wishes) as guards:
        facts = guards.facts()
        yield (
            Plan(
                layout, request, pin(facts, hosts, request.mpiexec.vendor, os.environ), differences(layout.own, facts)
            ),
            guards,
        )


def show(layout: Layout, request: Request, script: str) -> None:
    """Print the line for mpiexec; what would keep the job from starting goes to stderr."""
    token = secrets.token_hex(8)
    with planned(layout, request, script, _roll_call(token), token) as (plan, _):
        _say([*plan.differences, *([plan.pinning.note] if plan.pinning.note else [])])
        print(_command(plan, {}))


def run(layout: Layout, request: Request, script: str, start_seconds: float) -> int:
    """Start the job and see to its end; returns the exit code.

    Args:
        layout: where the ranks go.
        request: what is to be started.
        script: its path, for the comparison of the code beside it.
        start_seconds: within which all ranks must have started; 0: no limit.

    Raises:
        LaunchError: hosts cannot be reached, or differ from this one.
    """
    token = secrets.token_hex(8)
    path = _roll_call(token)
    with planned(layout, request, script, path, token) as (plan, guards), tempfile.TemporaryDirectory() as folder:
        if plan.differences:
            raise LaunchError(
                f"the job was not started: what the hosts have must be as on {layout.own}, and is not:\n    "
                + "\n    ".join(plan.differences)
                + "\nOne share for code and Python keeps hosts equal: `ansible-playbook cluster/setup.yml --tags "
                "nfs,runtime`; it may show the others a change some seconds late. `mpitrain run --show ...` prints the "
                "line that starts the job unchecked."
            )
        _say([plan.pinning.note] if plan.pinning.note else [])
        mark = f"{MARK}={token}"
        agent = ssh_agent_variable(request.mpiexec)
        environment = {
            MARK: token,
            ROLL_CALL: str(path),
            agent: _marking_ssh(Path(folder), os.environ.get(agent, "ssh"), mark),
            # The script above is on this machine alone, so that all connections must set out from here.
            **({"PRTE_MCA_plm_ssh_no_tree_spawn": "1"} if request.mpiexec.vendor == "openmpi" else {}),
        }
        return run_job(_command(plan, environment), request.num_ranks, WatchedJob(plan, guards, path, start_seconds))


def _command(plan: Plan, guarded: Mapping[str, str]) -> Command:
    """The mpiexec command; with `guarded`, the environment that the guards need, ranks sign when they start."""
    layout, request = plan.layout, plan.request
    settings = {
        f"{place.first_rank}-{place.ranks[-1]}": plan.pinning.by_host[place.host]
        for place in layout.places
        if place.host in plan.pinning.by_host
    }
    program = request.program
    if guarded or settings:
        program = [sys.executable, "-m", "mpitrain.launch.rank", json.dumps(settings), *program]
    added = {**plan.pinning.common, **guarded}
    request = replace(request, program=program, places=layout.places)
    names = _carried({**os.environ, **command_for(request, os.environ).environment, **added})
    command = command_for(replace(request, carried=names), os.environ)
    return replace(command, environment={**command.environment, **added})


def _carried(environ: Mapping[str, str]) -> Sequence[str]:
    return sorted(name for name in environ if name.isidentifier() and not _NOT_CARRIED.fullmatch(name))


def _marking_ssh(folder: Path, ssh: str, mark: str) -> str:
    path = folder / "ssh"
    path.write_text(_MARKING_SSH.format(ssh=shlex.quote(ssh), mark=mark))
    path.chmod(0o700)
    if not os.access(path, os.X_OK):
        raise LaunchError(f"no program in {folder} can be run: it is mounted noexec. Set TMPDIR to another folder")
    return str(path)


def _roll_call(token: str) -> Path:
    return Path("/tmp") / f"mpitrain-roll-call-{token}"


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"mpitrain: {line}", file=sys.stderr, flush=True)
