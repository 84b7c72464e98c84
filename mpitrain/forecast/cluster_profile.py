"""The costs of a cluster: its link, every pair of ranks, memory and codecs. A profile keeps them for the cost model.

Latency and bandwidth of every ordered pair are measured in rounds in which each rank has one partner. The rounds are
those of a tournament by the circle method: one rank stays, the others rotate. With four ranks:

    0-3 1-2     0-2 3-1     0-1 2-3

With an odd number of ranks, one pauses in each round. All pairs of a round measure at once. A switch should carry all
of them at the full rate; if it does not, a job will have the same limit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.algorithm import Algorithm
from mpitrain.compression import CODECS, make_codec
from mpitrain.forecast.operations import sum_by
from mpitrain.forecast.rounds import Variant, measure, num_calls, versions
from mpitrain.noise import median_and_error, noise
from mpitrain.profile import DEFAULT, Profile, fingerprint, to_json
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

_COUNTERS = Path("/proc/net/dev")  # the counters of this rank's network namespace
_INTERFACES = Path("/sys/class/net")
# Enough to stand out from other traffic; takes 0.2 s at 100 Mbit/s.
_BURST_BYTES = 2**21
_PART_OF_BURST = 2**16


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
        return given_gbit, f"{names}; {given_gbit:g} Gbit/s as --link says"
    rates = [gbit for _, _, gbit in links if gbit is not None]
    if len(rates) < len(links):
        return None, f"{names}; the rate is unknown, because a driver does not report it: set --link"
    return min(rates), f"{names}; {min(rates):g} Gbit/s as the driver says"


def _burst(leaders: MPI.Comm) -> None:
    own, other = numpy.zeros(_PART_OF_BURST, numpy.uint8), numpy.empty(_PART_OF_BURST, numpy.uint8)
    right, left = (leaders.rank + 1) % leaders.size, (leaders.rank - 1) % leaders.size
    for _ in range(_BURST_BYTES // _PART_OF_BURST):
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


_ROUND_TRIPS = 100
_WARM_UP = 10
_MESSAGE_BYTES = 2**20
_IN_FLIGHT = 4
_FEWEST, _MOST = 8, 512  # messages for the bandwidth
_SECONDS = 0.1  # approximate time for them
_TAG = 1


class Pairs(NamedTuple):
    """The measurements, by the sender's rank, then by the receiver's; the diagonal is 0."""

    latency_us: list[list[float]]  # half the round trip of one byte, median
    bytes_per_second: list[list[float]]  # messages of 1 MiB, several in flight


def circle_rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of each round; every two of `size` meet in exactly one round."""
    seats: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        drawn = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(a, b) for a, b in drawn if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def measure_pairs(comm: MPI.Comm, tell: Callable[[str], object] = lambda text: None) -> Pairs:
    """Measure every ordered pair of `comm`'s ranks. All ranks get the complete result. Collective over `comm`."""
    latency, rate = (numpy.zeros((comm.size, comm.size)) for _ in range(2))
    rounds = circle_rounds(comm.size)
    for number, pairs in enumerate(rounds):
        tell(f"point to point: round {number + 1} of {len(rounds)}")
        partner = next((b if comm.rank == a else a for a, b in pairs if comm.rank in (a, b)), None)
        for lower_first in (True, False):
            comm.Barrier()
            if partner is None:
                continue
            if (comm.rank < partner) == lower_first:
                latency[comm.rank, partner] = _round_trip(comm, partner) / 2
                rate[comm.rank, partner] = _send_many(comm, partner)
            else:
                _answer(comm, partner)
                _receive_many(comm, partner)
    # Each rank has filled in its own row, and zeros elsewhere.
    latency, rate = (sum(comm.allgather(table)) for table in (latency, rate))
    return Pairs((latency * 1e6).tolist(), rate.tolist())


def _round_trip(comm: MPI.Comm, partner: int) -> float:
    """Median seconds."""
    byte = numpy.zeros(1, numpy.uint8)
    seconds = []
    for _ in range(_WARM_UP + _ROUND_TRIPS):
        started = time.perf_counter()
        comm.Send(byte, partner, _TAG)
        comm.Recv(byte, partner, _TAG)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[_WARM_UP:])


