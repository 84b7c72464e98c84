"""What must hold on the hosts of a job, and whether it does: pure functions of their facts (facts.py).

If a condition fails, `mpitrain run` refuses to start. `mpitrain check-cluster --level quick` must find each such fault
beforehand. So each condition names the checks that find it, and a refusal names these checks to the user.
tests/check/test_conditions.py compares both sides.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

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


HostFacts = Mapping[str, Any]  # as returned by facts.collect

_NOT_THERE = "(not there)"


def differences(own: str, facts: Mapping[str, HostFacts]) -> list[Refusal]:
    """Return what keeps the job from starting.

    Args:
        own: the name of this machine in `facts`.
        facts: by host, this machine included, as returned by facts.collect.
    """
    here = facts[own]
    refusals = _paths(own, here)
    if refusals or "error" in here.get("environment", {}):
        return refusals or [Refusal(Condition.PYTHON, own, here["environment"]["error"])]
    for host, there in facts.items():
        if host != own:
            refusals += _paths(host, there) or _environment(host, there["environment"], here["environment"])
    return refusals


def mixed_processors(facts: Mapping[str, HostFacts]) -> str:
    """Return in a line which hosts have which processors, and what follows; "" if all have the same."""
    hosts: dict[str, list[str]] = {}
    for host, there in facts.items():
        hosts.setdefault(there.get("environment", {}).get("machine", ""), []).append(host)
    if len(hosts) < 2:
        return ""
    kinds = "; ".join(f"{machine}: {', '.join(names)}" for machine, names in hosts.items())
    return (
        f"the hosts have different processors ({kinds}), which round differently: the parameters of their ranks may "
        "differ in the last bits"
    )


def shared_addresses(facts: Mapping[str, HostFacts]) -> list[Refusal]:
    """Return which hosts have the address of another one, so that neither can be told from the other."""
    return [
        Refusal(
            Condition.ROUTES,
            host,
            f"it has the address {way['taken'].partition('/')[0]} of {peer} too. If that is {peer}'s, type on {host}: "
            f"`sudo ip address del {way['taken']}`, and remove it from the settings of its network",
        )
        for host, there in facts.items()
        for peer, way in there["routes"].items()
        if "taken" in way
    ]


def perhaps_late(refusals: Sequence[Refusal]) -> dict[str, str]:
    """Return, in a line each, what is wrong on the hosts that may only see a change on a share later than others.

    A network file system shows a replaced file, or a new one in a folder, some seconds late (NFS: its attribute cache).
    """
    others = {refusal.host for refusal in refusals if refusal.condition not in _READ_FROM_FILES}
    return faults_by_host([refusal for refusal in refusals if refusal.host not in others])


def without_files(own: str, facts: Mapping[str, HostFacts]) -> tuple[str, ...]:
    """List the other hosts that lack the script, the folder or the Python, as when the shared folder is not mounted."""
    return tuple(host for host, there in facts.items() if host != own and _paths(host, there))


def unlike(given: Any, own: HostFacts) -> str:
    """Return in a line how the environment of a worker differs from its server's; "" if it does not.

    Server and workers exchange numbers only, so their processors and MPI libraries may differ.

    Args:
        given: what a worker says that facts.environment has returned there. It may be anything.
        own: what it has returned for the server.
    """
    if not (
        isinstance(given, dict)
        and all(isinstance(given.get(key), str) for key in ("python", "mpitrain"))
        and all(
            isinstance(given.get(key), dict) and all(isinstance(value, str) for value in given[key].values())
            for key in ("packages", "files")
        )
    ):
        return "it does not say what code and packages it has; start it with `mpitrain work`"
    compared = ("python", "mpitrain", "packages", "files")
    return "; ".join(faults_by_host(_environment("", given, own, compared)).values())


def _paths(host: str, facts: HostFacts) -> list[Refusal]:
    faults = []
    for path, (how, *details) in facts["paths"].items():
        if how == "missing":
            faults.append(f"{details[0]} does not exist; is the shared folder mounted?")
        elif how == "empty":
            faults.append(f"{details[0]} is empty, so {path} does not exist; is the shared folder mounted?")
        elif how == "hangs":
            faults.append(f"{path} does not answer; is the file server up?")
        elif how == "error":
            faults.append(f"{details[0]}: {details[1]}")
    return [Refusal(Condition.FILES, host, fault) for fault in dict.fromkeys(faults)]


_READ_FROM_FILES = (Condition.PACKAGES, Condition.SCRIPT)

# The facts of an environment that must be equal, and the condition that fails if one is not.
_COMPARED = {
    "python": Condition.PYTHON,
    "machine": Condition.PYTHON,
    "mpitrain": Condition.PACKAGES,
    "mpi": Condition.PACKAGES,
    "packages": Condition.PACKAGES,
    "files": Condition.SCRIPT,
}
# Processors that may be in one job: their numbers have the same sizes and the same order of bytes, so the hosts read
# each other's messages. MPI sends them unchanged.
_ALIKE = frozenset({"x86_64", "aarch64"})
# What a refusal calls those that are single values.
_NAMES = {"python": "Python", "machine": "the processor", "mpitrain": "mpitrain's code", "mpi": "the MPI library"}


class EnvironmentDifference(NamedTuple):
    """A fact that two environments do not have in common: its value in each, None where it is not there.

    `kind` is a fact of facts.interpreter or facts.main; `name` that of a package or a file, else empty.
    """

    kind: str
    name: str
    there: str | None
    here: str | None

    @property
    def condition(self) -> Condition:
        """The condition that fails."""
        return _COMPARED[self.kind]


def unequal(
    there: Mapping[str, Any], here: Mapping[str, Any], kinds: Sequence[str] = ()
) -> list[EnvironmentDifference]:
    """Return how the environment of a job `there` differs from the one `here`, in facts of `kinds` (none: of all)."""
    differences = []
    for kind in kinds or _COMPARED:
        values = [one.get(kind, one.get(f"{kind}_error")) for one in (there, here)]
        tables = [value if isinstance(value, dict) else {"": value} for value in values]
        for name in sorted({*tables[0], *tables[1]}):
            found = EnvironmentDifference(kind, name, tables[0].get(name), tables[1].get(name))
            are_alike = kind == "machine" and {found.there, found.here} <= _ALIKE
            if found.there != found.here and not are_alike:
                differences.append(found)
    return differences


def _environment(
    host: str, there: Mapping[str, Any], here: Mapping[str, Any], kinds: Sequence[str] = ()
) -> list[Refusal]:
    if "error" in there:
        return [Refusal(Condition.PYTHON, host, there["error"])]
    hidden_there, hidden_here = there.get("hidden", {}), here.get("hidden", {})
    refusals: list[Refusal] = []
    of_files: list[Refusal] = []
    for one in unequal(there, here, kinds):
        both = f"{one.there or _NOT_THERE}, here {one.here or _NOT_THERE}"
        if one.kind == "files":
            how = "differs" if one.there and one.here else "is not there" if one.here else "is there, but not here"
            of_files.append(Refusal(one.condition, host, f"{one.name} {how}"))
            continue
        if one.kind == "packages":
            origins = _origin(one.name, hidden_there), _origin(one.name, hidden_here)
            fault = f"{one.name} {one.there or _NOT_THERE}{origins[0]}, here {one.here or _NOT_THERE}{origins[1]}"
        else:
            is_hash = one.kind == "mpitrain" and one.there and one.here
            fault = f"{_NAMES[one.kind]} {'differs' if is_hash else both}"
        refusals.append(Refusal(one.condition, host, fault))
    for name in sorted(hidden_there.keys() | hidden_here.keys()):
        copies = [hidden.get(name, ["", "-"]) for hidden in (hidden_there, hidden_here)]
        # A copy without a version is not in packages.
        if copies[0] != copies[1] and "" in (copies[0][1], copies[1][1]):
            places = [f"of {folder} (PYTHONPATH)" if folder else "of the environment" for folder, _ in copies]
            refusals.append(Refusal(Condition.PACKAGES, host, f"{name} is that {places[0]}, here that {places[1]}"))
    return refusals + of_files


def _origin(name: str, hidden: Mapping[str, Sequence[str]]) -> str:
    """Where a package comes from that is not the environment's."""
    folder = hidden.get(name.replace("-", "_"), [""])[0]
    return f" of {folder} (PYTHONPATH)" if folder else ""
