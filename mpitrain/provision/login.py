"""How Ansible logs in to each node: the same ssh, with the same options."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import ClusterError
from mpitrain.launch.hostfile import Host
from mpitrain.provision.project import Project, ansible_program
from mpitrain.reading import parsed

_ANSIBLE_SECONDS = 60.0


@dataclass(frozen=True)
class Login:
    """The arguments with which `ssh` reaches a node as Ansible does; None if Ansible does not use ssh."""

    host: Host
    options: tuple[str, ...] | None

    @property
    def destination(self) -> str:
        """The destination argument of ssh."""
        return self.host.address


def logins(project: Project, hosts: Sequence[Host]) -> list[Login]:
    """Return the login of each of `hosts`, from the inventory, its group_vars, ansible.cfg and ANSIBLE_* variables.

    Raises:
        ClusterError: Ansible is missing or cannot read these, or an option is a template, which only a playbook fills
            in.
    """
    listed = _ask_ansible(
        project, "ansible-inventory", "--playbook-dir", "cluster", "--list", "-i", str(project.inventory)
    )
    settings = _ssh_settings(_ask_ansible(project, "ansible-config", "dump", "-t", "connection", "--format", "json"))
    variables: Mapping[str, Mapping[str, Any]] = listed["_meta"]["hostvars"]
    return [_login(host, settings, variables.get(host.name, {})) for host in hosts]


def _login(host: Host, settings: Mapping[str, str], variables: Mapping[str, Any]) -> Login:
    def setting(option: str, *names: str) -> str:
        value = next((str(variables[name]) for name in names if name in variables), settings.get(option, ""))
        if "{{" in value:
            raise ClusterError(f"{host.name}: {names[0]} is the template {value!r}; write its value instead")
        return value

    if setting("connection", "ansible_connection") not in ("", "ssh", "smart"):
        return Login(host, None)
    options = shlex.split(setting("ssh_args", "ansible_ssh_args"))
    for option, flag, names in (
        ("remote_user", "-l", ("ansible_user", "ansible_ssh_user")),
        ("port", "-p", ("ansible_port", "ansible_ssh_port")),
        ("private_key_file", "-i", ("ansible_private_key_file", "ansible_ssh_private_key_file")),
    ):
        if value := setting(option, *names):
            options += [flag, value]
    options += shlex.split(setting("ssh_common_args", "ansible_ssh_common_args"))
    options += shlex.split(setting("ssh_extra_args", "ansible_ssh_extra_args"))
    return Login(host, tuple(options))


def _ssh_settings(dump: list[dict[str, list[dict[str, Any]]]]) -> dict[str, str]:
    of_ssh = next(plugin["ssh"] for plugin in dump if "ssh" in plugin)
    return {option["name"]: str(option["value"]) for option in of_ssh if option["value"] is not None}


def _ask_ansible(project: Project, name: str, *arguments: str) -> Any:
    command = [ansible_program(name), *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=project.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSIBLE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"no answer within {_ANSIBLE_SECONDS:.0f} s: {project.shown(command)}") from None
    if done.returncode != 0:
        raise ClusterError(f"{project.shown(command)} failed with code {done.returncode}:\n{done.stderr.strip()}")
    return parsed(lambda: json.loads(done.stdout), ClusterError, project.shown(command), "has not answered with JSON")
