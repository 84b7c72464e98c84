"""WireGuard between the nodes: an outsider can rob nodes that trust addresses, but not nodes with a tunnel.

The tests also break the tunnel. They are in the order of a bed's life. Three nodes are the cluster; the fourth is the
outsider.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.cluster.matrix import apply, check, findings
from nodes.beds import checkout_copy, cluster_bed
from testbed import Bed

pytestmark = [pytest.mark.timeout(3000), pytest.mark.nightly]
SHARE = "/home/cluster/nfs"
NODES, OUTSIDER = ("node1", "node2", "node3"), "node4"
VICTIM = "node3"  # the outsider takes this node's address while the node is down
UCX = "UCX_TLS=tcp,self"  # all nodes have one kernel here
SUM = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(2**MPI.COMM_WORLD.rank), MPI.Get_processor_name())"
# What a program of the outsider, with the shared user's number, does with the shared folder.
ROB = f"mkdir -p /mnt/try && timeout 20 mount -t nfs -o vers=4.2 {{head}}:{SHARE} /mnt/try"
WRITE = "setpriv --reuid 1900 --regid 1900 --clear-groups touch /mnt/try/venv/planted; umount /mnt/try"


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """A cluster without a tunnel, as set-up has left it."""
    with cluster_bed(f"tunnel{os.getpid()}") as (bed, _):
        yield bed


@pytest.fixture(scope="module")
def checkout(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the playbooks use, with the setting; and an inventory without the outsider."""
    folder = checkout_copy(tmp_path_factory.mktemp("checkout"))
    lines = [line for line in bed.inventory.read_text().splitlines() if not line.startswith(OUTSIDER)]
    (folder / "cluster/hosts").write_text("\n".join([*lines, ""]))
    switch(folder, "true")
    return folder


def switch(checkout: Path, value: str) -> None:
    path = checkout / "cluster/group_vars/all.yml"
    path.write_text(re.sub("^mpitrain_wireguard: .*$", f"mpitrain_wireguard: {value}", path.read_text(), flags=re.M))


