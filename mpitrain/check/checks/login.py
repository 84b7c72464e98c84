"""The inventory, this machine and the login from it: sshd on the node, both keys, a Python that runs the probe."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from ipaddress import ip_address

from mpitrain.check.check import BY_SSH, Ask, Check, Finding, NotHereError, NotSeenError, Seen, through_ssh

_SLOW_SECONDS = 2.0


def _inventory(seen: Seen, _names: Sequence[str]) -> Iterator[Finding]:
    hosts = seen.target.hosts
    for host in hosts:
        if ip_address(host.address).is_loopback and len(hosts) > 1:
            observed = f"its address is {host.address}"
            yield Finding("fail", observed, "an address that the other nodes can reach", where=(host.name,))
    if len(hosts) == 1:
        yield Finding("skip", "the inventory has only one node, so nothing between nodes can be checked")


def _control(seen: Seen, _names: Sequence[str]) -> Iterator[Finding]:
    for program, how in (("ssh", _INSTALL_SSH), ("ansible-playbook", "python3 -m pip install 'mpitrain[cluster]'")):
        if not seen.control.get(program):
            yield Finding("warn", f"there is no {program} on this machine", remedy=how)
    if why := seen.control.get("keeps nothing"):
        observed = f"no result is kept for `mpitrain dashboard`: {why}"
        yield Finding("warn", observed, "a folder with room", "df -h ~ ~/.local/state  # or set XDG_STATE_HOME")


_INSTALL_SSH = "sudo apt-get install -y openssh-client || sudo dnf install -y openssh-clients"


def _failed(seen: Seen, name: str, *kinds: str) -> Iterator[Finding]:
    login = seen.node(name, "login")
    if login["failed"] in kinds:
        remedy = next((line for words, line in _REMEDIES.items() if words in login["found"]), "")
        startup = _STARTUP.search(login["found"])
        if startup:
            remedy = f"sudo sed -i '1i [ -t 0 ] || return' {startup[1]}  # on the console of {{node}}"
        yield Finding("fail", login["found"], remedy=remedy)


def _reached(seen: Seen, name: str) -> Iterator[Finding]:
    yield from _failed(seen, name, "login")
    login = seen.node(name, "login")
    # On a busy machine everything is slow, which is not a fault of the login.
    if login.get("seconds", 0.0) > _SLOW_SECONDS * login.get("patience", 1.0):
        yield Finding("warn", f"a login takes {login['seconds']:.1f} s", f"less than {_SLOW_SECONDS:g} s")


def _host_key(seen: Seen, name: str) -> Iterator[Finding]:
    login = seen.node(name, "login")
    if login["failed"] == "host key":
        got = login.get("host_keys", {}).get("got")
        owners = [other for other in seen.target.names if other != name and got and _known_key(seen, other) == got]
        if owners:
            observed = f"{login['found']}; that is the key of {owners[0]}, which answers at this address"
            yield Finding("fail", observed, "its own key", _SWAPPED)
        else:
            yield Finding("fail", login["found"])


def _known_key(seen: Seen, name: str) -> str | None:
    """Return the fingerprint of a node's host key, as known here or as the node has proved."""
    key: str | None = seen.nodes.get(name, {}).get("login", {}).get("host_keys", {}).get("known")
    return key


def _key(seen: Seen, name: str) -> Iterator[Finding]:
    yield from _failed(seen, name, "key")


def _probe(seen: Seen, name: str) -> Iterator[Finding]:
    yield from _failed(seen, name, "agent")
    login = seen.node(name, "login")
    if login["failed"] not in ("", "agent"):
        raise NotSeenError("there was no login")
    if login.get("null"):
        device = "" if "mode" in login["null"] else "sudo rm -f /dev/null && sudo mknod /dev/null c 1 3 && "
        remedy = through_ssh("{login}", f"{device}sudo chmod 666 /dev/null")
        yield Finding("fail", f"/dev/null is not open to all: {login['null']}", "a device, mode 0666", remedy)


def _becomes(seen: Seen, name: str) -> Iterator[Finding]:
    user, hello = seen.target.user, seen.node(name, "login").get("hello")
    if hello != user and seen.node(name, "sudo")["hangs"]:
        yield Finding("fail", f"sudo, run by {hello}, hangs", "an answer at once", _SUDO_HANGS)
        return
    sections = seen.nodes[name]
    # The probe may end in the middle of its answers.
    errors = [str(answer.get("error", "")) for answer in sections.values() if isinstance(answer, dict)]
    crowded = next((words for words in errors if "cannot become" in words and _TOO_MANY.search(words)), "")
    if crowded:
        observed = f"{user} may not have enough processes: {crowded.rpartition(': ')[2]}"
        yield Finding("fail", observed, "nproc for a job with all its threads", _MORE_PROCESSES)
        return
    if sections.get("account", {}).get("uid", 0) is None:
        raise NotHereError(f"there is no user {user}")
    answer = sections.get("become")
    if isinstance(answer, dict) and "cannot become" in str(answer.get("error")):
        yield Finding("fail", answer["error"], f"`sudo -n -u {user}`")
    else:
        seen.node(name, "become")  # raises if it was not seen


