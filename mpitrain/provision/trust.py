"""First contact: show the key of each node, and add it to the known keys when the user says that it is right.

One ordinary login with the operator's own ssh shows both: the node's key, and whether the login works. ssh-keyscan, or
connections that end before they have logged in, would be simpler. But after a few of those, sshd of OpenSSH 9.8 and
later refuses the address for some time, also with the right key (PerSourcePenalties in sshd_config(5)).

The login uses a copy of the known keys of the node, in a separate file. ssh adds a new key to this file
(StrictHostKeyChecking=accept-new). To log in to an unknown machine is harmless: only public keys are tried, whose
signature is of no use elsewhere (RFC 4252, section 7), nothing is forwarded, and the command is `true`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpitrain.errors import ClusterError, ConfigError
from mpitrain.launch.hostfile import Host
from mpitrain.provision import terminal
from mpitrain.provision.login import Login, logins
from mpitrain.provision.project import Project
from mpitrain.reading import is_file, read_text, shown

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
        if equals and not is_file(argument):
            lines = [("--fingerprints", f"{name} {value}")]
        else:
            lines = [(f"{argument}:{number}", line) for number, line in enumerate(_lines(Path(argument)), 1)]
        for where, line in lines:
            fields = line.partition("#")[0].split()
            if not fields:
                continue
            if len(fields) != 2 or not _FINGERPRINT.fullmatch(fields[1]):
                raise ConfigError(
                    f"{where}: {shown(line.strip())} is not a fingerprint of a node; allowed is HOST=SHA256:... with "
                    "the 43 characters that `ssh-keygen -lf` shows, or a file with lines HOST SHA256:..."
                )
            chosen[fields[0]] = chosen.get(fields[0], frozenset()) | {fields[1]}
    return chosen


def _lines(path: Path) -> list[str]:
    return read_text(
        path,
        lambda said: ConfigError(f"{said}. --fingerprints takes HOST=SHA256:..., or a file with lines HOST SHA256:..."),
        called=f"--fingerprints {shown(str(path))}",
    ).splitlines()


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


# -- a node's key, by one login ----------------------------------------------------------------------------------------

_CONNECT_SECONDS = 10
_LOGIN_SECONDS = 30.0

State = Literal["known", "unknown", "changed", "unreachable", "local"]


@dataclass(frozen=True)
class Contact:
    """The result of a login. `problem` has ssh's own words if the login failed."""

    host: Host
    state: State
    fingerprint: str = ""  # the fingerprint of the node's key, as "SHA256:..."
    kind: str = ""  # the kind of that key, such as "ssh-ed25519"
    known_fingerprints: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()  # new lines for known_hosts, if the node is unknown
    known_hosts: Path | None = None  # the operator's file
    name: str = ""  # the name of the node in known_hosts
    problem: str = ""


def contact(login: Login) -> Contact:
    """Log in to a node once. This takes up to half a minute if the node does not answer.

    Raises:
        ClusterError: ssh is missing, or keeps no known_hosts.
    """
    if login.options is None:
        return Contact(login.host, "local")
    settings = _effective_settings(login)
    name = _known_name(settings)
    personal = [Path(file) for file in settings["userknownhostsfile"].split() if file not in ("none", "/dev/null")]
    if not personal:
        raise ClusterError(
            f"{login.host.name}: your ssh is configured without a known_hosts file (UserKnownHostsFile "
            f"{settings['userknownhostsfile']}), so no key can be trusted; remove that setting from ~/.ssh/config, "
            "ansible.cfg or the inventory"
        )
    known = _known_lines([*personal, *(Path(file) for file in settings["globalknownhostsfile"].split())], name)
    with tempfile.TemporaryDirectory(prefix="mpitrain-trust-") as folder:
        file = Path(folder, "known_hosts")
        file.write_text("".join(f"{line}\n" for line in known))
        code, words = _log_in(login, file)
        added = tuple(file.read_text().splitlines()[len(known) :])
    shown = re.search(r"^debug1: Server host key: (\S+) (SHA256:\S+)", words, re.M)
    if shown is None:
        return Contact(login.host, "unreachable", problem=_reason(words))
    return Contact(
        login.host,
        state=_state(words, added),
        fingerprint=shown[2],
        kind=shown[1],
        known_fingerprints=tuple(
            dict.fromkeys(fingerprint for line in known if (fingerprint := fingerprint_of_line(line)))
        ),
        lines=added,
        known_hosts=personal[0],
        name=name,
        problem="" if code == 0 else _reason(words),
    )


