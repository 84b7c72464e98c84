"""Where a node is a container: does it have the network and the shared memory that jobs need."""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.diagnostics.check import BY_SSH, Ask, Check, Finding, NotHereError, NotSeenError, Seen
from mpitrain.diagnostics.collect import ClusterStep, PairStep

# What docker gives where nobody asks for more, and what NCCL and MPI want.
_TINY_SHM_BYTES = 64 << 20
_SMALL_SHM_BYTES = 1 << 30
_LITTLE_FREE_SHM_BYTES = 256 << 20
# Half of the memory is the kernel's own default; a machine with little memory has no better.
_SHARE_OF_MEMORY = 0.4
_RUN = "docker run"
_KINDS = ("docker", "podman", "rkt", "container-other")


def _shared_memory(seen: Seen, node: str) -> Iterator[Finding]:
    resources = seen.node(node, "resources")
    place = resources["places"]["/dev/shm"]
    is_docker = resources["container"] in _KINDS
    remedy = f"{_RUN} --shm-size=8g  # start the container {{node}} anew with it" if is_docker else ""
    if place is not None and not place["is_read_only"] and not place["mode"] & 0o002:
        observed = f"/dev/shm has mode {place['mode']:04o}, so jobs may not write to it"
        remedy = "ssh {login} sudo chmod 1777 /dev/shm"
        yield Finding("fail", (node,), observed, "a tmpfs that everybody may write, mode 1777", remedy)
        return
    if place is None or not place["is_writable"]:
        observed = "there is no /dev/shm" if place is None else "/dev/shm may not be written"
        yield Finding("fail", (node,), observed, "a tmpfs that everybody may write", remedy=remedy or _MOUNT)
        return
    size, memory = place["size_bytes"], resources["memory_bytes"]
    is_small = size < _SMALL_SHM_BYTES and not (memory and size >= _SHARE_OF_MEMORY * memory)
    allowed = f"{_SMALL_SHM_BYTES >> 20} MiB, or half of the memory"
    if size <= _TINY_SHM_BYTES or is_small:
        # A few ranks of one machine get along with little.
        is_fatal = size <= _TINY_SHM_BYTES and not seen.target.is_here
        observed = f"/dev/shm has {size / 2**20:.0f} MiB"
        yield Finding("fail" if is_fatal else "warn", (node,), observed, allowed, remedy=remedy)
    elif place["free_bytes"] < _LITTLE_FREE_SHM_BYTES:
        is_fatal = place["free_bytes"] < _TINY_SHM_BYTES and not seen.target.is_here
        remedy = "ssh {login} ls -lt /dev/shm  # remove what is not used"
        observed = f"/dev/shm has {place['free_bytes'] / 2**20:.0f} MiB free of {size / 2**20:.0f} MiB"
        yield Finding(
            "fail" if is_fatal else "warn",
            (node,),
            observed,
            allowed,
            remedy="ssh {login} ls -lt /dev/shm  # remove what is not used",
        )


_MOUNT = "ssh {login} 'sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm'"


def _network(seen: Seen, node: str) -> Iterator[Finding]:
    kind = seen.node(node, "resources")["container"]
    if not kind:
        raise NotHereError("is not a container")
    own = seen.target.addresses[node]
    links = seen.node(node, "names")["links"]
    if not links:
        raise NotSeenError("`ip -j address` gives no interfaces")
    addresses = [one for link in links for one in link["addresses"] if not one.startswith(("127.", "::1", "fe80"))]
    if own not in addresses:
        observed = (
            f"a container ({kind}) with a network of its own: it has {', '.join(addresses) or 'no address'}, not {own}"
        )
        remedy = f"{_RUN} --network host  # start the container {{node}} anew with it"
        yield Finding("fail", (node,), observed, "the network of its host", remedy=remedy)


ASKS: tuple[Ask, ...] = ()
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {}
CHECKS = (
    Check(
        "CON01",
        "there is enough shared memory",
        "quick",
        "node",
        _shared_memory,
        uses=("resources",),
        alone=True,
        looks="The size of /dev/shm, what is free of it, and whether it may be written. Docker gives 64 MiB where "
        "nobody asks for more.",
        why="Ranks of one node exchange their data through it; a full one kills them (SIGBUS).",
        remedy="ssh {login} sudo mount -o remount,size=50% /dev/shm  # and the same in /etc/fstab, if it is there",
        needs=BY_SSH,
        fault="/dev/shm of 64 MiB; /dev/shm of mode 0755",
    ),
    Check(
        "CON02",
        "a container has the network of its host",
        "quick",
        "node",
        _network,
        uses=("resources", "names"),
        looks="In a container: whether one of its interfaces has the address of the inventory.",
        why="Ranks tell each other the addresses that they see; a bridge's lead nowhere from outside.",
        needs=(*BY_SSH, "WGD01"),
        fault="none on a bed, where only the node's own addresses lead to it: judged on made-up answers",
    ),
)
