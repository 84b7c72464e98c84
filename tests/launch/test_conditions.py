"""Differences between hosts that keep them from working together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.facts import hidden
from mpitrain.launch.conditions import HostFacts, differences, faults_by_host, listing, shared_addresses


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


def test_two_machines_have_one_address() -> None:
    way = {"interface": "eth0", "network": "10.0.0.0/24"}
    facts = {"a": {"routes": {"b": way, "c": way}}, "b": {"routes": {"a": way, "c": way}}, "c": {"routes": {}}}
    assert shared_addresses(facts) == []
    facts["c"]["routes"] = {"a": way, "b": {"interface": "lo", "taken": "10.0.0.2/24 dev eth0"}}
    (text,) = map(str, shared_addresses(facts))
    assert text.startswith("c: it has the address 10.0.0.2 of b too. ")
    assert "`sudo ip address del 10.0.0.2/24 dev eth0`" in text


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
    many = host(packages={f"p{number}": "1" for number in range(9)})
    facts = {"a": host(), "b": host(python="3.12.1", files={"train.py": "9", "model/net.py": "2"}), "c": many}
    packages = "mpi4py (not there), here 4.1.2; numpy (not there), here 2.4.6; p0 1, here (not there)"
    assert faults_by_host(differences("a", facts)) == {
        "b": "Python 3.12.1, here 3.11.2; train.py differs",
        "c": f"{packages}; and 8 more differences",
    }


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


def test_the_list() -> None:
    """This machine comes first, and a long list is cut."""
    broken = {"paths": {"/share": ["there"]}, "environment": {"error": "/share/python failed: no module x"}}
    for own in "ab":
        assert lines_of(own, {"a": broken, "b": host()}) == ["a: /share/python failed: no module x"]
    lines = lines_of("a", {"a": host(), "b": host(packages={f"p{number}": "1" for number in range(100)})})
    assert (len(lines), lines[-1]) == (31, "and 72 more differences")


def test_a_copy_in_pythonpath() -> None:
    """It hides the environment's package, and may have no version."""
    copy = host(hidden={"numpy": ["/scratch/lib", ""]})
    expected = "numpy is that of /scratch/lib (PYTHONPATH), here that of the environment"
    assert lines_of("a", {"a": host(), "b": copy}) == [f"b: {expected}"]
    assert lines_of("a", {"a": copy, "b": copy}) == []
    other = host(hidden={"numpy": ["/scratch/lib", "2.3.1"]}, packages={"numpy": "2.3.1", "mpi4py": "4.1.2"})
    expected = "numpy 2.3.1 of /scratch/lib (PYTHONPATH), here 2.4.6"
    assert lines_of("a", {"a": host(), "b": other}) == [f"b: {expected}"]


def test_what_a_folder_of_pythonpath_hides(tmp_path: Path) -> None:
    for name in ("installed/numpy", "installed/six", "first/numpy", "first/data", "second/six-1.0.dist-info"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("first/numpy/__init__.py", "installed/six.py", "second/six.py"):
        (tmp_path / name).touch()
    path = os.pathsep.join(["", *(str(tmp_path / name) for name in ("first", "missing", "second", "installed"))])
    assert hidden(path, [str(tmp_path / "installed")]) == {
        "numpy": [str(tmp_path / "first"), ""],
        "six": [str(tmp_path / "second"), "1.0"],
    }
