"""`mpitrain run` over the nodes of a cluster that the playbooks have set up, and jobs that cannot start there.

Every fault is real. After each, nothing of the job is left on any node.
"""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
import scripts_over_hosts
from launching import JOB_SECONDS, MOSTLY_MPICH, PYTHONS, SHARE, Job, as_user, run, write
from scripts_over_hosts import SCRIPTS, hosts

from testbed import Bed

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("healed")]
# A fixture: pytest finds it by this name.
scripts = scripts_over_hosts.scripts


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
    # In a ring of 4, each rank sends 1.5 buffers, and one rank of each node sends to the other node. 1 buffer would do.
    assert by_name["ring"]["link_multiple"] == pytest.approx(1.5, rel=0.05)


@pytest.mark.nightly
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
