"""`mpitrain run` over the nodes of a cluster that the playbooks have set up, without faults and with faults.

Every fault is real. After each, nothing of the job is left on any node.
"""

from __future__ import annotations

import json
import os
import re
import signal
import uuid

import pytest
from launching import JOB_SECONDS, MOSTLY_MPICH, PYTHONS, SHARE, Job, as_user, left, run, write

from mpitrain.testbed import Bed

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("healed")]

SCRIPTS = {
    "hello.py": """
import mpitrain as mt, os, socket, sys, time
world = mt.init()
names = ("UCX_NET_DEVICES", "LEARNING_RATE", "_MPITRAIN_EXPECTED_SIZE")
values = [os.environ.get(name) for name in names]
print("rank", world.rank, "of", world.size, "on", socket.gethostname(), world.context.device(world.rank), *values)
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
""",
    "plain.py": """
from mpi4py import MPI
import socket, sys
print("rank", MPI.COMM_WORLD.rank, "of", MPI.COMM_WORLD.allreduce(1), "on", socket.gethostname())
""",
    "fails_before_mpi.py": """
import socket
if socket.gethostname() != "node1":
    raise ImportError("no such library here")
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
""",
    "leaves_before_init.py": """
import socket, sys
import mpitrain as mt
if socket.gethostname() == "node3":
    sys.exit(3)
mt.init()
""",
    "late.py": """
import socket, time
import mpitrain as mt
if socket.gethostname() == "node3":
    time.sleep(1000)
mt.init()
""",
    "threads.py": """
import mpitrain as mt, os, socket
mt.init()
print(os.environ["OMP_NUM_THREADS"], "threads on", socket.gethostname())
""",
    "hangs.py": """
import os, signal, socket, subprocess, sys, time
import mpitrain as mt
world = mt.init()
def load():
    if sys.argv[1] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if sys.argv[1] == "die unseen":  # for two seconds its guard sees nothing, as on a host that is busy
        guard = subprocess.check_output(["pgrep", "-u", "cluster", "-f", "^[^ ]*python[^ ]* -I -u -c .import json"])
        line = f"kill -STOP {int(guard)}; touch {sys.argv[2]}; sleep 2; kill -CONT {int(guard)}"
        subprocess.Popen(["sh", "-c", line], env={"PATH": os.environ["PATH"]}, start_new_session=True)
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.01)
        os.unlink(sys.argv[2])
    if sys.argv[1].startswith("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    while sys.argv[1] == "loop":
        pass
    while sys.argv[1] == "sleep":
        time.sleep(1)
for number in range(10**9):
    if number == 20:
        print("stands still now")
        if socket.gethostname() == "node3":
            load()
    world.barrier()
    time.sleep(0.01)
""",
    "leaves_a_process.py": """
import socket, subprocess
import mpitrain as mt
world = mt.init()
if socket.gethostname() == "node2":
    null = subprocess.DEVNULL
    subprocess.Popen(["sleep", "1234"], start_new_session=True, stdin=null, stdout=null, stderr=null)
""",
}


@pytest.fixture(scope="module", autouse=True)
def scripts(bed: Bed) -> None:
    """The folder of the scripts, on the share."""
    for name, text in SCRIPTS.items():
        write(bed, "node1", f"{SHARE}/{name}", text)


def hosts(output: str) -> dict[int, str]:
    """The host of every rank that has printed its line."""
    words = [line.partition("] ")[2].split() for line in output.splitlines() if "] rank " in line]
    return {int(line[1]): line[5] for line in words}


def test_on_all_nodes_by_default(bed: Bed, python: str) -> None:
    job = run(bed, "-n 4 hello.py", python=python, setting="LEARNING_RATE=0.5")
    assert job.code == 0, job.output
    assert hosts(job.output) == {0: "node1", 1: "node2", 2: "node3", 3: "node4"}
    assert job.output.count("eth0 0.5 4") == 4, job.output


@MOSTLY_MPICH
def test_a_file_of_variables(bed: Bed, python: str) -> None:
    write(bed, "node1", f"{SHARE}/mpi.env", "UCX_NET_DEVICES=eth0\nLEARNING_RATE=0.7\n")
    job = run(bed, "--env-file mpi.env -n 4 hello.py", python=python)
    assert job.code == 0, job.output
    assert job.output.count("eth0 0.7 4") == 4, job.output
    job = run(bed, "-n 4 hello.py", python=python, setting="LEARNING_RATE=0.5 MPITRAIN_ENV_FILE=mpi.env")
    assert job.output.count("eth0 0.5 4") == 4, job.output


