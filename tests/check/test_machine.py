"""The judges of the shared user, clocks, limits, memory, and of what dead jobs have left, on made-up answers."""

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

from check.made_up import MIB, judged, of_each, only, sound, verdicts
from jobs import until
from mpitrain.check.check import Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.node import account, machine

NODES = ("node1", "node2", "node3")
ROOM = {"size_bytes": 8192 * MIB, "free_bytes": 4096 * MIB, "files": 1000, "free_files": 900}
ROOM |= {"is_read_only": False, "is_writable": True, "mode": 0o1777}
ACCOUNT = {"uid": 1900, "gid": 1900, "uid_owner": "cluster", "group": "cluster", "shell": "/bin/bash"}
ACCOUNT |= {"shell_works": True, "home": "/home/cluster", "home_owner": 1900, "expired": False}
ACCOUNT |= {"must_change_password": False, "nologin": ""}
RESOURCES = {"container": "", "memory_bytes": 16384 * MIB, "available_bytes": 8192 * MIB, "removes_ipc": False}
RESOURCES |= {"governors": ["schedutil"], "governor_drivers": ["amd-pstate"]}
MINE = [name for name in CHECKS if name[:3] in ("USR", "CLK", "LIM", "LEF") or name == "CON01"]


def healthy(**fields: Any) -> Seen:
    made = of_each(3, {}, **fields)
    for name in NODES:
        made.nodes[name] = {
            "account": {**ACCOUNT},
            "time_service": {"synchronized": True, "daemons": ["chrony"], "container": ""},
            "shell": {"limits": {"nofile": 65536, "memlock_bytes": None}, "has_rdma": True},
            "resources": {**RESOURCES, "places": {path: {**ROOM} for path in ("/", "/tmp", "/dev/shm")}},
            "processors": {"machine": 8, "usable": 8, "quota": None, "busy": []},
            "leftovers": {"processes": [], "files": []},
        }
    made.cluster["clock_offsets"] = {name: {"ahead_seconds": 0.001, "uncertain_seconds": 0.002} for name in NODES}
    return made


def changed(section: str, **fields: Any) -> Seen:
    made = healthy()
    made.nodes["node2"][section].update(fields)
    return made


def room(path: str, place: dict[str, Any] | None, **resources: Any) -> Seen:
    """The second node has another place there, or none."""
    made = changed("resources", **resources)
    made.nodes["node2"]["resources"]["places"][path] = place and {**ROOM, **place}
    return made


@pytest.mark.parametrize("name", MINE)
def test_a_healthy_cluster_and_one_without_answers(name: str) -> None:
    sound(name, healthy())
    silent, error = healthy(), {"error": "no answer within 8 s"}
    for node in silent.nodes.values():
        node.update(dict.fromkeys(node, error))
    silent.cluster["clock_offsets"] = error
    assert verdicts(name, silent) == {"unknown"}


def test_another_uid() -> None:
    found = "user cluster has uid 1950 and gid 1900"
    one = only("USR01", changed("account", uid=1950), "fail", "node2", found, "sudo usermod -u 1900 -g 1900 cluster")
    assert "find / -xdev -uid 1950 -exec chown -h 1900:1900 {} +" in one.remedy and "groupmod" not in one.remedy
    group = changed("account", gid=7, group="cluster")
    only("USR01", group, "fail", "node2", "uid 1900 and gid 7", "'sudo groupmod -g 1900 cluster && sudo usermod")
    # A group that others may be in is not renumbered.
    users = changed("account", uid=1950, gid=100, group="users")
    one = only("USR01", users, "fail", "node2", "uid 1950 and gid 100", "getent group users 1900'")
    assert "groupmod" not in one.remedy
    assert "uid 1950 is to be 1900 and gid 100 is to be 1900" in one.remedy
    # Other numbers than ours on all nodes are right.
    others = healthy()
    for name in NODES:
        others.nodes[name]["account"].update(uid=1000, gid=1000, home_owner=1000)
    sound("USR01", others)
    others.nodes["node3"]["account"].update(uid=1001)
    only("USR01", others, "fail", "node3", "uid 1001", "usermod -u 1000")