def _answer(comm: MPI.Comm, partner: int) -> None:
    byte = numpy.zeros(1, numpy.uint8)
    for _ in range(_WARM_UP + _ROUND_TRIPS):
        comm.Recv(byte, partner, _TAG)
        comm.Send(byte, partner, _TAG)


def _send_many(comm: MPI.Comm, partner: int) -> float:
    """Return bytes per second, from the first send to the reply that all messages have arrived."""
    message = numpy.zeros(_MESSAGE_BYTES, numpy.uint8)
    number, rate = _FEWEST, 0.0
    for _ in range(2):  # the first pass finds how many messages fill the time
        comm.send(number, partner, _TAG)
        comm.recv(None, partner, _TAG)
        started = time.perf_counter()
        sends: list[MPI.Request] = []
        for _ in range(number):
            if len(sends) == _IN_FLIGHT:
                sends.pop(0).Wait()
            sends.append(comm.Isend(message, partner, _TAG))
        for send in sends:
            send.Wait()
        comm.recv(None, partner, _TAG)
        rate = number * _MESSAGE_BYTES / (time.perf_counter() - started)
        number = max(_FEWEST, min(_MOST, int(_SECONDS * rate / _MESSAGE_BYTES)))
    return rate


def _receive_many(comm: MPI.Comm, partner: int) -> None:
    messages = [numpy.empty(_MESSAGE_BYTES, numpy.uint8) for _ in range(_IN_FLIGHT)]
    for _ in range(2):
        number = comm.recv(None, partner, _TAG)
        posted = [comm.Irecv(messages[index], partner, _TAG) for index in range(min(_IN_FLIGHT, number))]
        comm.send(None, partner, _TAG)
        for index in range(number):
            posted[index % _IN_FLIGHT].Wait()
            if index + _IN_FLIGHT < number:
                posted[index % _IN_FLIGHT] = comm.Irecv(messages[index % _IN_FLIGHT], partner, _TAG)
        comm.send(None, partner, _TAG)


_BLOCK_BYTES = 2**25  # larger than any cache
_CODEC_BYTES = 2**23
_MEMORY_ROUNDS = 10
# The sizes at which two algorithms are compared, each four times the one before. The limit is in the middle of two.
_LIMIT_BYTES = tuple(2**exponent for exponent in (12, 14, 16, 18, 20))
_LIMIT_ROUNDS = 15