def test_a_file_of_variables_that_does_not_fit_a_host(bed: Bed) -> None:
    write(bed, "node1", f"{SHARE}/mpi.env", "UCX_NET_DEVICES=bridge7\n")
    for node in ("node1", "node2", "node4"):
        bed.node_run(node, ["ip", "link", "add", "bridge7", "type", "bridge"])
    try:
        job = run(bed, "--env-file mpi.env -n 4 hello.py")
    finally:
        for node in ("node1", "node2", "node4"):
            bed.node_run(node, ["ip", "link", "del", "bridge7"])
    assert job.code == 1 and "rank 0" not in job.output
    assert "    node3: UCX_NET_DEVICES names bridge7, which does not exist there\n" in job.output
    assert "node2:" not in job.output


@MOSTLY_MPICH
def test_unequal_hosts_and_devices(bed: Bed, python: str) -> None:
    job = run(bed, "--hosts node3/cuda:0x2,node2/cpu hello.py", python=python)
    assert job.code == 0, job.output
    assert hosts(job.output) == {0: "node3", 1: "node3", 2: "node2"}
    assert job.output.count("on node3 cuda:0 ") == 2
    assert "on node2 cpu " in job.output


@MOSTLY_MPICH
def test_one_host_which_is_another_one(bed: Bed, python: str) -> None:
    job = run(bed, "-n 2 --hosts node3 hello.py", python=python)
    assert job.code == 0, job.output
    assert hosts(job.output) == {0: "node3", 1: "node3"}


def test_ranks_go_in_blocks(bed: Bed, python: str) -> None:
    job = run(bed, "-n 5 --hosts node1,node2 plain.py", python=python)
    assert job.code == 0, job.output
    assert hosts(job.output) == {0: "node1", 1: "node1", 2: "node1", 3: "node2", 4: "node2"}


def test_localhost_stays_here(bed: Bed) -> None:
    job = run(bed, "-n 2 --hosts localhost hello.py")
    assert job.code == 0, job.output
    assert set(hosts(job.output).values()) == {"node1"}


@MOSTLY_MPICH
def test_what_show_prints_can_be_run(bed: Bed, python: str) -> None:
    shown = as_user(bed, "node1", f"{python} -m mpitrain run --hosts node1,node2 --ppn 1 --show hello.py")
    assert shown.returncode == 0, shown.stderr
    assert "eth0" in shown.stdout
    done = as_user(bed, "node1", shown.stdout)
    assert done.returncode == 0, done.stderr
    # With MPICH the words of two ranks may be mixed, each with its tag in front.
    assert "of 2 on node2" in ("".join(re.findall(r"<mpitrain-rank-1>([^<]*)", done.stdout)) or done.stdout)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be shared unequally")
@MOSTLY_MPICH
def test_each_host_shares_its_own_cores(bed: Bed, python: str) -> None:
    limit = "for pid in $(pgrep -x sshd); do taskset --cpu-list --pid {} $pid; done"
    bed.node_run("node3", ["bash", "-c", limit.format(min(os.sched_getaffinity(0)))])
    try:
        job = run(bed, "-n 2 --hosts node1,node3 threads.py", python=python)
    finally:
        bed.node_run("node3", ["bash", "-c", limit.format(",".join(map(str, os.sched_getaffinity(0))))])
    assert job.code == 0, job.output
    assert f"[0] {len(os.sched_getaffinity(0))} threads on node1\n" in job.output
    assert "[1] 1 threads on node3\n" in job.output


