"""The nodes to check and their intended state: from the inventory, the variables of its group_vars, and ssh."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from getpass import getuser
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.launch.batch import find_allocation
from mpitrain.launch.foreign_files import refuse_foreign
from mpitrain.launch.hostfile import (
    NODE_INVENTORY,
    PROJECT_INVENTORY,
    Host,
    find_inventory,
    group_variables,
    read_inventory,
)
from mpitrain.launch.variables import network_variables, read_env_file
from mpitrain.reading import checked, named_path, parsed, read_text

# Settings of a node: arguments for ssh, which may name commands to run here.
SSH_ARGUMENTS = ("ansible_ssh_common_args", "ansible_ssh_extra_args")
_SSH_SECONDS = 5.0
# The same values as in cluster/group_vars/all.yml; a test compares them. They are used if that file is missing.
DEFAULTS: dict[str, Any] = {
    "mpitrain_user": "cluster",
    "mpitrain_uid": 1900,
    "mpitrain_gid": 1900,
    "mpitrain_share": "/home/cluster/nfs",
    "mpitrain_venv": "{{ mpitrain_share }}/venv",
    "mpitrain_nfs_options": "vers=4.2,hard,nconnect=4,noatime,nosuid,nodev,lookupcache=positive",
    "mpitrain_mpi": "wheel",
    "mpitrain_sshd_max_startups": "100:30:400",
    "mpitrain_nofile": 65536,
    "mpitrain_memlock": "unlimited",
    "mpitrain_firewall": "auto",
    "mpitrain_time": "auto",
    "mpitrain_tuning": False,
    "mpitrain_wireguard": False,
    "mpitrain_wireguard_network": "10.213.0.0/16",
}
_MOST_BYTES = 1 << 18  # of YAML, which is read slowly
_REFERENCE = re.compile(r"\{\{\s*(\w+)\s*\}\}")


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
        LoginError: ssh is missing, or does not report its settings.
    """
    command = ["ssh", "-G", *login_words(host)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SSH_SECONDS, check=True)
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


@dataclass(frozen=True)
class Target:
    """The cluster to check, and how its provisioning was configured.

    Attributes:
        hosts: the nodes to examine, the head first if it is one of them.
        user: the shared user, as whom jobs run.
        share: the shared folder; None if there is none, as far as known.
        venv: the virtual environment of jobs.
        settings: the variables of cluster/group_vars/all.yml, with their defaults.
        set_up: the beginning of a repair command: `ansible-playbook cluster/setup.yml`, with the inventory if needed;
            empty if the set-up has made nothing here.
        script: the program of `--script`, if any; an absolute path.
        environ: the user's variables that choose interfaces and ports.
        inventory_head: the head if it is not one of `hosts`; else None.
        inventory: the file with the nodes; None if they were named by hand.
        python_here: for `mpitrain doctor`, which looks at this machine alone: the Python of jobs. Else None.
    """

    hosts: tuple[Host, ...]
    user: str
    share: str | None
    venv: str | None
    settings: Mapping[str, Any]
    set_up: str
    script: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    inventory_head: Host | None = None
    inventory: Path | None = None
    python_here: str | None = None

    @property
    def is_here(self) -> bool:
        """True if the target is this machine by itself: there is no login, no set-up and no other node."""
        return self.python_here is not None

    @property
    def python(self) -> str:
        """The Python of jobs."""
        return self.python_here or f"{self.venv}/bin/python"

    @property
    def head(self) -> str:
        """The head's name, which need not be one of `names`."""
        return (self.inventory_head or self.hosts[0]).name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes to check, the head first if it is one of them."""
        return tuple(host.name for host in self.hosts)

    @property
    def addresses(self) -> dict[str, str]:
        """Name -> address, as the inventory has them; the head's too."""
        return {host.name: host.address for host in self._all()}

    def login(self, name: str) -> str:
        """Return the words after `ssh` that reach the node in a printed command; on this machine, a placeholder."""
        if self.is_here:
            return "{login}"
        return next(shlex.join(login_words(host)) for host in self._all() if host.name == name)

    def known_as(self, name: str) -> str:
        """Return the node's name in known_hosts, quoted for a shell, with its port if that is not ssh's own."""
        host = next(host for host in self._all() if host.name == name)
        port = host.variables.get("ansible_port", "22")
        place = destination(host)
        return shlex.quote(place if port == "22" else f"[{place}]:{port}")

    def destination(self, name: str) -> str:
        """Return the address that ssh from here uses; the other nodes may use another one."""
        return destination(next(host for host in self._all() if host.name == name))

    def _all(self) -> tuple[Host, ...]:
        return (*self.hosts, self.inventory_head) if self.inventory_head else self.hosts


