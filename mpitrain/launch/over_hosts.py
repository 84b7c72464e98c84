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
from typing import Any

from mpitrain.errors import LaunchError
from mpitrain.launch.arrival import diagnosis, misplaced, problem
from mpitrain.launch.compare import differences
from mpitrain.launch.dialects import Command, Request, command_for, ssh_agent
from mpitrain.launch.guard import MARK
from mpitrain.launch.hosts import Layout
from mpitrain.launch.interfaces import Pinning, pin
from mpitrain.launch.job import run_job
from mpitrain.launch.roll_call import ROLL_CALL
from mpitrain.launch.variables import absent
from mpitrain.launch.watch import GUARD_SILENCE_SECONDS, Guards

# Variables that say what this machine or this login is; Open MPI passes on those with its own prefixes by itself.
_NOT_CARRIED = re.compile(
    r"(SSH|XDG|DBUS|OMPI_MCA|PRTE|PMIX)_.*|HOME|USER|LOGNAME|SHELL|HOSTNAME|HOST|DISPLAY|PWD|OLDPWD|SHLVL|MAIL|TERM|_"
)

_THREADS = "OMP_NUM_THREADS"

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
    cores: Mapping[str, int]  # of each host that has ranks
    has_rdma: bool  # any of them
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
        layout = self._plan.layout
        if stray := misplaced(layout.places, self._guards.reports):
            return [stray]
        when, gone = self._guards.seen()
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
    layout: Layout, request: Request, script: str, roll_call: Path, token: str, given: Mapping[str, str]
) -> Iterator[tuple[Plan, Guards]]:
    """Ask every host; the guards live as long as `with`.

    Raises:
        LaunchError: names every host that cannot be reached, or has not the devices that `given` names.
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
        _refuse_absent(facts, given)
        pinning = pin(facts, hosts, request.mpiexec.vendor, os.environ)
        cores = {host: int(facts[host]["cores"]) for host in hosts}
        has_rdma = any(facts[host]["rdma"] for host in hosts)
        yield Plan(layout, request, pinning, cores, has_rdma, differences(layout.own, facts)), guards


def _refuse_absent(facts: Mapping[str, Mapping[str, Any]], given: Mapping[str, str]) -> None:
    lines = [f"{host}: {text}, which is not there" for host in facts for text in absent(given, facts[host]["devices"])]
    if lines:
        raise LaunchError(
            "the job was not started: the file of variables does not fit the hosts:\n    "
            + "\n    ".join(lines)
            + "\nWrite it anew: mpitrain check-cluster --write-env FILE"
        )


def show(layout: Layout, request: Request, script: str, given: Mapping[str, str]) -> None:
    """Print the line for mpiexec; what would keep the job from starting goes to stderr. For `given` see run."""
    token = secrets.token_hex(8)
    with planned(layout, request, script, _roll_call(token), token, given) as (plan, _):
        _say([*plan.differences, *([plan.pinning.note] if plan.pinning.note else [])])
        print(_command(plan, {}))


def run(layout: Layout, request: Request, script: str, start_seconds: float, given: Mapping[str, str]) -> int:
    """Start the job and see to its end; returns the exit code.

    Args:
        layout: where the ranks go.
        request: what is to be started.
        script: its path, for the comparison of the code beside it.
        start_seconds: within which all ranks must have started; 0: no limit.
        given: variables of a file, set already; the devices that they name must be on all hosts.

    Raises:
        LaunchError: hosts cannot be reached, or differ from this one.
    """
    token = secrets.token_hex(8)
    path = _roll_call(token)
    with (
        planned(layout, request, script, path, token, given) as (plan, guards),
        tempfile.TemporaryDirectory() as folder,
    ):
        if plan.differences:
            raise LaunchError(
                f"the job was not started: what the hosts have must be as on {layout.own}, and is not:\n    "
                + "\n    ".join(plan.differences)
                + "\nOne share for code and Python keeps hosts equal: `ansible-playbook cluster/setup.yml --tags "
                "nfs,runtime`; it may show the others a change some seconds late. `mpitrain run --show ...` prints the "
                "line that starts the job unchecked."
            )
        _say([plan.pinning.note] if plan.pinning.note else [])
        variable, ssh = ssh_agent(request.mpiexec, os.environ)
        environment = {
            MARK: token,
            ROLL_CALL: str(path),
            variable: _marking_ssh(Path(folder), ssh, f"{MARK}={token}"),
            # The script above is on this machine alone, so that all connections must set out from here.
            **({"PRTE_MCA_plm_ssh_no_tree_spawn": "1"} if request.mpiexec.vendor == "openmpi" else {}),
        }
        return run_job(_command(plan, environment), request.num_ranks, WatchedJob(plan, guards, path, start_seconds))


def _command(plan: Plan, guarded: Mapping[str, str]) -> Command:
    """The mpiexec command; with `guarded`, the environment that the guards need, ranks sign when they start."""
    layout, request = plan.layout, plan.request
    common, by_host = _threads(plan)
    settings = {
        f"{place.first_rank}-{place.ranks[-1]}": variables
        for place in layout.places
        if (variables := {**plan.pinning.by_host.get(place.host, {}), **by_host.get(place.host, {})})
    }
    program = request.program
    if guarded or settings:
        # -P: the working folder may have a json.py that is not Python's.
        program = [sys.executable, "-P", "-m", "mpitrain.launch.rank", json.dumps(settings), *program]
    added = {**plan.pinning.common, **common, **guarded}
    request = replace(
        request,
        program=program,
        places=layout.places,
        num_cores=min(plan.cores.values()),
        has_rdma=plan.has_rdma,
    )
    names = _carried({**os.environ, **command_for(request, os.environ).environment, **added})
    command = command_for(replace(request, carried=names), os.environ)
    return replace(command, environment={**command.environment, **added})


def _threads(plan: Plan) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """How many threads a rank may use, for all hosts, or for each: its host's cores, shared with the others there."""
    if _THREADS in os.environ:
        return {}, {}
    by_host = {
        place.host: {_THREADS: str(max(1, plan.cores[place.host] // place.num_ranks))} for place in plan.layout.places
    }
    first, *others = by_host.values()
    return (first, {}) if all(other == first for other in others) else ({}, by_host)


def _carried(environ: Mapping[str, str]) -> Sequence[str]:
    return sorted(name for name in environ if name.isidentifier() and not _NOT_CARRIED.fullmatch(name))


def _marking_ssh(folder: Path, ssh: Sequence[str], mark: str) -> str:
    path = folder / "ssh"
    path.write_text(_MARKING_SSH.format(ssh=shlex.join(ssh), mark=mark))
    path.chmod(0o700)
    if not os.access(path, os.X_OK):
        raise LaunchError(f"no program in {folder} can be run: it is mounted noexec. Set TMPDIR to another folder")
    return str(path)


def _roll_call(token: str) -> Path:
    return Path("/tmp") / f"mpitrain-roll-call-{token}"


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"mpitrain: {line}", file=sys.stderr, flush=True)
