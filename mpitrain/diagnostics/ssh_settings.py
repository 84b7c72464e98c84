"""How ssh would log in to a node: what a command line must say, and what ssh takes from its own configuration."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping

from mpitrain.launch.hostfile import Host

# Settings of a node: arguments for ssh, which may name commands to run here.
SSH_ARGUMENTS = ("ansible_ssh_common_args", "ansible_ssh_extra_args")
_SECONDS = 5.0


class LoginError(Exception):
    """A login failed. `kind`: the check for this failure; `reason`: what was seen."""

    def __init__(self, kind: str, reason: str, host_keys: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.host_keys = host_keys or {}  # fingerprints: the one "got", the one "known"


def destination(host: Host) -> str:
    """The host for ssh: the address, or a name of ssh's own configuration if the node was named so by hand."""
    return host.variables.get("ansible_host", host.address)


def login_words(host: Host) -> list[str]:
    """The words after `ssh` in a typed command, by the inventory: options, then user and address."""
    user = host.variables.get("ansible_user")
    return [*_options(host), f"{user}@{destination(host)}" if user else destination(host)]


def _options(host: Host) -> list[str]:
    options: list[str] = []
    for option, name in (("-p", "ansible_port"), ("-i", "ansible_ssh_private_key_file")):
        options += [option, host.variables[name]] if host.variables.get(name) else []
    for name in SSH_ARGUMENTS:
        options += shlex.split(host.variables.get(name, ""))
    return options


def ssh_settings(host: Host) -> dict[str, list[str]]:
    """How ssh itself would log in, by its own configuration and the inventory: name -> values.

    Raises:
        LoginError: ssh is not here, or does not say.
    """
    command = ["ssh", "-G", *login_words(host)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except FileNotFoundError:
        install = "sudo apt-get install openssh-client, or sudo dnf install openssh-clients"
        raise LoginError("login", f"there is no ssh on this machine: {install}") from None
    except subprocess.TimeoutExpired:
        raise LoginError("login", f"{shlex.join(command)} did not end") from None
    except subprocess.CalledProcessError as error:
        raise LoginError("login", f"{shlex.join(command)} failed: {error.stderr}") from None
    settings: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        settings.setdefault(name, []).extend(shlex.split(value) if name.endswith("knownhostsfile") else [value])
    return settings


def gateway(settings: Mapping[str, list[str]]) -> str | None:
    """The command by which ssh reaches a host behind another one, if one is set."""
    name, port = settings["hostname"][0], settings["port"][0]
    jumps = settings.get("proxyjump", ["none"])[0]
    if jumps != "none":
        *first, last = jumps.split(",")
        through = f"-J {shlex.quote(','.join(first))} " if first else ""
        last = last if last.startswith("ssh://") else f"ssh://{last}"
        return f"ssh -o BatchMode=yes {through}-W {shlex.quote(f'[{name}]:{port}')} {shlex.quote(last)}"
    command = settings.get("proxycommand", ["none"])[0]
    return None if command == "none" else command.replace("%h", name).replace("%p", port)