def find_target(inventory: Path | None, hosts: str | None, script: str | None, environ: Mapping[str, str]) -> Target:
    """The target of a command line.

    Args:
        inventory: value of `-i`; None for that of ANSIBLE_INVENTORY, else ./cluster/hosts, else /etc/mpitrain/hosts.
        hosts: value of `--hosts a,b`: names or addresses; the user of this command is then the shared user there. None:
            those of this job of a batch system, else all of the inventory.
        script: of `--script`.
        environ: the user's environment.

    Raises:
        ConfigError: there is no inventory; the inventory or a file beside it has invalid content; a file that was found
            rather than named is writable by other users, or has arguments of ssh.
    """
    named = environ.get("ANSIBLE_INVENTORY", "")
    if hosts is None and inventory is None and not named and (allocation := find_allocation(environ)):
        hosts = ",".join(allocation.slots)
    if inventory is None and "," in named:
        raise ConfigError(f"ANSIBLE_INVENTORY is {named!r}; it must be one file; or give the inventory with -i")
    is_named = inventory is not None or bool(named)
    path = inventory or (named_path(named) if named else find_inventory())
    if path is None:
        if hosts is None:
            raise ConfigError(
                f"there is no inventory: looked for {PROJECT_INVENTORY} and {NODE_INVENTORY}; `mpitrain cluster init` "
                "writes one, --hosts a,b does without"
            )
        nodes: tuple[Host, ...] = ()
    else:
        given = _login(_given(path, is_named=is_named))
        common = {**given, **group_variables(path)}
        nodes = tuple(replace(host, variables={**common, **host.variables}) for host in read_inventory(path).hosts)
        _refuse_commands(path, given, nodes, is_named=is_named)
    head = nodes[0] if nodes else None
    known = {host.name for host in nodes}
    if hosts is not None:
        nodes = _named(hosts, nodes)
        nodes = tuple(sorted(nodes, key=lambda host: host != head))  # the others stay as they are
    # Nodes named by hand, without an inventory: the cluster was not made by mpitrain, so this user and this Python are
    # used.
    settings = _settings(path, is_named=is_named) if path else {**DEFAULTS, **_here()}
    share = settings["mpitrain_share"]
    if settings["mpitrain_wireguard"]:
        network = settings["mpitrain_wireguard_network"]
        nodes = tuple(_through_tunnel(host, network) if host.name in known else host for host in nodes)
        head = _through_tunnel(head, network) if head else None
    file = environ.get("MPITRAIN_ENV_FILE", "")  # as in `mpitrain run`
    variables = {**(read_env_file(Path(file)) if file else {}), **environ}
    return Target(
        hosts=nodes,
        user=settings["mpitrain_user"],
        share=share,
        venv=settings["mpitrain_venv"],
        settings=settings,
        set_up=_set_up(path),
        script=None if script is None else str(Path(script).absolute()),
        environ=network_variables(variables),
        inventory_head=None if head in nodes else head,
        inventory=path,
    )


def _through_tunnel(host: Host, network: str) -> Host:
    """The node with the address by which the others reach it; the login from here follows the inventory."""
    return replace(
        host,
        address=tunnel_address(host.address, network),
        variables={**host.variables, "ansible_host": host.address},
    )


def tunnel_address(address: str, network: str) -> str:
    """The address in the tunnel that set-up makes from an address of the inventory: its last bits, in another network.

    Raises:
        ConfigError: there is no such network.
    """
    try:
        whole = ip_network(network)
    except ValueError as error:
        raise ConfigError(f"group_vars/all.yml: mpitrain_wireguard_network: {error}") from None
    return str(whole[int(ip_address(address)) % whole.num_addresses])


def _named(hosts: str, known: tuple[Host, ...]) -> tuple[Host, ...]:
    by_name = {host.name: host for host in known}
    named_hosts: list[Host] = []
    for name in (part.strip() for part in hosts.split(",")):
        if not name or name in {host.name for host in named_hosts}:
            raise ConfigError(f"--hosts {hosts!r}: {'an empty name' if not name else f'{name} is named twice'}")
        if name in by_name:
            named_hosts.append(by_name[name])
            continue
        host = _by_hand(name)
        if host.address in {one.address for one in named_hosts}:
            raise ConfigError(f"--hosts {hosts!r}: {name} is a second name of {host.address}")
        named_hosts.append(host)
    return tuple(named_hosts)


