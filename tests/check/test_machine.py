"""The judges of the shared user, clocks, limits, shared memory and leftovers of dead jobs, on made-up answers."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from check.made_up_machines import MIB, NODES, ROOM, changed, healthy, judged, nofile, only
from jobs import until
from mpitrain.check.check import Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.node import account, machine
from mpitrain.check.run import judge

MINE = [name for name in CHECKS if name[:3] in ("USR", "CLK", "LIM", "LEF") or name == "CON01"]


@pytest.mark.parametrize("name", MINE)
def test_a_healthy_cluster(name: str) -> None:
    assert judged(name, healthy()) == []


@pytest.mark.parametrize("name", MINE)
def test_without_an_answer_nothing_is_known(name: str) -> None:
    seen = healthy()
    error = {"error": "no answer within 8 s"}
    for node in seen.nodes.values():
        node.update(dict.fromkeys(node, error))
    seen.cluster["clock"] = error
    assert {result.verdict for result in judge([CHECKS[name]], seen)} == {"unknown"}


def test_our_own_probe_is_nobody_who_computes() -> None:
    assert {os.getpid(), os.getppid()} <= machine._ancestors()
    assert 1 not in machine._ancestors()


def test_no_arguments_of_other_peoples_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The findings about a rank without a parent and about busy programs show no arguments."""
    secret = "--password=hunter2"
    line = f"PMI_RANK=0 {sys.executable} -c 'import time; time.sleep(1000)' {secret} >/dev/null 2>&1 & echo $!"
    number = int(subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout)
    monkeypatch.setattr(account, "_YOUNG_PROCESS_SECONDS", -1.0)
    name = Path(sys.executable).name[:15]
    try:
        until(lambda: Path(f"/proc/{number}/comm").read_text() == f"{name}\n")  # until then it is still a shell
        found = machine._owner_and_program(number)
        ranks = [one for one in account.leftovers({"patterns": []})["processes"] if one["pid"] == number]
    finally:
        os.kill(number, signal.SIGKILL)
    assert found == {"user": getpass.getuser(), "program": name}
    assert [one["program"] for one in ranks] == [found["program"]]


def test_open_files() -> None:
    assert judged("LIM01", nofile(None)) == []
    assert judged("LIM01", nofile(1024)) == []
    only("LIM01", nofile(1023), "warn", "node2", "a job may have 1023 files open", "--tags limits")
    assert judged("LIM01", nofile(1023))[0].allowed.startswith("1024 or more; 160 is the least")  # 3 times 8
    only("LIM01", nofile(159), "fail", "node2", "a job may have 159 files open", "--tags limits")
    only("LIM01", nofile(64), "fail", "node2", "a job may have 64 files open", "--tags limits")


def test_open_files_of_many_ranks() -> None:
    seen = nofile(4096)
    seen.nodes["node1"]["processors"].update(usable=2048)
    least = 64 + 4 * (2048 + 16)
    only("LIM01", seen, "fail", "node2", "4096 files", "--tags limits --limit {limit}")
    assert judged("LIM01", seen)[0].allowed.startswith(f"{least} or more; {least} is the least")
    # If set-up's value is also too low, its line has the value that is needed.
    seen.target = replace(seen.target, settings={**seen.target.settings, "mpitrain_nofile": 1024})
    assert judged("LIM01", seen)[0].remedy.endswith(f"-e mpitrain_nofile={least}")


def locked(most: int | None, *, has_rdma: bool = True) -> Seen:
    return changed("shell", limits={"nofile": 65536, "memlock_bytes": most}, has_rdma=has_rdma)


def test_locked_memory() -> None:
    only("LIM02", locked(65536), "fail", "node2", "a job may lock only 64 KiB", "--tags limits")
    only("LIM02", locked(1024 * MIB), "warn", "node2", "a job may lock only 1,048,576 KiB", "--tags limits")
    only("LIM02", locked(65536, has_rdma=False), "skip", "node2", "no RDMA")


def test_memory() -> None:
    only("LIM03", changed("resources", available_bytes=100 * MIB), "fail", "node2", "100 MiB of 16,384 MiB", "ps -eo")
    only("LIM03", changed("resources", available_bytes=400 * MIB), "warn", "node2", "400 MiB of 16,384 MiB")


