"""Made-up answers of healthy machines, and what the checks say of them."""

from __future__ import annotations

from typing import Any

from check.made_up import seen as made_up
from mpitrain.check.check import Result, Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.run import judge

NODES = ("node1", "node2", "node3")


MIB = 1 << 20


ROOM = {"size_bytes": 8192 * MIB, "free_bytes": 4096 * MIB, "files": 1000, "free_files": 900}


ROOM |= {"is_read_only": False, "is_writable": True, "mode": 0o1777}


def sections() -> dict[str, Any]:
    return {
        "account": {
            "uid": 1900,
            "gid": 1900,
            "uid_owner": "cluster",
            "group": "cluster",
            "shell": "/bin/bash",
            "shell_works": True,
            "home": "/home/cluster",
            "home_owner": 1900,
            "expired": False,
            "must_change_password": False,
            "nologin": "",
        },
        "time_service": {"synchronized": True, "daemons": ["chrony"], "container": ""},
        "shell": {"limits": {"nofile": 65536, "memlock_bytes": None}, "has_rdma": True},
        "resources": {
            "container": "",
            "memory_bytes": 16384 * MIB,
            "available_bytes": 8192 * MIB,
            "places": {"/": {**ROOM}, "/tmp": {**ROOM}, "/dev/shm": {**ROOM}},
            "removes_ipc": False,
            "governors": ["schedutil"],
            "governor_drivers": ["amd-pstate"],
        },
        "processors": {"machine": 8, "usable": 8, "quota": None, "busy": []},
        "leftovers": {"processes": [], "files": []},
    }


def healthy(**fields: Any) -> Seen:
    seen = made_up(3, **fields)
    seen.nodes = {name: sections() for name in NODES}
    seen.cluster["clock"] = {name: {"ahead_seconds": 0.001, "uncertain_seconds": 0.002} for name in NODES}
    return seen


def judged(name: str, seen: Seen) -> list[Result]:
    return [result for result in judge([CHECKS[name]], seen) if result.verdict != "pass"]


def only(name: str, seen: Seen, verdict: str, node: str, found: str, remedy: str = "") -> None:
    (result,) = judged(name, seen)
    assert (result.verdict, result.where) == (verdict, (node,) if node else ())
    assert found in result.observed
    assert remedy in result.remedy
    assert verdict not in ("warn", "fail") or (result.remedy and result.allowed and node not in result.observed)


def changed(section: str, node: str = "node2", **fields: Any) -> Seen:
    seen = healthy()
    seen.nodes[node][section].update(fields)
    return seen


def nofile(most: int | None) -> Seen:
    return changed("shell", limits={"nofile": most, "memlock_bytes": None})
