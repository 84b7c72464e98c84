"""The recorded state of the nodes, and what has changed since."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpitrain.check.check import Ask, Check, Finding, NotHereError, Seen
from mpitrain.errors import ConfigError
from mpitrain.reading import json_of, read_text, shown

_VERSION = 1
_MOST_BYTES = 96 << 20
# Section -> entries that stay constant unless the machine is changed. Others, such as load, vary.
STABLE: Mapping[str, tuple[str, ...]] = {
    "login": ("python",),
    "system": ("system", "kernel", "architecture", "cores", "memory_mib", "packages"),
    "names": ("hostname", "hosts", "machine_id", "host_keys"),
    "account": ("uid", "gid", "shell", "home"),
    "network": ("interfaces",),
}
# Interfaces that come and go with containers and virtual machines.
_FLEETING = re.compile(r"(veth|docker|br-|virbr|vnet|tap|cni|cali|flannel|podman|lxc)\S*")


def stable(seen: Seen) -> dict[str, dict[str, Any]]:
    """Node -> "section.entry" (also nested) -> value, for all observations that do not change by themselves."""
    lasting: dict[str, dict[str, Any]] = {}
    for name, sections in seen.nodes.items():
        values: dict[str, Any] = {}
        for section, entries in STABLE.items():
            for entry in entries:
                if isinstance(sections.get(section), dict) and entry in sections[section]:
                    value = sections[section][entry]
                    value = _lasting(value) if entry == "interfaces" else value
                    values |= _leaves(f"{section}.{entry}", value)
        if values:
            lasting[name] = values
    return lasting


def _lasting(interfaces: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Interfaces and addresses, without those that vary by themselves."""
    kept = {}
    for name, link in interfaces.items():
        if not _FLEETING.fullmatch(name):
            # A tunnel gets another link-local address at each start.
            lasting = [
                one
                for one in link["addresses"]
                if one.split("/")[0] not in link["temporary"] and not one.startswith("fe80:")
            ]
            kept[name] = {
                **{attribute: value for attribute, value in link.items() if attribute != "temporary"},
                "addresses": lasting,
            }
    return kept


def _leaves(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {path: leaf for key, inner in value.items() for path, leaf in _leaves(f"{name}.{key}", inner).items()}


def write_baseline(path: Path, seen: Seen) -> None:
    """Write the constant entries to `path`.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps({"mpitrain_baseline": _VERSION, "nodes": stable(seen)}, indent=2, sort_keys=True)
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"--save-baseline {path}: cannot be written: {error.strerror}") from None


def read_baseline(path: Path) -> dict[str, Any]:
    """The nodes of a baseline: node -> entry -> value.

    Raises:
        ConfigError: the file is not a baseline.
    """

    def refusal(said: str) -> ConfigError:
        return ConfigError(f"{said}; --save-baseline {path} writes one")

    called, form = f"--baseline {path}", "is not a baseline"
    text = read_text(path, refusal, called=f"{called}:", most_bytes=_MOST_BYTES)
    baseline = json_of(text, refusal, called, form=form, any_text=True)
    nodes = baseline.get("nodes")
    if baseline.get("mpitrain_baseline") != _VERSION:
        raise refusal(f"{called} {form} of version {_VERSION}")
    if not (isinstance(nodes, dict) and all(isinstance(values, dict) for values in nodes.values())):
        raise refusal(f"{called} {form}: its nodes are {shown(nodes)}")
    return nodes


def drift(seen: Seen, _names: object) -> Iterator[Finding]:
    """The judge of DRF01: every value that differs from the baseline."""
    if "baseline" not in seen.cluster:
        raise NotHereError("there is no --baseline to compare with")
    before = seen.whole("baseline")
    now = stable(seen)
    for name in seen.target.names:
        if name not in before:
            yield Finding("warn", "is not in the baseline", where=(name,))
        old = before.get(name, {})
        for entry, value in now.get(name, {}).items():
            if old and old.get(entry) != value:
                was = f"{_short(old[entry])}, as in the baseline" if entry in old else "not there, as in the baseline"
                yield Finding("warn", f"{entry} is {_short(value)}", was, where=(name,))
        for entry in sorted(old.keys() - now.get(name, {}).keys()):
            section = seen.nodes.get(name, {}).get(entry.partition(".")[0])
            if not isinstance(section, dict) or section.keys() & {"error", "found"}:
                continue  # the entry was not seen
            yield Finding("warn", f"{entry} is not there", f"{_short(old[entry])}, as in the baseline", where=(name,))
    for name in before.keys() - set(seen.target.names):
        yield Finding("warn", f"{name} of the baseline is not in the inventory")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


ASKS = (Ask("system", "system", "login"),)
CHECKS = (
    Check(
        "DRF01",
        "the nodes are as in the baseline",
        drift,
        scope="cluster",
        uses=tuple(STABLE),
        looks="What does not change by itself (kernel, packages, addresses, limits), against the file of --baseline.",
        why="A cluster that no longer works was changed somewhere; this says where.",
        remedy="if the change is intended: mpitrain check-cluster --save-baseline FILE",
        needs=("PRB01",),
        fault="an interface's MTU changed after the baseline",
    ),
)
