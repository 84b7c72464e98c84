"""The judges of MPI."""

from __future__ import annotations

from typing import Any

import pytest

from check.made_up import seen
from mpitrain.check.check import Result, Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.checks.performance import bus_bytes_per_second
from mpitrain.check.run import judge

HYDRA = "HYDRA build details:\n    Version:                                 5.0.2\n"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: today"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"
STEPS = ["Allreduce of 1 bytes", "Bcast of 1 bytes"]


def judged(id_: str, found: Seen) -> list[Result]:
    return [one for one in judge([CHECKS[id_]], found) if one.verdict != "pass"]


def programs(library: str = MPICH, launcher: str = HYDRA, why: str = "") -> Seen:
    found = seen(1)
    found.nodes["node1"] = {
        "programs": {
            "mpi": {"why": library} if library.startswith("ImportError") else {"library": library},
            "mpiexec": {"path": "/b/mpiexec", "text": launcher, "why": why},
        }
    }
    return found


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        (programs(library=OPEN_MPI), "fail", "/b/mpiexec belongs to MPICH 5.0.2, mpi4py loads Open MPI 5.0.11"),
        (programs(launcher="mpiexec (OpenRTE) 4.1.4"), "fail", "belongs to Open MPI 4.1.4, mpi4py loads MPICH 5.0.2"),
        (programs(library="MPICH Version: 4.2.0"), "warn", "MPICH 5.0.2, mpi4py loads MPICH 4.2.0"),
        (programs(library="ImportError: libmpi.so.12"), "fail", "cannot load an MPI library: ImportError: libmpi"),
        (programs(why="not found"), "fail", "/b/mpiexec does not run: not found"),
    ],
)
def test_families(found: Seen, verdict: str, words: str) -> None:
    (one,) = judged("MPI01", found)
    assert one.verdict == verdict
    assert words in one.observed
    assert one.allowed
    assert "runtime" in one.remedy


def test_a_library_that_only_one_node_cannot_load_is_not_the_shares() -> None:
    found = seen(2)
    broken = programs(library="ImportError: file too short").nodes["node1"]
    found.nodes = {"node1": programs().nodes["node1"], "node2": broken}
    (one,) = judged("MPI01", found)
    assert one.where == ("node2",)
    assert "--tags" not in one.remedy and "from mpi4py import MPI" in one.remedy
    found.nodes["node1"] = broken
    assert {one.remedy for one in judged("MPI01", found)} == {
        "ansible-playbook cluster/setup.yml --tags runtime --limit {limit}"
    }


def test_one_family() -> None:
    assert not judged("MPI01", programs())
    assert not judged("MPI01", programs(library="Intel(R) MPI Library 2021.18"))  # it uses Hydra's protocol


def hello(*ranks: list[dict[str, Any]], code: int = 0, error: str = "") -> Seen:
    """A job on three nodes, with the output of each rank."""
    found = seen(3)
    said = {str(number): words for number, words in enumerate(ranks)}
    found.cluster["hello"] = {"code": code, "seconds": 25.0, "said": said, "error_text": error}
    return found


def rank(number: int, size: int = 3, **fields: Any) -> list[dict[str, Any]]:
    """The output of a rank without a fault."""
    host = {"host": f"node{number + 1}", **fields}
    done = [{"step": step, "is_right": True} for step in STEPS]
    return [host, {"size": size, "first_seconds": 0.5, "steps": STEPS}, *done]


def test_all_is_well() -> None:
    found = hello(rank(0), rank(1), rank(2))
    assert not judged("MPI02", found)
    assert not judged("MPI03", found)


def test_every_rank_alone() -> None:
    (one,) = judged("MPI02", hello(rank(0, size=1), rank(1, size=1), rank(2, size=1)))
    assert (one.verdict, one.where) == ("fail", ())
    assert one.observed == "3 ranks report a world of 1 ranks"
    assert one.allowed == "one world of 3 ranks, one on each node"