def test_processors() -> None:
    only("LIM04", changed("processors", usable=1), "fail", "node2", "may use 1 of 8 processors", "taskset")
    only("LIM04", changed("processors", usable=6), "warn", "node2", "may use 6 of 8 processors")
    only("LIM04", changed("processors", quota=2.5), "warn", "node2", "has time for only 2.5", "CPUQuota")


def test_somebody_computes() -> None:
    one = {"pid": 77, "cores": 1.0, "user": "ada", "program": "python"}
    assert judged("LIM04", changed("processors", busy=[one])) == []
    two = {**one, "pid": 78, "cores": 1.5}
    found = "other processes compute: python of ada (pid 78) and 1 more"
    only("LIM04", changed("processors", busy=[two, one]), "warn", "node2", found, "-p 78,77")


def test_shared_memory_at_logout() -> None:
    only("LIM05", changed("resources", removes_ipc=True), "warn", "node2", "RemoveIPC=yes", "--tags limits")
    only("LIM05", changed("resources", removes_ipc=None), "skip", "node2", "no systemd-logind")


def test_governors() -> None:
    only("LIM06", changed("resources", governors=["powersave"]), "warn", "node2", "powersave", "--tags tuning")
    fixed = changed("resources", governor_drivers=["acpi-cpufreq"], governors=["powersave"])
    assert judged("LIM06", fixed)[0].allowed == "performance"
    only("LIM06", changed("resources", governors=[]), "skip", "node2", "does not set")
    seen = healthy()
    for name in NODES:
        seen.nodes[name]["resources"]["governors"] = []
    only("LIM06", seen, "skip", "", "no node sets")
    wanted = healthy(settings={"mpitrain_tuning": True})
    assert [one.verdict for one in judged("LIM06", wanted)] == ["warn"] * 3


@pytest.mark.parametrize(
    ("place", "verdict", "found"),
    [
        (None, "fail", "there is no /tmp"),
        ({**ROOM, "free_bytes": 10 * MIB}, "fail", "/tmp has 10 MiB free of 8,192 MiB"),
        ({**ROOM, "free_bytes": 500 * MIB}, "warn", "/tmp has 500 MiB free of 8,192 MiB"),
        ({**ROOM, "free_files": 0}, "fail", "/tmp has no inodes left"),
        ({**ROOM, "is_read_only": True}, "fail", "/tmp is read-only"),
    ],
)
def test_disks(place: dict[str, Any] | None, verdict: str, found: str) -> None:
    seen = healthy()
    seen.nodes["node2"]["resources"]["places"]["/tmp"] = place
    only("LIM07", seen, verdict, "node2", found, "ssh 10.0.0.2 ")


@pytest.mark.parametrize(
    ("size_mib", "free_mib", "memory_mib", "verdict", "found"),
    [
        (64, 64, 16384, "fail", "/dev/shm has 64 MiB"),
        (512, 512, 16384, "warn", "/dev/shm has 512 MiB"),
        (512, 512, 1024, "", ""),
        (8192, 10, 16384, "fail", "/dev/shm has 10 MiB free of 8192 MiB"),
    ],
)
def test_shared_memory(size_mib: int, free_mib: int, memory_mib: int, verdict: str, found: str) -> None:
    seen = changed("resources", memory_bytes=memory_mib * MIB)
    place = {**ROOM, "size_bytes": size_mib * MIB, "free_bytes": free_mib * MIB}
    seen.nodes["node2"]["resources"]["places"]["/dev/shm"] = place
    if verdict:
        only("CON01", seen, verdict, "node2", found, "ssh 10.0.0.2 ")
    else:
        assert judged("CON01", seen) == []


def test_shared_memory_of_docker() -> None:
    seen = changed("resources", container="docker")
    seen.nodes["node2"]["resources"]["places"]["/dev/shm"] = {**ROOM, "size_bytes": 64 * MIB}
    only("CON01", seen, "fail", "node2", "64 MiB", "docker run --shm-size=8g")


@pytest.mark.parametrize("name", ["LIM01", "LIM02"])
def test_a_shell_that_was_refused(name: str) -> None:
    seen = healthy()
    seen.nodes["node2"]["shell"] = {"refused": "ended with code 255: Connection reset"}
    only(name, seen, "unknown", "node2", "ended with code 255: Connection reset")
