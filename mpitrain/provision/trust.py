"""First contact: show the key of each node, and add it to the known keys when the user says that it is right."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.launch.hostfile import Host
from mpitrain.provision import terminal
from mpitrain.provision.host_keys import Contact, contact, remember
from mpitrain.provision.login import logins
from mpitrain.provision.project import Project

_AT_ONCE = 8  # logins
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")

Fingerprints = Mapping[str, frozenset[str]]


def trust(project: Project, names: Sequence[str], fingerprints: Fingerprints) -> bool:
    """Make the keys of the nodes `names` (none: of all) known to the operator's ssh. Return whether all are known.

    `fingerprints` are the right ones by name or address. For a node that is not in it, ask at the terminal.

    Raises:
        ClusterError: Ansible or ssh is missing, or the user pressed Ctrl-C.
        ConfigError: a name or a fingerprint belongs to no node.
    """
    hosts = project.read().hosts
    chosen = _chosen(hosts, names)
    if strange := sorted(fingerprints.keys() - {word for host in hosts for word in (host.name, host.address)}):
        raise ConfigError(f"--fingerprints: there is no node {', '.join(strange)} in {project.inventory}")
    chosen_logins = logins(project, chosen)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        contacts = list(pool.map(contact, chosen_logins))
    given = [fingerprints.get(host.name, frozenset()) | fingerprints.get(host.address, frozenset()) for host in chosen]
    settled = [_settle(met, right, bool(fingerprints)) for met, right in zip(contacts, given, strict=True)]
    return all(settled)


def read_fingerprints(arguments: Sequence[str]) -> Fingerprints:
    """Read the values of `--fingerprints`: each HOST=SHA256:..., or a file with lines `HOST SHA256:...`.

    Raises:
        ConfigError: a value is neither of the two.
    """
    chosen: dict[str, frozenset[str]] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and not Path(argument).exists():
            lines = [(f"--fingerprints {argument}", f"{name} {value}")]
        else:
            lines = [(f"{argument}:{number}", line) for number, line in enumerate(_lines(Path(argument)), 1)]
        for where, line in lines:
            fields = line.partition("#")[0].split()
            if not fields:
                continue
            if len(fields) != 2 or not _FINGERPRINT.fullmatch(fields[1]):
                raise ConfigError(
                    f"{where}: {line.strip()!r} is not a fingerprint of a node; allowed is HOST=SHA256:... with the 43 "
                    "characters that `ssh-keygen -lf` shows, or a file with lines HOST SHA256:..."
                )
            chosen[fields[0]] = chosen.get(fields[0], frozenset()) | {fields[1]}
    return chosen


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--fingerprints {path}: neither HOST=SHA256:... nor a file that can be read: {error}"
        ) from None


def _chosen(hosts: Sequence[Host], names: Sequence[str]) -> list[Host]:
    by_name = {host.name: host for host in hosts}
    if unknown := [name for name in names if name not in by_name]:
        raise ConfigError(f"there is no node {', '.join(unknown)}; the nodes are {', '.join(by_name)}")
    return [by_name[name] for name in dict.fromkeys(names)] or list(hosts)


def _settle(met: Contact, right: frozenset[str], unattended: bool) -> bool:
    """Report what was found at one node, and act on it. Return whether its key is known now."""
    node = f"{met.host.name} ({met.host.address})" if met.host.name != met.host.address else met.host.name
    if met.state == "local":
        print(f"{node}: reached without ssh, nothing to do")
        return True
    if met.state == "unreachable":
        print(f"{node}: no key, because ssh got no answer: {met.problem}\n    Is it on, and is sshd running on it?")
        return False
    if met.state == "changed":
        print(_changed(node, met))
        return False
    if right and met.fingerprint not in right:
        print(
            f"{node}: WRONG KEY. It shows {met.kind} {met.fingerprint}\n"
            f"    but --fingerprints says {', '.join(sorted(right))}\n"
            "    Nothing was added. Another machine answers there, or the fingerprint belongs to another of its keys."
        )
        return False
    if met.state == "known":
        print(f"{node}: already known, {met.kind} {met.fingerprint}{_login_note(met)}")
        return True
    print(f"{node}: not known yet. It shows {met.kind}\n    {met.fingerprint}")
    if not right and not _accepted(met, unattended):
        print(f"{node}: not added")
        return False
    remember(met)
    print(f"{node}: added to {met.known_hosts}{_login_note(met)}")
    return True


def _accepted(met: Contact, unattended: bool) -> bool:
    """Ask whether the key of an unknown node is the right one."""
    file = f"/etc/ssh/ssh_host_{met.kind.removeprefix('ssh-').partition('-')[0]}_key.pub"
    print(f"    Compare it with the console of {met.host.name}: ssh-keygen -lf {file}")
    if unattended or not terminal.is_there():
        print(f"    To accept it without a terminal: --fingerprints {met.host.name}={met.fingerprint}")
        return False
    while True:
        answer = terminal.ask(f"    Is this the key of {met.host.name}? [yes/no/fingerprint] ")
        if answer.lower() in ("y", "yes") or answer == met.fingerprint:
            return True
        if answer.lower() in ("n", "no"):
            return False
        if _FINGERPRINT.fullmatch(answer):
            print("    That is another fingerprint.")
            return False
        print("    Please answer yes or no, or paste the fingerprint that the console shows.")


def _changed(node: str, met: Contact) -> str:
    known = ", ".join(met.known_fingerprints) or "(see ssh's own message)"
    forget = f"ssh-keygen -R {shlex.quote(met.name)} -f {shlex.quote(str(met.known_hosts))}"
    return (
        f"{node}: THE KEY HAS CHANGED. Nothing was added.\n"
        f"    known is {known}\n"
        f"    it shows {met.fingerprint} ({met.kind})\n"
        "    Another machine answers at that address, or this one was reinstalled. If its console shows the new\n"
        f"    fingerprint too, forget the old key and trust again:\n    {forget}"
    )


def _login_note(met: Contact) -> str:
    if not met.problem:
        return "; the login works"
    return (
        f"\n    The login with a key does not work yet: {met.problem}\n"
        f"    Arrange it (ssh-copy-id USER@{met.host.address}), or give the playbooks --ask-pass."
    )