def test_bench_sees_what_crosses_the_link(bed: Bed) -> None:
    words = "--hosts node1,node2 --ppn 2 --sizes 4M --rounds 3 --algorithms ring --link-gbit 1 --json bench.json"
    done = as_user(bed, "node1", f"{PYTHONS['mpich']} -m mpitrain bench {words}", timeout_seconds=JOB_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "# 4 ranks on 2 nodes, 2 on each: node1, node2"
    assert lines[2] == "# eth0 on every node; 1 Gbit/s as --link-gbit says"
    result = json.loads(as_user(bed, "node1", "cat bench.json").stdout)
    assert result["ranks_per_node"] == [2, 2]
    by_name = {row["algorithm"]: row for row in result["rows"]}
    assert set(by_name) == {"mpi", "ring"}
    for row in by_name.values():
        assert row["wrong"] == 0
        assert row["bound_us"] == pytest.approx(2**22 * 8 / 1e3)
        assert row["link_multiple"] > 0.99
    # In a ring of 4, ranks send 1.5 buffers, and one rank of each node sends to the other. 1 buffer would be enough.
    assert by_name["ring"]["link_multiple"] == pytest.approx(1.5, rel=0.05)


@pytest.mark.slow
def test_connections_that_the_user_keeps_open_are_none_of_the_job(bed: Bed) -> None:
    kept = "Host *\n    ControlMaster auto\n    ControlPath /tmp/kept-%C\n    ControlPersist 30\n"
    assert as_user(bed, "node1", "mkdir -p -m 700 /home/cluster/.ssh").returncode == 0
    write(bed, "node1", "/home/cluster/.ssh/config", kept)
    job = run(bed, "-n 2 hello.py")
    as_user(bed, "node1", "rm /home/cluster/.ssh/config")
    assert job.code == 0, job.output
    assert "processes of the job" not in job.output


@MOSTLY_MPICH
def test_interfaces_with_different_names(bed: Bed, python: str) -> None:
    rename = "ip link set {0} down && ip link set {0} name {1} && ip link set {1} up"
    bed.node_run("node2", ["bash", "-c", rename.format("eth0", "eno7")])
    try:
        job = run(bed, "-n 4 hello.py", python=python)
    finally:
        bed.node_run("node2", ["bash", "-c", rename.format("eno7", "eth0")])
    assert job.code == 0, job.output
    assert "so each rank sets its own: eth0 on node1, eno7 on node2" in job.output
    assert "on node2  eno7 " in job.output
    assert "on node3  eth0 " in job.output


@MOSTLY_MPICH
def test_power_cut(bed: Bed, python: str) -> None:
    job = Job(bed, "-n 4 hello.py 600", python=python)
    job.wait_for("of 4 on", 4)
    bed.kill("node3")
    end = job.end()
    assert end.code == 1, end.output
    assert "node3: no message from this host since " in end.output
    bed.start("node3")
    assert left(bed) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["freeze", "cut"])