def test_nodes_that_did_not_answer() -> None:
    found = judged("MPI02", hello(rank(0)[:1], rank(1)[:1], rank(2), code=124))
    assert [(one.where, one.observed) for one in found] == [
        (("node1",), "its rank began, but did not get through MPI_Init; no end within 25 s"),
        (("node2",), "its rank began, but did not get through MPI_Init; no end within 25 s"),
    ]
    assert all(one.remedy for one in found)
    (one,) = judged("MPI02", hello(rank(0)[:1], rank(1)[:1], code=124))  # the others wait for rank 2
    assert (one.where, one.observed) == (("node3",), "no rank began; no end within 25 s")
    (one,) = judged("MPI02", hello(rank(0), rank(1), code=1, error="no route"))
    assert (one.where, one.observed) == (("node3",), "no rank began; mpiexec ended with code 1: no route")


def test_two_ranks_on_one_host_and_a_slow_start() -> None:
    (one,) = judged("MPI02", hello(rank(0), rank(1, host="node1"), rank(2)))
    assert one.observed == "several ranks were on one host: node1"
    slow = rank(0)
    slow[1]["first_seconds"] = 17.0
    (one,) = judged("MPI02", hello(slow, rank(1), rank(2)))
    assert (one.verdict, one.observed) == ("warn", "MPI_Init takes 17 s")


def test_sums() -> None:
    wrong, hung = rank(1), rank(2)[:-1]
    wrong[2] = {"step": STEPS[0], "is_right": False}
    first, second = judged("MPI03", hello(rank(0), wrong, hung, code=124))
    assert (first.verdict, first.where, first.observed) == ("fail", ("node2",), "wrong result: Allreduce of 1 bytes")
    assert (second.where, second.observed) == (("node3",), "Bcast of 1 bytes did not end; no end within 25 s")
    assert first.remedy != second.remedy
    (one,) = judged("MPI03", hello([], [], []))
    assert one.verdict == "unknown"


def death(left: dict[str, Any], code: int = 9, *, dies: bool = True) -> Seen:
    found = hello([], [], [{"dies": True}] if dies else [], code=code)
    found.cluster["death"] = {
        **found.cluster["hello"],
        "left": {name: left.get(name, []) for name in found.target.names},
    }
    return found


def test_death() -> None:
    assert not judged("MPI04", death({}))
    (one,) = judged("MPI04", death({"node2": ["12 python", "13 hydra"]}))
    assert (one.verdict, one.where) == ("fail", ("node2",))
    assert one.observed == "2 processes of a dead job are left: 12 python; 13 hydra"
    assert one.remedy == "ssh 10.0.0.2 sudo kill -9 12 13"
    (one,) = judged("MPI04", death({}, code=124))
    assert "did not end by itself" in one.observed
    assert judged("MPI04", death({}, dies=False))[0].verdict == "unknown"
    assert judged("MPI04", death({"node3": {"error": "too slow"}}))[0].verdict == "unknown"


def rates(seconds: float, num_machines: int = 3) -> Seen:
    words = [{"num_machines": num_machines}, {"size_bytes": 1 << 20, "seconds": seconds}]
    found = hello(words)
    found.cluster["allreduce"] = found.cluster["hello"]
    found.cluster["ways"] = {"node1 node2": {"bytes_per_second": 100 << 20}, "node2 node1": {"error": "lost"}}
    return found


def test_rate() -> None:
    assert bus_bytes_per_second(1 << 20, 1.0, 4) == 1.5 * (1 << 20)
    assert not judged("PRF02", rates(0.02))
    (one,) = judged("PRF02", rates(0.2))
    assert (one.verdict, one.where) == ("warn", ())
    assert one.observed == "Allreduce moves 6.67 MiB/s on each way; the slowest way has 100 MiB/s"
    assert one.remedy
    assert judged("PRF02", rates(0.2, num_machines=1))[0].verdict == "skip"