def measure_cluster(world: World, tell: Callable[[str], object] = lambda text: None) -> dict[str, Any]:
    """Measure the cost of messages, links and memory, in well under a minute. Collective; equal on every rank.

    Returns:
        latency_between_nodes_us: half the round trip of one byte, median over pairs of nodes; None on one node.
        link_bytes_per_second: measured in one direction, by the sender's node rank, then by the receiver's; None on
            one node.
        link_latency_us: half the round trip of one byte, likewise.
        copy_bytes_per_second, add_bytes_per_second: the rate at which the slowest rank copies float32, or adds float32
            in place, while all ranks do so.
        codecs: by name: whether the codec is compiled on every rank; and, as above, the rates of float32 at which a
            rank encodes with its error, decodes, and adds.
        native_below_bytes: below this size MPI's own allreduce was faster, above it the algorithm that auto takes for
            large buffers.
    """
    with node_leaders(world) as leaders:
        between = measure_pairs(leaders, tell) if leaders is not None and world.num_nodes > 1 else None
    world.barrier()  # the other ranks wait here without taking the leaders' cores
    pairs: Pairs | None = world.broadcast_object(between)
    tell("memory")
    flat, other = numpy.ones(_BLOCK_BYTES // 4, numpy.float32), numpy.zeros(_BLOCK_BYTES // 4, numpy.float32)
    memory = {
        "copy": Variant(lambda: numpy.copyto(other, flat)),
        "add": Variant(lambda: numpy.add(flat, other, out=flat), prepare=lambda: flat.fill(1.0)),
    }
    measure(world, memory, 1)
    times = {name: statistics.median(row.seconds) for name, row in measure(world, memory, _MEMORY_ROUNDS).items()}
    tell("codecs")
    codecs = {name: _codec_rates(world, name) for name in CODECS}
    tell("small buffers")
    return {
        "latency_between_nodes_us": _median_off_diagonal(pairs.latency_us) if pairs else None,
        "link_bytes_per_second": pairs.bytes_per_second if pairs else None,
        "link_latency_us": pairs.latency_us if pairs else None,
        "copy_bytes_per_second": _BLOCK_BYTES / times["copy"],
        "add_bytes_per_second": _BLOCK_BYTES / times["add"],
        "codecs": codecs,
        "native_below_bytes": native_below(world if pairs is None else world.replaced(profile=_between(pairs))),
    }


def _codec_rates(world: World, name: str) -> dict[str, Any]:
    codec = make_codec(name)
    values = numpy.random.default_rng(world.rank).standard_normal(_CODEC_BYTES // 4, numpy.float32)
    error, wire = numpy.empty_like(values), numpy.empty(codec.wire_bytes(values.size), numpy.uint8)
    variants = {
        "encode": Variant(lambda: codec.encode(values, wire, error)),
        "decode": Variant(lambda: codec.decode(wire, error)),
        "add": Variant(lambda: codec.add(wire, error), prepare=lambda: error.fill(0.0)),
    }
    codec.encode(values, wire, error)  # decode and add must not find what happened to be in memory
    measure(world, variants, 1)
    rates = {
        f"{operation}_bytes_per_second": _CODEC_BYTES / statistics.median(measured.seconds)
        for operation, measured in measure(world, variants, _MEMORY_ROUNDS).items()
    }
    return {"compiled": all(world.allgather(codec.compiled)), **rates}


def _median_off_diagonal(table: list[list[float]]) -> float:
    return statistics.median(value for i, line in enumerate(table) for j, value in enumerate(line) if i != j)


def _between(pairs: Pairs) -> Profile:
    """Return the profile by which auto will choose between ring and direct."""
    latency, rate = _median_off_diagonal(pairs.latency_us) * 1e-6, _median_off_diagonal(pairs.bytes_per_second)
    return replace(DEFAULT, latency_seconds=latency, bytes_per_second=rate)


def native_below(world: World) -> int:
    """Return the size in bytes up to which native is faster than auto's choice for large buffers. Collective."""
    large = "shared_memory" if world.num_nodes == 1 else "hierarchical"
    algorithms = {name: ALGORITHMS[name].make(world) for name in ("native", large)}
    is_native_faster = {}
    for num_bytes in _LIMIT_BYTES:
        variants = {name: _sums(algorithm, num_bytes) for name, algorithm in algorithms.items()}
        measure(world, variants, 3)
        times = {name: measured.seconds for name, measured in measure(world, variants, _LIMIT_ROUNDS).items()}
        median, error = median_and_error(
            [one / other for one, other in zip(times[large], times["native"], strict=True)]
        )
        is_native_faster[num_bytes] = median - 1 > noise(1, error)
    return crossover(is_native_faster)


def _sums(algorithm: Algorithm, num_bytes: int) -> Variant:
    flats = [algorithm.allocate(num_bytes // 4, numpy.dtype(numpy.float32)) for _ in range(num_calls(num_bytes))]
    for flat in flats:
        flat.fill(0)

    def run() -> None:
        for flat in flats:
            sum_by(algorithm, flat)

    return Variant(run, calls=len(flats))


def crossover(is_native_faster: Mapping[int, bool]) -> int:
    """Return the limit, in the middle between the last size at which native was faster, and the next (fourfold) one."""
    return max((2 * size for size, is_faster in is_native_faster.items() if is_faster), default=0)


def save_profile(path: Path, world: World, measured: dict[str, Any]) -> None:
    """Write the file for MPITRAIN_PROFILE, completely or not at all. Only rank 0 calls this."""
    here = fingerprint(world.hosts, world.node_ranks, versions()["MPI"])
    nodes = [world.hosts[world.node_ranks.index(node)] for node in range(world.num_nodes)]
    new = path.with_name(path.name + ".new")
    new.write_text(to_json(measured, nodes, here, versions()))
    new.replace(path)
