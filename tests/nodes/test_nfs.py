"""NFS on a fast bed: the stand-in has the same set-up lines as the kernel's NFS, and behaves the same.

Who may mount it, squashing, and mounts after a boot are in tests/cluster/test_cycle.py.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from testbed import Bed, up
from testbed.container import Container

from .beds import new_name, traces

pytestmark = pytest.mark.nightly
SHARE = "/srv/share"
# A little more than nfs_mount.c's KEPT_SECONDS.
KEPT_SECONDS = 3.2
OPTIONS = "vers=4.2,hard,nconnect=4,noatime,nosuid,nodev,lookupcache=positive,_netdev"


def done(bed: Bed, node: str, script: str, timeout_seconds: float = 400.0) -> str:
    """The output of a script that root runs on a node. The script must succeed."""
    result = bed.node_run(node, ["sh", "-ec", script], timeout_seconds=timeout_seconds)
    assert result.returncode == 0, f"{node}: {script}\n{result.stdout}{result.stderr}"
    return result.stdout


def code(bed: Bed, node: str, script: str) -> int:
    return bed.node_run(node, ["sh", "-c", f"timeout 100 sh -c '{script}'"], timeout_seconds=120).returncode


@pytest.fixture(scope="module")
def share(image: str) -> Iterator[Bed]:
    """Two nodes: node1 exports, node2 mounts with systemd's automount."""
    with up(2, name=new_name()) as bed:
        install = "apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -qy --no-install-recommends install"
        done(
            bed,
            "node1",
            f"{install} nfs-kernel-server; useradd -u 1900 -m cluster; mkdir -p {SHARE} /etc/exports.d; "
            f"chown cluster: {SHARE}; "
            f"echo '{SHARE} {bed.address('node1')}(rw,sync,root_squash,no_subtree_check) "
            f"{bed.address('node2')}(rw,sync,root_squash,no_subtree_check)' >/etc/exports.d/mpitrain.exports; "
            "systemctl enable --now nfs-server; exportfs -r",
        )
        done(
            bed,
            "node2",
            f"{install} nfs-common; useradd -u 1900 -m cluster; cd /etc/systemd/system; "
            f"printf '[Mount]\\nWhat={bed.address('node1')}:{SHARE}\\nWhere={SHARE}\\nType=nfs4\\nOptions={OPTIONS}\\n"
            "TimeoutSec=10\\n' >srv-share.mount; "
            f"printf '[Automount]\\nWhere={SHARE}\\n[Install]\\nWantedBy=remote-fs.target\\n' >srv-share.automount; "
            f"mkdir -p {SHARE}; systemctl daemon-reload; systemctl enable --now srv-share.automount",
        )
        yield bed
    assert traces(bed.name) == []


def test_what_the_server_itself_changes_is_seen_at_once(share: Bed) -> None:
    """pip on the head replaces files directly in the folder, and not through the NFS server."""
    path = f"{SHARE}/code.py"
    done(share, "node1", f"echo old >{path}")
    assert done(share, "node2", f"cat {path}") == "old\n"
    done(share, "node1", f"echo newer >{path}.new && mv {path}.new {path}")
    time.sleep(KEPT_SECONDS)  # a client keeps names for that long, as with the kernel's NFS
    assert done(share, "node2", f"cat {path}; stat -c %s {path}") == "newer\n6\n"
    done(share, "node1", f"echo rewritten >{path}")
    time.sleep(KEPT_SECONDS)
    assert done(share, "node2", f"cat {path}; stat -c %s {path}") == "rewritten\n10\n"
    done(share, "node1", f"rm {path}")
    time.sleep(KEPT_SECONDS)
    assert done(share, "node2", f"test ! -e {path}; ls {SHARE}").count("code.py") == 0


WRITER = """
import os, sys, time
path = sys.argv[1]
for text in [*("x" * length + "." for length in range(60)), "the end"]:
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)
    time.sleep(0.1)
"""
READER = """
import errno, sys, time
deadline = time.monotonic() + 300
seen = set()
while "the end" not in seen and time.monotonic() < deadline:
    try:
        with open(sys.argv[1]) as file:
            text = file.read()
    except OSError as error:
        if error.errno not in (errno.ESTALE, errno.EFAULT):  # replaced meanwhile; the second one is ganesha's word
            raise
        continue
    assert text in ("the end", "x" * (len(text) - 1) + "."), (len(text), text[-3:])
    seen.add(text)
print(len(seen))
"""


def test_a_file_that_another_node_replaces_is_read_whole(share: Bed) -> None:
    """The first of several nodes that import a module replaces its compiled file. Each file is longer than the last."""
    path = f"{SHARE}/compiled"
    done(share, "node1", f"echo -n . >{path}")
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(done, share, "node2", f"python3 - {path} <<'END'\n{READER}END\n")
        done(share, "node1", f"python3 - {path} <<'END'\n{WRITER}END\n")
        assert int(reading.result()) > 20


def test_files_behave(share: Bed) -> None:
    script = f"""
        cd {SHARE}; umask 022; mkdir d; cd d
        head -c 3000000 /dev/urandom >big; cp big copy; cmp big copy
        printf a >log; printf b >>log; [ "$(cat log)" = ab ]
        ln -s log soft; [ "$(readlink soft)" = log ]; ln log hard; [ "$(stat -c %h log)" = 2 ]
        mv log moved; [ ! -e log ]; chmod 600 moved; [ "$(stat -c %a moved)" = 600 ]
        truncate -s 10 big; [ "$(stat -c %s big)" = 10 ]
        touch -d @1000000000 moved; [ "$(stat -c %Y moved)" = 1000000000 ]
        python3 -c 'open("new", "x"); import os; os.chmod("new", 0o640)'; rm new; [ "$(df -P . | wc -l)" = 2 ]
        cd ..; rm -r d; [ ! -e d ]
    """
    done(share, "node2", f"cat >/tmp/script <<'END'\n{script}END\nrunuser -u cluster -- sh -e /tmp/script")


def test_a_hard_mount_waits_for_its_server_and_can_be_killed(share: Bed) -> None:
    share.cut("node1")
    # SIGTERM ends the process after 3 s, although it waits for a dead server, as with the kernel's client.
    assert code(share, "node2", f"timeout 3 ls {SHARE}") == 124
    # A signal that the process handles does not end the wait: NFS does not hear of it.
    waiting = "import os, signal; signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(1); "
    waiting += f"print(len(os.listdir('{SHARE}')) > 0)"
    with subprocess.Popen(
        ["nsenter", "--target", str(pid_of(share, "node2")), "--all", "python3", "-c", waiting],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        time.sleep(2)
        assert process.poll() is None
        share.heal("node1")
        assert process.communicate(timeout=300)[0] == "True\n"
    done(share, "node2", f"ls {SHARE}")


def pid_of(bed: Bed, node: str) -> int:
    """The pid of the node's process 1, as seen from outside."""
    machine = bed.node(node)
    assert isinstance(machine, Container)
    pid = machine.pid()
    assert pid is not None
    return pid
