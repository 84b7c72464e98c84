"""Transports: allreduce algorithms for buffers on GPUs. Each replaces a CuPy array by its sum over all ranks.

To add a transport, write a file with a factory that takes a World, and add a line below. It then inherits the contract
tests (tests/device_ranks/test_transports.py), the benchmark and MPITRAIN_TRANSPORT, and `auto` measures it. If its
transport is impossible in this world, the factory raises the same DeviceError on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

from mpitrain.allreduce.device.aware import aware
from mpitrain.allreduce.device.nccl import nccl
from mpitrain.allreduce.device.peer import peer
from mpitrain.allreduce.device.select import fastest
from mpitrain.allreduce.device.sequential import DeviceSequential, Factory
from mpitrain.allreduce.device.staged import staged
from mpitrain.errors import ConfigError
from mpitrain.world import World

KINDS: dict[str, Factory] = {
    "aware": aware,
    "nccl": nccl,
    "peer": peer,
    "staged": staged,
}


def auto(world: World) -> DeviceSequential:
    """Make the fastest of KINDS that is possible here. Raises DeviceError as they do."""
    return fastest(world, KINDS)


TRANSPORTS: dict[str, Callable[[World], DeviceSequential]] = {"auto": auto, **KINDS}


def make_transport(world: World, name: str | None = None) -> DeviceSequential:
    """Make the transport of that name, or of the world's settings. Collective; makes this rank's GPU current.

    Raises:
        ConfigError: there is no transport of that name.
        DeviceError: a rank has no GPU, or the transport is impossible in this world; gives the reason, on every rank.
        MismatchError: the ranks give different names.
    """
    name = world.config.transport if name is None else name
    check_transport(name)
    world.agree("make a transport", [name])
    return TRANSPORTS[name](world)


def check_transport(name: str) -> None:
    """Raise ConfigError unless there is a transport of that name."""
    if name not in TRANSPORTS:
        raise ConfigError(f"there is no transport {name!r}; known: {', '.join(sorted(TRANSPORTS))}")
