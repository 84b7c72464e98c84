"""The judges of the shared user, clocks, limits, shared memory, and what dead jobs leave, on made-up answers."""

from __future__ import annotations

import getpass
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diagnostics.made_up import seen as made_up
from jobs import until
from mpitrain.diagnostics.check import Result, Seen
from mpitrain.diagnostics.checks import CHECKS
from mpitrain.diagnostics.judge import judge
from mpitrain.diagnostics.node import account, machine

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


def test_another_uid() -> None:
    found = "user cluster has uid 1950 and gid 1900"
    only("USR01", changed("account", uid=1950), "fail", "node2", found, "sudo usermod -u 1900 -g 1900 cluster")
    only(
        "USR01",
        changed("account", gid=7, group="cluster"),
        "fail",
        "node2",
        "uid 1900 and gid 7",
        "'sudo groupmod -g 1900 cluster && sudo usermod",
    )
    assert (
        "find / -xdev -uid 1950 -exec chown -h 1900:1900 {} +"
        in judged("USR01", changed("account", uid=1950))[0].remedy
    )


def test_a_group_that_others_may_be_in_is_not_renumbered() -> None:
    seen = changed("account", uid=1950, gid=100, group="users")
    only("USR01", seen, "fail", "node2", "uid 1950 and gid 100", "getent group users 1900'")
    remedy = judged("USR01", seen)[0].remedy
    assert "groupmod" not in remedy
    assert "uid 1950 is to be 1900 and gid 100 is to be 1900" in remedy
    assert "groupmod" not in judged("USR01", changed("account", uid=1950))[0].remedy


def test_our_own_probe_is_nobody_who_computes() -> None:
    assert {os.getpid(), os.getppid()} <= machine._ancestors()
    assert 1 not in machine._ancestors()


def test_an_expiry_that_may_not_be_read_is_no_pass() -> None:
    only("USR02", changed("account", expired=None), "skip", "node2", "can only be read as root")
    only("USR02", changed("account", expired=True), "fail", "node2", "has expired", "chage -E -1 cluster")


