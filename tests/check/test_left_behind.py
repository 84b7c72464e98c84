"""The judges of processes and files that dead jobs have left."""

from __future__ import annotations

import shlex

from check.made_up_machines import MIB, changed, judged, only


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
        "sudo rm -rf /dev/shm/mpich_shm_a",
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
    assert shlex.split(remote) == ["sudo", "rm", "-rf", path]
    many = [{**file, "path": f"/dev/shm/mpich_shm_{number}"} for number in range(103)]
    (one,) = judged("LEF02", changed("leftovers", files=many))
    assert one.remedy.count("/dev/shm/") == 100
    assert one.remedy.endswith("# then check again, for the other 3")
