"""The shared folder on each node: is it mounted, responsive, writable, consistent, with free space, and permanent?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Any
from uuid import uuid4

from mpitrain.check.check import Ask, Check, Finding, NotHereError, NotSeenError, Seen
from mpitrain.check.collect import Cluster, PairStep, quietly
from mpitrain.check.target import Target
from mpitrain.launch.hostfile import Host

# A server has several addresses and names, and each node may use a different one.
_KINDS = ("nfs", "nfs4", "fuse.nfs")  # the last is a client in user space
_SLOW_LIST_SECONDS = 1.0
_SLOW_NAME_SECONDS = 2.0
_SLOW_VIEW_SECONDS = 0.5
_LEAST_BYTES = 1 << 30
_STEP_SECONDS = 8.0


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

    The shared folder may be a folder of a larger share, mounted above. A mount of the node's own disk above does not
    count.
    """
    mounts = [one for one in seen.node(name, "mount")["mounts"] if one["type"] != "autofs"]
    if mounts and mounts[-1]["path"] != the_share(seen).rstrip("/") and mounts[-1]["type"] not in _KINDS:
        return None
    return mounts[-1] if mounts else None


def addresses_of(seen: Seen, name: str) -> set[str]:
    """Return all addresses of a node, as far as seen; the shared folder may use another one than the inventory."""
    links = seen.nodes.get(name, {}).get("names", {}).get("links", [])
    own = {address for link in links for address in link["addresses"] if not ip_address(address).is_loopback}
    return own | {seen.target.addresses[name]}


def origin_of(mount: Mapping[str, Any], share: str) -> str:
    """Where the shared folder's files are, as server:path, even if the mount is above the shared folder."""
    below = share.rstrip("/")[len(mount["path"].rstrip("/")) :]
    return f"{mount['source'].rstrip('/') if below else mount['source']}{below}"


def is_nfs(seen: Seen, name: str) -> bool:
    """True if the mount is a share of another machine."""
    mount = mount_of(seen, name)
    return mount is not None and mount["type"] in _KINDS


def _server_addresses(seen: Seen, name: str) -> set[str]:
    """Return the addresses of the server's name on that node; each node may use another name."""
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


def _mounted(seen: Seen, name: str) -> Iterator[Finding]:
    share, mount, state = the_share(seen), mount_of(seen, name), seen.node(name, "mount")
    head = seen.target.head
    if name == head:  # the head's own folder, on any disk, or a folder of another server
        if mount is None and state.get("kind") in ("missing", "file"):
            yield Finding("fail", f"{share} is {state['kind']}", "a folder, exported to the other nodes")
        return
    # If the head is not examined, assume that it serves its own folder.
    elsewhere = mount_of(seen, head) if head in seen.target.names and is_nfs(seen, head) else None
    right = origin_of(elsewhere, share) if elsewhere else f"{seen.target.addresses[head]}:{share}"
    if mount is None:
        yield Finding("fail", _why_not_mounted(share, state), f"NFS from {right}")
    elif not is_nfs(seen, name):
        yield Finding("fail", f"{share} is {mount['type']} from {mount['source']}", f"NFS from {right}")
    elif elsewhere is not None and not is_same(seen, (name, head), (origin_of(mount, share), right)):
        yield Finding("fail", f"{share} is {origin_of(mount, share)}", f"{right}, as on the head")
    elif elsewhere is None and not is_from_head(seen, name, origin_of(mount, share)):
        yield Finding("fail", f"{share} is {origin_of(mount, share)}", f"NFS from {right}")


def _why_not_mounted(share: str, state: Mapping[str, Any]) -> str:
    if "slow" in state:
        return f"{share} is not mounted: a mount of it does not end within {state['slow']:g} s"
    if any(one["type"] == "autofs" for one in state["mounts"]):
        return f"{share} is not mounted: {state['why'] or 'its automount did nothing'}"
    if state["kind"] == "missing":
        return f"there is no {share}"
    return f"{share} is a local folder; files in it stay on this node"


def _answers(seen: Seen, name: str) -> Iterator[Finding]:
    the_share(seen)
    listed = seen.node(name, "use")["list"]
    if "slow" in listed:
        yield Finding("fail", f"listing it does not end within {listed['slow']:g} s", "at once")
    elif listed["seconds"] > _SLOW_LIST_SECONDS:
        yield Finding("warn", "listing it twice takes more than a second each", "at once")