def test_no_arguments_of_other_peoples_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank that has lost its parent, and of whoever computes."""
    secret = "--password=hunter2"
    line = f"PMI_RANK=0 {sys.executable} -c 'import time; time.sleep(1000)' {secret} >/dev/null 2>&1 & echo $!"
    number = int(subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout)
    monkeypatch.setattr(account, "_YOUNG_PROCESS_SECONDS", -1.0)
    name = Path(sys.executable).name[:15]
    try:
        until(lambda: Path(f"/proc/{number}/comm").read_text() == f"{name}\n")  # before, it is still a shell
        found = machine._owner_and_program(number)
        ranks = [one for one in account.leftovers({"patterns": []})["processes"] if one["pid"] == number]
    finally:
        os.kill(number, signal.SIGKILL)
    assert found == {"user": getpass.getuser(), "program": name}
    assert [one["program"] for one in ranks] == [found["program"]]


def test_a_home_with_a_space() -> None:
    (one,) = judged("USR02", changed("account", home_owner=0, home="/home/a b"))
    assert shlex.split(one.remedy)[2] == "sudo chown cluster: '/home/a b'"


def test_no_user() -> None:
    only("USR01", changed("account", uid=None, uid_owner=None), "fail", "node2", "there is no user", "--tags users")
    taken = changed("account", uid=None, uid_owner="bob")
    only("USR01", taken, "fail", "node2", "there is no user cluster, and uid 1900 belongs to bob", "mpitrain_uid")
    only("USR02", taken, "skip", "node2", "there is no user")


def test_other_numbers_than_ours_on_all_nodes_are_right() -> None:
    seen = healthy()
    for name in NODES:
        seen.nodes[name]["account"].update(uid=1000, gid=1000, home_owner=1000)
    assert judged("USR01", seen) == []
    seen.nodes["node3"]["account"].update(uid=1001)
    only("USR01", seen, "fail", "node3", "uid 1001", "usermod -u 1000")


@pytest.mark.parametrize(
    ("fields", "found", "remedy"),
    [
        (
            {"shell": "/usr/sbin/nologin"},
            "/usr/sbin/nologin, refuses logins",
            "ssh 10.0.0.2 sudo usermod -s /bin/bash cluster",
        ),
        ({"shell": "/bin/zsh", "shell_works": False}, "/bin/zsh, does not exist", "usermod -s"),
        ({"home_owner": None}, "/home/cluster, does not exist", "--tags users"),
        ({"home_owner": 0}, "belongs to uid 0", "sudo chown cluster: /home/cluster"),
        ({"expired": True}, "has expired", "sudo chage -E -1 cluster"),
        ({"must_change_password": True}, "must choose another password", "sudo chage -d -1 -M -1 cluster"),
        ({"nologin": "/etc/nologin"}, "lets only root log in", "sudo rm /etc/nologin"),
    ],
)
def test_an_account_that_cannot_log_in(fields: dict[str, Any], found: str, remedy: str) -> None:
    only("USR02", changed("account", **fields), "fail", "node2", found, remedy)


def test_root_may_log_in_all_the_same() -> None:
    account = {"uid": 0, "gid": 0, "home_owner": 0, "nologin": "/etc/nologin"}
    assert judged("USR02", changed("account", **account)) == []


def clocks(uncertain: float = 0.002, **ahead: float) -> Seen:
    seen = healthy()
    for node, seconds in ahead.items():
        seen.cluster["clock"][node] = {"ahead_seconds": seconds, "uncertain_seconds": uncertain}
    return seen


def test_a_clock_that_is_wrong() -> None:
    only(
        "CLK01", clocks(node3=300.0), "fail", "node3", "its clock is 300 s ahead of the others", "sudo chronyc makestep"
    )
    only("CLK01", clocks(node3=-1.0), "warn", "node3", "its clock is 1.0 s behind the others")
    assert judged("CLK01", clocks(node3=0.2)) == []


def test_a_slow_answer_is_no_wrong_clock() -> None:
    assert judged("CLK01", clocks(uncertain=2.0, node3=2.1)) == []
    only("CLK01", clocks(uncertain=2.0, node3=4.5), "fail", "node3", "2.5 s ahead")


def test_our_own_clock_may_be_wrong() -> None:
    assert judged("CLK01", clocks(node1=300.0, node2=300.0, node3=300.0)) == []


@pytest.mark.parametrize(
    ("service", "remedy"),
    [
        ({"daemons": [], "container": ""}, "--tags time"),
        ({"daemons": ["systemd-timesyncd"], "container": ""}, "systemctl restart systemd-timesyncd"),
        ({"daemons": [], "container": "docker"}, "on the host of the container node3"),
    ],
)
def test_who_can_set_the_clock(service: dict[str, Any], remedy: str) -> None:
    seen = clocks(node3=9.0)
    seen.nodes["node3"]["time_service"].update(service)
    only("CLK01", seen, "fail", "node3", "9.0 s ahead", remedy)


def test_a_node_whose_clock_did_not_answer() -> None:
    seen = healthy()
    seen.cluster["clock"]["node2"] = {"error": "no answer within 3 s"}
    only("CLK01", seen, "unknown", "node2", "no answer")


def test_who_keeps_the_clock() -> None:
    only(
        "CLK02",
        changed("time_service", synchronized=False, daemons=[]),
        "warn",
        "node2",
        "no time daemon",
        "--tags time",
    )
    only(
        "CLK02", changed("time_service", synchronized=False), "warn", "node2", "chrony runs, but has not", "chronyc -n"
    )
    only("CLK02", changed("time_service", synchronized=None), "unknown", "node2", "neither timedatectl nor chronyc")
    only("CLK02", changed("time_service", container="docker"), "skip", "node2", "has its host's clock")


def nofile(most: int | None) -> Seen:
    return changed("shell", limits={"nofile": most, "memlock_bytes": None})


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
    # Where set-up would give too few as well, its line says how many.
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


def test_processes_of_dead_jobs() -> None:
    one = {"pid": 41, "age_seconds": 7300.0, "program": "python"}
    seen = changed("leftovers", processes=[one, {**one, "pid": 42}])
    found = "2 processes of a dead job, the oldest 2 h old: python of cluster (pid 41, 42)"
    only("LEF01", seen, "warn", "node2", found, "ssh 10.0.0.2 sudo kill -9 41 42")


def test_files_of_dead_jobs() -> None:
    file = {"path": "/dev/shm/mpich_shm_a", "bytes": 3 * MIB, "age_seconds": 99.0, "pattern": "mpich_shm_*"}
    only(
        "LEF02",
        changed("leftovers", files=[file]),
        "warn",
        "node2",
        "1 file of dead jobs",
        "sudo rm -f /dev/shm/mpich_shm_a",
    )
    seen = changed("leftovers", files=[{**file, "path": f"/dev/shm/mpich_shm_{number}"} for number in range(9)])
    only(
        "LEF02", seen, "warn", "node2", "9 files of dead jobs in /dev/shm, 27 MiB", "mpich_shm_7 /dev/shm/mpich_shm_8'"
    )


def test_only_the_files_that_were_found_are_removed() -> None:
    file = {"bytes": MIB, "age_seconds": 99.0, "pattern": "mpich_shm_*"}
    path = "/dev/shm/mpich_shm_$(reboot) 'a"
    (one,) = judged("LEF02", changed("leftovers", files=[{**file, "path": path}]))
    program, address, remote = shlex.split(one.remedy)
    assert (program, address) == ("ssh", "10.0.0.2")
    assert shlex.split(remote) == ["sudo", "rm", "-f", path]
    many = [{**file, "path": f"/dev/shm/mpich_shm_{number}"} for number in range(103)]
    (one,) = judged("LEF02", changed("leftovers", files=many))
    assert one.remedy.count("/dev/shm/") == 100
    assert one.remedy.endswith("# then check again, for the other 3")


@pytest.mark.parametrize("name", ["LIM01", "LIM02"])
def test_a_shell_that_was_refused(name: str) -> None:
    seen = healthy()
    seen.nodes["node2"]["shell"] = {"refused": "ended with code 255: Connection reset"}
    only(name, seen, "unknown", "node2", "ended with code 255: Connection reset")