def test_a_node_that_falls_silent(bed: Bed, fault: str) -> None:
    job = Job(bed, "-n 4 hello.py 600")
    job.wait_for("of 4 on", 4)
    getattr(bed, fault)("node2")
    end = job.end()
    assert end.code == 1, end.output
    assert "node2: no message from this host since " in end.output
    if fault == "cut":  # the node ends its part of the job itself
        assert left(bed) == []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        pytest.param("stop", r"is stopped \(SIGSTOP\?\): kill -CONT \d+", marks=pytest.mark.slow),
        ("loop", r"runs? in hangs\.py:\d+ \(load\), after call \d+"),
        pytest.param("sleep", r"sleeps? in hangs\.py:\d+ \(load\), after call \d+", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_stands_still(bed: Bed, kind: str, expected: str) -> None:
    job = run(bed, f"-n 8 hangs.py {kind}", setting="MPITRAIN_STALL_SECONDS=5 MPITRAIN_HANG_SECONDS=20")
    waits = r"ranks 0-3,6,7 on node1,node2,node4 wait in barrier \(call \d+\)"
    assert job.code == 1, job.output
    ended = r"nothing has moved for 20 s \(hang_seconds\), and the job is ended"
    for head in (r"no progress for ([5-9]|1\d) s", ended):
        # Two ranks of a host that stand in the same place have a line each, or one line together.
        assert re.search(rf"mpitrain: {head}: {waits}; ranks? 4(,5)? on node3 {expected}", job.output), job.output


@pytest.mark.slow
def test_silent_hosts_are_named_before_they_are_given_up(bed: Bed) -> None:
    """The launcher's own cable is cut. It waits longer for all other hosts together than for one."""
    job = Job(bed, "-n 4 hangs.py no", setting="MPITRAIN_STALL_SECONDS=8")
    job.wait_for("stands still now")
    bed.cut("node1")
    done = job.end()
    assert done.code == 1, done.output
    report = re.search(r"no progress for \d+ s: .*", done.output)
    assert report, done.output
    for rank in (1, 2, 3):
        assert f"rank {rank} on node{rank + 1}: no message from this host for " in report[0]
    assert "node2, node3, node4: no message from these hosts since " in done.output


def test_jobs_are_listed_and_ended_by_their_id(bed: Bed) -> None:
    job = Job(bed, "-n 4 hello.py 1000")
    job.wait_for("] rank ", 4)
    ps = as_user(bed, "node2", f"{PYTHONS['mpich']} -m mpitrain ps")
    assert ps.returncode == 0, ps.stderr
    expected = r"JOB .*\n(\w{8})  \S+ \S+  runs +- +- +0 on node1, 1 on node2, 2 on node3, 3 on node4  hello\.py 1000\n"
    found = re.fullmatch(expected, ps.stdout)
    assert found, ps.stdout
    killed = as_user(bed, "node2", f"{PYTHONS['mpich']} -m mpitrain kill {found[1]}")
    assert killed.returncode == 0, killed.stderr
    assert killed.stdout == f"job {found[1]} has ended on node1, node2, node3, node4\n"
    assert job.end().code == 128 + signal.SIGTERM


@MOSTLY_MPICH
def test_a_killed_launcher_leaves_nothing(bed: Bed, python: str) -> None:
    job = Job(bed, "-n 4 hello.py 600", python=python)
    job.wait_for("of 4 on", 4)
    job.signal("KILL")
    assert job.end().code == 137
    assert left(bed) == []


@MOSTLY_MPICH
def test_a_killed_rank(bed: Bed, python: str) -> None:
    """MPICH's mpiexec then ends with 255, because its proxies on the other hosts fail as well."""
    end = run(bed, "-n 4 hangs.py die", python=python)
    if python == PYTHONS["mpich"]:
        assert "mpitrain: rank 2 on node3 was killed by signal 9; mpiexec ended the others" in end.output
        assert end.code == 128 + signal.SIGKILL, end.output
    else:  # the line depends on the order in which its processes end
        assert "mpitrain: rank 2 on node3 " in end.output and end.code != 0, end.output
    assert left(bed) == []


def test_a_killed_rank_whose_guard_is_late(bed: Bed, python: str) -> None:
    """The kernel gives the time of each end. By the times at which guards see them, another node's rank is first."""
    end = run(bed, f"-n 4 hangs.py 'die unseen' /tmp/stopped-{uuid.uuid4().hex}", python=python)
    assert end.code != 0
    blamed = re.findall(r"^mpitrain: (ranks? \S+ on \S+) (?:was killed|ended|left)", end.output, re.M)
    assert blamed == ["rank 2 on node3"], end.output
    assert left(bed) == []


@MOSTLY_MPICH
def test_interrupted(bed: Bed, python: str) -> None:
    job = Job(bed, "-n 4 hello.py 600", python=python)
    job.wait_for("of 4 on", 4)
    job.signal("INT")
    end = job.end()
    assert end.code == 130, end.output
    assert left(bed) == []


def test_suspension_is_refused(bed: Bed) -> None:
    """A stopped launcher would be silent, and the guards would end the job."""
    job = Job(bed, "-n 2 hello.py 5")
    job.wait_for("of 2 on", 2)
    job.signal("TSTP")
    assert job.end().code == 0


def test_python_fails_before_mpi_on_three_of_four(bed: Bed, python: str) -> None:
    end = run(bed, "-n 4 --start-seconds 30 fails_before_mpi.py", python=python)
    assert end.code != 0
    assert "ImportError: no such library here" in end.output
    if python == PYTHONS["mpich"]:  # Open MPI's mpiexec itself ends such a job
        assert "rank 1 on node2, rank 2 on node3, rank 3 on node4 ended early" in end.output


@MOSTLY_MPICH
def test_a_rank_that_leaves_before_init(bed: Bed, python: str) -> None:
    end = run(bed, "-n 4 leaves_before_init.py", python=python)
    assert end.code in (1, 3), end.output
    if python == PYTHONS["mpich"]:
        assert "rank 2 on node3 ended before calling init(), and the others wait there" in end.output


@MOSTLY_MPICH
def test_a_rank_that_is_late(bed: Bed, python: str) -> None:
    end = run(bed, "-n 4 --start-seconds 20 late.py", python=python)
    assert end.code == 1, end.output
    assert "rank 2 on node3: did not call init() within 20 s after rank " in end.output
    assert "node3: rank 2 runs, before init()" in end.output


@MOSTLY_MPICH
@pytest.mark.parametrize("script", [pytest.param("hello.py", marks=pytest.mark.slow), "plain.py"])
def test_a_firewall_that_drops_what_mpi_sends(bed: Bed, python: str, script: str) -> None:
    bed.drop("node3", "1024-65535")
    end = run(bed, f"-n 4 --start-seconds 30 {script}", python=python)
    assert end.code == 1, end.output
    assert "rank 2 on node3 did not start within 30 s" in end.output.replace("rank 3 on node4 ", "rank 2 on node3 ")
    assert "look at node3 first: `ssh node3 sudo nft list ruleset`" in end.output


def test_what_a_rank_leaves_is_ended_and_named(bed: Bed) -> None:
    end = run(bed, "-n 2 leaves_a_process.py")
    assert end.code == 1, end.output
    assert "node2: " in end.output
    assert "sleep 1234" in end.output
    assert left(bed) == []


@MOSTLY_MPICH
def test_the_share_is_missing_on_one_node(bed: Bed, python: str) -> None:
    bed.node_run("node2", ["bash", "-c", f"systemctl stop '*nfs.automount'; umount -l {SHARE}; true"])
    try:
        end = run(bed, "-n 4 hello.py", python=python)
    finally:
        bed.node_run("node2", ["bash", "-c", "systemctl start '*nfs.automount' --all; true"])
        assert as_user(bed, "node2", f"ls {SHARE}/hello.py").returncode == 0
    assert end.code == 1, end.output
    assert f"node2: {SHARE} is empty" in end.output
    assert "is the share mounted?" in end.output
    assert "node3: " not in end.output


def test_the_code_differs_on_one_node(bed: Bed) -> None:
    for node in bed.names:
        write(bed, node, "/home/cluster/hello.py", SCRIPTS["hello.py"])
    write(bed, "node3", "/home/cluster/hello.py", "print('older')\n")
    end = run(bed, "-n 4 /home/cluster/hello.py")
    assert end.code == 1, end.output
    assert "    node3: hello.py differs\n" in end.output
    assert "older" not in end.output


def test_a_package_differs_on_one_node(bed: Bed) -> None:
    site = "/home/cluster/own/lib/python3*/site-packages"
    for node in bed.names:
        made = f"python3 -m venv --without-pip /home/cluster/own && echo {SHARE}/venv/lib/python3*/site-packages"
        assert as_user(bed, node, f"{made} > $(echo {site})/share.pth").returncode == 0
    as_user(bed, "node3", f"mkdir $(echo {site})/tqdm-4.60.dist-info")
    # The Python finds its library only beside itself. This variable must reach the Python of the other hosts too.
    setting, python = f"MPI4PY_LIBMPI={SHARE}/venv/lib/libmpi.so.12", "/home/cluster/own/bin/python"
    end = run(bed, "-n 4 hello.py", python=python, setting=setting)
    assert end.code == 1, end.output
    assert "    node3: tqdm 4.60, here (not there)\n" in end.output
    as_user(bed, "node3", f"rmdir $(echo {site})/tqdm-4.60.dist-info")
    end = run(bed, "-n 4 hello.py", python=python, setting=setting)
    assert end.code == 0, end.output


def test_a_node_that_is_off(bed: Bed) -> None:
    bed.kill("node2")
    end = run(bed, "-n 4 hello.py")
    bed.start("node2")
    assert end.code == 1, end.output
    assert "node2: ssh: connect to host node2 port 22: " in end.output
    assert "Is it switched on" in end.output


def test_logins_that_are_refused(bed: Bed) -> None:
    keys, host_key = "/etc/ssh/mpitrain/authorized_keys", "/etc/ssh/ssh_host_ed25519_key"
    bed.node_run("node2", ["mv", keys, f"{keys}.away"])
    changed = f"mv {host_key} /root/key; ssh-keygen -q -t ed25519 -N '' -f {host_key} <<< y; systemctl restart ssh"
    bed.node_run("node3", ["bash", "-c", changed])
    try:
        end = run(bed, "-n 4 hello.py")
    finally:
        bed.node_run("node2", ["mv", f"{keys}.away", keys])
        back = f"mv /root/key {host_key}; ssh-keygen -y -f {host_key} > {host_key}.pub; systemctl restart ssh"
        bed.node_run("node3", ["bash", "-c", back])
    assert end.code == 1, end.output
    assert "Permission denied (publickey" in end.output
    assert "`mpitrain cluster trust node3`" in end.output
    assert run(bed, "-n 4 hello.py").code == 0


def test_an_unknown_host(bed: Bed) -> None:
    end = run(bed, "--hosts node1,node9 --ppn 1 hello.py")
    assert end.code == 2, end.output
    assert "there is no host 'node9'; /etc/mpitrain/hosts has node1, node2, node3, node4" in end.output
