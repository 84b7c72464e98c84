"""The inventory and this machine: do they have what the checks need?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import ip_address

from mpitrain.diagnostics.check import Ask, Check, Finding, Seen
from mpitrain.diagnostics.collect import ClusterStep, PairStep


def _inventory(seen: Seen, _names: Sequence[str]) -> Iterator[Finding]:
    hosts = seen.target.hosts
    for host in hosts:
        if ip_address(host.address).is_loopback and len(hosts) > 1:
            observed = f"its address is {host.address}"
            yield Finding("fail", (host.name,), observed, "an address that the other nodes can reach")
    if len(hosts) == 1:
        yield Finding("skip", (), "the inventory has only one node, so nothing between nodes can be checked")


def _control(seen: Seen, _names: Sequence[str]) -> Iterator[Finding]:
    for program, how in (("ssh", _INSTALL_SSH), ("ansible-playbook", "python3 -m pip install 'mpitrain[cluster]'")):
        if not seen.control.get(program):
            yield Finding("warn", (), f"there is no {program} on this machine", remedy=how)


_INSTALL_SSH = "sudo apt-get install -y openssh-client || sudo dnf install -y openssh-clients"

ASKS: tuple[Ask, ...] = ()
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {}
CHECKS = (
    Check(
        "INV01",
        "the inventory names nodes that can form a cluster",
        "quick",
        "cluster",
        _inventory,
        looks="The inventory: unique names, unique addresses, one head. An unreadable inventory ends the run with code "
        "2.",
        why="Ansible, mpiexec and the checks all take the nodes from it.",
        remedy="edit the inventory; `ip -brief address` on {node} shows its addresses",
    ),
    Check(
        "INV02",
        "this machine has the programs that check and repair",
        "quick",
        "cluster",
        _control,
        looks="ssh and ansible-playbook, beside this Python or on PATH.",
        why="Most repairs are a line of ansible-playbook.",
    ),
)
