"""Steps of synchronous training in simulated time: computing, gradients that are ready one after the other, sums.

As in a job (mpitrain/reducer/reducer.py): gradients come during the backward pass, the last layer's first. When a
bucket is full, its sum begins, after the sum before it. Between nodes a thread drives the sums beside the computation.
On one node, and with rounds, the sums begin when the computation has ended.

    rank 0   forward | backward          |
                       bucket 0 . bucket 1 . bucket 2
    sums                       [ 0  ][ 1  ]    [ 2 ] step ends

Not simulated: the agreement and the vote of a step (48 bytes a rank each), and the update of the parameters, which is
part of the computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy

from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.algorithm import Steps
from mpitrain.allreduce.costs import bucket_bytes
from mpitrain.allreduce.ring import PIECE_BYTES
from mpitrain.compression.kernels import can_compile
from mpitrain.forecast.events import Events, Network, SimulatedRank
from mpitrain.forecast.machines import Machines
from mpitrain.forecast.ring_times import OrderUnknownError, RingTimes, knows_order
from mpitrain.forecast.sums import flat_buffer, make_sums, simulated_groups

# Of the computation: the backward pass computes two products of matrices for each one of the forward pass.
_FORWARD = 1 / 3
# Two steps are the same if no rank begins them earlier or later by more than this share of the step. Ranks whose part
# of a sum has one element more end a little later.
_SAME = 1e-6
# For fewer messages, in all steps, the loops of ring_times.py are not worth their compilation.
_MANY_MESSAGES = 200_000


@dataclass(frozen=True)
class SimulatedTraining:
    """What each rank does in a step.

    Attributes:
        num_parameters: float32.
        compute_seconds: forward and backward pass, on a node of speed 1.
        num_samples: of one rank in one step.
        algorithm, codec: see make_sums.
        bucket_mib: of gradients; None: what a job would choose.
        sync_every: steps of a round. 1: gradients are summed in each step. More: parameters, after so many steps.
        spread: standard deviation of the logarithm of the time of a computation, whose mean stays. 0: none.
        straggler: the last rank takes this many times as long to compute.
        buckets: the place in the gradients at which each bucket ends, and the share of the computation after which its
            gradients are ready, in place of `bucket_mib` and of times in proportion to bytes.
    """

    num_parameters: int
    compute_seconds: float
    num_samples: int
    algorithm: str = "auto"
    codec: str = "none"
    bucket_mib: float | None = None
    sync_every: int = 1
    spread: float = 0.0
    straggler: float = 1.0
    buckets: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SimulatedRun:
    """Some steps on some ranks.

    Attributes:
        num_ranks: how many.
        step_seconds: of each step, or of each round divided by its steps.
        compute_share: of the time, the mean of the ranks.
        slowest_share: of the time, the sum of the longest computation of each step.
        link: the name of the link that was busy longest; "" with none.
        link_share: of the time.
    """

    num_ranks: int
    step_seconds: tuple[float, ...]
    compute_share: float
    slowest_share: float
    link: str
    link_share: float

    @property
    def mean_seconds(self) -> float:
        """Mean step time."""
        return sum(self.step_seconds) / len(self.step_seconds)

    @property
    def bound(self) -> str:
        """What takes most of the time: the computation, the slowest rank, a link, or, if none of them, latency."""
        shares = [
            (self.compute_share, "compute"),
            (self.slowest_share - _SAME, "the slowest rank"),  # without differences both are equal, to rounding
            (self.link_share, self.link),
        ]
        share, name = max(shares)
        return name if share >= 0.5 else "latency"


def simulate_steps(
    machines: Machines, num_ranks: int, training: SimulatedTraining, num_steps: int, seed: int = 0
) -> SimulatedRun:
    """Simulate the first steps of a training. The same seed gives the same times.

    Without a spread, steps after two equal ones are not computed: they are the same, to 1e-6 of a step. Many messages
    of a ring need no events (ring_times.py), and have the same times.

    Args:
        num_steps: or rounds.
        seed: of the times of computations.

    Raises:
        ConfigError: there is no room for the ranks, or the sums cannot be simulated.
    """
    if is_plain_ring(training) and least_messages(machines, num_ranks, training)[0] * num_steps >= _MANY_MESSAGES:
        with suppress(OrderUnknownError):
            return _simulated(_Simulation(machines, num_ranks, training, seed, without_events=True), num_steps)
    return _simulated(_Simulation(machines, num_ranks, training, seed), num_steps)


def _simulated(simulation: _Simulation, num_steps: int) -> SimulatedRun:
    for number in range(num_steps):
        simulation.step()
        if simulation.is_steady():
            simulation.repeat(num_steps - number - 1)
            break
    return simulation.result()


def is_plain_ring(training: SimulatedTraining) -> bool:
    """True if a simulation of many messages can mostly do without events (ring_times.py)."""
    return training.algorithm == "ring" and training.codec == "none" and can_compile()


def least_messages(machines: Machines, num_ranks: int, training: SimulatedTraining) -> tuple[int, int]:
    """How many messages are simulated at least between nodes, in one step and in the sum of one bucket.

    Each node sends nearly all bytes in both halves of a sum, in pieces. And each of p alike ranks sends p - 1 messages
    in each half, round the ring or to all others; other ranks send at least log2 of the nodes.
    """
    num_nodes = machines.nodes_of(num_ranks)[-1] + 1
    if num_nodes == 1:
        return 0, 0
    ends = _bucket_ends(machines, num_nodes, training)
    entry = ALGORITHMS.get(training.algorithm)
    each = 2 * (num_ranks - 1) if entry is not None and entry.is_alike else num_nodes.bit_length() - 1
    num_bytes = training.num_parameters * 4 if training.codec == "none" else 0
    senders = 1 if _are_alike(machines, num_ranks, training, ends) else num_ranks
    pieces = 2 * (num_nodes - 1) * num_bytes // PIECE_BYTES * senders // num_ranks
    messages = max(len(ends) * each * senders, pieces)
    return messages, messages // len(ends)


class _Simulation:
    """A training in simulated time."""

    def __init__(
        self,
        machines: Machines,
        num_ranks: int,
        training: SimulatedTraining,
        seed: int,
        *,
        without_events: bool = False,
    ) -> None:
        """`without_events`: of a ring, if that is possible."""
        node_of = machines.nodes_of(num_ranks)
        num_nodes = max(node_of) + 1
        ends = _bucket_ends(machines, num_nodes, training)
        alike = _are_alike(machines, num_ranks, training, ends)
        self._network = Network(machines, node_of)
        self._events = Events(self._network, 1 if alike else num_ranks, num_alike=num_ranks if alike else 0)
        self._num_ranks = num_ranks
        self._training, self._random = training, numpy.random.default_rng([seed, num_ranks])
        self._sums: Sequence[Steps] = (
            make_sums(self._events, machines, node_of, training.algorithm, training.codec) if num_ranks > 1 else ()
        )
        slow = numpy.array([1 / machines.speeds[node] for node in node_of[: len(self._events.ranks)]])
        slow[-1] *= training.straggler
        self._mean_seconds = training.compute_seconds * slow
        self._overlaps = num_nodes > 1 and training.sync_every == 1
        self._ends = ends if self._sums else []
        shares = [share for _, share in training.buckets] or [
            _FORWARD + (1 - _FORWARD) * end / training.num_parameters for end in ends
        ]
        self._ready_shares = shares if self._overlaps else [1.0] * len(ends)
        self._flat = flat_buffer(self._events, machines, training.num_parameters)
        self._ring: RingTimes | None = None
        if without_events and not alike and is_plain_ring(training) and num_ranks > 1:
            groups = simulated_groups(self._events, machines, node_of)
            if knows_order(self._network, groups[0].members):
                self._ring = RingTimes(self._network, machines, groups, ends)
        self._seconds: list[float] = []
        self._computed: list[tuple[float, float]] = []  # mean and longest of each step
        self._begins = self._before = numpy.zeros(len(self._events.ranks))

    def step(self) -> None:
        """Run one step, or one round, on every rank."""
        training, ranks = self._training, self._events.ranks
        self._before = self._begins
        computing = numpy.zeros(len(ranks))
        for _ in range(training.sync_every):
            computing += self._mean_seconds * self._factors()
        if self._ring is None:
            self._events.run([self._work(rank, float(computing[rank.number])) for rank in ranks])
            self._begins = numpy.array([rank.clock for rank in ranks])
        else:
            shares = self._ready_shares[: len(self._ends)]
            ready_at = numpy.array([self._before + computing * share for share in shares])
            summed = self._ring.sum_buckets(self._before, ready_at)
            self._begins = numpy.maximum(summed, self._before + computing)
        self._seconds.append(float(self._begins.max() - self._before.max()))
        self._computed.append((float(computing.mean()), float(computing.max())))

    def is_steady(self) -> bool:
        """True if the next step would equal the last one: no spread, and every rank begins as long after rank 0 as
        before."""
        if self._training.spread:
            return False
        before, now = self._before - self._before[0], self._begins - self._begins[0]
        return bool(numpy.abs(now - before).max() <= _SAME * self._seconds[-1])

    def repeat(self, times: int) -> None:
        """Repeat the last step this many times."""
        self._seconds += self._seconds[-1:] * times
        self._computed += self._computed[-1:] * times

    def result(self) -> SimulatedRun:
        """The result."""
        simulated = float(self._begins.max())
        total = sum(self._seconds)
        link = max(self._network.links, key=lambda one: one.busy_seconds)
        steps = self._training.sync_every
        return SimulatedRun(
            self._num_ranks,
            tuple(seconds / steps for seconds in self._seconds),
            sum(mean for mean, _ in self._computed) / total,
            sum(longest for _, longest in self._computed) / total,
            link.name if link.busy_seconds else "",
            link.busy_seconds / simulated,
        )

    def _factors(self) -> numpy.ndarray:
        spread = self._training.spread
        number = len(self._mean_seconds)
        # The mean of a lognormal distribution is exp(mu + sigma^2 / 2).
        return self._random.lognormal(-(spread**2) / 2, spread, number) if spread else numpy.ones(number)

    def _work(self, rank: SimulatedRank, seconds: float) -> Iterator[object]:
        begin = rank.clock
        computed = self._events.until(rank, begin + seconds)
        first = 0
        for end, share in zip(self._ends, self._ready_shares, strict=False):  # one rank has no sums
            ready = self._events.until(rank, begin + seconds * share)
            while not ready.Test():
                yield None
            yield from self._sums[rank.number](self._flat[first:end])
            first = end
        while not computed.Test():
            yield None


def _bucket_ends(machines: Machines, num_nodes: int, training: SimulatedTraining) -> list[int]:
    """The place in the gradients at which each bucket ends."""
    if training.buckets:
        return [end for end, _ in training.buckets]
    limit = round(training.bucket_mib * 2**20) if training.bucket_mib else bucket_bytes(
        machines.profile(num_nodes), num_nodes
    )  # fmt: skip
    per_bucket, count = max(1, limit // 4), training.num_parameters
    return [min(begin + per_bucket, count) for begin in range(0, count, per_bucket)]


def _are_alike(machines: Machines, num_ranks: int, training: SimulatedTraining, ends: Sequence[int]) -> bool:
    """True if every rank does the same at the same time: on equal nodes, with parts of equal length."""
    are_equal = all(len(set(values[:num_ranks])) == 1 for values in (machines.link_bytes_per_second, machines.speeds))
    return (
        num_ranks > 1
        and machines.ranks_per_node == 1
        and are_equal
        and not machines.pairs
        and (machines.nodes_per_rack == 0 or num_ranks <= machines.nodes_per_rack)
        and training.spread == 0
        and training.straggler == 1
        and training.codec == "none"
        and training.algorithm in ALGORITHMS
        and ALGORITHMS[training.algorithm].is_alike
        and all(end % num_ranks == 0 for end in ends)
    )
