"""A job over several hosts, from their facts to its end: asked, compared, pinned, started, watched.

guards connect ─> facts ─> compare, or refuse ─> pin interfaces ─> mpiexec ─> watch ─> guards end what is left
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpitrain.errors import LaunchError
from mpitrain.launch.compare import differences, without_files
from mpitrain.launch.dialects import Command, Request, command_for, ssh_agent
from mpitrain.launch.ending import Ended
from mpitrain.launch.hosts import Layout
from mpitrain.launch.interfaces import Pinning, pin
from mpitrain.launch.job import run_job
from mpitrain.launch.roll_call import ROLL_CALL
from mpitrain.launch.variables import absent
from mpitrain.launch.watch import GUARD_SILENCE_SECONDS, Guards
from mpitrain.launch.watched import WatchedJob, marks, new_token

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
exec {ssh} $options "$host" "export {marks}; $*"
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
    without_files: tuple[str, ...]  # the hosts that have not the script, the folder or the Python


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
        different, bare = differences(layout.own, facts), without_files(layout.own, facts)
        yield Plan(layout, request, pinning, cores, has_rdma, different, bare), guards


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
    token = new_token()
    with planned(layout, request, script, _roll_call(token), token, given) as (plan, _):
        _say([*plan.differences, *([plan.pinning.note] if plan.pinning.note else [])])
        print(_command(plan, {}))


def run(layout: Layout, request: Request, script: str, start_seconds: float, given: Mapping[str, str]) -> Ended:
    """Start the job and see to its end.

    Args:
        layout: where the ranks go.
        request: what is to be started.
        script: its path, for the comparison of the code beside it.
        start_seconds: within which all ranks must have started; 0: no limit.
        given: variables of a file, set already; the devices that they name must be on all hosts.

    Raises:
        LaunchError: hosts cannot be reached, or differ from this one.
    """
    token = new_token()
    path = _roll_call(token)
    with (
        planned(layout, request, script, path, token, given) as (plan, guards),
        tempfile.TemporaryDirectory() as folder,
    ):
        if plan.differences:
            refusal = LaunchError(
                f"the job was not started: what the hosts have must be as on {layout.own}, and is not:\n    "
                + "\n    ".join(plan.differences)
                + "\nOne share for code and Python keeps hosts equal: `ansible-playbook cluster/setup.yml --tags "
                "nfs,runtime`; it may show the others a change some seconds late. `mpitrain run --show ...` prints the "
                "line that starts the job unchecked."
            )
            refusal.hosts = plan.without_files
            raise refusal
        _say([plan.pinning.note] if plan.pinning.note else [])
        variable, ssh = ssh_agent(request.mpiexec, os.environ)
        environment = {
            **marks(token),
            ROLL_CALL: str(path),
            variable: _marking_ssh(Path(folder), ssh, marks(token)),
            # The script above is on this machine alone, so that all connections must set out from here.
            **({"PRTE_MCA_plm_ssh_no_tree_spawn": "1"} if request.mpiexec.vendor == "openmpi" else {}),
        }
        return run_job(
            _command(plan, environment), request.num_ranks, WatchedJob(layout.places, guards, path, start_seconds)
        )


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


def _marking_ssh(folder: Path, ssh: Sequence[str], marks: Mapping[str, str]) -> str:
    path = folder / "ssh"
    exports = " ".join(f"{name}='{value}'" for name, value in marks.items())
    path.write_text(_MARKING_SSH.format(ssh=shlex.join(ssh), marks=exports))
    path.chmod(0o700)
    if not os.access(path, os.X_OK):
        raise LaunchError(f"no program in {folder} can be run: it is mounted noexec. Set TMPDIR to another folder")
    return str(path)


def _roll_call(token: str) -> Path:
    return Path("/tmp") / f"mpitrain-roll-call-{token}"


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"mpitrain: {line}", file=sys.stderr, flush=True)
