"""exact: the exact sum of host arrays, for arrays on GPUs. They go through the host, as in staged.py.

The results have the bits of host arrays, because every sum is rounded once, whatever pieces it is made in. With one
rank, too: there, it makes -0 to +0, and all NaNs equal.

Cost a rank: N bytes down, N bytes up, and what the exact sum on the host costs.
"""

from __future__ import annotations

from mpitrain.allreduce.algorithm import FLOATS
from mpitrain.allreduce.device import check_transport
from mpitrain.allreduce.device.sequential import DevicePlace, DeviceSequential, refuse
from mpitrain.allreduce.device.staged import staged_steps
from mpitrain.allreduce.exact import ExactSum
from mpitrain.world import World


def exact_staged(world: World, host: ExactSum, transport: str | None = None) -> DeviceSequential:
    """Make the exact sum of arrays on GPUs out of that of host arrays. Collective.

    Args:
        transport: the one that is asked for; default: the world's setting.

    Raises:
        ConfigError: there is no such transport.
        DeviceError: it does not go through the host; or some rank has no GPU, or no page-locked memory. On every rank.
        MismatchError: the ranks ask for different ones.
    """
    asked = world.config.transport if transport is None else transport
    check_transport(asked)
    world.agree("make an exact sum of arrays on GPUs", [asked])
    if asked not in ("auto", "staged"):
        refuse(world, asked, "exact sums are made on the host; use auto or staged with reduction=exact")
    place = DevicePlace(world)
    steps = staged_steps(world, place, host.steps, host)
    return DeviceSequential(world, place, "exact staged", steps, dtypes=FLOATS, alone=True)
