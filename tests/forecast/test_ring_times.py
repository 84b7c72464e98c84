"""A ring's times without events: the times of the events, to the last bit, whatever the machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpitrain.compression.kernels import can_compile
from mpitrain.forecast import training as training_module
from mpitrain.forecast.events import Events, Network
from mpitrain.forecast.machines import equal_machines
from mpitrain.forecast.ring_times import OrderUnknownError, RingTimes, knows_order
from mpitrain.forecast.training import SimulatedTraining, simulate_steps

pytestmark = pytest.mark.skipif(not can_compile(), reason="without Numba, all messages are events")
MACHINES = equal_machines(7, bytes_per_second=1e8, latency_seconds=5e-5)
# Buckets of several pieces a segment on few ranks, and a short one at the end.
TRAINING = SimulatedTraining(1_000_003, 0.05, 1, "ring", bucket_mib=2.5)
SLOW = (1.0, 1.0, 0.1, 1.0, 3.0, 1.0, 0.5)

PLACES = {
    "equal": MACHINES,
    "unequal links": replace(MACHINES, link_bytes_per_second=tuple(1e8 * share for share in SLOW)),
    "no latency": replace(MACHINES, latency_seconds=0.0, link_bytes_per_second=tuple(1e8 * share for share in SLOW)),
    "racks": replace(MACHINES, nodes_per_rack=2, uplink_bytes_per_second=3e7),
    "fast uplinks": replace(MACHINES, nodes_per_rack=3, uplink_bytes_per_second=1e9, latency_seconds=1e-3),
    "pairs": replace(MACHINES, pairs=tuple(tuple(1e8 - 3e6 * (i + j) for j in range(7)) for i in range(7))),
    "unequal nodes": replace(MACHINES, speeds=(1.0, 0.5, 1.0, 1.3, 1.0, 0.9, 1.0)),
}
CHANGES = {
    "plain": TRAINING,
    "spread": replace(TRAINING, spread=0.5),
    "straggler": replace(TRAINING, straggler=3.0),
    "rounds": replace(TRAINING, sync_every=3, spread=0.1),
    "fewer elements than ranks": replace(TRAINING, num_parameters=5, spread=0.1),
    "one element": replace(TRAINING, num_parameters=1, straggler=1.5),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("p", [3, 7, *(pytest.param(p, marks=pytest.mark.nightly) for p in (2, 4, 5))])
def test_the_times_of_the_events(place: str, change: str, p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every step, and how long each link was busy."""
    events = simulate_steps(PLACES[place], p, CHANGES[change], 3, seed=1)  # so few messages are events
    without_events(monkeypatch)
    assert simulate_steps(PLACES[place], p, CHANGES[change], 3, seed=1) == events


def test_a_large_ring_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 ranks in racks, one of them slow: 32,256 messages in each of three steps. No event is made."""
    links = (1e8,) * 40 + (2e7,) + (1e8,) * 23
    many = replace(equal_machines(64), link_bytes_per_second=links, nodes_per_rack=10, uplink_bytes_per_second=1e8)
    training = replace(TRAINING, num_parameters=250_000, bucket_mib=0.25, spread=0.2)
    events = simulate_steps(many, 64, training, 3)
    monkeypatch.setattr(training_module, "_MANY_MESSAGES", 3 * 4 * 2 * 63 * 64)
    monkeypatch.setattr(Events, "run", lambda *_: pytest.fail("events were run"))
    assert simulate_steps(many, 64, training, 3) == events


def test_who_competes_for_a_link_is_decided_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on one node have no link between them; an order of ranks may pass an uplink twice."""
    racks = replace(MACHINES, nodes_per_rack=2, uplink_bytes_per_second=1e8)
    network = Network(racks, range(7))
    assert knows_order(network, (0, 1, 2, 3, 4, 5, 6))
    assert not knows_order(network, (0, 2, 1, 3))
    pairs = Network(replace(MACHINES, ranks_per_node=2), (0, 0, 1, 1))
    assert not knows_order(pairs, (0, 1, 2, 3))
    two = replace(MACHINES, ranks_per_node=2)
    events = simulate_steps(two, 4, TRAINING, 2)
    monkeypatch.setattr(training_module, "_MANY_MESSAGES", 0)
    monkeypatch.setattr(RingTimes, "sum_buckets", lambda *_: pytest.fail("the order is not known"))
    assert simulate_steps(two, 4, TRAINING, 2) == events


def test_a_delay_that_only_events_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between these pairs, messages are slow, and the links are free before it is noticed that one has left."""
    odd = tuple(tuple(2e7 if (i, j) == (1, 2) else 1e9 for j in range(7)) for i in range(7))
    slow_pair = replace(MACHINES, link_bytes_per_second=(1e9,) * 7, pairs=odd)
    training = replace(TRAINING, num_parameters=4_000_000, bucket_mib=16)
    events = simulate_steps(slow_pair, 3, training, 2)
    gave_up: list[bool] = []
    sum_buckets = RingTimes.sum_buckets

    def seen(*arguments: object) -> object:
        try:
            return sum_buckets(*arguments)  # type: ignore[arg-type]
        except OrderUnknownError:
            gave_up.append(True)
            raise

    monkeypatch.setattr(RingTimes, "sum_buckets", seen)
    without_events(monkeypatch)
    assert simulate_steps(slow_pair, 3, training, 2) == events
    assert gave_up == [True]


def without_events(patch: pytest.MonkeyPatch) -> None:
    """From now on, a ring is simulated as if it had many messages, and with no rank that stands for all."""
    patch.setattr(training_module, "_MANY_MESSAGES", 0)
    patch.setattr(training_module, "_are_alike", lambda *_: False)