def _room(seen: Seen, name: str) -> Iterator[Finding]:
    share = the_share(seen)
    use = seen.node(name, "use")
    if "room" not in use:
        raise NotHereError("it cannot be listed")  # another check reports that
    room = use["room"]
    if "slow" in room:
        raise NotSeenError(f"the query of its free space does not end within {room['slow']:g} s")
    free, whole = room["free_bytes"], max(1, room["bytes"])
    remedy = f"ssh {seen.target.login(seen.target.head)} sudo du -xh --max-depth=2 {share} | sort -h | tail"
    observed = f"{share} has {free / 2**30:.1f} of {whole / 2**30:.1f} GiB free"
    if free < _LEAST_BYTES or free < whole // 100:
        yield Finding("fail", observed, "1 GiB, and a hundredth of it", remedy)
    elif free < whole // 10:
        yield Finding("warn", observed, "a tenth of it", remedy)
    if room["files"] and room["free_files"] < room["files"] // 100:
        files = f"{share} has space for {room['free_files']} of {room['files']} files"
        yield Finding("fail", files, "a hundredth of them", remedy)


def _writes(seen: Seen, name: str) -> Iterator[Finding]:
    share = the_share(seen)
    use = seen.node(name, "use")
    listed = use["list"]
    done = {"doing": "listing it", **listed} if listed.get("why") else use.get("write")
    if done is None:
        raise NotSeenError("it was not written to")
    if "slow" in done:
        yield Finding("fail", f"writing to {share} does not end within {done['slow']:g} s", "at once")
    elif done["why"]:
        observed = f"{done['doing']} as {{user}} fails: {done['why']}".replace("{user}", seen.target.user)
        # Set-up repairs the folder's owner, and a mount that cannot be listed. It leaves a mount that can be listed.
        again = "ssh {login} 'sudo umount --lazy {share}' && {set_up} --tags nfs --limit {node}"
        remedy = again if done.get("code") == "EROFS" else ""
        yield Finding("fail", observed, "list, write, read and remove", remedy)


def _see(cluster: Cluster, a: str, b: str) -> dict[str, Any]:
    """Let `a` write and `b` read. Do not touch a folder that has already blocked one of them, or that is not shared."""
    share = cluster.target.share
    if share is None:
        return {"error": "no shared folder is known"}
    for name in (a, b):
        use = cluster.seen.nodes.get(name, {}).get("use", {})
        if use.get("write", {"why": "not done"}).get("why", "slow"):
            return {"error": f"{name} cannot write to it"}
    run, token = str(uuid4()), str(uuid4())

    def take(name: str, action: str) -> Any:
        wish = {"share": share, "action": action, "run": run, "token": token}
        return cluster.ask(name, "share_step", wish, seconds=_STEP_SECONDS)

    try:
        answers: dict[str, Any] = {}
        for name, action in ((a, "begin"), (b, "miss"), (a, "write"), (b, "wait")):
            answers[action] = take(name, action)
            if isinstance(answers[action], dict) and ("why" in answers[action] or "slow" in answers[action]):
                return {"failed": action, **answers[action]}
        return dict(answers["wait"])
    finally:
        quietly(lambda: take(a, "end"))


def _visible(seen: Seen, pair: tuple[str, str]) -> Iterator[Finding]:
    the_share(seen)
    view = seen.pair(pair, "view")
    if "failed" in view:
        why = view.get("why") or f"no answer within {view['slow']:g} s"
        yield Finding("fail", f"the step {view['failed']!r} of a file from one to the other fails: {why}")
        return
    listed, by_name = view["listed_seconds"], view["by_name_seconds"]
    if listed is None:
        yield Finding("fail", "a new file is not listed within 3 s", f"within {_SLOW_VIEW_SECONDS:g} s")
    elif not view["is_same"]:
        yield Finding("fail", "a new file has different content there", "the same content")
    elif by_name is None or by_name > _SLOW_NAME_SECONDS:
        observed = f"a new file is listed, but not found by its name for more than {_SLOW_NAME_SECONDS:g} s"
        yield Finding("warn", observed, "at once: mount option lookupcache=positive", mend=(pair[1],))
    elif listed > _SLOW_VIEW_SECONDS:
        yield Finding("warn", f"a new file is listed after {listed:.1f} s", f"{_SLOW_VIEW_SECONDS:g} s")


def _options(seen: Seen, name: str) -> Iterator[Finding]:
    the_share(seen)
    mount = mount_of(seen, name)
    if mount is None or not is_nfs(seen, name):
        raise NotHereError("it is this node's own folder")
    # A client in user space does not show its NFS options; the unit has them.
    options = [*mount["options"], *(seen.node(name, "mount")["unit_options"] if mount["type"] == "fuse.nfs" else [])]
    version = next((option.split("=")[1] for option in options if option.startswith(("vers=", "nfsvers="))), "")
    if "soft" in options and "ro" not in options:
        yield Finding("fail", "it is mounted soft and for writing", "hard")
    if version and float(version.split(".")[0]) < 4:
        yield Finding("warn", f"it is NFS {version}", "NFS 4.1 or newer")
    if "noac" in options or "sync" in options:
        observed = "it is mounted with " + ("noac" if "noac" in options else "sync")
        yield Finding("warn", observed, "without: every write waits for the server")


