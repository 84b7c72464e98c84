"""Servers and workers against the arithmetic of docs/how-to/performance.md#how-many-servers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpitrain.errors import ConfigError
from mpitrain.forecast.machines import equal_machines
from mpitrain.forecast.scaling import servers_report
from mpitrain.forecast.serving import MODES, SimulatedServing, simulate_serving

# Links of 100 Mbit/s and parameters of 2 MiB, as in docs/how-to/performance.md, and 256 bytes in a message without
# arrays.
B, L, NUM_BYTES, SMALL = 12.5e6, 50e-6, 2 * 2**20, 256
MACHINES = equal_machines(40, bytes_per_second=B, latency_seconds=L)
ADD = MACHINES.costs.add_bytes_per_second
SERVING = SimulatedServing(NUM_BYTES // 4, 1.0, 1)
TRANSFER = (NUM_BYTES + SMALL) / B


@pytest.mark.parametrize("mode", MODES)
def test_one_worker_waits_for_each_message(mode: str) -> None:
    """The job with all parameters, the computation, the answer, the update."""
    rate, _, _ = simulate_serving(MACHINES, 1, 1, replace(SERVING, mode=mode), 5)
    assert rate == pytest.approx(1 / (1.0 + 2 * (TRANSFER + L) + NUM_BYTES / ADD), rel=1e-9)


def test_one_worker_of_two_servers() -> None:
    """It pulls one half after the other, and asks for the second one. It pushes both at once."""
    rate, _, _ = simulate_serving(MACHINES, 2, 1, SERVING, 5)
    half, ask = (NUM_BYTES / 2 + SMALL) / B, SMALL / B
    # At the end, one update, and the word of the second server to the first one.
    least = 1.0 + half + L + (ask + L) + (half + L) + 2 * half + L
    assert least < 1 / rate < least + NUM_BYTES / 2 / ADD + ask + L + 1e-9


@pytest.mark.parametrize(("servers", "least"), [(1, 0.97), (2, 0.7), (4, 0.7)])
def test_the_links_of_servers_are_a_bound(servers: int, least: float) -> None:
    """With more workers than links for them: servers x rate of a link / bytes of a job.

    Workers pull from one server after the other. They stay bunched, so that the links of several servers wait in turn.
    """
    busy = replace(SERVING, compute_seconds=0.01)
    rate, link, share = simulate_serving(MACHINES, servers, 32, busy, 6)
    bound = servers / ((NUM_BYTES + servers * SMALL) / B)
    assert bound * least < rate <= bound * 1.0001
    assert link.startswith("link of node ")
    assert int(link.rpartition(" ")[2]) < servers
    assert share > least - 0.1


def test_workers_are_a_bound() -> None:
    """Three of them find the links of four servers free: three times one worker, but for some collisions."""
    one, _, _ = simulate_serving(MACHINES, 4, 1, SERVING, 6)
    three, _, _ = simulate_serving(MACHINES, 4, 3, SERVING, 6)
    assert 0.93 * 3 * one < three <= 3 * one * (1 + 1e-9)


@pytest.mark.parametrize("workers", [2, 8])
def test_in_step(workers: int) -> None:
    """All pull at once, and push when they have computed: between one link for each and one for both."""
    rate, _, _ = simulate_serving(MACHINES, 1, workers, replace(SERVING, mode="sync"), 4)
    step = workers / rate
    assert 1.0 + (workers + 1) * TRANSFER < step < 1.0 + 2 * workers * (TRANSFER + L) + workers * NUM_BYTES / ADD


def test_a_slow_worker() -> None:
    """It holds up all in mode sync, the others at last in mode bounded, and nobody in mode async."""
    slow = replace(MACHINES, speeds=(1.0, 0.1) + (1.0,) * 38)
    in_step, _, _ = simulate_serving(slow, 1, 3, replace(SERVING, mode="sync"), 3)
    assert 3 / in_step > 10
    free, _, _ = simulate_serving(slow, 1, 3, SERVING, 12)
    # In mode bounded, two answers of each other worker go ahead, and then all are as fast as the slow one.
    bounded, _, _ = simulate_serving(slow, 1, 3, replace(SERVING, mode="bounded", staleness=1), 12)
    assert in_step * 0.95 < bounded < in_step * 36 / 30
    two, _, _ = simulate_serving(MACHINES, 1, 2, SERVING, 12)
    assert two < free < two * 1.15


def test_the_table() -> None:
    serving = replace(SERVING, spread=0.1)
    report = servers_report(MACHINES, serving, [2, 1], [8, 1], num_rounds=4, num_seeds=2)
    assert [(row["num_workers"], row["num_servers"]) for row in report.rows] == [(1, 1), (1, 2), (8, 1), (8, 2)]
    for row in report.rows:
        assert row["lowest"] < row["samples_per_second"] < row["highest"]
        assert row["efficiency"] == pytest.approx(row["samples_per_second"] / row["num_workers"])
    assert report.answers[0] == "1 worker: 90% of the most samples/s with 1 of these servers"
    assert report.rows == servers_report(MACHINES, serving, [1, 2], [1, 8], num_rounds=4, num_seeds=2).rows


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="30 servers and 11 workers are 41 ranks; equal machines has room for 40"):
        servers_report(MACHINES, SERVING, [1, 30], [1, 11], num_rounds=1, num_seeds=1)
    with pytest.raises(ConfigError, match="there is no mode 'bound' in simulations; known: sync, bounded, async"):
        servers_report(MACHINES, replace(SERVING, mode="bound"), [1], [1], num_rounds=1, num_seeds=1)
