"""The first inventory, from options or from the user's answers; and changes to it.

Each change is written in one step, and only if the result can be read again.
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import tempfile
from collections.abc import Sequence
from getpass import getuser
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.launch.hostfile import Host, Inventory, parse, read_text, sections
from mpitrain.provision import terminal
from mpitrain.reading import is_file, named_path, shown, shown_text


def create_inventory(path: Path, nodes: Sequence[Host], head: str | None) -> Inventory:
    """Write an inventory of `nodes` to `path`, with `head` (None: the first node) as the head.

    Raises:
        ConfigError: the file exists already, `head` is not one of the nodes, or names or addresses are not valid.
    """
    refuse_existing(path)
    heads = [host for host in nodes if host.name == head] if head is not None else [nodes[0]]
    if not heads:
        raise ConfigError(f"--head is {head!r}; it must be one of the nodes: {', '.join(host.name for host in nodes)}")
    inventory = Inventory(path, heads[0], tuple(host for host in nodes if host is not heads[0]))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_inventory(path, inventory)
    return inventory


def refuse_existing(path: Path) -> None:
    """Raise if there is an inventory already.

    Raises:
        ConfigError: there is an inventory.
    """
    if path.exists() or path.is_symlink():
        if str(path) == os.environ.get("ANSIBLE_INVENTORY"):
            raise ConfigError(
                f"ANSIBLE_INVENTORY names {path}, which exists already and is used; to make an inventory of your own, "
                "`unset ANSIBLE_INVENTORY`"
            )
        raise ConfigError(
            f"{path} exists already and was not changed; edit it, use `mpitrain cluster add` or `remove`, "
            f"or move it away: mv {path} {path}.old"
        )


def parse_nodes(text: str, variables: dict[str, str]) -> list[Host]:
    """Parse the nodes in `a=10.0.0.1,b=10.0.0.2`, each with these variables.

    Raises:
        ConfigError: a part is not NAME=ADDRESS, or its address is not an IP address of a machine.
    """
    nodes: list[Host] = []
    for part in text.split(","):
        node = _node(part, variables)
        _refuse_second(node, nodes)
        nodes.append(node)
    return nodes


def _node(text: str, variables: dict[str, str]) -> Host:
    name, _, address = (part.strip() for part in text.strip().partition("="))
    if not name or not address:
        raise ConfigError(f"{shown(text.strip())} is not a node; allowed is NAME=ADDRESS, such as node1=10.0.0.1")
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        raise ConfigError(
            f"{shown_text(name)}: {shown(address)} is not an IP address; `ip -brief address` there shows its addresses"
        ) from None
    if loopback:
        raise ConfigError(f"{name}: the other nodes cannot reach {address}; `ip -brief address` on {name} shows more")
    return Host(name, address, variables)


def login_variables(user: str | None, key: str | None) -> dict[str, str]:
    """Return the variables for the login in a node's line.

    Raises:
        ConfigError: the key does not exist, or is the public key.
    """
    variables = {} if user is None else {"ansible_user": user}
    if key is not None:
        path = named_path(key).absolute()
        if path.suffix == ".pub":
            raise ConfigError(f"--key: {path} is the public key; give the private one, {path.with_suffix('')}")
        if not is_file(path):
            raise ConfigError(f"--key: there is no file {path}; `ssh-keygen -t ed25519` makes a key")
        variables["ansible_ssh_private_key_file"] = str(path)
    return variables


def ask_for_nodes(variables: dict[str, str]) -> list[Host]:
    """Ask for the nodes. Repeat the question if an answer is not valid.

    Raises:
        ClusterError: Ctrl-C or the end of the input.
    """
    print("Begin with the head: it holds the shared folder, and you start jobs on it. An empty name ends the list.")
    nodes: list[Host] = []
    while True:
        role = "the head" if not nodes else f"worker {len(nodes)}"
        name = terminal.ask(f"Name of {role}: ")
        if not name and nodes:
            return nodes
        try:
            node = _node(f"{name}={terminal.ask(f'IP address of {name}: ') if name else ''}", variables)
            _refuse_second(node, nodes)
        except ConfigError as error:
            print(f"  {error}")
            continue
        nodes.append(node)


def ask_for_login() -> tuple[str | None, str | None]:
    """Ask for the user and the private key for the login to the nodes; None leaves the choice to ssh.

    Raises:
        ClusterError: Ctrl-C or the end of the input.
    """
    user = terminal.ask("User to log in as, who may use sudo (empty: as your ssh does): ")
    while True:
        key = terminal.ask("Private key for that login (empty: as your ssh does): ")
        try:
            login_variables(None, key or None)
        except ConfigError as error:
            print(f"  {error}")
            continue
        return user or None, key or None


def _refuse_second(node: Host, nodes: Sequence[Host]) -> None:
    for other in nodes:
        if node.name.lower() == other.name.lower() or node.address == other.address:
            raise ConfigError(f"{node.name}={node.address}: {other.name}={other.address} is in the list already")


# -- changes, each in one step -----------------------------------------------------------------------------------------


def write_inventory(path: Path, inventory: Inventory) -> None:
    """Write the nodes to `path`, completely or not at all. Comments and group variables of an older file are lost.

    Raises:
        ConfigError: the new content could not be read again.
    """
    lines = ["[head]", host_line(inventory.head), "", "[workers]"]
    lines += [host_line(host) for host in inventory.workers]
    lines += ["", "[cluster:children]", "head", "workers"]
    _replace(path, "\n".join(lines) + "\n")


def add_worker(path: Path, host: Host) -> Inventory:
    """Add `host` after the last worker in the file at `path`. No other line changes.

    Raises:
        ConfigError: its name or address is already in the file, or is not valid.
    """
    text = read_text(path)
    parse(path, text)  # checks that there is a section of workers
    behind = max(number for number, group, kind, _ in sections(path, text) if (group, kind) == ("workers", ""))
    lines = text.splitlines()
    return _replace(path, "\n".join([*lines[:behind], host_line(host), *lines[behind:]]) + "\n")


def remove_worker(path: Path, name: str) -> Inventory:
    """Remove the line of the worker `name` from the file at `path`. No other line changes.

    Raises:
        ConfigError: there is no such worker; the head cannot be removed.
    """
    text = read_text(path)
    inventory = parse(path, text)
    if name not in {host.name for host in inventory.workers}:
        workers = ", ".join(host.name for host in inventory.workers) or "none"
        why = "it is the head, which a cluster needs" if name == inventory.head.name else "it is not in the file"
        raise ConfigError(f"{path}: cannot remove {name!r}: {why}; the workers are: {workers}")
    gone = {
        number
        for number, group, kind, line in sections(path, text)
        if (group, kind) == ("workers", "") and not line.startswith("[") and shlex.split(line, comments=True)[0] == name
    }
    kept = [line for number, line in enumerate(text.splitlines(), 1) if number not in gone]
    return _replace(path, "\n".join(kept) + "\n")


def host_line(host: Host) -> str:
    """Return the line of a node, without a line break."""
    variables = ({} if host.name == host.address else {"ansible_host": host.address}) | dict(host.variables)
    return " ".join([host.name, *(f"{name}={shlex.quote(value)}" for name, value in variables.items())])


def _replace(path: Path, text: str) -> Inventory:
    """Write `text` to `path` in one step, if it is an inventory. Return the inventory."""
    inventory = parse(path, text)
    target = path.resolve()  # a link stays a link
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
    try:
        file = tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, prefix=".hosts-", delete=False)  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; check that {getuser()} may write it") from None
    with file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), mode)
            Path(file.name).replace(target)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return inventory