def test_no_user() -> None:
    only("USR01", changed("account", uid=None, uid_owner=None), "fail", "node2", "there is no user", "--tags users")
    taken = changed("account", uid=None, uid_owner="bob")
    only("USR01", taken, "fail", "node2", "there is no user cluster, and uid 1900 belongs to bob", "mpitrain_uid")
    only("USR02", taken, "skip", "node2", "there is no user")


@pytest.mark.parametrize(
    ("fields", "found", "remedy"),
    [
        (
            {"shell": "/usr/sbin/nologin"},
            "/usr/sbin/nologin, refuses",
            "ssh 10.0.0.2 sudo usermod -s /bin/bash cluster",
        ),
        ({"shell": "/bin/zsh", "shell_works": False}, "/bin/zsh, does not exist", "usermod -s"),
        ({"home_owner": None}, "/home/cluster, does not exist", "--tags users"),
        ({"home_owner": 0}, "belongs to uid 0", "sudo chown cluster: /home/cluster"),
        ({"home_owner": 0, "home": "/home/a b"}, "belongs to uid 0", "sudo chown cluster: '\"'\"'/home/a b'\"'\"''"),
        ({"expired": True}, "has expired", "sudo chage -E -1 cluster"),
        ({"must_change_password": True}, "must choose another password", "sudo chage -d -1 -M -1 cluster"),
        ({"nologin": "/etc/nologin"}, "lets only root log in", "sudo rm /etc/nologin"),
    ],
)
def test_an_account_that_cannot_log_in(fields: dict[str, Any], found: str, remedy: str) -> None:
    only("USR02", changed("account", **fields), "fail", "node2", found, remedy)


def test_accounts_that_may_log_in_and_those_of_which_nothing_is_known() -> None:
    sound("USR02", changed("account", uid=0, gid=0, home_owner=0, nologin="/etc/nologin"))  # root may all the same
    only("USR02", changed("account", expired=None), "skip", "node2", "can only be read as root")


def clocks(uncertain: float = 0.002, **ahead: Any) -> Seen:
    made = healthy()
    for node, seconds in ahead.items():
        made.cluster["clock_offsets"][node] = {"ahead_seconds": seconds, "uncertain_seconds": uncertain}
    return made


def test_a_clock_that_is_wrong() -> None:
    found = "its clock is 300 s ahead of the others"
    only("CLK01", clocks(node3=300.0), "fail", "node3", found, "sudo chronyc makestep")
    only("CLK01", clocks(node3=-1.0), "warn", "node3", "its clock is 1.0 s behind the others")
    only("CLK01", clocks(uncertain=2.0, node3=4.5), "fail", "node3", "2.5 s ahead")
    # A slow answer is no wrong clock, and ours may be the wrong one.
    sound("CLK01", clocks(node3=0.2), clocks(uncertain=2.0, node3=2.1), clocks(node1=3e2, node2=3e2, node3=3e2))
    silent = healthy()
    silent.cluster["clock_offsets"]["node2"] = {"error": "no answer within 3 s"}
    only("CLK01", silent, "unknown", "node2", "no answer")


@pytest.mark.parametrize(
    ("service", "remedy"),
    [
        ({"daemons": [], "container": ""}, "--tags time"),
        ({"daemons": ["systemd-timesyncd"], "container": ""}, "systemctl restart systemd-timesyncd"),
        ({"daemons": [], "container": "docker"}, "on the host of the container node3"),
    ],
)
def test_who_can_set_the_clock(service: dict[str, Any], remedy: str) -> None:
    made = clocks(node3=9.0)
    made.nodes["node3"]["time_service"].update(service)
    only("CLK01", made, "fail", "node3", "9.0 s ahead", remedy)


