"""The tunnel between the nodes, if provisioning made one: is it up, with the right keys, and is the firewall closed?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mpitrain.check.check import Ask, Check, Finding, NotHereError, Seen


def has_tunnel(seen: Seen, name: str) -> bool:
    """True if the node reaches the others through a tunnel, by the settings of set-up and by what it has made."""
    is_wanted = bool(seen.target.settings["mpitrain_wireguard"])
    return is_wanted or bool(seen.nodes.get(name, {}).get("tunnel", {}).get("is_set_up"))


def _tunnel(seen: Seen, name: str) -> Mapping[str, Any]:
    tunnel: Mapping[str, Any] = seen.node(name, "tunnel")
    if not tunnel["is_known"]:
        raise NotHereError("the tunnel can only be examined as root, and the login may not use sudo")
    if not has_tunnel(seen, name):
        raise NotHereError("mpitrain_wireguard is false: the nodes reach each other without a tunnel")
    return tunnel


def _up(seen: Seen, name: str) -> Iterator[Finding]:
    tunnel = _tunnel(seen, name)
    own = seen.target.addresses[name]
    if not tunnel["is_set_up"]:
        # The other nodes must also learn its key, so no node is named.
        yield Finding("fail", "there is no tunnel, but mpitrain_wireguard is true", "the tunnel", _ALL)
        return
    if own not in tunnel["addresses"]:
        has = ", ".join(tunnel["addresses"])
        is_wanted = seen.target.settings["mpitrain_wireguard"]
        if has and not is_wanted:
            observed = f"there is a tunnel, with the address {has}, but mpitrain_wireguard is false"
            yield Finding("fail", observed, "no tunnel, or mpitrain_wireguard: true", _NOT_WANTED)
            return
        observed = f"the tunnel has the address {has}" if has else "the tunnel is down"
        # If the tunnel is not wanted, provisioning removes it from all nodes or from none.
        yield Finding("fail", observed, f"up, with the address {own}", "" if is_wanted else _ALL)
        return
    others = {other: seen.nodes.get(other, {}).get("tunnel", {}) for other in seen.target.names if other != name}
    strange = [
        other
        for other, seen_there in others.items()
        if seen_there.get("key") and seen_there.get("peers", {}).get(own) != tunnel["key"]
    ]
    if strange:
        observed = f"the tunnel runs with a key that {', '.join(strange)} do{'' if strange[1:] else 'es'} not know"
        yield Finding("fail", observed, "a key that all others know", _ALL)


def _gate(seen: Seen, name: str) -> Iterator[Finding]:
    gate = _tunnel(seen, name)["gate"]
    if gate != "closed":
        table = "nftables has no table inet mpitrain" if gate == "open" else "the table inet mpitrain was changed"
        yield Finding("fail", f"{table}: other machines may reach the node's services", "as set-up wrote it")


_ALL = "{set_up} --tags wireguard"
_NOT_WANTED = (
    f"{_ALL}  # removes it from all nodes; to keep it, "
    "first write mpitrain_wireguard: true into cluster/group_vars/all.yml"
)

ASKS = (Ask("tunnel", "tunnel", "login"),)
CHECKS = (
    Check(
        "WGD01",
        "the tunnel to the other nodes is up, with a key that they know",
        _up,
        uses=("tunnel",),
        looks="`wg show mpitrain`, as root: the node's own key, against the key that the other nodes have for it.",
        why="Names, logins, the shared folder and jobs all use the tunnel; without it, the node is cut off.",
        tag="wireguard",
        needs=("PRB01", "PRB02"),
        fault="the tunnel stopped; a new key on one node",
    ),
    Check(
        "WGD02",
        "from outside, the node answers only through ssh and the tunnel",
        _gate,
        uses=("tunnel",),
        looks="`nft list table inet mpitrain`, as root, against the rules that set-up has loaded.",
        why="NFS trusts every user number that a client sends: a machine that reaches the server can write as the "
        "shared user.",
        tag="gate",
        needs=("PRB01", "PRB02"),
        fault="the rules flushed; a rule inserted before them",
    ),
)
