"""What is mounted at the share's path, and whose it is: servers have several addresses, and names for them."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

from mpitrain.diagnostics.check import NotHereError, Seen

_KINDS = ("nfs", "nfs4", "fuse.nfs")  # the last is a client in user space


def the_share(seen: Seen) -> str:
    """The folder.

    Raises:
        NotHereError: there is none.
    """
    if seen.target.share is None:
        raise NotHereError("no shared folder is known")
    return seen.target.share


def mount_of(seen: Seen, name: str) -> Mapping[str, Any] | None:
    """What is on top at the path, an automount that has not mounted anything aside; None where nothing is.

    The share may be a folder of a larger one, mounted above; that of the node's own disk is nothing.
    """
    mounts = [one for one in seen.node(name, "mount")["mounts"] if one["type"] != "autofs"]
    if mounts and mounts[-1]["path"] != the_share(seen).rstrip("/") and mounts[-1]["type"] not in _KINDS:
        return None
    return mounts[-1] if mounts else None


def addresses_of(seen: Seen, name: str) -> set[str]:
    """All addresses of a node, as far as they were seen; the share may go another way than the inventory's."""
    links = seen.nodes.get(name, {}).get("names", {}).get("links", [])
    own = {address for link in links for address in link["addresses"] if not ip_address(address).is_loopback}
    return own | {seen.target.addresses[name]}


def origin_of(mount: Mapping[str, Any], share: str) -> str:
    """Where the share's files are, as server:path, for a mount above it as well."""
    below = share.rstrip("/")[len(mount["path"].rstrip("/")) :]
    return f"{mount['source'].rstrip('/') if below else mount['source']}{below}"


def is_nfs(seen: Seen, name: str) -> bool:
    """Whether it is the share of another machine that is mounted there."""
    mount = mount_of(seen, name)
    return mount is not None and mount["type"] in _KINDS


def _server_addresses(seen: Seen, name: str) -> set[str]:
    """Those to which the name of the server, which each node may write in another way, leads there."""
    return set(seen.node(name, "mount")["server_addresses"])


def is_same(seen: Seen, names: tuple[str, str], origins: tuple[str, str]) -> bool:
    """Whether two nodes have the same folder of the same server, under whatever name."""
    (server, _, path), (other, _, other_path) = (origin.rpartition(":") for origin in origins)
    a, b = (_server_addresses(seen, name) for name in names)
    return path == other_path and (server == other or bool(a & b))


def is_from_head(seen: Seen, name: str, origin: str) -> bool:
    """Whether it is the head's folder that a node has mounted."""
    server, _, path = origin.rpartition(":")
    head, share = seen.target.head, the_share(seen).rstrip("/")
    # A server that exports a root of its own (fsid=0) shows a shorter path.
    is_path = share.endswith(path.rstrip("/"))
    places = {server.strip("[]"), *_server_addresses(seen, name)}
    return is_path and bool(places & {head, *addresses_of(seen, head)})
