"""The nodes of a cluster, from the file that Ansible reads too: `cluster/hosts`, in a small subset of Ansible's INI.

    [head]
    node1 ansible_host=10.0.0.1

    [workers]
    node2 ansible_host=10.0.0.2 ansible_user=admin

    [cluster:children]
    head
    workers

The first column is the node's name everywhere. Forms that Ansible would read in another way (ranges, further groups,
YAML) are refused, so that Ansible and mpitrain always mean the same nodes.
"""

from __future__ import annotations

import codecs
import dataclasses
import ipaddress
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.launch.foreign_files import refuse_foreign
from mpitrain.reading import find_file, shown, shown_text, text_of

PROJECT_INVENTORY = Path("cluster/hosts")  # in a project's folder
NODE_INVENTORY = Path("/etc/mpitrain/hosts")  # on every node, written by the set-up

_HEADER = re.compile(r"\[([^:\]\s]+)(?::(\w+))?\]\s*(?:#.*)?")
_CHILD = re.compile(r"([^:\]\s#]+)\s*(?:#.*)?")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_HOST_GROUPS = ("head", "workers")
_VARIABLE_GROUPS = (*_HOST_GROUPS, "cluster", "all")
# Ansible's own groups, and names that /etc/hosts has already.
_TAKEN_NAMES = {*_VARIABLE_GROUPS, "ungrouped", "localhost"}


@dataclass(frozen=True)
class Host:
    """A node: its name, its IP address, and the other settings of its line, as text."""

    name: str
    address: str
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Inventory:
    """The nodes of a cluster, and the file with them."""

    path: Path
    head: Host
    workers: tuple[Host, ...] = ()

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All nodes: the head first, the others in the order of the file."""
        return (self.head, *self.workers)


def find_inventory(otherwise: str = "") -> Path | None:
    """Return ./cluster/hosts, else /etc/mpitrain/hosts, else None.

    Raises:
        ConfigError: somebody else may write the file, or the file cannot be looked up.
    """
    for path in (PROJECT_INVENTORY, NODE_INVENTORY):
        try:
            is_there = path.is_file()
        except OSError as error:
            raise ConfigError(f"{path} cannot be looked at: {error.strerror}; name the inventory: -i FILE") from None
        if is_there:
            refuse_foreign(path, instead=f"name it: -i {path}{otherwise}")
            return path
    return None


def read_inventory(path: Path) -> Inventory:
    """Read the nodes in the file at `path`.

    Raises:
        ConfigError: the file does not exist; Ansible would read a line in another way; a name or an address is
            invalid or appears twice; there is no head, or more than one.
    """
    return parse(path, read_text(path))


def group_variables(path: Path) -> dict[str, str]:
    """Return what the sections [all:vars] and [cluster:vars] of the file at `path` set for all nodes.

    Raises:
        ConfigError: as read_inventory.
    """
    variables: dict[str, str] = {}
    for number, group, kind, line in sections(path, read_text(path)):
        if kind == "vars" and group in ("all", "cluster") and not line.startswith("["):
            name, _, value = line.partition("=")
            variables[name.strip()] = " ".join(_words(path, number, value))
    return variables


def read_text(path: Path) -> str:
    """Return the text of the file at `path`.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    content = find_file(path, ConfigError, is_given=True)
    if content is None:
        raise ConfigError(f"{path}: there is no such file; `mpitrain cluster init` writes one")
    if content.startswith(codecs.BOM_UTF8):
        remedy = f"remove it: sed -i '1s/^\\xef\\xbb\\xbf//' {shlex.quote(str(path))}"
        raise _error(path, 1, "the file begins with a byte order mark, which Ansible takes for a name", remedy)
    return text_of(content, ConfigError, f"{path} cannot be read")


def sections(path: Path, text: str) -> list[tuple[int, str, str, str]]:
    """Yield line number, group, kind ("", "children", "vars") and text of every line with content, and of headers.

    Raises:
        ConfigError: a section is unknown, or a line stands before the first section.
    """
    lines: list[tuple[int, str, str, str]] = []
    group = kind = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith(("#", ";")):
            continue
        if line.startswith("["):
            header = _HEADER.fullmatch(line)
            if header is None:
                raise _error(
                    path, number, f"{shown(line)} is no section", "write [head], [workers] or [cluster:children]"
                )
            group, kind = header[1], header[2] or ""
            _check_section(path, number, group, kind)
        elif not group:
            yaml = line == "---" or line.endswith(":")
            problem = "this looks like YAML" if yaml else f"{shown(line)} stands before the first section"
            raise _error(path, number, problem, "an inventory begins with [head], in the form of cluster/hosts.example")
        lines.append((number, group, kind, line))
    return lines


def _check_section(path: Path, number: int, group: str, kind: str) -> None:
    fits = {
        "": group in _HOST_GROUPS,
        "children": group == "cluster",
        "vars": group in _VARIABLE_GROUPS,
    }
    if not fits.get(kind, False):
        section = shown_text(f"[{group}:{kind}]" if kind else f"[{group}]")
        allowed = "[head], [workers], [cluster:children] and [GROUP:vars] of these groups or of all"
        raise _error(path, number, f"the section {section} is not known", f"allowed are {allowed}")


