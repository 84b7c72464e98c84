"""Check that all hosts have the same code and environment as this one; a pure function of their facts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mpitrain.launch.conditions import Condition, Refusal, faults_by_host

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


def without_files(own: str, facts: Mapping[str, HostFacts]) -> tuple[str, ...]:
    """List the other hosts that lack the script, the folder or the Python, as without the mounted share."""
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
    compared = {key: _VALUES[key] for key in ("python", "mpitrain")}
    return "; ".join(faults_by_host(_environment("", given, own, compared)).values())


def _paths(host: str, facts: HostFacts) -> list[Refusal]:
    faults = []
    for path, (how, *details) in facts["paths"].items():
        if how == "missing":
            faults.append(f"{details[0]} does not exist; is the share mounted?")
        elif how == "empty":
            faults.append(f"{details[0]} is empty, so {path} does not exist; is the share mounted?")
        elif how == "hangs":
            faults.append(f"{path} does not answer; is the file server up?")
        elif how == "error":
            faults.append(f"{details[0]}: {details[1]}")
    return [Refusal(Condition.FILES, host, fault) for fault in dict.fromkeys(faults)]


# The facts of an environment that are single values: their condition, and what a refusal calls them.
_VALUES = {
    "python": (Condition.PYTHON, "Python"),
    "machine": (Condition.PYTHON, "the processor"),
    "mpitrain": (Condition.PACKAGES, "mpitrain's code"),
    "mpi": (Condition.PACKAGES, "the MPI library"),
}


def _environment(
    host: str,
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    values: Mapping[str, tuple[Condition, str]] = MappingProxyType(_VALUES),
) -> list[Refusal]:
    if "error" in there:
        return [Refusal(Condition.PYTHON, host, there["error"])]
    refusals = []
    for key, (condition, name) in values.items():
        value_there, value_here = there.get(key, there.get(f"{key}_error")), here.get(key, here.get(f"{key}_error"))
        if value_there == value_here:
            continue
        is_hash = key == "mpitrain" and value_there and value_here
        shown = f"{value_there or _NOT_THERE}, here {value_here or _NOT_THERE}"
        refusals.append(Refusal(condition, host, f"{name} {'differs' if is_hash else shown}"))
    for name, version_there, version_here in _unequal(there["packages"], here["packages"]):
        fault = f"{name} {version_there or _NOT_THERE}, here {version_here or _NOT_THERE}"
        refusals.append(Refusal(Condition.PACKAGES, host, fault))
    for name, hash_there, hash_here in _unequal(there["files"], here["files"]):
        how = "differs" if hash_there and hash_here else "is not there" if hash_here else "is there, but not here"
        refusals.append(Refusal(Condition.SCRIPT, host, f"{name} {how}"))
    return refusals


def _unequal(there: Mapping[str, str], here: Mapping[str, str]) -> list[tuple[str, str | None, str | None]]:
    return [
        (name, there.get(name), here.get(name))
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