@pytest.mark.parametrize(
    ("service", "verdict", "found", "remedy"),
    [
        ({"synchronized": False, "daemons": []}, "warn", "no time daemon", "--tags time"),
        ({"synchronized": False}, "warn", "chrony runs, but has not", "chronyc -n"),
        ({"synchronized": None}, "unknown", "neither timedatectl nor chronyc", ""),
        ({"container": "docker"}, "skip", "has its host's clock", ""),
    ],
)
def test_who_keeps_the_clock(service: dict[str, Any], verdict: str, found: str, remedy: str) -> None:
    only("CLK02", changed("time_service", **service), verdict, "node2", found, remedy)


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


def limits(nofile: int | None, memlock_bytes: int | None = None, *, has_rdma: bool = True) -> Seen:
    return changed("shell", limits={"nofile": nofile, "memlock_bytes": memlock_bytes}, has_rdma=has_rdma)


def test_open_files() -> None:
    sound("LIM01", limits(None), limits(1024))
    allowed = "1024 or more; 160 is the least"  # 3 times 8 ranks
    for most, verdict in ((1023, "warn"), (159, "fail"), (64, "fail")):
        only("LIM01", limits(most), verdict, "node2", f"a job may have {most} files open", "--tags limits", allowed)
    many = limits(4096)
    many.nodes["node1"]["processors"].update(usable=2048)
    least = 64 + 4 * (2048 + 16)
    set_up = "--tags limits --limit {limit}"
    only("LIM01", many, "fail", "node2", "4096 files", set_up, f"{least} or more; {least} is the least")
    # If set-up's value is also too low, its line has the value that is needed.
    many.target = replace(many.target, settings={**many.target.settings, "mpitrain_nofile": 1024})
    assert judged("LIM01", many)[0].remedy.endswith(f"-e mpitrain_nofile={least}")


@pytest.mark.parametrize(
    ("id_", "made", "verdict", "found", "remedy"),
    [
        ("LIM02", limits(65536, 65536), "fail", "a job may lock only 64 KiB", "--tags limits"),
        ("LIM02", limits(65536, 1024 * MIB), "warn", "a job may lock only 1,048,576 KiB", "--tags limits"),
        ("LIM02", limits(65536, 65536, has_rdma=False), "skip", "no RDMA", ""),
        ("LIM03", changed("resources", available_bytes=100 * MIB), "fail", "100 MiB of 16,384 MiB", "ps -eo"),
        ("LIM03", changed("resources", available_bytes=400 * MIB), "warn", "400 MiB of 16,384 MiB", ""),
        ("LIM04", changed("processors", usable=1), "fail", "may use 1 of 8 processors", "taskset"),
        ("LIM04", changed("processors", usable=6), "warn", "may use 6 of 8 processors", ""),
        ("LIM04", changed("processors", quota=2.5), "warn", "has time for only 2.5", "CPUQuota"),
        ("LIM05", changed("resources", removes_ipc=True), "warn", "RemoveIPC=yes", "--tags limits"),
        ("LIM05", changed("resources", removes_ipc=None), "skip", "no systemd-logind", ""),
        ("LIM06", changed("resources", governors=["powersave"]), "warn", "powersave", "--tags tuning"),
        ("LIM06", changed("resources", governors=[]), "skip", "does not set", ""),
        ("LIM07", room("/tmp", None), "fail", "there is no /tmp", "ssh 10.0.0.2 "),
        ("LIM07", room("/tmp", {"free_bytes": 10 * MIB}), "fail", "/tmp has 10 MiB free of 8,192", "ssh 10.0.0.2 "),
        ("LIM07", room("/tmp", {"free_bytes": 500 * MIB}), "warn", "/tmp has 500 MiB free of 8,192", "ssh 10.0.0.2 "),
        ("LIM07", room("/tmp", {"free_files": 0}), "fail", "/tmp has no inodes left", "ssh 10.0.0.2 "),
        ("LIM07", room("/tmp", {"is_read_only": True}), "fail", "/tmp is read-only", "ssh 10.0.0.2 "),
        ("CON01", room("/dev/shm", {"size_bytes": 64 * MIB}), "fail", "/dev/shm has 64 MiB", "ssh 10.0.0.2 "),
        ("CON01", room("/dev/shm", {"size_bytes": 512 * MIB}), "warn", "/dev/shm has 512 MiB", "ssh 10.0.0.2 "),
        ("CON01", room("/dev/shm", {"free_bytes": 10 * MIB}), "fail", "has 10 MiB free of 8192 MiB", "ssh 10.0.0.2 "),
        ("CON01", room("/dev/shm", {"size_bytes": 64 * MIB}, container="docker"), "fail", "64 MiB", "--shm-size=8g"),
    ],
)
def test_limits(id_: str, made: Seen, verdict: str, found: str, remedy: str) -> None:
    only(id_, made, verdict, "node2", found, remedy)


