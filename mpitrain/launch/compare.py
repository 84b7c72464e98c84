"""Whether all hosts have the same code and the same environment as this one; a pure function of their facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Facts = Mapping[str, Any]

_MOST_LINES = 30  # a whole environment that differs needs no whole list
_NOT_THERE = "(not there)"


def differences(own: str, facts: Mapping[str, Facts]) -> list[str]:
    """What keeps the job from starting, a line each, beginning with the host.

    Args:
        own: the name under which this machine's facts are found.
        facts: of every host, this machine included, as facts.collect gives them.
    """
    here = facts[own]
    lines = _paths(own, here)
    if lines or "error" in here.get("environment", {}):
        return lines or [f"{own}: {here['environment']['error']}"]
    for host, found in facts.items():
        if host != own:
            lines += _paths(host, found) or _environment(host, found["environment"], here["environment"])
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more differences"]
    return lines


def without_files(own: str, facts: Mapping[str, Facts]) -> tuple[str, ...]:
    """The other hosts that have not the script, the folder or the Python, as where a share is not mounted."""
    return tuple(host for host, found in facts.items() if host != own and _paths(host, found))


def _paths(host: str, facts: Facts) -> list[str]:
    lines = []
    for path, (how, *what) in facts["paths"].items():
        if how == "missing":
            lines.append(f"{host}: {what[0]} is not there: is the share mounted?")
        elif how == "empty":
            lines.append(f"{host}: {what[0]} is empty, {path} is not there: is the share mounted?")
        elif how == "hangs":
            lines.append(f"{host}: {path} does not answer: is the server of the share up?")
        elif how == "error":
            lines.append(f"{host}: {what[0]}: {what[1]}")
    return list(dict.fromkeys(lines))


def _environment(host: str, found: Facts, here: Facts) -> list[str]:
    if "error" in found:
        return [f"{host}: {found['error']}"]
    names = {"python": "Python", "machine": "the processor", "mpitrain": "mpitrain's code", "mpi": "the MPI library"}
    lines = []
    for key, name in names.items():
        there, mine = found.get(key, found.get(f"{key}_error")), here.get(key, here.get(f"{key}_error"))
        if there == mine:
            continue
        is_hash = key == "mpitrain" and there and mine
        lines.append(f"{host}: {name} {'differs' if is_hash else f'{there or _NOT_THERE}, here {mine or _NOT_THERE}'}")
    for name, there, mine in _unequal(found["packages"], here["packages"]):
        lines.append(f"{host}: {name} {there or _NOT_THERE}, here {mine or _NOT_THERE}")
    for name, there, mine in _unequal(found["files"], here["files"]):
        how = "differs" if there and mine else "is not there" if mine else "is there, but not here"
        lines.append(f"{host}: {name} {how}")
    return lines


def _unequal(found: Mapping[str, str], here: Mapping[str, str]) -> list[tuple[str, str | None, str | None]]:
    return [
        (name, found.get(name), here.get(name))
        for name in sorted(found.keys() | here.keys())
        if found.get(name) != here.get(name)
    ]
