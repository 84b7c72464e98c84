"""A cluster after its set-up: what works, what an outsider cannot do, and what a later run of the playbooks does."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import NODES
from playbooks import FASHION, SETUP, SHARE, TEARDOWN, USER, changed_files, inventory_of, playbook, root, shared_user

from jobs import REPOSITORY
from testbed import Bed

pytestmark = pytest.mark.timeout(3000)
OUTSIDER = "node5"
CARD = f"sudo -iu {USER} mpiexec -n 4 -ppn 1 -hosts {','.join(NODES)} python examples/train.py"


def needs_fashion() -> None:
    if not FASHION.is_dir():
        pytest.skip("Fashion-MNIST is not here: scripts/get-data fashion")


@pytest.fixture
def note(bed: Bed) -> Iterator[str]:
    """A file on the shared folder, which node2 has written."""
    assert shared_user(bed, "node2", "echo from node2 > ~/nfs/note").returncode == 0
    yield "cat ~/nfs/note"
    deadline = time.monotonic() + 300
    while shared_user(bed, "node3", "timeout 30 cat ~/nfs/note").stdout != "from node2\n":
        assert time.monotonic() < deadline, "the shared folder has not come back"
        time.sleep(0.5)


def test_the_set_up_prints_little(set_up: tuple[Bed, str]) -> None:
    bed, said = set_up
    lines = said.splitlines()
    assert len(lines) <= 15, said
    assert re.fullmatch(r"done in \d+:\d\d: 4 nodes, \d+ changes", lines[-1]), said
    needs_fashion()
    assert f"To train on all nodes, as a user of node1: {CARD}" in lines
    trained = root(bed, "node1", f"{CARD} --steps 30")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "ranks: 4, nodes: 4, mlp on numpy, fashion" in trained.stdout
    assert re.findall(r"loss ([0-9.]+)", trained.stdout), trained.stdout


def test_the_shared_user_logs_in_from_any_to_any_with_host_keys_checked(bed: Bed) -> None:
    for source in NODES:
        done = shared_user(bed, source, " && ".join(f"ssh -v {target} uname -n </dev/null" for target in NODES))
        assert done.stdout.split() == list(NODES), done.stderr
        assert done.stderr.count("is known and matches the ED25519 host key") == len(NODES)
        # ssh asked nothing and added no host key.
        assert shared_user(bed, source, "ls -A ~/.ssh 2>/dev/null").stdout.strip() == ""
        options = shared_user(bed, source, "ssh -G node2").stdout.splitlines()
        assert {"stricthostkeychecking true", "batchmode yes"} <= set(options)
        assert root(bed, source, f"passwd -S {USER}").stdout.split()[1] == "L"  # no password


@pytest.mark.nightly
def test_another_host_key_is_refused(bed: Bed) -> None:
    key = "/etc/ssh/ssh_host_ed25519_key"
    # Not `reload`, which returns before sshd listens again. A restart returns when sshd listens.
    renew = (
        f"cp -a {key} {key}.pub /root/ && rm {key} && ssh-keygen -q -t ed25519 -N '' -f {key} && systemctl restart ssh"
    )
    assert root(bed, "node3", renew).returncode == 0
    try:
        done = shared_user(bed, "node2", "ssh node3 true")
        assert done.returncode == 255
        assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr
    finally:
        back = root(bed, "node3", "mv /root/ssh_host_ed25519_key* /etc/ssh/ && systemctl restart ssh")
        assert back.returncode == 0, back.stderr


def test_the_share_is_read_by_all_nodes_and_by_nobody_else(bed: Bed, note: str) -> None:
    address = bed.address("node1")
    for node in NODES:
        assert shared_user(bed, node, note).stdout == "from node2\n"
    source = root(bed, "node3", f"findmnt -n -t nfs,nfs4,fuse.nfs -o SOURCE {SHARE}").stdout.strip()
    assert source == f"{address}:{SHARE}"
    # root of a client is nobody. On the server root has access: it is squashing that refuses.
    assert shared_user(bed, "node1", "echo secret > ~/nfs/secret && chmod 600 ~/nfs/secret").returncode == 0
    for node in ("node2", "node3"):
        assert root(bed, node, f"cat {SHARE}/secret").returncode != 0
        assert root(bed, node, f"touch {SHARE}/made-by-root").returncode != 0
    assert root(bed, "node1", f"cat {SHARE}/secret").stdout == "secret\n"
    mount = f"mkdir -p /mnt/try && timeout 20 mount -t nfs -o vers=4.2 {address}:{SHARE} /mnt/try"
    inside = root(bed, "node2", f"{mount} && umount /mnt/try")
    assert inside.returncode == 0, inside.stderr
    outside = root(bed, OUTSIDER, mount)
    assert outside.returncode not in (0, 124), outside.stdout
    assert root(bed, OUTSIDER, "findmnt /mnt/try").returncode != 0


def test_a_host_outside_cannot_log_in_even_with_a_stolen_key(bed: Bed) -> None:
    key = root(bed, "node2", "cat /etc/ssh/mpitrain/id_ed25519").stdout
    steal = f"umask 077; cat > /root/stolen <<'END'\n{key}END"
    options = "-F none -i /root/stolen -o BatchMode=yes -o StrictHostKeyChecking=no"
    log_in = f"ssh {options} {USER}@{bed.address('node1')} id -un"
    answers = {}
    for node in ("node2", OUTSIDER):
        root(bed, node, steal)
        answers[node] = root(bed, node, log_in)
        root(bed, node, "rm -rf /root/stolen /root/.ssh/known_hosts*")
    assert answers["node2"].stdout.strip() == USER, answers["node2"].stderr
    assert answers[OUTSIDER].returncode == 255
    assert "Permission denied" in answers[OUTSIDER].stderr


def test_commands_are_found_without_a_login_shell_and_do_not_wait_for_the_share(bed: Bed, note: str) -> None:
    limits = "/etc/security/limits.d/90-mpitrain.conf"
    # A container may not have a limit as high as set-up writes it.
    lower = root(bed, "node2", f"grep -q 'nofile 65536$' {limits} && sed -i 's/nofile 65536$/nofile 4096/' {limits}")
    assert lower.returncode == 0
    found = shared_user(bed, "node1", "ssh node2 'command -v python mpiexec mpitrain; ulimit -n; ulimit -l'")
    root(bed, "node2", f"sed -i 's/nofile 4096$/nofile 65536/' {limits}")
    commands = [f"/usr/local/lib/mpitrain/bin/{name}" for name in ("python", "mpiexec", "mpitrain")]
    most = root(bed, "node2", "ulimit -Hl").stdout.strip()  # "unlimited", except in containers of some machines
    assert found.stdout.split() == [*commands, "4096", most]
    # The server's cable is out. Logins and commands of other users still work. A process that waits for the mounted
    # share waits as long as the cable is out.
    for node in ("node2", "node3"):
        assert shared_user(bed, node, note).returncode == 0
    bed.cut("node1")
    try:
        done = shared_user(bed, "node3", "ssh node2 'ls /etc/hostname'")
        assert done.returncode == 0, done.stderr
    finally:
        bed.heal("node1")


def test_what_was_changed_is_what_the_documentation_says(bed: Bed) -> None:
    text = (REPOSITORY / "docs/how-to/cluster-admin.md").read_text().partition("## What is changed on each machine")[2]
    listed = set(re.findall(r"`(/etc/[^`]*)`", text.partition("\n## ")[0]))
    packages = r"/etc/(default|init.d|rc.\.d|insserv|idmapd|nfs|request|modprobe|rpc|netconfig|ufw|keyutils|exports$)"
    for node in NODES:
        ours = {path for path in changed_files(bed, node) if not re.match(packages, path)}
        assert "/etc/mpitrain" in ours
        unsaid = {path for path in ours if not any(path == one or path.startswith(f"{one}/") for one in listed)}
        assert unsaid == set()


@pytest.mark.nightly
def test_sshd_offers_passwords_to_nobody(bed: Bed) -> None:
    """No user, known or unknown, gets an offer. node5, which is not set up, shows that the test can see one."""
    assert playbook(bed, SETUP, "--tags", "ssh", "-e", '{"mpitrain_sshd_passwords": false}').code == 0
    ask = "ssh -F none -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    for node, methods in (("node1", "(publickey)"), (OUTSIDER, "(publickey,password)")):
        for user in ("admin", "root", USER, "nobody"):
            done = root(bed, OUTSIDER, f"{ask} {user}@{bed.address(node)} true")
            assert f"Permission denied {methods}." in done.stderr
    assert playbook(bed, SETUP, "--tags", "ssh").code == 0


@pytest.mark.nightly
def test_a_second_run_changes_nothing_and_edited_examples_stay(bed: Bed) -> None:
    if FASHION.is_dir():
        assert shared_user(bed, "node2", "echo '# mine' >> ~/examples/train.py").returncode == 0
    run = playbook(bed, SETUP)
    assert run.code == 0, run.output
    assert run.changed() == {}, run.output
    if FASHION.is_dir():
        assert shared_user(bed, "node1", "tail -n 1 ~/nfs/examples/train.py").stdout == "# mine\n"


@pytest.mark.nightly
def test_a_stale_mount_is_mended_by_the_next_run(bed: Bed, note: str) -> None:
    """The mount is removed, and systemd does not mount it again."""
    assert shared_user(bed, "node2", "ls ~/nfs").returncode == 0
    root(bed, "node2", "systemctl stop home-cluster-nfs.automount; umount -l /home/cluster/nfs")
    assert shared_user(bed, "node2", note).returncode != 0
    run = playbook(bed, SETUP, "--tags", "nfs")
    assert run.code == 0, run.output
    assert shared_user(bed, "node2", note).stdout == "from node2\n"


@pytest.mark.nightly
def test_the_mount_comes_back_after_the_server_and_no_boot_waits_for_it(bed: Bed, note: str) -> None:
    bed.reboot("node1")
    bed.kill("node1")
    try:
        bed.reboot("node3")
        # The node has not even tried: it mounts at the first use.
        states = root(bed, "node3", "systemctl is-active home-cluster-nfs.automount home-cluster-nfs.mount")
        assert states.stdout == "active\ninactive\n"
        assert shared_user(bed, "node3", "id -un").stdout.strip() == USER
    finally:
        bed.start("node1")


@pytest.mark.nightly
def test_a_node_is_removed_and_added_again(bed: Bed, tmp_path: Path, note: str) -> None:
    everywhere = (
        "/etc/hosts /etc/mpitrain/hosts /etc/ssh/mpitrain/authorized_keys /etc/ssh/mpitrain/known_hosts"
        " /etc/ssh/ssh_config.d/10-mpitrain.conf"
    )
    gone = playbook(bed, TEARDOWN, "-e", "confirm=yes", "--limit", "node4")
    assert gone.code == 0, gone.output
    smaller = inventory_of(bed, tmp_path / "hosts", NODES[:-1])
    shrunk = playbook(bed, SETUP, "--tags", "hosts,ssh,firewall,nfs,wireguard", inventory=smaller)
    assert shrunk.code == 0, shrunk.output
    assert changed_files(bed, "node4") == set()
    left = rf"grep -lE 'node4|{bed.address('node4')}\b' {everywhere} /etc/exports.d/mpitrain.exports 2>/dev/null"
    for node in NODES[:-1]:
        assert root(bed, node, left).stdout == ""
        assert shared_user(bed, node, "ssh node4 true").returncode == 255
    mount = f"mkdir -p /mnt/try && timeout 20 mount -t nfs {bed.address('node1')}:{SHARE} /mnt/try"
    assert root(bed, "node4", mount).returncode != 0

    grown = playbook(bed, SETUP)
    assert grown.code == 0, grown.output
    for node in NODES:
        assert root(bed, node, f"grep -l node4 {everywhere}").stdout.split() == everywhere.split()
    assert shared_user(bed, "node4", f"ssh node1 uname -n; {note}").stdout == "node1\nfrom node2\n"


@pytest.mark.nightly
def test_under_limit_the_files_still_name_all_nodes(bed: Bed) -> None:
    root(bed, "node2", "rm /etc/ssh/mpitrain/known_hosts; sed -i /node3/d /etc/hosts")
    run = playbook(bed, SETUP, "--limit", "node2")
    assert run.code == 0, run.output
    assert set(run.counts) <= {"node2", "localhost", "node1"}
    assert shared_user(bed, "node2", "ssh node3 uname -n").stdout == "node3\n"
    assert playbook(bed, SETUP).changed() == {}