def _lasts(seen: Seen, name: str) -> Iterator[Finding]:
    the_share(seen)
    if name == seen.target.head and not is_nfs(seen, name):
        if len(seen.target.hosts) == 1:
            raise NotHereError("there is one node")
        if seen.node(name, "serving")["enabled"] not in ("enabled", "static", "alias", "indirect"):
            observed = f"nfs-server is {seen.node(name, 'serving')['enabled'] or 'not enabled'}"
            yield Finding("fail", observed, "enabled, so that it serves after a restart")
        return
    state = seen.node(name, "mount")
    units, fstab = state["units"], state["fstab"]
    enabled = {kind: state.get("UnitFileState", "") in ("enabled", "generated") for kind, state in units.items()}
    if not any(enabled.values()) and not fstab:
        yield Finding("fail", "it is mounted now, but would not be after a restart", "an enabled automount")
    elif not enabled["automount"] and not {"nofail", "x-systemd.automount"} & set(fstab):
        observed = "its line in /etc/fstab has neither nofail nor x-systemd.automount"
        yield Finding("warn", observed, "one of them: a server that starts later must not stop the boot")


def wish_of_share(target: Target, _host: Host) -> dict[str, str]:
    """Return the questions for a node."""
    return {"share": target.share or "/nowhere", "run": str(uuid4())}


ASKS = (
    Ask("mount", "share_mount", "login", wish_of_share, seconds=9.0),
    Ask("use", "share_use", "job", wish_of_share, seconds=16.0),
)
PAIRS: dict[str, PairStep] = {
    "view": _see,
}
CHECKS = (
    Check(
        "NFS01",
        "the shared folder is mounted, from the right place",
        _mounted,
        uses=("mount", "names"),
        looks="An access, which triggers an automount; then /proc/self/mountinfo: what is mounted there, and from "
        "where.",
        why="A node with a local folder of the same name runs old programs, and its results stay on it.",
        tag="nfs",
        needs=("PRB01", "WGD01", "NET01"),
        needs_head=("PRB01", "WGD01", "NFS09"),
        fault="the mount stopped and masked; a local folder in its place; another folder mounted there",
    ),
    Check(
        "NFS02",
        "the shared folder answers",
        _answers,
        uses=("use",),
        looks="As the shared user: a listing, in a child with a deadline of 5 s; if it takes a second, once more.",
        why="A program that uses a share whose server does not answer waits forever, without a message.",
        remedy="{set_up} --tags firewall,nfs  # if it is a firewall; TCP port 2049 must be open all the way",
        needs=("PRB02", "NFS01"),
        needs_head=("NFS09",),
        fault="port 2049 of the head dropped",
    ),
    Check(
        "NFS07",
        "the shared folder has free space",
        _room,
        uses=("use",),
        looks="statvfs of the shared folder, in a child with a deadline: bytes and files.",
        why="A checkpoint that does not fit is lost, at the end of a long computation.",
        needs=("PRB02", "NFS01", "NFS02"),
        fault="the shared folder full",
    ),
    Check(
        "NFS03",
        "the shared user can list, write, read back and remove",
        _writes,
        uses=("use", "mount"),
        looks="As the shared user: list; make .mpitrain-check-UUID and a file in it, fsync, read back, remove. "
        "df and stat -f succeed even on a stale mount.",
        why="A mount that can be listed but not used looks healthy until the first checkpoint.",
        tag="nfs",
        needs=("PRB02", "USR01", "NFS01", "NFS02", "NFS07"),
        fault="mounted read-only; the folder of another user; a stale handle",
    ),
    Check(
        "NFS04",
        "a file written on one node is seen on the other at once",
        _visible,
        level="full",
        scope="pair",
        uses=("view", "use"),
        looks="One node looks for a name, the other writes the file; the first lists, opens by name and compares.",
        why="If names are cached, a program that waits for another node's file waits up to a minute longer.",
        tag="nfs",
        needs=("NFS01", "NFS02", "NFS03", "NFS07"),
        needs_head=("NFS09",),
        fault="another folder in the shared folder's place on one node",
    ),
    Check(
        "NFS05",
        "the shared folder is mounted hard, with NFS 4",
        _options,
        uses=("mount",),
        looks="The options in /proc/self/mountinfo; if the client does not show them, those of the unit.",
        why="A soft mount gives up when the server is slow, and silently damages the file.",
        tag="nfs",
        needs=("NFS01",),
        fault="mounted soft",
    ),
    Check(
        "NFS08",
        "the shared folder comes back after a restart",
        _lasts,
        level="full",
        uses=("mount", "serving"),
        looks="systemctl show of the path's automount and mount, and /etc/fstab; on the head, of nfs-server.",
        why="A share that was mounted by hand is gone after the next power cut.",
        tag="nfs",
        needs=("NFS01",),
        fault="the automount disabled; nfs-server disabled",
    ),
)
