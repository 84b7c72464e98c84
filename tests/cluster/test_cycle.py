"""The whole life of a cluster, on a bed of four machines: three become a cluster, the fourth stays outside.

The tests are in the order of that life and share its bed. Each test also runs alone.
"""

from __future__ import annotations

import re
import time

import life
import pytest
from life import NODES, NOFILE, OWN_LINE, Cluster, needs_fashion, wait_for_the_note
from playbooks import SHARE, TEARDOWN, USER, difference, etc, root, shared_user

from jobs import REPOSITORY

# Fixtures: pytest finds them by these names.
bare, cluster = life.bare, life.cluster

pytestmark = pytest.mark.timeout(3000)
OUTSIDER = "node4"
CLUSTER_WIDE = "hosts,ssh,firewall,nfs,wireguard"


@pytest.mark.nightly
def test_a_dry_run_on_bare_nodes_passes_and_changes_nothing(bare: Cluster) -> None:
    run = bare.setup("--check", "--diff")
    assert run.code == 0, run.output
    assert set(run.changed()) == set(NODES)
    for node in NODES:
        assert difference(bare.before[node], etc(bare.bed, node)) == {}
        assert root(bare.bed, node, f"id {USER}").returncode != 0


def test_from_bare_nodes_to_the_first_training_step(bare: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    run = bare.setup()
    assert run.code == 0, run.output
    seconds = time.monotonic() - started
    lines = run.stdout.splitlines()
    assert len(lines) <= 15, run.output
    assert re.fullmatch(r"done in \d+:\d\d: 3 nodes, \d+ changes", lines[-1]), run.output
    needs_fashion()
    hosts = ",".join(NODES)
    card = f"sudo -iu {USER} mpiexec -n 3 -ppn 1 -hosts {hosts} python examples/train.py"
    assert f"To train on all nodes, as a user of node1: {card}" in lines
    trained = root(bare.bed, "node1", f"{card} --steps 1")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    with capsys.disabled():
        print(f"\n3 bare nodes to a cluster: {seconds:.0f} s; to the first step: {time.monotonic() - started:.0f} s")


def test_the_line_on_the_card_trains_from_the_head(cluster: Cluster) -> None:
    """Four ranks on two of the nodes, started in the home of the shared user. Nothing is copied by hand."""
    needs_fashion()
    line = f"sudo -iu {USER} mpiexec -n 4 -ppn 1 -hosts node1,node2 python examples/train.py --steps 30"
    trained = root(cluster.bed, "node1", line)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "ranks: 4, nodes: 2, mlp on numpy, fashion" in trained.stdout
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", trained.stdout)]
    assert losses, trained.stdout


def test_examples_that_a_user_has_edited_stay(cluster: Cluster) -> None:
    needs_fashion()
    assert shared_user(cluster.bed, "node2", "echo '# mine' >> ~/examples/train.py").returncode == 0
    run = cluster.setup("--tags", "examples")
    assert run.code == 0 and run.changed() == {}, run.output
    assert shared_user(cluster.bed, "node1", "tail -n 1 ~/nfs/examples/train.py").stdout == "# mine\n"


def test_a_second_run_changes_nothing(cluster: Cluster) -> None:
    run = cluster.setup()
    assert run.code == 0, run.output
    assert run.changed() == {}, run.output


@pytest.mark.parametrize("source", NODES)
def test_the_shared_user_logs_in_from_any_to_any_with_host_keys_checked(cluster: Cluster, source: str) -> None:
    lines = [f"ssh -v {target} uname -n </dev/null" for target in NODES]
    done = shared_user(cluster.bed, source, " && ".join(lines))
    assert done.stdout.split() == list(NODES), done.stderr
    assert done.stderr.count("is known and matches the ED25519 host key") == len(NODES)
    # ssh asked nothing and added no host key.
    assert shared_user(cluster.bed, source, "ls -A ~/.ssh 2>/dev/null").stdout.strip() == ""
    options = shared_user(cluster.bed, source, "ssh -G node2").stdout.splitlines()
    assert {"stricthostkeychecking true", "batchmode yes"} <= set(options)


def test_another_host_key_is_refused(cluster: Cluster) -> None:
    key = "/etc/ssh/ssh_host_ed25519_key"
    # Not `reload`, which returns before sshd listens again. A restart returns when sshd listens.
    renew = (
        f"cp -a {key} {key}.pub /root/ && rm {key} && ssh-keygen -q -t ed25519 -N '' -f {key} && systemctl restart ssh"
    )
    assert root(cluster.bed, "node3", renew).returncode == 0
    try:
        done = shared_user(cluster.bed, "node2", "ssh node3 true")
        assert done.returncode == 255
        assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr
    finally:
        back = root(cluster.bed, "node3", "mv /root/ssh_host_ed25519_key* /etc/ssh/ && systemctl restart ssh")
        assert back.returncode == 0, back.stderr


def test_a_file_written_on_one_node_is_read_on_the_others(cluster: Cluster) -> None:
    for node in NODES:
        assert shared_user(cluster.bed, node, "cat ~/nfs/note").stdout == "from node2\n"
    source = root(cluster.bed, "node3", f"findmnt -n -t nfs,nfs4,fuse.nfs -o SOURCE {SHARE}").stdout.strip()
    assert source == f"{cluster.bed.address('node1')}:{SHARE}"


def test_commands_are_found_without_a_login_shell_and_do_not_wait_for_the_share(cluster: Cluster) -> None:
    found = shared_user(cluster.bed, "node1", "ssh node2 'command -v python mpiexec mpitrain; ulimit -n; ulimit -l'")
    folder = "/usr/local/lib/mpitrain/bin"
    most = root(cluster.bed, "node2", "ulimit -Hl").stdout.strip()  # "unlimited", except in containers of some machines
    assert found.stdout.split() == [
        *(f"{folder}/{name}" for name in ("python", "mpiexec", "mpitrain")),
        str(NOFILE),
        most,
    ]
    # The server's cable is out. Logins and commands of other users still work. A process that waits for the mounted
    # share waits as long as the cable is out.
    for node in ("node2", "node3"):
        assert shared_user(cluster.bed, node, "cat ~/nfs/note").returncode == 0
    cluster.bed.cut("node1")
    try:
        done = shared_user(cluster.bed, "node3", "ssh node2 'ls /etc/hostname'")
        assert done.returncode == 0, done.stderr
    finally:
        cluster.bed.heal("node1")


def test_root_on_a_client_is_squashed(cluster: Cluster) -> None:
    assert shared_user(cluster.bed, "node1", "echo secret > ~/nfs/secret && chmod 600 ~/nfs/secret").returncode == 0
    for node in ("node2", "node3"):
        assert root(cluster.bed, node, f"cat {SHARE}/secret").returncode != 0
        assert root(cluster.bed, node, f"touch {SHARE}/made-by-root").returncode != 0
    # Without squashing, root has access. So the refusal above came from squashing, not from the path.
    assert root(cluster.bed, "node1", f"cat {SHARE}/secret").stdout == "secret\n"


def test_a_host_outside_cannot_mount_the_share(cluster: Cluster) -> None:
    address = cluster.bed.address("node1")
    mount = f"mkdir -p /mnt/try && timeout 20 mount -t nfs -o vers=4.2 {address}:{SHARE} /mnt/try"
    inside = root(cluster.bed, "node2", f"{mount} && umount /mnt/try")
    assert inside.returncode == 0, inside.stderr
    outside = root(cluster.bed, OUTSIDER, mount)
    assert outside.returncode not in (0, 124), outside.stdout
    assert root(cluster.bed, OUTSIDER, "findmnt /mnt/try").returncode != 0


def test_a_host_outside_cannot_log_in_even_with_a_stolen_key(cluster: Cluster) -> None:
    key = root(cluster.bed, "node2", "cat /etc/ssh/mpitrain/id_ed25519").stdout
    steal = f"umask 077; cat > /root/stolen <<'END'\n{key}END"
    options = "-F none -i /root/stolen -o BatchMode=yes -o StrictHostKeyChecking=no"
    log_in = f"ssh {options} {USER}@{cluster.bed.address('node1')} id -un"
    answers = {}
    for node in ("node2", OUTSIDER):
        root(cluster.bed, node, steal)
        answers[node] = root(cluster.bed, node, log_in)
        root(cluster.bed, node, "rm -rf /root/stolen /root/.ssh/known_hosts*")
    assert answers["node2"].stdout.strip() == USER, answers["node2"].stderr
    assert answers[OUTSIDER].returncode == 255
    assert "Permission denied" in answers[OUTSIDER].stderr


def test_the_shared_user_has_no_password(cluster: Cluster) -> None:
    for node in NODES:
        assert root(cluster.bed, node, f"passwd -S {USER}").stdout.split()[1] == "L"


def test_sshd_offers_passwords_to_nobody(cluster: Cluster) -> None:
    """No user, known or unknown, gets an offer. node4, which is not set up, shows that the test can see one."""
    ask = "ssh -F none -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    for node, methods in (("node1", "(publickey)"), (OUTSIDER, "(publickey,password)")):
        for user in ("admin", "root", USER, "nobody"):
            done = root(cluster.bed, OUTSIDER, f"{ask} {user}@{cluster.bed.address(node)} true")
            assert f"Permission denied {methods}." in done.stderr


def test_what_was_changed_is_what_the_documentation_says(cluster: Cluster) -> None:
    text = (REPOSITORY / "docs/how-to/cluster-admin.md").read_text().partition("## What is changed on each machine")[2]
    listed = set(re.findall(r"`(/etc/[^`]*)`", text.partition("\n## ")[0]))
    packages = r"/etc/(default|init.d|rc.\.d|insserv|idmapd|nfs|request|modprobe|rpc|netconfig|ufw|keyutils|exports$)"
    for node in NODES:
        changed = difference(cluster.before[node], etc(cluster.bed, node))
        ours = {path for path in changed if not re.match(packages, path)}
        unsaid = {path for path in ours if not any(path == one or path.startswith(f"{one}/") for one in listed)}
        assert unsaid == set()


def test_a_stale_mount_is_mended_by_the_next_run(cluster: Cluster) -> None:
    # The mount is removed, and systemd does not mount it again.
    assert shared_user(cluster.bed, "node2", "ls ~/nfs").returncode == 0
    root(cluster.bed, "node2", "systemctl stop home-cluster-nfs.automount; umount -l /home/cluster/nfs")
    assert shared_user(cluster.bed, "node2", "cat ~/nfs/note").returncode != 0
    run = cluster.setup("--tags", "nfs")
    assert run.code == 0, run.output
    assert shared_user(cluster.bed, "node2", "cat ~/nfs/note").stdout == "from node2\n"


def test_the_mount_comes_back_after_the_server_rebooted(cluster: Cluster) -> None:
    cluster.bed.reboot("node1")
    wait_for_the_note(cluster, "node3")


@pytest.mark.nightly
def test_the_boot_of_a_client_does_not_wait_for_a_dead_server(cluster: Cluster) -> None:
    cluster.bed.kill("node1")
    try:
        cluster.bed.reboot("node3")
        # The node has not even tried: it mounts at the first use.
        states = root(cluster.bed, "node3", "systemctl is-active home-cluster-nfs.automount home-cluster-nfs.mount")
        assert states.stdout == "active\ninactive\n"
        assert shared_user(cluster.bed, "node3", "id -un").stdout.strip() == USER
    finally:
        cluster.bed.start("node1")
    wait_for_the_note(cluster, "node3")


@pytest.mark.nightly
def test_a_node_is_removed_and_added_again(cluster: Cluster) -> None:
    bed = cluster.bed
    everywhere = (
        "/etc/hosts /etc/mpitrain/hosts /etc/ssh/mpitrain/authorized_keys /etc/ssh/mpitrain/known_hosts"
        " /etc/ssh/ssh_config.d/10-mpitrain.conf"
    )
    gone = cluster.play(TEARDOWN, "-e", "confirm=yes", "--limit", "node3")
    assert gone.code == 0, gone.output
    shrunk = cluster.setup("--tags", CLUSTER_WIDE, inventory=cluster.smaller)
    assert shrunk.code == 0, shrunk.output
    assert difference(cluster.before["node3"], etc(bed, "node3")) == {}
    left = rf"grep -lE 'node3|{bed.address('node3')}\b' {everywhere} /etc/exports.d/mpitrain.exports 2>/dev/null"
    for node in NODES[:-1]:
        assert root(bed, node, left).stdout == ""
        assert shared_user(bed, node, "ssh node3 true").returncode == 255
    mount = f"mkdir -p /mnt/try && timeout 20 mount -t nfs {bed.address('node1')}:{SHARE} /mnt/try"
    assert root(bed, "node3", mount).returncode != 0

    grown = cluster.setup()
    assert grown.code == 0, grown.output
    for node in NODES:
        assert root(bed, node, f"grep -l node3 {everywhere}").stdout.split() == everywhere.split()
    assert shared_user(bed, "node3", "ssh node1 uname -n; cat ~/nfs/note").stdout == "node1\nfrom node2\n"


@pytest.mark.nightly
def test_under_limit_the_files_still_name_all_nodes(cluster: Cluster) -> None:
    root(cluster.bed, "node2", "rm /etc/ssh/mpitrain/known_hosts; sed -i /node3/d /etc/hosts")
    run = cluster.setup("--limit", "node2")
    assert run.code == 0, run.output
    assert set(run.counts) <= {"node2", "localhost", "node1"}
    assert shared_user(cluster.bed, "node2", "ssh node3 uname -n").stdout == "node3\n"
    assert cluster.setup().changed() == {}


def test_teardown_asks_first(cluster: Cluster) -> None:
    run = cluster.play(TEARDOWN)
    assert run.code != 0
    assert "-e confirm=yes" in run.text
    assert run.changed() == {}


def test_teardown_waits_for_the_users_processes(cluster: Cluster) -> None:
    root(cluster.bed, "node3", f"systemd-run --uid={USER} --unit=at-work sleep 300")
    try:
        run = cluster.play(TEARDOWN, "-e", "confirm=yes")
        assert run.code != 0
        assert re.search(r"node3: cluster still runs \d+ .*sleep 300", run.text), run.output
        assert run.changed() == {}
    finally:
        root(cluster.bed, "node3", "systemctl stop at-work")


def test_teardown_leaves_etc_as_it_was_and_keeps_the_data(cluster: Cluster) -> None:
    shared_user(cluster.bed, "node1", "echo precious > ~/nfs/precious; echo mine > ~/mine")
    run = cluster.play(TEARDOWN, "-e", "confirm=yes")
    assert run.code == 0, run.output
    for node in NODES:
        assert difference(cluster.before[node], etc(cluster.bed, node)) == {}, node
        assert root(cluster.bed, node, f"id {USER}").returncode != 0
        assert root(cluster.bed, node, "ls -d /usr/local/lib/mpitrain").returncode != 0
        assert OWN_LINE in root(cluster.bed, node, "cat /etc/hosts").stdout
    assert root(cluster.bed, "node1", f"cat {SHARE}/precious /home/{USER}/mine").stdout == "precious\nmine\n"
    kept = f"/home/{USER}, {SHARE}, {SHARE}/venv"
    remedy = f"sudo rm -rf {kept.replace(',', '')}"
    assert f"node1: what is in {kept} stays. To remove it: {remedy}" in run.text
    assert root(cluster.bed, "node1", f"{remedy} && ls -d /home/{USER}").returncode != 0


@pytest.mark.nightly
def test_a_second_teardown_finds_nothing_to_do(cluster: Cluster) -> None:
    again = cluster.play(TEARDOWN, "-e", "confirm=yes")
    assert again.code == 0, again.output
