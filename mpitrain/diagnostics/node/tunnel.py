"""The tunnel of a node to the other nodes, and the gate around it."""

from __future__ import annotations

from typing import Any

from mpitrain.diagnostics.node import children, interfaces

_NAME = "mpitrain"


def tunnel(_wish: dict[str, Any]) -> dict[str, Any]:
    """Return the running tunnel: its addresses, its public key, and the others' keys by address."""
    folder = children.as_root("ls", "/etc/wireguard/mpitrain.d")
    if folder is None:
        return {"is_known": False}
    peers = {}
    for line in _shown("allowed-ips").splitlines():
        key, *networks = line.split()
        peers.update({network.partition("/")[0]: key for network in networks})
    links = [link for link in interfaces.addresses() if link["ifname"] == _NAME]
    return {
        "is_known": True,
        "is_set_up": bool(folder.strip()),
        "addresses": [
            one["local"] for link in links for one in link.get("addr_info", []) if one.get("family", "inet") == "inet"
        ],
        "key": _shown("public-key").strip(),
        "peers": peers,
        "gate": _gate(),
    }


def _shown(field: str) -> str:
    # Never all fields, which would include the private key.
    return children.as_root("wg", "show", _NAME, field) or ""


def _gate() -> str:
    """ "closed" as set-up has closed it, "changed", or "open"."""
    loaded = children.as_root("nft", "-s", "list", "table", "inet", _NAME) or ""
    return "open" if not loaded else "closed" if loaded == children.text("/etc/mpitrain/gate.loaded") else "changed"


CALLS = {"tunnel": tunnel}
