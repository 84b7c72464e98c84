"""Transports: allreduce algorithms for buffers on GPUs. Each replaces a CuPy array by its sum over all ranks.

To add a transport, write a file with a factory that takes a World, and add a line to KINDS. It then inherits the
contract tests (tests/device_ranks/test_transports.py), the benchmark and MPITRAIN_TRANSPORT, and `auto` measures it. If
its transport is impossible in this world, the factory raises the same DeviceError on every rank.

auto: the fastest transport here, by a short measurement; one for small buffers and one for large ones. Every possible
transport is made and timed at two sizes. The slowest rank's time counts, the best of a few rounds. Rank 0 decides and
tells the others. From then on, the choice depends only on the bytes of a buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy

from mpitrain.allreduce.algorithm import DTYPES, FLOATS, Progress
from mpitrain.allreduce.exact import ExactSum
from mpitrain.arrays import Array
from mpitrain.cuda.device import cupy_module
from mpitrain.cuda.nccl import nccl
from mpitrain.cuda.peer import peer
from mpitrain.cuda.ring import aware
from mpitrain.cuda.sequential import DevicePlace, DeviceSequential, Factory, refuse
from mpitrain.cuda.staged import staged, staged_steps
from mpitrain.errors import ConfigError, DeviceError, everywhere
from mpitrain.world.world import World

KINDS: dict[str, Factory] = {
    "aware": aware,
    "nccl": nccl,
    "peer": peer,
    "staged": staged,
}

SMALL_BYTES, LARGE_BYTES = 64 * 1024, 4 * 2**20
LIMIT_BYTES = 512 * 1024  # the limit between the two transports: the geometric mean of the two sizes
_WARM_UP_ROUNDS, _ROUNDS = 1, 3


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


@dataclass(frozen=True)
class Choice:
    """The choices of `auto`.

    Attributes:
        small, large: the transports for buffers below LIMIT_BYTES, and from there on, fastest first: the first one that
            sums a buffer's dtype is used.
        seconds: the times of each possible transport, at SMALL_BYTES and LARGE_BYTES; empty if nothing was measured.
        why_not: the other transports, each with the reason.
    """

    small: tuple[str, ...]
    large: tuple[str, ...]
    seconds: Mapping[str, tuple[float, float]]
    why_not: Mapping[str, str]

    def lines(self) -> list[str]:
        """The lines that a user reads."""
        result = [f"transport {name}: not possible: {why}" for name, why in self.why_not.items()]
        for name, (small, large) in self.seconds.items():
            result.append(
                f"transport {name}: {small * 1e6:.0f} us for {SMALL_BYTES // 1024} KiB, "
                f"{large * 1e6:.0f} us for {LARGE_BYTES // 1024} KiB"
            )
        result.append(f"below {LIMIT_BYTES // 1024} KiB: {self.small[0]}; from there on: {self.large[0]}")
        return result


def possible(world: World, factories: Mapping[str, Factory]) -> tuple[dict[str, DeviceSequential], dict[str, str]]:
    """The transports that can be made, and why the others cannot. Collective; the same names on every rank."""
    place = DevicePlace(world)  # raises if a rank has no GPU
    made, why_not = {}, {}
    for name, factory in factories.items():
        try:
            made[name] = factory(world, place)
        except DeviceError as error:
            if not error.known_everywhere:
                raise
            why_not[name] = str(error).removeprefix(f"the transport {name} is not possible here: ")
    return made, why_not


def fastest(world: World, factories: Mapping[str, Factory]) -> DeviceSequential:
    """Combine all possible transports in one. See Algorithm for the contract.

    Raises:
        DeviceError: some rank has no GPU, or none of the transports is possible. On every rank.
    """
    made, choice = choose(world, factories)
    first = made[choice.large[0]]

    def steps(flat: Array, residual: Array | None = None) -> Progress:
        names = choice.small if flat.nbytes < LIMIT_BYTES else choice.large
        return next(made[name] for name in names if flat.dtype in made[name].dtypes).steps(flat, residual)

    # Memory that suits one of them is good for the others too.
    liked = [name for name in (choice.large[0], choice.small[0]) if made[name].has_own_memory]
    dtypes = [dtype for dtype in DTYPES if any(dtype in transport.dtypes for transport in made.values())]
    return DeviceSequential(world, first.place, "auto", steps, made[liked[0]].allocate_here if liked else None, dtypes)


def choose(world: World, factories: Mapping[str, Factory]) -> tuple[dict[str, DeviceSequential], Choice]:
    """The possible transports, and the choice among them. Collective."""
    made, why_not = possible(world, factories)
    if not made:
        raise everywhere(DeviceError("; ".join(why_not.values())))
    if world.size == 1 or len(made) == 1:
        names = tuple(sorted(made, key=lambda name: name != "staged"))
        return made, Choice(names, names, {}, why_not)
    seconds = {
        name: (_seconds(world, transport, SMALL_BYTES), _seconds(world, transport, LARGE_BYTES))
        for name, transport in made.items()
    }
    small, large = (tuple(sorted(made, key=lambda name: seconds[name][size])) for size in (0, 1))
    choice: Choice = world.broadcast_object(Choice(small, large, seconds, why_not))
    return made, choice


def _seconds(world: World, transport: DeviceSequential, num_bytes: int) -> float:
    """Time one sum until the slowest rank's GPU has it; the best of several rounds. Collective."""
    cuda, gpu = cupy_module().cuda, transport.place.gpu
    flat = transport.allocate(num_bytes // 4, numpy.dtype(numpy.float32))
    durations = []
    with gpu.current():
        flat.fill(0)
        for _ in range(_WARM_UP_ROUNDS + _ROUNDS):
            cuda.get_current_stream().synchronize()
            world.barrier()
            started = time.perf_counter()
            transport.start(flat).wait()
            cuda.get_current_stream().synchronize()
            durations.append(time.perf_counter() - started)
    rounds = zip(*world.allgather(durations[_WARM_UP_ROUNDS:]), strict=True)
    return float(min(max(round_) for round_ in rounds))


def exact_staged(world: World, host: ExactSum, transport: str | None = None) -> DeviceSequential:
    """Make the exact sum of GPU arrays from that of CPU arrays: through the CPU, as in staged.py. Collective.

    The results have the bits of host arrays, because every sum is rounded once, whatever pieces it is made in. With one
    rank, too: there, it makes -0 to +0, and all NaNs equal. Cost a rank: N bytes down, N bytes up, and what the exact
    sum on the host costs.

    Args:
        transport: the requested one; default: the world's setting.

    Raises:
        ConfigError: there is no such transport.
        DeviceError: it does not go through the CPU; or some rank has no GPU, or no page-locked memory. Raised on every
            rank.
        MismatchError: the ranks ask for different ones.
    """
    asked = world.config.transport if transport is None else transport
    check_transport(asked)
    world.agree("make an exact sum of arrays on GPUs", [asked])
    if asked not in ("auto", "staged"):
        refuse(world, asked, "exact sums are made on the CPU; use auto or staged with reduction=exact")
    place = DevicePlace(world)
    steps = staged_steps(world, place, host.steps, host)
    return DeviceSequential(world, place, "exact staged", steps, dtypes=FLOATS, alone=True)