def set_up(bed: Bed, checkout: Path, *options: str, playbook: str = "setup") -> str:
    """Run the set-up, which must succeed. Return its last lines."""
    line = ["ansible-playbook", f"cluster/{playbook}.yml", *options]
    env = {
        "ANSIBLE_INVENTORY": "cluster/hosts",
        "ANSIBLE_STDOUT_CALLBACK": "default",
    }  # Ansible's full output has the counts
    done = bed.run(line, timeout_seconds=1200, cwd=checkout, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.rpartition("PLAY RECAP")[2]


def found(bed: Bed, checkout: Path, *options: str) -> dict[str, tuple[str, str]]:
    """The findings of a check of the three nodes."""
    _, document = check(bed, *options, env={"ANSIBLE_INVENTORY": "cluster/hosts"}, checkout=checkout)
    return findings(document)


def remedies(bed: Bed, checkout: Path) -> list[str]:
    _, document = check(bed, "--level", "quick", env={"ANSIBLE_INVENTORY": "cluster/hosts"}, checkout=checkout)
    return [one["remedy"] for one in document["findings"] if one["verdict"] == "fail"]


def inside(bed: Bed, node: str) -> str:
    """The last 16 bits of the node's address, in 10.213.0.0/16."""
    return "10.213." + bed.address(node).split(".", 2)[2]


def root(bed: Bed, node: str, script: str) -> subprocess.CompletedProcess[str]:
    return bed.node_run(node, ["bash", "-c", script], timeout_seconds=400)


def listening(bed: Bed, node: str) -> set[int]:
    """TCP ports on which programs of the node listen for other machines."""
    shown = root(bed, node, "ss -Hltn | awk '{print $4}' | grep -v '^127\\.\\|^\\[::1\\]'").stdout.split()
    return {int(place.rpartition(":")[2]) for place in shown}


def answering(bed: Bed, address: str, ports: set[int], by: str = OUTSIDER) -> set[int]:
    """The ports, of those given, that accept a connection from the outsider."""
    ask = 'for port in {}; do timeout 3 bash -c "exec 3<>/dev/tcp/{}/$port" 2>/dev/null && echo $port; done; true'
    return {int(port) for port in root(bed, by, ask.format(" ".join(map(str, sorted(ports))), address)).stdout.split()}


def rob(bed: Bed) -> bool:
    """If the outsider can mount the shared folder with the address of a node that is down and plant a file in it."""
    bed.kill(VICTIM)
    own, taken = bed.address(OUTSIDER), bed.address(VICTIM)
    take = f"ip addr add {taken}/24 dev eth0 && ip route replace {bed.address('node1')} dev eth0 src {taken}"
    try:
        assert root(bed, OUTSIDER, take).returncode == 0
        # The new owner of the address gets no answer until the head has learnt where the address is now.
        assert root(bed, OUTSIDER, f"ping -c 1 -w 120 -I {taken} {bed.address('node1')}").returncode == 0
        mounted = root(bed, OUTSIDER, ROB.format(head=bed.address("node1"))).returncode == 0
        return mounted and root(bed, OUTSIDER, WRITE).returncode == 0
    finally:
        give = (
            f"ip addr del {taken}/24 dev eth0; ip route del {bed.address('node1')}; ip addr show dev eth0 | grep {own}"
        )
        assert root(bed, OUTSIDER, give).returncode == 0
        for node in set(NODES) - {VICTIM}:
            root(bed, node, f"ip neigh flush to {taken}")
        bed.start(VICTIM)


def test_an_address_is_enough_without_a_tunnel(bed: Bed, checkout: Path) -> None:
    """As cluster-admin.md says: whoever has the address of a node that is down can write to the Python of all nodes."""
    assert {22, 111, 2049} <= answering(bed, bed.address("node1"), listening(bed, "node1"))
    root(bed, OUTSIDER, "systemctl stop home-cluster-nfs.automount home-cluster-nfs.mount")
    assert rob(bed)
    assert root(bed, "node1", f"rm {SHARE}/venv/planted").returncode == 0


def test_the_tag_moves_a_running_cluster_into_a_tunnel(bed: Bed, checkout: Path) -> None:
    set_up(bed, checkout, "--tags", "wireguard")
    for node in NODES:
        addresses = root(bed, node, "getent ahostsv4 node1 node2 node3 | awk '$2 == \"STREAM\" {print $1}'").stdout
        assert addresses.split() == [inside(bed, name) for name in NODES]
        assert root(bed, node, "stat -c %a /etc/wireguard/mpitrain.d/1-key /etc/wireguard/mpitrain.conf").stdout == (
            "600\n600\n"
        )
    source = root(bed, "node2", f"sudo -u cluster ls {SHARE}; findmnt -n -t nfs,nfs4,fuse.nfs -o SOURCE {SHARE}").stdout
    assert source.split()[-1] == f"{inside(bed, 'node1')}:{SHARE}"
    exports = root(bed, "node1", "cat /etc/exports.d/mpitrain.exports").stdout
    assert re.findall(r" ([\d.]+)\(", exports) == [inside(bed, "node2"), inside(bed, "node3")]
    recap = set_up(bed, checkout, "--tags", "wireguard")
    assert re.findall(r"changed=(\d+)", recap) == ["0"] * 4, recap  # three nodes, and the look at the inventory


def test_nothing_but_the_tunnel_goes_between_the_nodes(bed: Bed, checkout: Path) -> None:
    """Jobs of mpiexec and of mpitrain run, with logins, agents and share: no TCP between nodes goes past the tunnel."""
    others = ", ".join(bed.address(node) for node in NODES)
    table = (
        f"table inet count {{ chain out {{ type filter hook output priority 0; oifname eth0 ip daddr {{ {others} }} "
    )
    table += "meta l4proto tcp counter; }; }"
    for node in NODES:
        assert root(bed, node, f"nft '{table}'").returncode == 0
    job = f"cd {SHARE} && {UCX} mpiexec -n 3 -ppn 1 -hosts node1,node2,node3 python -c '{SUM}'"
    done = bed.node_run("node1", ["su", "-", "cluster", "-c", job], timeout_seconds=400)
    assert sorted(done.stdout.split("\n")) == ["", "7 node1", "7 node2", "7 node3"], done.stderr
    job = f"cd {SHARE} && echo '{SUM}' >sum.py && {UCX} mpitrain run -n 3 --ppn 1 sum.py"
    done = bed.node_run("node1", ["su", "-", "cluster", "-c", job], timeout_seconds=400)
    assert {f"7 {node}" for node in NODES} <= set(re.findall(r"7 node\d", done.stdout)), done.stdout + done.stderr
    for node in NODES:
        counted = root(bed, node, "nft list table inet count; nft delete table inet count").stdout
        assert "counter packets 0 bytes 0" in counted


def test_from_outside_only_ssh_answers(bed: Bed, checkout: Path) -> None:
    for node in NODES:
        ports = listening(bed, node)
        assert {22, 111} <= ports
        for address in (bed.address(node), inside(bed, node)):
            # The outsider has a route to the tunnel's address; anybody on the network can add one.
            root(bed, OUTSIDER, f"ip route replace {inside(bed, node)} via {bed.address(node)}")
            assert answering(bed, address, ports) == {22}
        root(bed, OUTSIDER, f"ip route del {inside(bed, node)}")
    question = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.settimeout(2); "
    question += (
        "s.sendto(b'\\0\\0\\0\\1' + b'\\0' * 7 + b'\\2\\0\\1\\x86\\xa0\\0\\0\\0\\2' + b'\\0' * 20, ('{}', 111)); "
    )
    question += "print(len(s.recv(99)))"  # rpcbind's answer to the null procedure
    here, there = (
        root(bed, node, f'/usr/bin/python3 -c "{question.format(address)}"')
        for node, address in (("node2", inside(bed, "node1")), (OUTSIDER, bed.address("node1")))
    )
    assert here.stdout == "24\n", here.stderr
    assert "timed out" in there.stderr


def test_an_address_is_not_enough_with_a_tunnel(bed: Bed, checkout: Path) -> None:
    assert not rob(bed)
    assert root(bed, "node1", f"ls {SHARE}/venv/planted").returncode != 0
    assert root(bed, VICTIM, f"sudo -u cluster timeout 60 ls {SHARE}/venv").returncode == 0  # after its boot


def test_a_healthy_tunnel_has_no_findings(bed: Bed, checkout: Path) -> None:
    assert found(bed, checkout, "--level", "full") == {}


_NEW_KEY = (
    "cd /etc/wireguard/mpitrain.d && umask 077 && printf '[Interface]\\nPrivateKey = %s\\n' $(wg genkey) >1-key && "
    "cat * >../mpitrain.conf && systemctl reload wg-quick@mpitrain"
)
FAULTS = {
    "the tunnel stopped": ("systemctl stop wg-quick@mpitrain", "WGD01", "--tags wireguard --limit node3"),
    "a new key, which the others do not know": (
        _NEW_KEY,
        "WGD01",
        "--tags wireguard",
    ),
    "the rules flushed": ("nft flush ruleset", "WGD02", "--tags gate --limit node3"),
    "a rule put before them": ("nft insert rule inet mpitrain outside accept", "WGD02", "--tags gate --limit node3"),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_what_breaks_it_is_found_and_repaired(bed: Bed, checkout: Path, name: str) -> None:
    script, id_, remedy = FAULTS[name]
    apply(bed, {"node3": script})
    try:
        assert found(bed, checkout, "--level", "quick") == {id_: ("fail", "node3")}
        (line,) = remedies(bed, checkout)
        assert line == f"ansible-playbook cluster/setup.yml {remedy}"
    finally:
        done = bed.run(
            ["bash", "-c", f"ansible-playbook cluster/setup.yml {remedy}"],
            timeout_seconds=1200,
            cwd=checkout,
            env={"ANSIBLE_INVENTORY": "cluster/hosts"},
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert found(bed, checkout, "--level", "quick") == {}


def test_a_node_comes_and_goes(bed: Bed, checkout: Path) -> None:
    hosts = checkout / "cluster/hosts"
    three = hosts.read_text()
    (line,) = [line for line in bed.inventory.read_text().splitlines() if line.startswith(OUTSIDER)]
    hosts.write_text(three.replace("[cluster:children]", f"{line}\n\n[cluster:children]"))
    set_up(bed, checkout)
    assert root(bed, "node2", f"ping -c 1 -w 20 {inside(bed, OUTSIDER)}").returncode == 0
    assert root(bed, OUTSIDER, f"sudo -u cluster timeout 60 ls {SHARE}/venv").returncode == 0
    set_up(bed, checkout, "--limit", OUTSIDER, "-e", "confirm=yes", playbook="teardown")
    hosts.write_text(three)
    set_up(bed, checkout, "--tags", "hosts,ssh,firewall,nfs,wireguard")
    left = "ls -d /etc/wireguard/mpitrain* /etc/mpitrain /etc/systemd/system/mpitrain-gate.service; nft list ruleset"
    assert root(bed, OUTSIDER, left).stdout == ""
    assert inside(bed, OUTSIDER) not in root(bed, "node2", "wg show mpitrain allowed-ips").stdout
    assert found(bed, checkout, "--level", "quick") == {}


def test_the_way_back(bed: Bed, checkout: Path) -> None:
    switch(checkout, "false")
    set_up(bed, checkout)
    for node in NODES:
        assert root(bed, node, "getent ahostsv4 node1").stdout.split()[0] == bed.address("node1")
        assert root(bed, node, "ls /etc/wireguard; ip link show mpitrain; nft list ruleset").stdout == ""
    assert found(bed, checkout, "--level", "full") == {}
