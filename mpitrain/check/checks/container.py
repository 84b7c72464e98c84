"""Nodes that are containers: do they have the network and the shared memory that jobs need?"""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.check.check import BY_SSH, Check, Finding, NotHereError, NotSeenError, Seen

# Docker's default, and the amount that NCCL and MPI need.
_TINY_SHM_BYTES = 64 << 20
_SMALL_SHM_BYTES = 1 << 30
_LITTLE_FREE_SHM_BYTES = 256 << 20
# The kernel's own default is half of the memory, so a machine with little memory cannot have more.
_SHARE_OF_MEMORY = 0.4
_RUN = "docker run"
_KINDS = ("docker", "podman", "rkt", "container-other")


def _shared_memory(seen: Seen, node: str) -> Iterator[Finding]:
    resources = seen.node(node, "resources")
    place = resources["places"]["/dev/shm"]
    is_docker = resources["container"] in _KINDS
    remedy = f"{_RUN} --shm-size=8g  # start the container {{node}} again with it" if is_docker else ""
    if place is not None and not place["is_read_only"] and not place["mode"] & 0o002:
        observed = f"/dev/shm has mode {place['mode']:04o}, so jobs may not write to it"
        remedy = "ssh {login} sudo chmod 1777 /dev/shm"
        yield Finding("fail", observed, "a tmpfs that all users may write, mode 1777", remedy)
        return
    if place is None or not place["is_writable"]:
        observed = "there is no /dev/shm" if place is None else "/dev/shm is not writable"
        yield Finding("fail", observed, "a tmpfs that all users may write", remedy=remedy or _MOUNT)
        return
    size, memory = place["size_bytes"], resources["memory_bytes"]
    is_small = size < _SMALL_SHM_BYTES and not (memory and size >= _SHARE_OF_MEMORY * memory)
    allowed = f"{_SMALL_SHM_BYTES >> 20} MiB, or half of the memory"
    if size <= _TINY_SHM_BYTES or is_small:
        # A few ranks on one machine need only little.
        is_fatal = size <= _TINY_SHM_BYTES and not seen.target.is_here
        observed = f"/dev/shm has {size / 2**20:.0f} MiB"
        yield Finding("fail" if is_fatal else "warn", observed, allowed, remedy=remedy)
    elif place["free_bytes"] < _LITTLE_FREE_SHM_BYTES:
        is_fatal = place["free_bytes"] < _TINY_SHM_BYTES and not seen.target.is_here
        remedy = "ssh {login} ls -lt /dev/shm  # remove what is not used"
        observed = f"/dev/shm has {place['free_bytes'] / 2**20:.0f} MiB free of {size / 2**20:.0f} MiB"
        yield Finding("fail" if is_fatal else "warn", observed, allowed, remedy)


_MOUNT = "ssh {login} 'sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm'"


def _network(seen: Seen, node: str) -> Iterator[Finding]:
    kind = seen.node(node, "resources")["container"]
    if not kind:
        raise NotHereError("it is not a container")
    own = seen.target.addresses[node]
    links = seen.node(node, "names")["links"]
    if not links:
        raise NotSeenError("`ip -j address` gives no interfaces")
    addresses = [one for link in links for one in link["addresses"] if not one.startswith(("127.", "::1", "fe80"))]
    if own not in addresses:
        observed = (
            f"the container ({kind}) has its own network: it has {', '.join(addresses) or 'no address'}, not {own}"
        )
        remedy = f"{_RUN} --network host  # start the container {{node}} again with it"
        yield Finding("fail", observed, "the network of its host", remedy=remedy)


CHECKS = (
    Check(
        "CON01",
        "there is enough shared memory",
        _shared_memory,
        uses=("resources",),
        alone=True,
        looks="The size of /dev/shm, its free space, and whether it is writable. Docker gives 64 MiB by default.",
        why="Ranks of one node exchange their data through it. If it is full, it kills them (SIGBUS).",
        remedy="ssh {login} sudo mount -o remount,size=50% /dev/shm  # and the same in /etc/fstab, if it is there",
        needs=BY_SSH,
        fault="/dev/shm of 64 MiB; /dev/shm of mode 0755",
    ),
    Check(
        "CON02",
        "a container has the network of its host",
        _network,
        uses=("resources", "names"),
        looks="In a container: whether one of its interfaces has the address of the inventory.",
        why="Ranks tell each other the addresses that they see. A bridge's addresses cannot be reached from outside.",
        needs=(*BY_SSH, "WGD01"),
        fault="none on a test bed, where a node can be reached only at its own addresses: judged on made-up answers",
    ),
)
