"""The shared folder on the head: does it serve every node, and no other machine?"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address, ip_network

from mpitrain.check.check import Ask, Check, Finding, NotHereError, Seen
from mpitrain.check.checks.share import addresses_of, is_nfs, the_share, wish_of_share
from mpitrain.check.checks.tunnel import has_tunnel


def _served(seen: Seen, head: str) -> Iterator[Finding]:
    share = the_share(seen)
    if len(seen.target.hosts) == 1:
        raise NotHereError("there is one node")
    if is_nfs(seen, head):
        raise NotHereError("the head has the shared folder from another server")
    serving = seen.node(head, "serving")
    of_share = [one for one in serving["exports"] or () if _covers(one["path"], share)]
    is_known = serving["exports"] is not None
    if is_known and not of_share and seen.node(head, "mount")["kind"] == "missing":
        yield Finding("fail", f"there is no {share}, and it is not exported", "a folder, exported to all nodes")
        return
    if serving["server"] != "active":
        yield Finding("fail", f"nfs-server is {serving['server']}", "active")
    elif not serving["is_listening"]:
        yield Finding("fail", "nothing listens on port 2049", "nfs-server does", _RESTART)
    elif serving["answers"] is False:
        text = "nfs-server accepts connections, but answers no call"
        yield Finding("fail", text, "an answer at once", _RESTART)
    if not is_known:
        raise NotHereError(_NO_SUDO)
    others = [name for name in seen.target.names if name != head]
    missing = [name for name in others if not any(_admits(one["client"], name, seen) for one in of_share)]
    if missing:
        yield Finding("fail", f"{share} is not exported to {', '.join(missing)}", "exported to all nodes")


def _covers(path: str, share: str) -> bool:
    return share == path or share.startswith(path.rstrip("/") + "/")


def _admits(client: str, name: str, seen: Seen) -> bool:
    """True if a client of /etc/exports names the node. A netgroup, which cannot be resolved here, counts as naming
    it."""
    addresses = addresses_of(seen, name)
    if client in ("*", "<world>", name, *addresses) or client.startswith("@"):
        return True
    try:
        network = ip_network(client, strict=False)
        return any(ip_address(address) in network for address in addresses)
    except ValueError:
        return "*" in client or "?" in client or "." in client  # a name or pattern for the server's resolver


def _safe(seen: Seen, head: str) -> Iterator[Finding]:
    share = the_share(seen)
    exports = seen.node(head, "serving")["exports"]
    if exports is None:
        raise NotHereError(_NO_SUDO)
    of_share = [one for one in exports if _covers(one["path"], share)]
    if not of_share:
        raise NotHereError("the node exports nothing")
    root = sorted({one["client"] for one in of_share if "no_root_squash" in one["options"]})
    if root:
        observed = f"{share} is exported with no_root_squash to {', '.join(root)}"
        yield Finding("fail", observed, "root_squash")
    strangers = sorted({one["client"] for one in of_share if not _is_ours(one["client"], seen)})
    world = [client for client in strangers if client in ("*", "<world>", "0.0.0.0/0", "::/0")]
    if strangers:
        observed = f"{share} is exported to {', '.join(strangers)}"
        yield Finding("fail" if world else "warn", observed, "only to the nodes", _EXPORTS)


def _is_ours(client: str, seen: Seen) -> bool:
    """With a tunnel, only the addresses inside it belong to the nodes. Any machine may have the other addresses."""
    for name in seen.target.names:
        own = {seen.target.addresses[name]} if has_tunnel(seen, name) else addresses_of(seen, name)
        if client in (name, *own):
            return True
    return False


# Set-up writes its own file and exports again. If another file exports the same share, a person must remove it.
_EXPORTS = (
    "ssh {login} \"sudo grep -rn '{share}' /etc/exports /etc/exports.d\"  # leave only mpitrain.exports; "
    "then: {set_up} --tags nfs --limit {node}"
)
_NO_SUDO = "exports can only be read as root, and the login may not use sudo"
_RESTART = "ssh {login} sudo systemctl restart nfs-server"

ASKS = (Ask("serving", "share_serving", "login", wish_of_share, seconds=14.0, head_only=True),)
CHECKS = (
    Check(
        "NFS09",
        "the head serves the shared folder to every node",
        _served,
        scope="head",
        uses=("serving", "mount", "names"),
        looks="On the head, as root: exportfs -s, systemctl show nfs-server, /proc/net/tcp for port 2049, and an "
        "empty call to that port.",
        why="Otherwise the other nodes have no share, or wait for it forever.",
        tag="nfs",
        needs=("PRB01", "PRB02"),
        fault="the export removed; nfs-server stopped; nfs-server frozen (SIGSTOP)",
    ),
    Check(
        "NFS06",
        "the shared folder is exported only to the nodes, and without root's rights",
        _safe,
        scope="head",
        uses=("serving", "names", "tunnel"),
        looks="On the head, as root: exportfs -s. With a tunnel, only the nodes' addresses in it are right.",
        why="With no_root_squash, or an export to all machines, root on any such machine owns all data.",
        tag="nfs",
        needs=("PRB01", "PRB02", "NFS09"),
        fault="exported with no_root_squash; exported to all machines",
    ),
)
