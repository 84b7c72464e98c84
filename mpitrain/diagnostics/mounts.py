"""What is mounted at the share's path, and from which server: servers have several addresses and names."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

from mpitrain.diagnostics.check import NotHereError, Seen

_KINDS = ("nfs", "nfs4", "fuse.nfs")  # the last is a client in user space


def the_share(seen: Seen) -> str:
    """The folder.

    Raises:
        NotHereError: there is no share.
    """
    if seen.target.share is None:
        raise NotHereError("no shared folder is known")
    return seen.target.share


def mount_of(seen: Seen, name: str) -> Mapping[str, Any] | None:
    """Return the top mount at the path, ignoring an automount that has mounted nothing; None if there is no mount.

    The share may be a folder of a larger share, mounted above. A mount of the node's own disk above does not count.
    """
    mounts = [one for one in seen.node(name, "mount")["mounts"] if one["type"] != "autofs"]
    if mounts and mounts[-1]["path"] != the_share(seen).rstrip("/") and mounts[-1]["type"] not in _KINDS:
        return None
    return mounts[-1] if mounts else None


def addresses_of(seen: Seen, name: str) -> set[str]:
    """Return all addresses of a node, as far as seen; the share may use another one than the inventory."""
    links = seen.nodes.get(name, {}).get("names", {}).get("links", [])
    own = {address for link in links for address in link["addresses"] if not ip_address(address).is_loopback}
    return own | {seen.target.addresses[name]}


def origin_of(mount: Mapping[str, Any], share: str) -> str:
    """Where the share's files are, as server:path, even if the mount is above the share."""
    below = share.rstrip("/")[len(mount["path"].rstrip("/")) :]
    return f"{mount['source'].rstrip('/') if below else mount['source']}{below}"


def is_nfs(seen: Seen, name: str) -> bool:
    """True if the mount is a share of another machine."""
    mount = mount_of(seen, name)
    return mount is not None and mount["type"] in _KINDS


def _server_addresses(seen: Seen, name: str) -> set[str]:
    """Return the addresses that the server's name means on that node; each node may use another name."""
    return set(seen.node(name, "mount")["server_addresses"])


def is_same(seen: Seen, names: tuple[str, str], origins: tuple[str, str]) -> bool:
    """True if two nodes have the same folder of the same server, under whatever name."""
    (server, _, path), (other, _, other_path) = (origin.rpartition(":") for origin in origins)
    a, b = (_server_addresses(seen, name) for name in names)
    return path == other_path and (server == other or bool(a & b))


def is_from_head(seen: Seen, name: str, origin: str) -> bool:
    """True if a node has mounted the head's folder."""
    server, _, path = origin.rpartition(":")
    head, share = seen.target.head, the_share(seen).rstrip("/")
    # A server that exports a root of its own (fsid=0) shows a shorter path.
    is_path = share.endswith(path.rstrip("/"))
    places = {server.strip("[]"), *_server_addresses(seen, name)}
    return is_path and bool(places & {head, *addresses_of(seen, head)})
