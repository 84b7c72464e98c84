"""The judges of MPI."""

from __future__ import annotations

from typing import Any

import pytest

from check.made_up import SET_UP, judged, only, seen, sound, verdicts
from mpitrain.check.check import Seen
from mpitrain.check.checks.performance import bus_bytes_per_second

HYDRA = "HYDRA build details:\n    Version:                                 5.0.2\n"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: today"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"
STEPS = ["Allreduce of 1 bytes", "Bcast of 1 bytes"]
NO_LIBRARY = "ImportError: libmpi.so.12"


def programs(library: str = MPICH, launcher: str = HYDRA, why: str = "") -> Seen:
    found = seen(1)
    mpi = {"why": library} if library.startswith("ImportError") else {"library": library}
    mpiexec = {"path": "/b/mpiexec", "text": launcher, "why": why}
    found.nodes["node1"] = {"programs": {"mpi": mpi, "mpiexec": mpiexec}}
    return found


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        (programs(library=OPEN_MPI), "fail", "/b/mpiexec belongs to MPICH 5.0.2, mpi4py loads Open MPI 5.0.11"),
        (programs(launcher="mpiexec (OpenRTE) 4.1.4"), "fail", "belongs to Open MPI 4.1.4, mpi4py loads MPICH 5.0.2"),
        (programs(library="MPICH Version: 4.2.0"), "warn", "MPICH 5.0.2, mpi4py loads MPICH 4.2.0"),
        (programs(library=NO_LIBRARY), "fail", f"cannot load an MPI library: {NO_LIBRARY}"),
        (programs(why="not found"), "fail", "/b/mpiexec does not run: not found"),
    ],
)
def test_families(found: Seen, verdict: str, words: str) -> None:
    assert only("MPI01", found, verdict, "node1", words, "runtime").allowed


def test_a_library_that_only_one_node_cannot_load_is_not_the_shares() -> None:
    sound("MPI01", programs(), programs(library="Intel(R) MPI Library 2021.18"))  # it uses Hydra's protocol
    found = seen(2)
    broken = programs(library="ImportError: file too short").nodes["node1"]
    found.nodes = {"node1": programs().nodes["node1"], "node2": broken}
    assert "--tags" not in only("MPI01", found, "fail", "node2", "", "from mpi4py import MPI").remedy
    found.nodes["node1"] = broken
    assert {one.remedy for one in judged("MPI01", found)} == {SET_UP.format(tag="runtime")}


def hello(*ranks: list[dict[str, Any]], code: int = 0, error: str = "") -> Seen:
    """A job on three nodes, with the output of each rank."""
    found = seen(3)
    said = {str(number): words for number, words in enumerate(ranks)}
    found.cluster["hello"] = {"code": code, "seconds": 25.0, "said": said, "error_text": error}
    return found


def rank(number: int, size: int = 3, seconds: float = 0.5, **fields: Any) -> list[dict[str, Any]]:
    """The output of a rank without a fault."""
    host = {"host": f"node{number + 1}", **fields}
    done = [{"step": step, "is_right": True} for step in STEPS]
    return [host, {"size": size, "first_seconds": seconds, "steps": STEPS}, *done]


def begun(number: int) -> list[dict[str, Any]]:
    return rank(number)[:1]


ALONE = hello(*(rank(number, size=1) for number in range(3)))


@pytest.mark.parametrize(
    ("found", "verdict", "where", "words"),
    [
        (ALONE, "fail", "", "3 ranks report a world of 1 ranks"),
        (hello(begun(0), begun(1), code=124), "fail", "node3", "no rank began; no end within 25 s"),  # they wait for 2
        (hello(rank(0), rank(1), code=1, error="x"), "fail", "node3", "no rank began; mpiexec ended with code 1: x"),
        (hello(rank(0), rank(1, host="node1"), rank(2)), "fail", "", "several ranks were on one host: node1"),
        (hello(rank(0, seconds=17.0), rank(1), rank(2)), "warn", "", "MPI_Init takes 17 s"),
    ],
)
def test_a_job_of_all_nodes(found: Seen, verdict: str, where: str, words: str) -> None:
    (one,) = judged("MPI02", found)
    assert (one.verdict, one.observed) == (verdict, words) and one.remedy
    assert verdict == "warn" or "host" in words or one.where == tuple(where.split())
    assert found is not ALONE or one.allowed == "one world of 3 ranks, one on each node"


def test_nodes_that_did_not_answer() -> None:
    sound("MPI02", hello(rank(0), rank(1), rank(2)))
    found = judged("MPI02", hello(begun(0), begun(1), rank(2), code=124))
    words = "its rank began, but did not get through MPI_Init; no end within 25 s"
    assert [(one.where, one.observed) for one in found] == [(("node1",), words), (("node2",), words)]
    assert all(one.remedy for one in found)


def test_sums() -> None:
    sound("MPI03", hello(rank(0), rank(1), rank(2)))
    wrong, hung = rank(1), rank(2)[:-1]
    wrong[2] = {"step": STEPS[0], "is_right": False}
    first, second = judged("MPI03", hello(rank(0), wrong, hung, code=124))
    assert (first.verdict, first.where, first.observed) == ("fail", ("node2",), "wrong result: Allreduce of 1 bytes")
    assert (second.where, second.observed) == (("node3",), "Bcast of 1 bytes did not end; no end within 25 s")
    assert first.remedy != second.remedy
    assert verdicts("MPI03", hello([], [], [])) == {"unknown"}


def death(left: dict[str, Any], code: int = 9, *, dies: bool = True) -> Seen:
    found = hello([], [], [{"dies": True}] if dies else [], code=code)
    by_node = {name: left.get(name, []) for name in found.target.names}
    found.cluster["death"] = {**found.cluster["hello"], "left": by_node}
    return found


def test_death() -> None:
    sound("MPI04", death({}))
    words = "2 processes of a dead job are left: 12 python; 13 hydra"
    left = death({"node2": ["12 python", "13 hydra"]})
    only("MPI04", left, "fail", "node2", words, "ssh 10.0.0.2 sudo kill -9 12 13")
    (one,) = judged("MPI04", death({}, code=124))
    assert "did not end by itself" in one.observed
    for unknown in (death({}, dies=False), death({"node3": {"error": "too slow"}})):
        assert judged("MPI04", unknown)[0].verdict == "unknown"


def rates(seconds: float, num_machines: int = 3) -> Seen:
    found = hello([{"num_machines": num_machines}, {"size_bytes": 1 << 20, "seconds": seconds}])
    found.cluster["allreduce"] = found.cluster["hello"]
    found.cluster["ways"] = {"node1 node2": {"bytes_per_second": 100 << 20}, "node2 node1": {"error": "lost"}}
    return found


def test_rate() -> None:
    assert bus_bytes_per_second(1 << 20, 1.0, 4) == 1.5 * (1 << 20)
    sound("PRF02", rates(0.02))
    words = "Allreduce moves 6.67 MiB/s on each way; the slowest way has 100 MiB/s"
    only("PRF02", rates(0.2), "warn", "", words)
    assert verdicts("PRF02", rates(0.2, num_machines=1)) == {"skip"}