def parse(path: Path, text: str) -> Inventory:
    """Parse `text`, the present or future content of the file at `path`.

    Raises:
        ConfigError: as read_inventory.
    """
    groups: dict[str, list[Host]] = {}
    children: list[str] = []
    seen: dict[str, tuple[int, str]] = {}  # names (lower case) and addresses: their line and owner
    for number, group, kind, line in sections(path, text):
        if line.startswith("["):
            if not kind:
                groups.setdefault(group, [])
        elif kind == "vars":
            _check_variable(path, number, line)
        elif kind == "children":
            children.append(_child(path, number, line))
        else:
            host = _host(path, number, line)
            for word, value in (("name", host.name.lower()), ("address", host.address)):
                key = f"{word} {value}"
                if key in seen:
                    there, owner = seen[key]
                    problem = f"the {word} {value} of {host.name} is in line {there} already, for {owner}"
                    raise _error(path, number, problem, "every node has one line, a name and an address of its own")
                seen[key] = (number, host.name)
            groups[group].append(host)
    return _inventory(path, groups, children)


def _inventory(path: Path, groups: Mapping[str, Sequence[Host]], children: Sequence[str]) -> Inventory:
    for group in _HOST_GROUPS:
        if group not in groups:
            raise ConfigError(f"{path}: there is no section [{group}]; add it, with a line for each node, or empty")
    if sorted(children) != sorted(_HOST_GROUPS):
        listed = ", ".join(children) or "nothing"
        raise ConfigError(
            f"{path}: [cluster:children] has {listed}; it must have the two lines head and workers, "
            "or Ansible would leave nodes out"
        )
    if len(groups["head"]) != 1:
        names = ", ".join(host.name for host in groups["head"]) or "nothing"
        raise ConfigError(
            f"{path}: [head] has {names}; it must have exactly one node, the one that holds the shared folder; "
            "put the others under [workers]"
        )
    return Inventory(path, groups["head"][0], tuple(groups["workers"]))


def _host(path: Path, number: int, line: str) -> Host:
    name, *settings = _words(path, number, line, comments=True) or [""]
    if "[" in name:
        raise _error(path, number, f"{shown(name)} is a range of names", "write a line for each node, with its address")
    if not _NAME.fullmatch(name):
        allowed = "a host name has letters, digits, - and ., at most 63; a port goes into ansible_port=, IPv6 into "
        raise _error(path, number, f"{shown(name)} cannot be a node's name", f"{allowed}ansible_host=")
    if name.lower() in _TAKEN_NAMES:
        raise _error(path, number, f"the name {shown(name)} is reserved", "give the node another name")
    variables: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not _VARIABLE.fullmatch(key):
            problem = f"{shown(setting)} of {name} is not of the form variable=value"
            raise _error(path, number, problem, "write no space around =, and quote a value with spaces")
        if key in variables:
            raise _error(path, number, f"{name} sets {key} twice", "keep one of them")
        variables[key] = value
    return Host(name, _address(path, number, name, variables.pop("ansible_host", None)), variables)


def _words(path: Path, number: int, text: str, *, comments: bool = False) -> list[str]:
    try:
        return shlex.split(text, comments=comments)
    except ValueError as error:
        problem = f"{shown(text)} cannot be split: {error}"
        raise _error(path, number, problem, """close the quotation, or quote the quote: note="it's mine\"""") from None


def _address(path: Path, number: int, name: str, given: str | None) -> str:
    named = _ip(name)
    text = name if given is None else given
    address = _ip(text)
    if address is None:
        problem = (
            f"{name} has no address" if given is None else f"the address {shown(given)} of {name} is not an IP address"
        )
        remedy = f"write its IP address: {name} ansible_host=10.0.0.1 (`ip -brief address` on {name} shows it)"
        raise _error(path, number, problem, remedy)
    if named is not None and named != address:
        raise _error(path, number, f"{name} is an address, but its ansible_host is {address}", "give the node a name")
    if address.is_unspecified or address.is_multicast:
        raise _error(path, number, f"{address} of {name} is not a machine's address", "write its own IP address")
    return str(address)


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _child(path: Path, number: int, line: str) -> str:
    child = _CHILD.fullmatch(line)
    if child is None or child[1] not in _HOST_GROUPS:
        problem = f"{shown(line)} is not one of its groups"
        raise _error(path, number, problem, "[cluster:children] has the lines head and workers")
    return child[1]


def _check_variable(path: Path, number: int, line: str) -> None:
    name, equals, value = line.partition("=")
    _words(path, number, value)
    if not equals or not _VARIABLE.fullmatch(name.strip()):
        raise _error(path, number, f"{shown(line)} is not of the form variable=value", "one variable a line")
    if name.strip() == "ansible_host":
        raise _error(path, number, "ansible_host is set for a whole group", "put it into the line of the node")


def _error(path: Path, number: int, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"{path}:{number}: {problem}; {remedy}")
