"""Whether all hosts have the same code and the same environment as this one; a pure function of their facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HostFacts = Mapping[str, Any]  # as facts.collect gives them

_MOST_LINES = 30  # a whole environment that differs needs no whole list
_NOT_THERE = "(not there)"


def differences(own: str, facts: Mapping[str, HostFacts]) -> list[str]:
    """What keeps the job from starting, a line each, beginning with the host.

    Args:
        own: the name under which this machine's facts are found.
        facts: of every host, this machine included, as facts.collect gives them.
    """
    here = facts[own]
    lines = _paths(own, here)
    if lines or "error" in here.get("environment", {}):
        return lines or [f"{own}: {here['environment']['error']}"]
    for host, there in facts.items():
        if host != own:
            lines += _paths(host, there) or _environment(host, there["environment"], here["environment"])
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more differences"]
    return lines


def without_files(own: str, facts: Mapping[str, HostFacts]) -> tuple[str, ...]:
    """The other hosts that have not the script, the folder or the Python, as where a share is not mounted."""
    return tuple(host for host, there in facts.items() if host != own and _paths(host, there))


def _paths(host: str, facts: HostFacts) -> list[str]:
    lines = []
    for path, (how, *details) in facts["paths"].items():
        if how == "missing":
            lines.append(f"{host}: {details[0]} is not there: is the share mounted?")
        elif how == "empty":
            lines.append(f"{host}: {details[0]} is empty, {path} is not there: is the share mounted?")
        elif how == "hangs":
            lines.append(f"{host}: {path} does not answer: is the server of the share up?")
        elif how == "error":
            lines.append(f"{host}: {details[0]}: {details[1]}")
    return list(dict.fromkeys(lines))


def _environment(host: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    if "error" in there:
        return [f"{host}: {there['error']}"]
    names = {"python": "Python", "machine": "the processor", "mpitrain": "mpitrain's code", "mpi": "the MPI library"}
    lines = []
    for key, name in names.items():
        value_there, value_here = there.get(key, there.get(f"{key}_error")), here.get(key, here.get(f"{key}_error"))
        if value_there == value_here:
            continue
        is_hash = key == "mpitrain" and value_there and value_here
        values = f"{value_there or _NOT_THERE}, here {value_here or _NOT_THERE}"
        lines.append(f"{host}: {name} {'differs' if is_hash else values}")
    for name, version_there, version_here in _unequal(there["packages"], here["packages"]):
        lines.append(f"{host}: {name} {version_there or _NOT_THERE}, here {version_here or _NOT_THERE}")
    for name, hash_there, hash_here in _unequal(there["files"], here["files"]):
        how = "differs" if hash_there and hash_here else "is not there" if hash_here else "is there, but not here"
        lines.append(f"{host}: {name} {how}")
    return lines


def _unequal(there: Mapping[str, str], here: Mapping[str, str]) -> list[tuple[str, str | None, str | None]]:
    return [
        (name, there.get(name), here.get(name))
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