# The messages of sudo, of Python and of env.
_TOO_MANY = re.compile("can't start new thread|Resource temporarily unavailable|Cannot fork")
# The last file that pam_limits reads, and a line for the user itself: it wins over all others.
_MORE_PROCESSES = (
    "ssh {login} \"echo '{user} - nproc unlimited' | sudo tee /etc/security/limits.d/zz-mpitrain-nproc.conf\""
)
_LOOK = "ping -c 3 {address}  # if it answers, on its console: systemctl status ssh (sshd on Red Hat's family)"
_SWAPPED = (
    "correct ansible_host in the inventory, or the addresses of the nodes; on the console of {node}: ip -brief address"
)
# sudo usually waits for another machine.
_SUDO_HANGS = "time getent group sudo wheel; journalctl -n 20 _COMM=sudo  # on the console of {node}: sssd, LDAP, DNS?"
# bash's message about a startup file in which it ends before it runs the command.
_STARTUP = re.compile(r"(/\S*bashrc): line ")
_NO_PYTHON = (
    "ssh {login} '/usr/bin/python3 --version | head -c 200'  # if that is not a Python: "
    "sudo apt-get install --reinstall -y python3-minimal, or sudo dnf reinstall -y python3"
)
_REMEDIES = {
    "3.8 or newer is needed": "ssh {login} 'cat /etc/os-release'  # {node} needs a newer release of its system: "
    "Debian 11, Ubuntu 20.04, Red Hat 9",
    "something else than our probe": _NO_PYTHON,
    "ended with code": _NO_PYTHON,
    "did not start our probe": "ssh -v {login} true  # if it hangs, something in .bashrc or /etc/bash.bashrc waits",
    "Connection refused": "sudo systemctl start ssh  # on the console of {node}; sshd on Red Hat's family",
    "and hangs up": "sudo rm -f /etc/nologin /run/nologin; sudo journalctl -n 20 _COMM=sshd  # on the console of "
    "{node}: these files keep all but root out; if there was none, sshd says what does",
    "ssh-agent does not hold it": "ssh-add  # here, and type the passphrase once",
    "No route to host": "ping -c 3 {address}  # is {node} switched on, is its cable in?",
}

ASKS = (
    Ask("sudo", "sudo", "login"),
    Ask("become", "become", "job"),
)
CHECKS = (
    Check(
        "INV01",
        "the inventory names nodes that can form a cluster",
        _inventory,
        scope="cluster",
        looks="The inventory: unique names, unique addresses, one head. An unreadable inventory ends the run with code "
        "2.",
        why="Ansible, mpiexec and the checks all take the nodes from it.",
        remedy="edit the inventory; `ip -brief address` on {node} shows its addresses",
    ),
    Check(
        "INV02",
        "this machine has the programs that check and repair, and room for their results",
        _control,
        scope="cluster",
        looks="ssh and ansible-playbook, beside this Python or on PATH; a file of 1 MiB in ~/.local/state/mpitrain, "
        "which is removed again.",
        why="Most repairs are a line of ansible-playbook. Jobs run without kept results.",
        fault="a folder for results in which no file can be made",
    ),
    Check(
        "SSH01",
        "this machine reaches the node's sshd",
        _reached,
        uses=("login",),
        looks="One login with ssh's own configuration and the inventory, with a deadline; never a bare probe of a "
        "port.",
        why="Ansible and mpiexec start everything over ssh.",
        remedy=_LOOK,
        fault="sshd stopped; port 22 dropped; the node off",
    ),
    Check(
        "SSH03",
        "the node's host key is the known one",
        _host_key,
        uses=("login",),
        looks="The key that the node's sshd proves to have, against known_hosts. An unknown key is refused.",
        why="Another key means a new installation of the node, swapped addresses, or an attacker in between.",
        remedy="compare on the console of {node}: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub; if it is right: "
        "ssh-keygen -R {known_as} && mpitrain cluster trust {node}",
        needs=("SSH01",),
        fault="another host key; the addresses of two nodes swapped",
    ),
    Check(
        "SSH02",
        "the node accepts the key of the login",
        _key,
        uses=("login",),
        looks="The same login, with public keys only; it never asks for a password.",
        why="A job cannot type a password and would wait forever.",
        remedy="ssh-copy-id {login}",
        needs=("SSH01", "SSH03"),
        fault="authorized_keys emptied",
    ),
    Check(
        "PRB01",
        "the node's Python runs the probe",
        _probe,
        uses=("login",),
        looks="/usr/bin/python3, 3.8 or newer, gets the probe over the login and answers; nothing is installed.",
        why="Every other check of the node uses this probe, and Ansible needs the same Python.",
        remedy="ssh {login} 'sudo apt-get install -y python3 || sudo dnf install -y python3'",
        needs=("SSH01", "SSH03", "SSH02"),
        fault="/usr/bin/python3 removed, too old, or answering garbage",
    ),
    Check(
        "PRB02",
        "the login becomes the shared user",
        _becomes,
        uses=("login", "sudo", "become", "account"),
        looks="sudo -n true, with a deadline; then a second probe with sudo -n -u USER, unless the login is that user.",
        why="The limits, keys and share that a job finds on a node are examined as the user of the job.",
        remedy="ssh -t {login} sudo -l  # it needs a rule with NOPASSWD; or run this on the head, as {user}",
        needs=BY_SSH,
        fault="a sudo that hangs; nproc 5 for the shared user",
    ),
)
