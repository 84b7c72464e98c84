"""Does the login from this machine work: sshd there, the key, the host key, and a Python that runs our probe."""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.diagnostics.cluster.check import Ask, Check, Finding, NotSeenError, Seen
from mpitrain.diagnostics.cluster.collect import ClusterStep, PairStep

_SLOW_SECONDS = 2.0


def _failed(seen: Seen, name: str, *kinds: str) -> Iterator[Finding]:
    login = seen.node(name, "login")
    if login["failed"] in kinds:
        yield Finding("fail", (name,), login["found"], remedy=_REMEDIES.get(login["found"], ""))


def _reached(seen: Seen, name: str) -> Iterator[Finding]:
    yield from _failed(seen, name, "login")
    login = seen.node(name, "login")
    if login.get("seconds", 0.0) > _SLOW_SECONDS:
        yield Finding("warn", (name,), f"a login takes {login['seconds']:.1f} s", f"less than {_SLOW_SECONDS:g} s")


def _host_key(seen: Seen, name: str) -> Iterator[Finding]:
    yield from _failed(seen, name, "host key")


def _key(seen: Seen, name: str) -> Iterator[Finding]:
    yield from _failed(seen, name, "key")


def _probe(seen: Seen, name: str) -> Iterator[Finding]:
    yield from _failed(seen, name, "agent")
    if seen.node(name, "login")["failed"] not in ("", "agent"):
        raise NotSeenError("there was no login")


_LOOK = "ping -c 3 {address}; on its console: systemctl status ssh"
_REMEDIES = {
    "Connection refused": "on the console of {node}: sudo systemctl start ssh",
    "No route to host": "is {node} switched on, is its cable in? ping -c 3 {address}",
}

ASKS: tuple[Ask, ...] = ()
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {}
CHECKS = (
    Check(
        "SSH01",
        "this machine reaches the node's sshd",
        "quick",
        "node",
        _reached,
        uses=("login",),
        looks="One login by ssh's own configuration and the inventory, with a deadline; never a bare probe of a port.",
        why="Ansible and mpiexec start everything over ssh.",
        remedy=_LOOK,
        fault="sshd stopped; port 22 dropped; the node off",
    ),
    Check(
        "SSH03",
        "the node's host key is the one that is known here",
        "quick",
        "node",
        _host_key,
        uses=("login",),
        looks="The key that the node's sshd proves to have, against known_hosts; an unknown one is refused.",
        why="Another key means that the node was installed anew, that addresses were swapped, or that someone listens.",
        remedy="compare on the console of {node}: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub; if it is right: "
        "ssh-keygen -R {address} && mpitrain cluster trust {node}",
        needs=("SSH01",),
        fault="another host key; the addresses of two nodes swapped",
    ),
    Check(
        "SSH02",
        "the node takes the key of the login",
        "quick",
        "node",
        _key,
        uses=("login",),
        looks="The same login: public keys only, no password is ever asked for.",
        why="A job cannot type a password; it would wait for ever.",
        remedy="ssh-copy-id {address}  # with the user of the inventory",
        needs=("SSH01", "SSH03"),
        fault="authorized_keys emptied",
    ),
    Check(
        "PRB01",
        "the node's Python runs the probe",
        "quick",
        "node",
        _probe,
        uses=("login",),
        looks="/usr/bin/python3, 3.8 or newer, gets the probe over the login and says hello; nothing is installed.",
        why="Every other check of the node asks this probe, and Ansible needs the same Python.",
        remedy="ssh {address} 'sudo apt-get install -y python3'",
        needs=("SSH01", "SSH03", "SSH02"),
        fault="/usr/bin/python3 taken away, too old, or answering garbage",
    ),
)
