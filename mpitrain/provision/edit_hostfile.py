"""Changes to a cluster's inventory: each is written in one step, and only if the result can be read again."""

from __future__ import annotations

import os
import shlex
import tempfile
from getpass import getuser
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.launch.hostfile import Host, Inventory, parse, read_text, sections


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
