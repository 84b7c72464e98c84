"""A made-up shared folder of two nodes, and what its judges say."""

from __future__ import annotations

from typing import Any

from check.made_up import seen
from mpitrain.check.check import Result, Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.run import judge

SHARE = "/home/cluster/nfs"
NFS = {"path": SHARE, "type": "nfs4", "source": f"10.0.0.1:{SHARE}", "options": ["rw", "vers=4.2", "hard"]}
AUTOFS = {"path": SHARE, "type": "autofs", "source": "systemd-1", "options": ["rw"]}
STATES = {"automount": {"UnitFileState": "enabled"}, "mount": {"UnitFileState": "static"}}
EXPORT = {"path": SHARE, "client": "10.0.0.2", "options": ["rw", "root_squash"]}
SERVING = {"exports": [EXPORT], "server": "active", "enabled": "enabled", "is_listening": True, "answers": True}
USE = {
    "list": {"seconds": 0.0, "why": ""},
    "room": {"bytes": 100 << 30, "free_bytes": 50 << 30, "files": 1000, "free_files": 900},
    "write": {"doing": "removing it", "why": "", "code": ""},
}
VIEW = {"by_name_seconds": 0.0, "listed_seconds": 0.0, "is_same": True}


def mount(*mounts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "kind": "folder",
        "why": "",
        "mounts": list(mounts),
        "server_addresses": [],
        "units": STATES,
        "unit_options": [],
        "fstab": [],
    } | fields


def looked(**of_node2: Any) -> Seen:
    """Two nodes in good order, except for the given values of the second. `serving` is the head's answer."""
    found = seen(2)
    serving = of_node2.pop("serving", SERVING)
    view = of_node2.pop("view", VIEW)
    found.nodes = {
        "node1": {"mount": mount(), "use": USE, "serving": serving},
        "node2": {"mount": mount(AUTOFS, NFS), "use": USE, **of_node2},
    }
    found.pairs = {pair: {"view": view} for pair in (("node1", "node2"), ("node2", "node1"))}
    return found


def judged(id_: str, found: Seen) -> list[Result]:
    return [one for one in judge([CHECKS[id_]], found) if one.verdict not in ("pass", "skip")]
