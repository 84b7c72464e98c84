"""The link between nodes: the interface that MPI uses, its nominal rate, and the bytes that crossed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from mpitrain.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

_COUNTERS = Path("/proc/net/dev")  # the counters of this rank's network namespace
_INTERFACES = Path("/sys/class/net")
# Enough to stand out from other traffic; takes 0.2 s at 100 Mbit/s.
_BURST_BYTES = 2**21
_MESSAGE_BYTES = 2**16


@dataclass(frozen=True)
class Link:
    """The link between the nodes.

    Attributes:
        interface: this node's interface; "" if all ranks are on one node, or if no interface counts MPI's bytes.
        gbit: nominal rate in Gbit/s (1e9) of the slowest node's interface; None if it is unknown.
        about: one line for people: the interfaces and the rate, or why they are unknown.
    """

    interface: str
    gbit: float | None
    about: str

    def counters(self) -> tuple[int, int]:
        """Return the bytes (received, sent) of this node's interface since it came up; zeros if there is none."""
        return parse_counters(_COUNTERS.read_text())[self.interface] if self.interface else (0, 0)


def find_link(world: World, given_gbit: float | None = None) -> Link:
    """Find the interface of each node whose counters grow when the nodes send to each other. Collective.

    Args:
        world: the World of the nodes.
        given_gbit: the nominal rate in Gbit/s, if the user has given it.
    """
    if world.num_nodes == 1:
        return Link("", None, "all ranks are on one node")
    interface = ""
    with node_leaders(world) as leaders:
        if leaders is not None:
            before = parse_counters(_COUNTERS.read_text())
            _burst(leaders)
            interface = busiest(before, parse_counters(_COUNTERS.read_text()))
    is_leader = world.local_rank == 0
    own = (world.host, interface, nominal_gbit(interface) if interface else None) if is_leader else None
    links = [link for link in world.allgather(own) if link is not None]
    return Link(interface, *_rate(links, given_gbit))


@contextmanager
def node_leaders(world: World) -> Iterator[MPI.Comm | None]:
    """A context with a communicator of the lowest ranks of all nodes; None on other ranks. Collective."""
    from mpi4py import MPI

    leaders = world.comm.Split(0 if world.local_rank == 0 else MPI.UNDEFINED, world.rank)
    try:
        yield leaders or None
    finally:
        if leaders:
            leaders.Free()


def _rate(links: Sequence[tuple[str, str, float | None]], given_gbit: float | None) -> tuple[float | None, str]:
    interfaces = [name or "no interface that counts bytes" for _, name, _ in links]
    names = ", ".join(f"{name} on {host}" for name, (host, _, _) in zip(interfaces, links, strict=True))
    if len(set(interfaces)) == 1:
        names = f"{interfaces[0]} on every node"
    if given_gbit is not None:
        return given_gbit, f"{names}; {given_gbit:g} Gbit/s as --link-gbit says"
    rates = [gbit for _, _, gbit in links if gbit is not None]
    if len(rates) < len(links):
        return None, f"{names}; the rate is unknown, because a driver does not report it: set --link-gbit"
    return min(rates), f"{names}; {min(rates):g} Gbit/s as the driver says"


def _burst(leaders: MPI.Comm) -> None:
    own, other = numpy.zeros(_MESSAGE_BYTES, numpy.uint8), numpy.empty(_MESSAGE_BYTES, numpy.uint8)
    right, left = (leaders.rank + 1) % leaders.size, (leaders.rank - 1) % leaders.size
    for _ in range(_BURST_BYTES // _MESSAGE_BYTES):
        leaders.Sendrecv(own, right, recvbuf=other, source=left)
    leaders.Barrier()


def parse_counters(text: str) -> dict[str, tuple[int, int]]:
    """Return the bytes (received, sent) by interface, from the text of /proc/net/dev."""
    counters = {}
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        columns = numbers.split()
        counters[name.strip()] = int(columns[0]), int(columns[8])
    return counters


def busiest(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> str:
    """Return the interface that sent most of a burst; "" if none sent half of it (as with RDMA)."""
    sent = {name: after[name][1] - before[name][1] for name in after if name in before and name != "lo"}
    name = max(sorted(sent), key=lambda each: sent[each], default="")
    return name if name and sent[name] >= _BURST_BYTES // 2 else ""


def nominal_gbit(interface: str, folder: Path = _INTERFACES) -> float | None:
    """Return the interface's rate in Gbit/s; None if its driver reports none, or if it is virtual and invents one."""
    if not _is_hardware(folder / interface):
        return None
    try:
        mbit = int((folder / interface / "speed").read_text())
    except (OSError, ValueError):  # without a cable, and in many virtual machines
        return None
    return mbit / 1000 if mbit > 0 else None


def _is_hardware(path: Path) -> bool:
    """True if the interface is hardware, or a bond or VLAN of hardware."""
    lower = [one.resolve() for one in path.glob("lower_*")]
    return (path / "device").exists() or (bool(lower) and all(_is_hardware(one) for one in lower))
