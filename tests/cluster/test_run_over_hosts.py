"""`mpitrain run` over the nodes of a cluster: jobs there, jobs that cannot start, and jobs in which something fails.

Every fault is real. After each, nothing of the job is left on any node.
"""

from __future__ import annotations

import json
import os
import re
import signal
import uuid

import pytest
from launching import JOB_SECONDS, PYTHONS, SHARE, Job, as_user, left, run, write

from jobs import until
from testbed import Bed

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("healed")]
NIGHTLY = pytest.mark.nightly

HELLO = """
import mpitrain as mt, os, socket, sys, time
world = mt.init()
names = ("UCX_NET_DEVICES", "LEARNING_RATE", "_MPITRAIN_EXPECTED_SIZE")
values = [os.environ.get(name) for name in names]
print("rank", world.rank, "of", world.size, "on", socket.gethostname(), world.context.device(world.rank), *values)
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""
SCRIPTS = {
    "hello.py": HELLO,
    "plain.py": """
from mpi4py import MPI
import socket, sys
print("rank", MPI.COMM_WORLD.rank, "of", MPI.COMM_WORLD.allreduce(1), "on", socket.gethostname())
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
    if sys.argv[1] == "die unseen":  # for two seconds its agent sees nothing, as on a host that is busy
        agent = subprocess.check_output(["pgrep", "-u", "cluster", "-f", "^[^ ]*python[^ ]* -I -u -c .import json"])
        line = f"kill -STOP {int(agent)}; touch {sys.argv[2]}; sleep 2; kill -CONT {int(agent)}"
        subprocess.Popen(["sh", "-c", line], env={"PATH": os.environ["PATH"]}, start_new_session=True)
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.01)
        os.unlink(sys.argv[2])
    if sys.argv[1].startswith("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    while sys.argv[1] == "loop":
        pass
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
    """Write the scripts to the shared folder."""
    for name, text in SCRIPTS.items():
        write(bed, "node1", f"{SHARE}/{name}", text)
    write(bed, "node1", f"{SHARE}/mpi.env", "UCX_NET_DEVICES=eth0\nLEARNING_RATE=0.7\n")


def started(bed: Bed, python: str, ranks: int = 4, words: str = "600") -> Job:
    """A job whose ranks have begun, one on each node."""
    job = Job(bed, f"-n {ranks} hello.py {words}", python=python)
    job.wait_for(f"of {ranks} on", ranks)
    return job


def test_a_job_on_all_nodes_is_listed_and_ended_by_its_id(bed: Bed, python: str) -> None:
    job = Job(bed, "-n 4 hello.py 1000", python=python, setting="LEARNING_RATE=0.5")
    job.wait_for("eth0 0.5 4", 4)
    assert hosts(job.output()) == {0: "node1", 1: "node2", 2: "node3", 3: "node4"}
    expected = (
        r"JOB .*\n(\w{8})  \S+ \S+  starts +- +- +0 on node1, 1 on node2, 2 on node3, 3 on node4  hello\.py 1000\n"
    )
    found: list[str] = []

    def is_listed() -> bool:
        ps = as_user(bed, "node2", f"{python} -m mpitrain ps")
        assert ps.returncode == 0, ps.stderr
        found[:] = [ps.stdout, *re.findall(expected, ps.stdout)]
        return len(found) == 2

    until(is_listed, "the job is not listed")
    killed = as_user(bed, "node2", f"{python} -m mpitrain kill {found[1]}")
    assert killed.returncode == 0, killed.stderr
    assert killed.stdout == f"job {found[1]} has ended on node1, node2, node3, node4\n"
    assert job.end().code == 128 + signal.SIGTERM


# As torch.distributed's store does: rank 0 listens at the port, and the others come to its address.
MEET = """
import os, socket, time
rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
if rank == 0:
    with socket.create_server(("", port)) as server:
        lines = sorted(server.accept()[0].recv(99).decode() for _ in range(size - 1))
    print(*lines, os.environ["GROUP_RANK"], flush=True)
else:
    for _ in range(600):  # rank 0 may listen later
        try:
            line = socket.create_connection((os.environ["MASTER_ADDR"], port))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    with line:
        names = "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"
        line.sendall("/".join(os.environ[name] for name in names).encode())
"""


def test_a_script_for_torchrun_meets_at_the_first_rank(bed: Bed) -> None:
    """Wherever that is: here the launcher's host has no ranks."""
    write(bed, "node1", "meet.py", MEET)
    job = run(bed, "--hosts node3,node2 --ppn 2 meet.py")
    assert job.code == 0, job.output
    assert "[0] 1/1/2/0/2 2/0/2/1/2 3/1/2/1/2 0\n" in job.output


@NIGHTLY
@pytest.mark.parametrize(
    ("arguments", "expected", "shows"),
    [
        ("--hosts node3/cuda:0x2,node2/cpu hello.py", "node3 node3 node2", ("on node3 cuda:0 ", "on node2 cpu ")),
        ("-n 2 --hosts node3 hello.py", "node3 node3", ()),
        ("-n 5 --hosts node1,node2 plain.py", "node1 node1 node1 node2 node2", ()),
        ("-n 2 --hosts localhost hello.py", "node1 node1", ()),
        ("--env-file mpi.env -n 4 hello.py", "node1 node2 node3 node4", ("eth0 0.7 4",)),
    ],
)
def test_where_ranks_go(bed: Bed, python: str, arguments: str, expected: str, shows: tuple[str, ...]) -> None:
    job = run(bed, arguments, python=python)
    assert job.code == 0, job.output
    assert hosts(job.output) == dict(enumerate(expected.split()))
    for text in shows:
        assert text in job.output


def hosts(output: str) -> dict[int, str]:
    """The host of every rank that has printed its line."""
    words = [line.partition("] ")[2].split() for line in output.splitlines() if "] rank " in line]
    return {int(line[1]): line[5] for line in words}


@NIGHTLY
def test_what_show_prints_can_be_run(bed: Bed, python: str) -> None:
    shown = as_user(bed, "node1", f"{python} -m mpitrain run --hosts node1,node2 --ppn 1 --dry-run hello.py")
    assert shown.returncode == 0, shown.stderr
    assert "eth0" in shown.stdout
    done = as_user(bed, "node1", shown.stdout)
    assert done.returncode == 0, done.stderr
    # With MPICH the words of two ranks may be mixed, each with its tag in front.
    assert "of 2 on node2" in ("".join(re.findall(r"<mpitrain-rank-1>([^<]*)", done.stdout)) or done.stdout)


@NIGHTLY
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be shared unequally")
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


@NIGHTLY
def test_bench_sees_what_crosses_the_link(bed: Bed) -> None:
    words = "--hosts node1,node2 --ppn 2 --sizes 4M --rounds 3 --algorithms ring --link 1Gbit/s --json bench.json"
    done = as_user(bed, "node1", f"{PYTHONS['mpich']} -m mpitrain bench {words}", timeout_seconds=JOB_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "# 4 ranks on 2 nodes, 2 on each: node1, node2"
    assert lines[2] == "# eth0 on every node; 1 Gbit/s as --link says"
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


@NIGHTLY
def test_connections_that_the_user_keeps_open_are_none_of_the_job(bed: Bed) -> None:
    kept = "Host *\n    ControlMaster auto\n    ControlPath /tmp/kept-%C\n    ControlPersist 30\n"
    assert as_user(bed, "node1", "mkdir -p -m 700 /home/cluster/.ssh").returncode == 0
    write(bed, "node1", "/home/cluster/.ssh/config", kept)
    job = run(bed, "-n 2 hello.py")
    as_user(bed, "node1", "rm -r /home/cluster/.ssh")
    assert job.code == 0, job.output
    assert "processes of the job" not in job.output


@NIGHTLY
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


@NIGHTLY
def test_a_script_that_was_just_replaced(bed: Bed) -> None:
    """The other nodes keep its name for some seconds, as with the kernel's NFS. A true difference is still refused."""
    script = f"{SHARE}/edited.py"
    write(bed, "node1", script, "print('before')\n")
    for node in ("node2", "node3", "node4"):
        assert as_user(bed, node, f"cat {script}").returncode == 0
    write(bed, "node1", f"{script}.new", HELLO)
    as_user(bed, "node1", f"mv {script}.new {script}")
    job = run(bed, "-n 4 edited.py")
    assert job.code == 0, job.output
    assert len(hosts(job.output)) == 4
    for node in bed.names[:4]:
        write(bed, node, "/home/cluster/hello.py", "print('older')\n" if node == "node3" else HELLO)
    end = run(bed, "-n 4 /home/cluster/hello.py")
    assert end.code == 1, end.output
    assert "    node3: hello.py differs\n" in end.output
    assert "older" not in end.output and "rank 0" not in end.output


_KEYS, _HOST_KEY = "/etc/ssh/mpitrain/authorized_keys", "/etc/ssh/ssh_host_ed25519_key"
_OWN, _SITE = "/home/cluster/own", "/home/cluster/own/lib/python3*/site-packages"
_BRIDGE = dict.fromkeys(("node1", "node2", "node4"), "ip link add bridge7 type bridge")
_NEW_KEY = f"mv {_HOST_KEY} /root/key; ssh-keygen -q -t ed25519 -N '' -f {_HOST_KEY} <<< y; systemctl restart ssh"
_OLD_KEY = f"mv /root/key {_HOST_KEY}; ssh-keygen -y -f {_HOST_KEY} > {_HOST_KEY}.pub; systemctl restart ssh"
# What is done to nodes, what undoes it, a job's variables, and what it prints when it does not start.
REFUSED = {
    "variables that do not fit a host": (
        {"node1": f"echo UCX_NET_DEVICES=bridge7 > {SHARE}/bridge.env; {_BRIDGE['node1']}", **_BRIDGE},
        dict.fromkeys(_BRIDGE, "ip link del bridge7"),
        "MPITRAIN_ENV_FILE=bridge.env",
        ("    node3: UCX_NET_DEVICES names bridge7, which does not exist there\n",),
    ),
    "the shared folder is missing": (
        {"node2": f"systemctl stop '*nfs.automount'; umount -l {SHARE}; true"},
        {"node2": f"systemctl start '*nfs.automount' --all; runuser -u cluster ls {SHARE}/hello.py"},
        "",
        (f"node2: {SHARE} is empty", "is the shared folder mounted?"),
    ),
    "logins that are refused": (
        {"node2": f"mv {_KEYS} {_KEYS}.away", "node3": _NEW_KEY},
        {"node2": f"mv {_KEYS}.away {_KEYS}", "node3": _OLD_KEY},
        "",
        ("Permission denied (publickey", "`mpitrain cluster trust node3`"),
    ),
}


@NIGHTLY
@pytest.mark.parametrize("name", REFUSED)
def test_nodes_on_which_a_job_cannot_start(bed: Bed, python: str, name: str) -> None:
    do, undo, setting, says = REFUSED[name]
    for node, script in do.items():
        bed.node_run(node, ["bash", "-c", script])
    try:
        end = run(bed, "-n 4 hello.py", python=python, setting=setting)
    finally:
        for node, script in undo.items():
            assert bed.node_run(node, ["bash", "-c", script]).returncode == 0
    assert end.code == 1 and "rank 0" not in end.output, end.output
    for text in says:
        assert text in end.output
    assert "node4: " not in end.output
    assert run(bed, "-n 4 hello.py", python=python).code == 0


@NIGHTLY
def test_a_package_differs_on_one_node(bed: Bed) -> None:
    for node in bed.names[:4]:
        made = f"python3 -m venv --without-pip {_OWN} && echo {SHARE}/venv/lib/python3*/site-packages"
        assert as_user(bed, node, f"{made} > $(echo {_SITE})/share.pth").returncode == 0
    as_user(bed, "node3", f"mkdir $(echo {_SITE})/tqdm-4.60.dist-info")
    # The Python finds its library only beside itself. This variable must reach the Python of the other hosts too.
    setting, python = f"MPI4PY_LIBMPI={SHARE}/venv/lib/libmpi.so.12", f"{_OWN}/bin/python"
    end = run(bed, "-n 4 hello.py", python=python, setting=setting)
    assert end.code == 1, end.output
    assert "    node3: tqdm 4.60, here (not there)\n" in end.output
    as_user(bed, "node3", f"rmdir $(echo {_SITE})/tqdm-4.60.dist-info")
    end = run(bed, "-n 4 hello.py", python=python, setting=setting)
    assert end.code == 0, end.output


@NIGHTLY
def test_a_node_that_is_off_and_one_that_nobody_knows(bed: Bed) -> None:
    bed.kill("node2")
    end = run(bed, "-n 4 hello.py")
    bed.start("node2")
    assert end.code == 1, end.output
    assert "node2: ssh: connect to host node2 port 22: " in end.output
    assert "Is it switched on" in end.output
    end = run(bed, "--hosts node1,node9 --ppn 1 hello.py")
    assert end.code == 2, end.output
    assert "there is no host 'node9'; /etc/mpitrain/hosts has node1, node2, node3, node4" in end.output


@NIGHTLY
@pytest.mark.parametrize("fault", ["kill", "freeze", "cut"])
def test_a_node_that_falls_silent(bed: Bed, python: str, fault: str) -> None:
    job = started(bed, python)
    getattr(bed, fault)("node3")
    end = job.end()
    assert end.code == 1, end.output
    assert "node3: no message from this host since " in end.output
    if fault == "kill":
        bed.start("node3")
    if fault != "freeze":  # the node ends its part of the job itself
        assert left(bed) == []


@NIGHTLY
def test_a_rank_that_stands_still(bed: Bed) -> None:
    job = run(bed, "-n 8 hangs.py loop", setting="MPITRAIN_STALL_SECONDS=5 MPITRAIN_HANG_SECONDS=20")
    waits = r"ranks 0-3,6,7 on node1,node2,node4 wait in barrier \(call \d+\)"
    stands = r"runs? in hangs\.py:\d+ \(load\), after call \d+"
    assert job.code == 1, job.output
    ended = r"nothing has moved for 20 s \(hang_seconds\), and the job is ended"
    for head in (r"no progress for ([5-9]|1\d) s", ended):
        # Two ranks of a host that stand in the same place have a line each, or one line together.
        assert re.search(rf"mpitrain: {head}: {waits}; ranks? 4(,5)? on node3 {stands}", job.output), job.output


@NIGHTLY
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


@NIGHTLY
@pytest.mark.parametrize(("name", "code"), [("KILL", 137), ("INT", 130)])
def test_a_launcher_that_ends_leaves_nothing(bed: Bed, python: str, name: str, code: int) -> None:
    job = started(bed, python)
    job.signal(name)
    assert job.end().code == code
    assert left(bed) == []


@NIGHTLY
def test_a_launcher_that_is_killed_while_a_host_is_cut_off(bed: Bed) -> None:
    """Nobody can tell that host: what runs there ends because its launcher is silent, without a cable too."""
    job = started(bed, PYTHONS["mpich"])
    bed.cut("node3")
    job.signal("KILL")
    assert job.end().code == 137
    assert left(bed, patience_seconds=150.0) == []


@NIGHTLY
def test_a_killed_rank(bed: Bed, python: str) -> None:
    """MPICH's mpiexec then ends with 255, because its proxies on the other hosts fail as well."""
    end = run(bed, "-n 4 hangs.py die", python=python)
    if python == PYTHONS["mpich"]:
        assert "mpitrain: rank 2 on node3 was killed by signal 9; mpiexec ended the others" in end.output
        assert end.code == 128 + signal.SIGKILL, end.output
    else:  # the line depends on the order in which the processes of Open MPI end
        assert "mpitrain: rank 2 on node3 " in end.output and end.code != 0, end.output
    assert left(bed) == []


@NIGHTLY
def test_a_killed_rank_whose_agent_is_late(bed: Bed, python: str) -> None:
    """The kernel gives the time of each end. By the times at which agents see ends, another node's rank is first."""
    end = run(bed, f"-n 4 hangs.py 'die unseen' /tmp/stopped-{uuid.uuid4().hex}", python=python)
    assert end.code != 0
    blamed = re.findall(r"^mpitrain: (ranks? \S+ on \S+) (?:was killed|ended|left)", end.output, re.M)
    assert blamed == ["rank 2 on node3"], end.output
    assert left(bed) == []


@NIGHTLY
def test_suspension_is_refused(bed: Bed) -> None:
    """A stopped launcher would be silent, and the agents would end the job."""
    job = started(bed, PYTHONS["mpich"], 2, "5")
    job.signal("TSTP")
    assert job.end().code == 0


@NIGHTLY
@pytest.mark.parametrize("script", ["hello.py", "plain.py"])
def test_a_firewall_that_drops_what_mpi_sends(bed: Bed, python: str, script: str) -> None:
    bed.drop("node3", "1024-65535")
    end = run(bed, f"-n 4 --start-timeout 30s {script}", python=python)
    assert end.code == 1, end.output
    assert "rank 2 on node3 did not start within 30 s" in end.output.replace("rank 3 on node4 ", "rank 2 on node3 ")
    assert "look at node3 first: `ssh node3 sudo nft list ruleset`" in end.output


@NIGHTLY
def test_what_a_rank_leaves_is_ended_and_named(bed: Bed) -> None:
    end = run(bed, "-n 2 leaves_a_process.py")
    assert end.code == 1, end.output
    assert "node2: " in end.output
    assert "sleep 1234" in end.output
    assert left(bed) == []
