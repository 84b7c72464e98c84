"""What must hold on the hosts of a job. If one of these conditions fails, `mpitrain run` refuses to start.

`mpitrain check-cluster --level quick` must find each such fault beforehand. So each condition names the checks that
find it, and a refusal names these checks to the user. tests/diagnostics/test_conditions.py compares both sides.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from mpitrain.errors import LaunchError

_MOST_LINES = 30
_MOST_FAULTS = 3  # in one line
# Checks that need the path of the program.
_OF_SCRIPTS = {"ENV04", "RUN04"}


class _Rule(NamedTuple):
    says: str
    checks: tuple[str, ...]


class Condition(Enum):
    """A condition: its text, and the checks that find where it fails."""

    INVENTORY = _Rule("nobody else may write the inventory", ("RUN03",))
    NAMES = _Rule("the names of the hosts are known", ("NAM03",))
    ROUTES = _Rule("there is a way to each host", ("NET01",))
    MACHINES = _Rule("each host is a machine of its own", ("NAM01", "NAM07"))
    LOGIN = _Rule("ssh lets the user in without a question, and /usr/bin/python3 runs", ("SSH01", "PRB01", "SSH11"))
    SOCKETS = _Rule("the user may make a socket in /tmp", ("RUN01",))
    PROGRAMS = _Rule("where the job starts, programs in the temporary folder can be run", ("RUN01",))
    DEVICES = _Rule("the devices that variables name are there", ("NET07",))
    FILES = _Rule("the folder, the script and Python are there", ("NFS01", "NFS02", "NFS03", "ENV01", "ENV04"))
    PYTHON = _Rule("the Python of the job runs, and is the same", ("ENV01", "RUN04"))
    PACKAGES = _Rule("packages, mpitrain's code and the MPI library are the same", ("ENV02",))
    SCRIPT = _Rule("the program is the same", ("ENV04",))
    MPI = _Rule("mpiexec and the library that mpi4py loads are of one MPI", ("MPI01",))

    @property
    def says(self) -> str:
        """The condition as a sentence."""
        return self.value.says

    @property
    def checks(self) -> tuple[str, ...]:
        """The ids of the checks that find where the condition fails."""
        return self.value.checks


@dataclass(frozen=True)
class Refusal:
    """Why a job cannot start: a host, and the condition that fails there."""

    condition: Condition
    host: str
    fault: str

    def __str__(self) -> str:
        return f"{self.host}: {self.fault}"


def faults_by_host(refusals: Sequence[Refusal]) -> dict[str, str]:
    """Return what is wrong on each host, in a line."""
    by_host: dict[str, list[str]] = {}
    for refusal in refusals:
        by_host.setdefault(refusal.host, []).append(refusal.fault)
    for faults in by_host.values():
        if len(faults) > _MOST_FAULTS:
            faults[_MOST_FAULTS:] = [f"and {len(faults) - _MOST_FAULTS} more differences"]
    return {host: "; ".join(faults) for host, faults in by_host.items()}


def listing(refusals: Sequence[Refusal]) -> list[str]:
    """List the refusals, one per line, but only the first few: environments that differ need no complete list."""
    lines = [str(refusal) for refusal in refusals]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more differences"]
    return lines


def refuse(headline: str, refusals: Sequence[Refusal], script: str, advice: str = "") -> LaunchError:
    """Make the error that lists the refusals of a job over hosts, and names the checks that find their causes."""
    names = dict.fromkeys(check for refusal in refusals for check in refusal.condition.checks)
    checks = ",".join(names) + (f" --script {shlex.quote(script)}" if _OF_SCRIPTS & names.keys() else "")
    return LaunchError(
        f"{headline}:\n    " + "\n    ".join(listing(refusals)) + f"\n{advice}On the machine that set up the "
        f"cluster, `mpitrain check-cluster --only {checks}` names the cause and the command that repairs it."
    )


def refuse_here(refusal: Refusal) -> LaunchError:
    """Make the error of a job on this machine alone."""
    return LaunchError(
        f"the job was not started: {refusal}\n`mpitrain doctor` names the cause and the command that repairs it."
    )
