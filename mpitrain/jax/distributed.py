"""Makes the ranks the processes of JAX's own distributed runtime, for its own collectives between GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import jax

from mpitrain.errors import DeviceError, LaunchError, everywhere
from mpitrain.job.start import init
from mpitrain.world.shard import part_of
from mpitrain.world.world import World

_CONNECT_SECONDS = 3.0


def initialize() -> None:
    """Call jax.distributed.initialize with arguments from MPI. All ranks call this before JAX computes.

    From then on, jax.devices() lists the devices of all ranks, and JAX's own collectives (jit over a Mesh, shard_map)
    run between them, with NCCL on GPUs and Gloo on CPUs. Rank r is JAX's process r. The GPUs of a machine are divided
    among its ranks, unless CUDA_VISIBLE_DEVICES or `mpitrain run --hosts` has given each rank its own.

    Raises:
        DeviceError: a machine has fewer GPUs than ranks. Raised on every rank.
        LaunchError: no address of rank 0's machine can be reached from all others. Raised on every rank.
        RuntimeError: JAX has already computed something; JAX raises this.
    """
    world = init()
    if world.observer:
        world.print("mpitrain verify: only calls of mpitrain.jax are seen, not exchanges by JAX's own collectives")
    gpus = _gpus(world)
    address = _meeting_point(world)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=world.size,
        process_id=world.rank,
        local_device_ids=gpus,
        coordinator_bind_address=f"0.0.0.0:{address.rpartition(':')[2]}",
    )


def _meeting_point(world: World) -> str:
    """Return HOST:PORT on rank 0's machine that every rank can reach; the port is free at this moment. Collective."""
    with socket.socket() as listener:
        meeting: tuple[list[str], int] = ([], 0)
        if world.is_root:
            # The kernel completes up to that many connections without accept().
            listener.bind(("0.0.0.0", 0))
            listener.listen(len(world.hosts) * 8)
            meeting = _own_addresses(world.hosts) if world.num_nodes > 1 else ["127.0.0.1"], listener.getsockname()[1]
        addresses, port = world.broadcast_object(meeting)
        reached = world.allgather([address for address in addresses if world.is_root or _answers(address, port)])
    common = [address for address in addresses if all(address in reached_by_rank for reached_by_rank in reached)]
    if not common:
        lost = next(rank for rank, usable in enumerate(reached) if not usable or usable != addresses)
        raise everywhere(
            LaunchError(
                f"{world.name(lost)} cannot connect to {world.name(0)}, port {port}, at any address that all "
                f"ranks can use; tried: {', '.join(addresses) or 'none, it has none'}. Allow TCP between the "
                "machines (mpitrain "
                "check-cluster), and make their names resolve to addresses that the others can reach"
            )
        )
    return f"{common[0]}:{port}"


def _own_addresses(hosts: Sequence[str]) -> list[str]:
    """Return this machine's IPv4 addresses, except loopback; those that it uses for the other hosts come first."""
    addresses: dict[str, None] = {}
    for host in dict.fromkeys(hosts):
        # Connecting a datagram socket sends nothing, and shows which of this machine's addresses would be used.
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
            towards.connect((host, 9))
            addresses[towards.getsockname()[0]] = None
    with suppress(OSError):
        addresses |= dict.fromkeys(socket.gethostbyname_ex(socket.gethostname())[2])
    return [address for address in addresses if not address.startswith("127.")]


def _answers(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port), timeout=_CONNECT_SECONDS):
        return True
    return False


@dataclass(frozen=True)
class Sight:
    """The GPUs that a rank may use.

    Attributes:
        node_rank: the number of its machine.
        visible: CUDA_VISIBLE_DEVICES; None if it is not set.
        count: the number of GPUs that CUDA sees.
        given: the device that `mpitrain run --hosts` has given to the rank, such as "cuda:1".
    """

    node_rank: int
    visible: str | None
    count: int
    given: str


def _gpus(world: World) -> list[int] | None:
    """Return the GPUs of this rank, for JAX; None: all that it sees. Collective."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # JAX must not be initialised yet, so it cannot be asked. Without its plugin it sees no GPUs.
    if not any("cuda" in entry.name for entry in entry_points(group="jax_plugins")):
        count = 0
    elif visible is not None:
        count = len([name for name in visible.split(",") if name not in ("", "-1")])
    else:
        count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    sights = world.allgather(Sight(world.node_rank, visible, count, world.context.device(world.rank)))
    for rank in range(world.size):
        try:
            share_of_gpus(sights, rank)
        except DeviceError as problem:
            raise everywhere(DeviceError(f"{world.name(rank)}: {problem}")) from None
    return share_of_gpus(sights, world.rank)


def share_of_gpus(sights: Sequence[Sight], rank: int) -> list[int] | None:
    """Return the numbers of one rank's GPUs among those that it sees; None: all of them, or there are none.

    Args:
        sights: the GPUs that each rank sees, in rank order.
        rank: the rank.

    Raises:
        DeviceError: the rank's machine has fewer GPUs than ranks. Ranks must not share a GPU here.
    """
    sight = sights[rank]
    if sight.given.startswith("cuda:"):
        return [int(sight.given.removeprefix("cuda:"))]
    here = [other for other, seen in enumerate(sights) if seen.node_rank == sight.node_rank]
    has_its_own = len({sights[other].visible for other in here}) > 1
    if sight.count == 0 or len(here) == 1 or has_its_own:
        return None
    if sight.count < len(here):
        raise DeviceError(
            f"{len(here)} ranks on a machine with {sight.count} GPU(s), which JAX's processes cannot share; start at "
            f"most {sight.count} rank(s) there, or hide the GPUs: CUDA_VISIBLE_DEVICES="
        )
    return list(range(sight.count))[part_of(sight.count, here.index(rank), len(here))]