def test_what_is_enough() -> None:
    """A small shared memory on a small machine; a governor that the driver has fixed; on no node a governor."""
    sound("CON01", room("/dev/shm", {"size_bytes": 512 * MIB, "free_bytes": 512 * MIB}, memory_bytes=1024 * MIB))
    fixed = changed("resources", governor_drivers=["acpi-cpufreq"], governors=["powersave"])
    assert judged("LIM06", fixed)[0].allowed == "performance"
    nothing = healthy()
    for name in NODES:
        nothing.nodes[name]["resources"]["governors"] = []
    only("LIM06", nothing, "skip", "", "no node sets")
    repaired = healthy()
    repaired.nodes["node2"]["resources"]["governors"] = ["performance"]
    assert [(one.verdict, one.where) for one in judged("LIM06", repaired)] == [
        ("warn", (name,)) for name in NODES if name != "node2"
    ]
    wanted = healthy(settings={"mpitrain_tuning": True})
    assert [one.verdict for one in judged("LIM06", wanted)] == ["warn"] * 3


def test_somebody_computes() -> None:
    one = {"pid": 77, "cores": 1.0, "user": "ada", "program": "python"}
    sound("LIM04", changed("processors", busy=[one]))
    two = {**one, "pid": 78, "cores": 1.5}
    found = "other processes compute: python of ada (pid 78) and 1 more"
    only("LIM04", changed("processors", busy=[two, one]), "warn", "node2", found, "-p 78,77")


@pytest.mark.parametrize("name", ["LIM01", "LIM02"])
def test_a_shell_that_was_refused(name: str) -> None:
    made = healthy()
    made.nodes["node2"]["shell"] = {"refused": "ended with code 255: Connection reset"}
    only(name, made, "unknown", "node2", "ended with code 255: Connection reset")


def test_processes_of_dead_jobs() -> None:
    one = {"pid": 41, "age_seconds": 7300.0, "program": "python"}
    found = "2 processes of a dead job, the oldest 2 h old: python of cluster (pid 41, 42)"
    made = changed("leftovers", processes=[one, {**one, "pid": 42}])
    only("LEF01", made, "warn", "node2", found, "ssh 10.0.0.2 sudo kill -9 41 42")


def test_files_of_dead_jobs() -> None:
    """Only those that were found are removed."""

    def left(*names: str) -> Seen:
        file = {"bytes": 3 * MIB, "age_seconds": 99.0, "pattern": "mpich_shm_*"}
        return changed("leftovers", files=[{**file, "path": f"/dev/shm/mpich_shm_{name}"} for name in names])

    only("LEF02", left("a"), "warn", "node2", "1 file of dead jobs", "sudo rm -rf /dev/shm/mpich_shm_a")
    nine = left(*"012345678")
    only(
        "LEF02", nine, "warn", "node2", "9 files of dead jobs in /dev/shm, 27 MiB", "mpich_shm_7 /dev/shm/mpich_shm_8'"
    )
    odd = "$(reboot) 'a"
    program, address, remote = shlex.split(judged("LEF02", left(odd))[0].remedy)
    assert (program, address) == ("ssh", "10.0.0.2")
    assert shlex.split(remote) == ["sudo", "rm", "-rf", f"/dev/shm/mpich_shm_{odd}"]
    (one,) = judged("LEF02", left(*map(str, range(103))))
    assert one.remedy.count("/dev/shm/") == 100
    assert one.remedy.endswith("# then check again, for the other 3")
