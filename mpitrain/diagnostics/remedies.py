"""Repair commands that differ from system to system, or go through two shells."""

from __future__ import annotations

import shlex

from mpitrain.diagnostics.check import Seen

_SSH = "ssh {login} "


def over_ssh(login: str, *command: str) -> str:
    """A command line that runs a command on a node; its words, such as paths, survive both shells unchanged."""
    return through_ssh(login, shlex.join(command))


def through_ssh(login: str, line: str) -> str:
    """Do the same for a line of shell."""
    return f"ssh {login} {shlex.quote(line)}"


def on_this_machine(line: str) -> str:
    """A command line that reaches a node by ssh, or the same words as typed on the node itself."""
    command, mark, comment = line.partition("  # ")
    words = command.removeprefix(_SSH)
    return line if words == command else f"{' '.join(shlex.split(words))}{mark}{comment}"


def as_user(seen: Seen, *command: str) -> str:
    """A command line that runs a command on a node as the shared user."""
    return over_ssh("{login}", *(() if seen.target.is_here else ("sudo", "-u", seen.target.user)), *command)


def on_each(seen: Seen, names: list[str], line: str) -> str:
    """A line of shell that runs on several nodes, one after the other."""
    return "; ".join(through_ssh(seen.target.login(name), line) for name in names)


def is_red_hat(seen: Seen, name: str) -> bool:
    """True if the node is of Red Hat's family, with dnf and other names; False if that was not seen."""
    return bool(seen.nodes.get(name, {}).get("login", {}).get("family") == "redhat")


def ssh_service(seen: Seen, name: str) -> str:
    """The name of sshd's service in systemd there."""
    return "sshd" if is_red_hat(seen, name) else "ssh"
