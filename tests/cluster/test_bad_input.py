"""Faults that preflight must refuse, on real nodes: preflight names node and remedy, and changes nothing.

The node that does not fit is node5, which is bare, beside the head of the cluster; some faults need two bare nodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from playbooks import SETUP, SHARE, USER, difference, etc, inventory_of, playbook, root, shared_user

from jobs import REPOSITORY
from testbed import Bed, up

pytestmark = pytest.mark.timeout(3000)
VICTIM, NODES = "node5", ("node1", "node2")
ARCHITECTURE_32 = "printf '#!/bin/sh\\nexec setarch i686 /usr/bin/python3 \"$@\"\\n' > /usr/local/bin/python32"
# Set $to to node1's address, and $by to the interface towards it.
OTHER_WAY = (
    "own=$(hostname -I | cut -d' ' -f1); to=${own%.*}.11; by=$(ip -o route get $to | sed 's/.* dev //; s/ .*//')"
)

# For each fault: what to do to node5, how to undo it, what the message must contain, and options of the run.
FAULTS = {
    "another system": (
        "mv /etc/os-release /root/ && printf 'ID=arch\\nPRETTY_NAME=\"Arch Linux\"\\n' > /etc/os-release",
        "mv /root/os-release /etc/os-release",
        ("node5: runs Arch Linux", "Remove it from the inventory"),
        (),
    ),
    "another architecture": (
        f"{ARCHITECTURE_32} && chmod 755 /usr/local/bin/python32",
        "rm /usr/local/bin/python32",
        ("node5: the architecture is i686; allowed: x86_64 as on node1",),
        (),
    ),
    "a wrong password for sudo": (
        "mv /etc/sudoers.d/admin /root/; echo 'admin ALL=(ALL) ALL' >/etc/sudoers.d/admin; echo admin:right | chpasswd",
        "mv /root/admin /etc/sudoers.d/admin; usermod -p '*' admin",
        ("node5 (", "sudo refuses", "--ask-become-pass"),
        ("-e", "ansible_become_password=wrong"),
    ),
    "a login by a password where passwords are to go": (
        "echo admin:right | chpasswd; mv /home/admin/.ssh/authorized_keys /root/",
        "mv /root/authorized_keys /home/admin/.ssh/; usermod -p '*' admin",
        (
            "node5 (",
            "a login with a key alone fails",
            "Permission denied",
            "Set-up would lock you out",
            "ssh-copy-id admin@10.",
        ),
        ("-e", "ansible_password=right", "-e", "mpitrain_sshd_passwords=false"),
    ),
    "the uid belongs to another": (
        "useradd -u 1900 -M bob",
        "userdel bob; rm -f /var/mail/bob",
        ("node5: uid 1900 belongs to bob", "Choose another mpitrain_uid"),
        (),
    ),
    "the user has another uid": (
        f"useradd -u 2345 -M {USER}",
        f"userdel {USER}",
        (f"node5: user {USER} has uid 2345; allowed: 1900",),
        (),
    ),
    "files where the shared folder would be mounted": (
        f"mkdir -p {SHARE} && touch {SHARE}/mine",
        "rm -r /home/cluster",
        (f"node5: {SHARE} holds files on the node's own disk", "Move the files away"),
        (),
    ),
    "the shared folder's path is a mount of something else": (
        f"mkdir -p {SHARE} && mount -t tmpfs mine {SHARE}",
        f"umount {SHARE}; rm -r /home/cluster",
        (f"node5: {SHARE} is a mount of mine (tmpfs)", "sudo umount"),
        (),
    ),
    "another host name": (
        "hostname other",
        "hostname node5",
        ("node5: the host name is other", "mpitrain_set_hostname: true"),
        (),
    ),
    "no include in sshd_config": (
        "sed -i.bak '/^Include/d' /etc/ssh/sshd_config",
        "mv /etc/ssh/sshd_config.bak /etc/ssh/sshd_config",
        ("node5: /etc/ssh/sshd_config does not include", "Add this line at its top"),
        (),
    ),
    "its own name on a loopback address": (
        "cp -a /etc/hosts /root/; sed 's/^127.0.0.1.*/127.0.0.1 localhost node5/' /root/hosts > /etc/hosts",
        "cat /root/hosts > /etc/hosts",
        ("node5: /etc/hosts has the line '127.0.0.1 localhost node5'", "Remove node5 from this line"),
        (),
    ),
    "an old address of another node": (
        "cp -a /etc/hosts /root/; echo '192.0.2.1 node1 # moved' >> /etc/hosts",
        "cat /root/hosts > /etc/hosts",
        ("node5: /etc/hosts has the line '192.0.2.1 node1 # moved'; allowed: node1 at",),
        (),
    ),
    "a way to another node from a second address": (
        f"{OTHER_WAY}; ip address add 192.0.2.9/32 dev lo && ip route add $to dev $by src 192.0.2.9",
        f"{OTHER_WAY}; ip route del $to; ip address del 192.0.2.9/32 dev lo",
        ("node5: reaches node1", "from its address 192.0.2.9; allowed: from"),
        (),
    ),
}


@pytest.fixture(scope="module")
def bare() -> Iterator[Bed]:
    """Two nodes that are not set up."""
    with up(2, name=f"bad{os.getpid()}") as bed:
        yield bed


def refused(bed: Bed, *arguments: str, inventory: Path, says: tuple[str, ...]) -> None:
    """Run the set-up. It must end in preflight with these words, and must not change node1."""
    before = etc(bed, "node1")
    run = playbook(bed, SETUP, *arguments, inventory=inventory)
    assert run.code not in (0, None), run.output
    for words in ("Nothing was changed.", *says):
        assert words in run.text, run.output
    assert run.changed() == {}
    assert difference(before, etc(bed, "node1")) == set()


# Faults that node5 can have at the same time: one run names them all. `scripts/test --nightly` also makes each alone.
TOGETHER = (
    "another system",
    "the user has another uid",
    "files where the shared folder would be mounted",
    "another host name",
    "no include in sshd_config",
    "its own name on a loopback address",
    "a way to another node from a second address",
)


@pytest.mark.parametrize(
    "faults",
    [pytest.param(TOGETHER, id="together")]
    + [pytest.param((fault,), id=fault, marks=pytest.mark.nightly) for fault in FAULTS],
)
def test_a_node_that_does_not_fit_is_named_and_nothing_is_changed(
    bed: Bed, tmp_path: Path, faults: tuple[str, ...]
) -> None:
    inventory = inventory_of(bed, tmp_path / "hosts", ("node1", VICTIM))
    if "another architecture" in faults:
        interpreter = f"{VICTIM} ansible_python_interpreter=/usr/local/bin/python32 "
        inventory.write_text(inventory.read_text().replace(f"{VICTIM} ", interpreter, 1))
    do, undo, says, options = zip(*(FAULTS[fault] for fault in faults), strict=True)
    for script in do:
        assert root(bed, VICTIM, script).returncode == 0
    try:
        refused(bed, *chain(*options), inventory=inventory, says=tuple(chain(*says)))
    finally:
        for script in undo:
            root(bed, VICTIM, script)


@pytest.mark.nightly
def test_a_node_that_is_down(bed: Bed, tmp_path: Path) -> None:
    inventory = inventory_of(bed, tmp_path / "hosts", ("node1", VICTIM))
    bed.kill(VICTIM)
    try:
        # The connection of another test may still be open. In that case sudo is what does not answer.
        says = (f"{VICTIM} ({bed.address(VICTIM)}): ", "Try: ssh ", f"remove {VICTIM} from the inventory")
        refused(bed, inventory=inventory, says=says)
    finally:
        bed.start(VICTIM)


INVENTORIES = {
    "all that can be wrong in it": (
        "[head]\nnode1 ansible_host={0}\nnode2 ansible_host=node2\n[workers]\nnode1\nnode3 ansible_host={0}\n",
        (
            "inventory: [head] has 2 hosts ['node1', 'node2']; allowed: exactly one",
            "inventory: node1 is in the groups [head] and [workers]",
            "inventory: node2 has ansible_host=node2; allowed: an IP address",
            "inventory: node1 and node3 have the same address",
        ),
    ),
    "an address of another machine": (
        "[head]\nnode1 ansible_host={0}\n[workers]\nother ansible_host={1}\n",
        ("other: the host name is node5",),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", INVENTORIES)
def test_an_inventory_that_cannot_be(bed: Bed, tmp_path: Path, kind: str) -> None:
    text, says = INVENTORIES[kind]
    inventory = tmp_path / "hosts"
    text += "[cluster:children]\nhead\nworkers\n[cluster:vars]\nansible_user=admin\n"
    inventory.write_text(text.format(bed.address("node1"), bed.address(VICTIM)))
    refused(bed, inventory=inventory, says=says)


@pytest.mark.nightly
def test_no_inventory_at_all(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("")
    run = playbook(bed, SETUP, inventory=tmp_path / "hosts")
    assert run.code not in (0, None)
    assert "Copy cluster/hosts.example to cluster/hosts" in run.text


@pytest.mark.nightly
def test_too_little_room_on_the_share(bare: Bed, tmp_path: Path) -> None:
    inventory = inventory_of(bare, tmp_path / "hosts", NODES)
    root(bare, "node1", f"mkdir -p {SHARE} && mount -t tmpfs -o size=64m,uid=1900,gid=1900 small {SHARE}")
    try:
        says = (f"node1: {SHARE} has 64 MiB free; needed: 1024 MiB", "mpitrain_min_free_mib")
        refused(bare, inventory=inventory, says=says)
        # With preflight's check switched off, set-up fails when the disk is full, and names the cause.
        options = ("-e", "mpitrain_min_free_mib=1", "--tags", "users,runtime")
        run = playbook(bare, SETUP, *options, inventory=inventory)
        assert run.code not in (0, None)
        assert "node1: the environment /home/cluster/nfs/venv could not be made" in run.text, run.output
        assert "No space left on device" in run.text, run.output
        assert "run again with --tags runtime" in run.text
    finally:
        # Also remove the note that the environment there is ours. Another test must not find that note.
        root(bare, "node1", f"umount {SHARE}; rm -r /home/cluster /etc/mpitrain")


@pytest.mark.nightly
def test_an_environment_that_is_not_ours_is_not_emptied(bare: Bed, tmp_path: Path) -> None:
    inventory = inventory_of(bare, tmp_path / "hosts", NODES)
    root(bare, "node1", f"mkdir -p {SHARE}/venv && echo mine > {SHARE}/venv/mine")
    try:
        says = (f"node1: {SHARE}/venv holds files that set-up did not make", "choose another mpitrain_venv")
        refused(bare, inventory=inventory, says=says)
        assert root(bare, "node1", f"cat {SHARE}/venv/mine").stdout == "mine\n"
        elsewhere = ("-e", f"mpitrain_venv={SHARE}")
        refused(bare, *elsewhere, inventory=inventory, says=(f"node1: mpitrain_venv is '{SHARE}'",))
    finally:
        root(bare, "node1", "rm -r /home/cluster")


@pytest.mark.nightly
def test_what_sshd_does_not_take_is_taken_away(bare: Bed, tmp_path: Path) -> None:
    """Include inside a Match block: sshd would keep running, but would not start after the next boot."""
    inventory = inventory_of(bare, tmp_path / "hosts", NODES)
    config = "/etc/ssh/sshd_config"
    nested = f"Match User nobody\\nInclude {config}.d/*.conf\\n"
    nest = f"sed -i.bak '/^Include/d' {config} && printf '{nested}' >> {config}"
    assert root(bare, "node2", f"{nest} && sshd -t").returncode == 0
    try:
        run = playbook(bare, SETUP, "--tags", "ssh", inventory=inventory)
        assert run.code not in (0, None), run.output
        assert "node2: sshd does not accept" in run.text and "Put Include at the top" in run.text, run.output
        assert root(bare, "node2", "sshd -t && ls /etc/ssh/sshd_config.d").stdout.strip() == ""
    finally:
        root(bare, "node2", f"mv {config}.bak {config}")


@pytest.mark.nightly
def test_a_dry_run_on_bare_nodes_passes_and_changes_nothing(bare: Bed, tmp_path: Path) -> None:
    inventory, before = inventory_of(bare, tmp_path / "hosts", NODES), {node: etc(bare, node) for node in NODES}
    run = playbook(bare, SETUP, "--check", "--diff", inventory=inventory)
    assert run.code == 0, run.output
    assert set(run.changed()) == set(NODES)
    for node in NODES:
        assert difference(before[node], etc(bare, node)) == set()
        assert root(bare, node, f"id {USER}").returncode != 0


# Runs are cut off at the start of these tasks.
CUTS = ("mpitrain_packages : Install by apt", "mpitrain_ssh : Reload sshd", "mpitrain_runtime : Install by pip")


@pytest.mark.nightly
def test_a_run_that_was_cut_off_is_mended_by_the_next(bare: Bed, tmp_path: Path) -> None:
    inventory = inventory_of(bare, tmp_path / "hosts", NODES)
    for task in CUTS:
        script = f"""
            ansible-playbook -v -i {inventory} {SETUP} > {tmp_path}/log 2>&1 & run=$!
            until grep -qF '[{task}]' {tmp_path}/log; do kill -0 $run || exit 3; sleep 0.02; done
            sleep 0.1; kill -KILL $run; wait $run; exit 0
        """
        cut = bare.run(["bash", "-c", script], timeout_seconds=1200, cwd=REPOSITORY)
        assert cut.returncode == 0, (tmp_path / "log").read_text()
    mended = playbook(bare, SETUP, inventory=inventory)
    assert mended.code == 0, mended.output
    # sshd has read its settings, although the run that wrote them never came to its handler.
    assert (
        shared_user(bare, "node1", "ssh node2 'command -v python'").stdout.strip()
        == "/usr/local/lib/mpitrain/bin/python"
    )
    second = playbook(bare, SETUP, inventory=inventory)
    assert second.code == 0 and second.changed() == {}, second.output


WAIT_FOR_LISTENER = "for i in {1..600}; do (exec 3<>/dev/tcp/127.0.0.1/5555) && exit 0; sleep 0.1; done; exit 1"


@pytest.mark.nightly
@pytest.mark.parametrize("firewall", ["ufw", "firewalld"])
def test_an_active_firewall_lets_the_nodes_in_and_nobody_else(bare: Bed, tmp_path: Path, firewall: str) -> None:
    inventory = inventory_of(bare, tmp_path / "hosts", NODES)
    start = {
        "ufw": "apt-get -q install -y ufw && ufw default deny && ufw allow 22/tcp && ufw --force enable",
        # systemd reports the service as started when its name is on the bus. Its rules reach the kernel later.
        "firewalld": "apt-get -q install -y firewalld && systemctl start firewalld && firewall-cmd --state",
    }[firewall]
    stop = {"ufw": "ufw --force disable", "firewalld": "systemctl stop firewalld"}[firewall]
    begun = root(bare, "node2", f"apt-get -q update && {start}")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    listen = "systemd-run --unit=listener python3 -m http.server 5555"
    ask = ["timeout", "10", "bash", "-c", f"exec 3<>/dev/tcp/{bare.address('node2')}/5555"]
    try:
        assert root(bare, "node2", listen).returncode == 0
        open_here = root(bare, "node2", WAIT_FOR_LISTENER)
        assert open_here.returncode == 0
        assert bare.node_run("node1", ask).returncode != 0
        run = playbook(bare, SETUP, "--tags", "firewall", inventory=inventory)
        assert run.code == 0, run.output
        assert set(run.changed()) == {"node2"}
        assert bare.node_run("node1", ask).returncode == 0
        # The controller is not a node.
        assert bare.run(ask).returncode != 0
        assert playbook(bare, SETUP, "--tags", "firewall", inventory=inventory).changed() == {}
    finally:
        root(bare, "node2", f"systemctl stop listener; {stop}")