def remember(seen: Contact) -> None:
    """Add the key of an unknown node to the operator's known_hosts."""
    assert seen.known_hosts is not None
    seen.known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = seen.known_hosts.read_bytes() if seen.known_hosts.exists() else b""
    text = "".join(f"{line}\n" for line in seen.lines)
    seen.known_hosts.touch(mode=0o600)  # an existing file keeps its mode
    with seen.known_hosts.open("a") as file:
        file.write(text if before.endswith(b"\n") or not before else f"\n{text}")


def fingerprint_of_line(line: str) -> str:
    """Return the fingerprint of the key in a line of a known_hosts file; empty if the line has no key."""
    fields = line.split()
    if line.startswith(("#", "@cert-authority")) or len(fields) < 3:
        return ""
    try:
        blob = base64.b64decode(fields[3 if line.startswith("@") else 2], validate=True)
    except (binascii.Error, IndexError):
        return ""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _state(words: str, added: Sequence[str]) -> State:
    if "HOST IDENTIFICATION HAS CHANGED" in words or "REVOKED HOST KEY" in words:
        return "changed"
    return "unknown" if added else "known"


def _reason(words: str) -> str:
    """Return ssh's last message that is not about its own internals."""
    workings = re.compile(r"debug\d:|OpenSSH_|Warning: Permanently added|Transferred:|Bytes per second:")
    told = [line.strip() for line in words.splitlines() if line.strip() and not workings.match(line)]
    return told[-1] if told else "ssh said nothing"


def _log_in(login: Login, known_hosts: Path) -> tuple[int, str]:
    """Return exit code and output of one login. ssh uses the first value of an option, so these options come first."""
    assert login.options is not None
    options = {
        "UserKnownHostsFile": str(known_hosts),
        "StrictHostKeyChecking": "accept-new",
        "UpdateHostKeys": "no",
        "ControlMaster": "no",  # an open connection would show no key
        "ControlPath": "none",
        "BatchMode": "yes",
        "PreferredAuthentications": "publickey",  # send no password to an unknown machine
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "ClearAllForwardings": "yes",
        "ConnectTimeout": str(_CONNECT_SECONDS),
    }
    command = ["ssh", "-v", "-T"]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    return _run([*command, *login.options, login.destination, "true"], _LOGIN_SECONDS)


def _effective_settings(login: Login) -> dict[str, str]:
    """Return ssh's effective settings, from options and the operator's configuration (`ssh -G`), by lower-case name."""
    assert login.options is not None
    command = ["ssh", "-G", *login.options, login.destination]
    code, words = _run(command, _LOGIN_SECONDS)
    if code != 0:
        raise ClusterError(f"{login.host.name}: ssh does not accept its options: {_reason(words)}")
    return {name: value for name, _, value in (line.partition(" ") for line in words.splitlines())}


def _known_name(settings: dict[str, str]) -> str:
    """Return the name under which ssh looks up a node in known_hosts."""
    name = settings.get("hostkeyalias", "none")
    if name != "none":
        return name
    return settings["hostname"] if settings["port"] == "22" else f"[{settings['hostname']}]:{settings['port']}"


def _known_lines(files: Sequence[Path], name: str) -> list[str]:
    """Return the lines about a node in known_hosts files, including hashed ones."""
    lines: list[str] = []
    for file in files:
        if file.is_file():
            _, words = _run(["ssh-keygen", "-F", name, "-f", str(file)], _LOGIN_SECONDS)
            lines += [line for line in words.splitlines() if line and not line.startswith("#")]
    return lines


def _run(command: Sequence[str], timeout_seconds: float) -> tuple[int, str]:
    """Return exit code and output. The command runs in its own session: it cannot ask at the terminal, and ends
    whole."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ClusterError(
            f"there is no {command[0]} on PATH; install openssh-client (Red Hat: openssh-clients)"
        ) from None
    with process:
        try:
            words, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            words, _ = process.communicate()
            return 255, f"{words}\nno answer within {timeout_seconds:.0f} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, words
