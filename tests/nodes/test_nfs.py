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
# A little more than nfs_mount.c's KEPT_FILE_SECONDS.
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


def calls(bed: Bed) -> int:
    """How many calls node2 has sent on its connection: each is one segment, since none of those counted is long."""
    return int(done(bed, "node2", "ss -tinH dport = :2049 | grep -o 'data_segs_out:[0-9]*' | cut -d: -f2"))


def test_an_operation_is_about_one_call(share: Bed) -> None:
    """Found by path from the root for every call, a file deep in a tree costs twenty; a real client asks thrice."""
    folder, number = f"{SHARE}/deep/a/b/c/d/e", 100
    write = (
        f"mkdir -p {folder}; for i in $(seq {number}); do echo $i >{folder}/$i; done; chown -R cluster: {SHARE}/deep"
    )
    done(share, "node1", write)
    done(share, "node2", f"ls {SHARE}")  # the mount
    before = calls(share)
    assert done(share, "node2", f"cd {folder}; seq {number} | runuser -u cluster -- xargs cat | wc -l") == f"{number}\n"
    assert number <= calls(share) - before <= 3 * number + 50  # to look up, to look up at open if that is late, to read
    before = calls(share)
    done(share, "node2", f"ls -R {SHARE}/deep | wc -l; find {SHARE}/deep -type f | wc -l")
    assert calls(share) - before <= 50  # not one for each file


def test_what_another_node_has_appended_is_not_overwritten(share: Bed) -> None:
    path = f"{SHARE}/log"
    done(share, "node1", f"echo 1 >{path}; chown cluster: {path}")
    for number in (2, 4, 6):  # each at once after the other's, within the time for which attributes are kept
        done(share, "node2", f"runuser -u cluster -- sh -c 'cat {path} >/dev/null; echo {number} >>{path}'")
        done(share, "node1", f"echo {number + 1} >>{path}")
    assert done(share, "node2", f"runuser -u cluster -- cat {path}").split() == list("1234567")


GROWING = """
import sys, time
deadline = time.monotonic() + 5
with open(sys.argv[1], "w") as file:
    while time.monotonic() < deadline:
        print("line", file=file, flush=True)
"""
FOLLOWING = """
import sys, time
deadline = time.monotonic() + 3
most = 0
while time.monotonic() < deadline:
    with open(sys.argv[1]) as file, open(sys.argv[1], "a"):
        size = len(file.read())
        assert size >= most, (size, most)
        most = size
print(most)
"""


def test_a_file_that_grows_all_the_time_can_be_opened(share: Bed) -> None:
    path = f"{SHARE}/growing"
    done(share, "node1", f"echo line >{path}; chmod 666 {path}")
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(done, share, "node1", f"python3 - {path} <<'END'\n{GROWING}END\n")
        assert int(done(share, "node2", f"python3 - {path} <<'END'\n{FOLLOWING}END\n")) > 100
        writing.result()


def test_the_server_decides_when_a_file_is_opened(share: Bed) -> None:
    """Root is nobody for the server, although the kernel would let it open everything."""
    path = f"{SHARE}/private"
    done(share, "node1", f"echo secret >{path}; chown cluster: {path}; chmod 600 {path}")
    attempt = f"import os\ntry:\n    os.open('{path}', os.O_RDWR)\nexcept PermissionError:\n    print('refused')"
    run = f'python3 -c "{attempt}"'
    assert done(share, "node2", run) == "refused\n"
    assert done(share, "node2", f"runuser -u cluster -- {run}; runuser -u cluster -- cat {path}") == "secret\n"


def test_an_open_file_is_read_under_its_new_name(share: Bed) -> None:
    script = f"cd {SHARE}; exec 3>old; echo 1 >&3; mv old new; echo 2 >&3; cat /proc/self/fd/3; cat new; rm new"
    assert done(share, "node2", f"runuser -u cluster -- sh -ec '{script}'").split() == list("1212")


def test_a_soft_mount_gives_up_after_its_patience_and_goes_on_later(share: Bed) -> None:
    where = f"{share.address('node1')}:{SHARE}"
    done(share, "node2", f"mkdir -p /mnt/soft; mount -t nfs -o soft,timeo=10,retrans=2 {where} /mnt/soft")
    done(share, "node1", f"echo there >{SHARE}/patience")
    share.cut("node1")
    try:
        failed = share.node_run("node2", ["cat", "/mnt/soft/patience"], timeout_seconds=100)
        assert (failed.returncode, "Input/output error" in failed.stderr) == (1, True), failed.stderr
    finally:
        share.heal("node1")
    for _ in range(100):
        if code(share, "node2", "cat /mnt/soft/patience") == 0:
            break
        time.sleep(0.5)
    assert done(share, "node2", "cat /mnt/soft/patience; umount /mnt/soft") == "there\n"


def test_calls_that_wait_are_answered_when_the_server_has_started_again(share: Bed) -> None:
    """Several at once, which all wait on one connection."""
    done(share, "node1", "systemctl stop nfs-server")
    script = f'for i in 1 2 3 4 5; do runuser -u cluster -- sh -c "echo $i >{SHARE}/w$i" & done; wait; cat {SHARE}/w?'
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(done, share, "node2", script)
        time.sleep(2)
        assert not waiting.done()
        done(share, "node1", "systemctl start nfs-server")
        assert waiting.result().split() == list("12345")


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
