"""Differences between hosts that keep them from working together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.launch.compare import HostFacts, differences
from mpitrain.launch.conditions import faults_by_host, listing


def lines_of(own: str, facts: Mapping[str, HostFacts]) -> list[str]:
    return listing(differences(own, facts))


def host(**changes: Any) -> dict[str, Any]:
    environment = {
        "python": "3.11.2",
        "machine": "x86_64",
        "packages": {"numpy": "2.4.6", "mpi4py": "4.1.2"},
        "mpitrain": "abc",
        "files": {"train.py": "1", "model/net.py": "2"},
        "mpi": "MPICH 5.0.2",
    }
    return {"paths": {"/share": ["there"]}, "environment": {**environment, **changes}}


def test_equal_hosts() -> None:
    assert lines_of("a", {"a": host(), "b": host()}) == []


def test_the_differences_of_a_host_in_a_line() -> None:
    many = host(packages={f"p{number}": "1" for number in range(9)})
    facts = {"a": host(), "b": host(python="3.12.1", files={"train.py": "9", "model/net.py": "2"}), "c": many}
    assert faults_by_host(differences("a", facts)) == {
        "b": "Python 3.12.1, here 3.11.2; train.py differs",
        "c": "mpi4py (not there), here 4.1.2; numpy (not there), here 2.4.6; p0 1, here (not there); "
        "and 8 more differences",
    }


def test_every_difference_is_named() -> None:
    other = host(
        python="3.12.1",
        packages={"numpy": "2.3.1", "six": "1.0"},
        mpitrain="xyz",
        files={"train.py": "9", "old.py": "3"},
    )
    del other["environment"]["mpi"]
    other["environment"]["mpi_error"] = "RuntimeError: cannot load MPI library"
    assert lines_of("a", {"a": host(), "b": host(), "c": other}) == [
        "c: Python 3.12.1, here 3.11.2",
        "c: mpitrain's code differs",
        "c: the MPI library RuntimeError: cannot load MPI library, here MPICH 5.0.2",
        "c: mpi4py (not there), here 4.1.2",
        "c: numpy 2.3.1, here 2.4.6",
        "c: six 1.0, here (not there)",
        "c: model/net.py is not there",
        "c: old.py is there, but not here",
        "c: train.py differs",
    ]


def test_missing_paths_come_alone() -> None:
    def with_path(*found: str) -> dict[str, Any]:
        return {"paths": {"/share/venv/bin/python": list(found)}}

    facts = {
        "a": host(),
        "b": with_path("missing", "/share/venv"),
        "c": with_path("empty", "/share"),
        "d": with_path("hangs"),
        "e": with_path("error", "/share", "Stale file handle"),
    }
    assert lines_of("a", facts) == [
        "b: /share/venv does not exist; is the share mounted?",
        "c: /share is empty, so /share/venv/bin/python does not exist; is the share mounted?",
        "d: /share/venv/bin/python does not answer; is the file server up?",
        "e: /share: Stale file handle",
    ]


def test_this_machine_comes_first() -> None:
    broken = {"paths": {"/share": ["there"]}, "environment": {"error": "/share/python failed: no module x"}}
    assert lines_of("a", {"a": broken, "b": host()}) == ["a: /share/python failed: no module x"]
    assert lines_of("b", {"a": broken, "b": host()}) == ["a: /share/python failed: no module x"]


def test_a_long_list_is_cut() -> None:
    lines = lines_of("a", {"a": host(), "b": host(packages={f"p{number}": "1" for number in range(100)})})
    assert len(lines) == 31
    assert lines[-1] == "and 72 more differences"