def _by_hand(name: str) -> Host:
    """A node that only --hosts names: ssh reads the name, which may be one of ssh's own configuration."""
    real = name
    with suppress(LoginError):  # which each login will say
        real = ssh_settings(Host(name, name))["hostname"][0]
    try:
        address = _address(real)
    except OSError as error:
        raise ConfigError(f"--hosts: {name} is in no inventory and cannot be resolved: {error}") from None
    try:
        _address(name)
    except OSError:  # only ssh knows the name, here; the nodes know its address
        return Host(real, address, {"ansible_host": name})
    return Host(name, address, {"ansible_host": name})


def _address(name: str) -> str:
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])


def _here() -> dict[str, Any]:
    venv = Path(sys.prefix)
    is_made_by_set_up = (venv / ".mpitrain").is_file()  # the set-up writes this file
    return {
        "mpitrain_user": getuser(),
        "mpitrain_share": str(venv.parent) if is_made_by_set_up else None,
        "mpitrain_venv": str(venv),
    }


def _login(given: Mapping[str, Any]) -> dict[str, str]:
    names = ("ansible_user", "ansible_port", "ansible_ssh_private_key_file", *SSH_ARGUMENTS)
    return {name: str(given[name]) for name in names if name in given}


def _settings(inventory: Path, *, is_named: bool) -> dict[str, Any]:
    """DEFAULTS, overridden by group_vars/all.yml beside the inventory or in the project's folder."""
    given = _given(inventory, is_named=is_named)
    settings = {**DEFAULTS, **{name: value for name, value in given.items() if name in DEFAULTS}}

    def filled(value: Any) -> Any:
        return _REFERENCE.sub(lambda m: str(settings.get(m[1], m[0])), value) if isinstance(value, str) else value

    settings = {name: filled(value) for name, value in settings.items()}
    for name, value in settings.items():
        if isinstance(value, str) and "{{" in value:
            raise ConfigError(
                f"group_vars/all.yml: {name} is the template {value!r}, which only Ansible can fill in; write its value"
            )
    return settings


def _given(inventory: Path, *, is_named: bool) -> dict[str, Any]:
    path = _group_vars(inventory)
    if path is None:
        return {}
    if not (is_named and _is_beside(path, inventory)):
        refuse_foreign(path)
    return _read(path)


def _is_beside(group_vars: Path, inventory: Path) -> bool:
    """True for a file beside a named inventory, which is named with it. Files of the current folder are not."""
    return group_vars.parent.parent == inventory.parent


def _group_vars(inventory: Path) -> Path | None:
    places = [inventory.parent / "group_vars/all.yml", PROJECT_INVENTORY.parent / "group_vars/all.yml"]
    return next((place for place in places if place.is_file()), None)


def _refuse_commands(inventory: Path, given: Mapping[str, str], nodes: Iterable[Host], *, is_named: bool) -> None:
    """Refuse arguments of ssh, which may be commands to run here, in a file that was found and not named.

    Args:
        given: what the group_vars say about the login.
        is_named: the user has named the inventory.
    """
    group_vars = _group_vars(inventory)
    is_beside = group_vars is not None and _is_beside(group_vars, inventory)
    unnamed = [] if group_vars is None or (is_named and is_beside) else [(group_vars, given)]
    unnamed += [] if is_named else [(inventory, host.variables) for host in nodes]
    for file, variables in unnamed:
        for name in SSH_ARGUMENTS:
            if name in variables:
                remedy = f"name the inventory: -i {inventory}"
                if file == group_vars and not is_beside:
                    remedy = f"write the setting into {inventory}, and name that file: -i {inventory}"
                raise ConfigError(
                    f"{file}, which was found rather than named, sets {name} to {variables[name]!r}. This setting can "
                    f"make ssh run commands on this machine, so it is only allowed in an inventory that you name. If "
                    f"you trust the file, {remedy}"
                )


def _read(path: Path) -> dict[str, Any]:
    import yaml

    text = read_text(path, ConfigError, most_bytes=_MOST_BYTES)
    content = parsed(lambda: checked(yaml.safe_load(text)), ConfigError, str(path), "is not YAML")
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds no variables")
    return content


def _set_up(inventory: Path | None) -> str:
    """The beginning of a repair line. It names the inventory, unless ansible.cfg does.

    Where an inventory is without playbooks, `mpitrain cluster` has those of the installed mpitrain.
    """
    is_default = inventory is None or inventory in (PROJECT_INVENTORY, NODE_INVENTORY)
    is_named = not is_default and str(inventory) != os.environ.get("ANSIBLE_INVENTORY")
    if inventory not in (None, NODE_INVENTORY) and not Path("cluster/setup.yml").is_file():
        return f"mpitrain cluster setup{f' --inventory {inventory}' if is_named else ''} --"
    return f"ansible-playbook{f' -i {inventory}' if is_named else ''} cluster/setup.yml"
