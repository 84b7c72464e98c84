"""Servers and workers, and how often to save, against arithmetic; the simulator against what others have published."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy
import pytest

from mpitrain.compression.kernels import can_compile
from mpitrain.errors import ConfigError
from mpitrain.forecast.machines import equal_machines
from mpitrain.forecast.saves import (
    Failing,
    daly_seconds,
    expected_seconds,
    saves_report,
    simulate_failures,
    young_seconds,
)
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


def test_the_table_of_servers() -> None:
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


# A failure every 1000 s.
FAILING = Failing(20_000.0, 8000.0, 8, save_seconds=20.0, restart_seconds=50.0)


class Gaps:
    """Failures at given distances, in place of random ones."""

    def __init__(self, *gaps: float) -> None:
        self.gaps = list(gaps)

    def exponential(self, mean: float) -> float:
        assert mean == 1000.0
        return self.gaps.pop(0)


def by_hand(*gaps: float, every: float = 300.0, work: float = 1000.0) -> float:
    return simulate_failures(replace(FAILING, work_seconds=work), every, Gaps(*gaps))  # type: ignore[arg-type]


def test_without_a_failure() -> None:
    """Work, and a save after each interval and at the end."""
    assert by_hand(1e9) == 1000 + 4 * 20
    assert by_hand(1e9, every=500) == 1000 + 2 * 20
    assert by_hand(1e9, every=5000) == 1000 + 20


@pytest.mark.parametrize(
    ("gaps", "seconds"),
    [
        ((100, 1e9), 100 + 50 + 1080),  # in the first interval: all of it is lost
        ((319, 1e9), 319 + 50 + 1080),  # in the first save: it does not count
        ((320, 1e9), 320 + 50 + 700 + 3 * 20),  # after it
        ((700, 1e9), 700 + 50 + 400 + 2 * 20),  # after the second one
        ((700, 49, 1e9), 700 + 49 + 50 + 400 + 2 * 20),  # and once more during the restart
        ((700, 369, 1e9), 700 + 369 + 50 + 400 + 2 * 20),  # and just before the save that would count
        ((700, 370, 1e9), 700 + 370 + 50 + 100 + 20),
        ((1079, 1e9), 1079 + 50 + 100 + 20),  # in the last save
    ],
)
def test_failures_by_hand(gaps: tuple[float, ...], seconds: float) -> None:
    assert by_hand(*gaps) == seconds


@pytest.mark.parametrize("every", [100.0, 200.0, 1000.0])
def test_many_trainings_take_what_the_model_says(every: float) -> None:
    """The mean of 2000 trainings, within 4 standard errors. The intervals divide the work."""
    random = numpy.random.default_rng(3)
    totals = numpy.array([simulate_failures(FAILING, every, random) for _ in range(2000)])
    # The model, by adding up: an interval succeeds at once, or fails and must succeed together with a restart.
    rate, length = 1 / 1000, every + 20
    fails = -math.expm1(-rate * length)
    interval = fails / rate + fails * math.expm1(rate * (length + 50)) / rate
    expected = interval * 20_000 / every
    assert expected_seconds(FAILING, every) == pytest.approx(expected, rel=1e-12)
    error = 4 * totals.std() / len(totals) ** 0.5
    assert error < 0.05 * expected
    assert abs(totals.mean() - expected) < error


def test_the_best_interval() -> None:
    """Young's is sqrt(2 x 20 x 1000) = 200; Daly's is closer to the lowest expected time, found by trying."""
    assert young_seconds(FAILING) == 200
    assert daly_seconds(FAILING) == pytest.approx(200 * (1 + 0.1 / 3 + 0.01 / 9) - 20, rel=1e-12)
    best = min(numpy.arange(50.0, 500.0, 0.5), key=lambda every: expected_seconds(FAILING, every))
    assert abs(daly_seconds(FAILING) - best) < 1
    assert abs(young_seconds(FAILING) - best) > 10
    assert daly_seconds(replace(FAILING, save_seconds=2000)) == 1000


def test_the_table_of_saves() -> None:
    report = saves_report(FAILING, [400, 50, 187, 187], 300)
    assert [row["every_seconds"] for row in report.rows] == [50, 187, 400]
    for row in report.rows:
        assert row["lowest_seconds"] < row["total_seconds"] < row["highest_seconds"]
        assert row["useful_share"] == 20_000 / row["total_seconds"]
        assert row["total_seconds"] == pytest.approx(row["expected_seconds"], rel=0.05)
    assert report.answers == [
        "a failure every 1000 s on average",
        "fastest of these: save every 187 s",
        "Young: every 200 s; Daly: every 187 s",
    ]
    around = saves_report(FAILING, None, 1)
    assert [row["every_seconds"] for row in around.rows] == [
        factor * daly_seconds(FAILING) for factor in (0.25, 0.5, 1, 2, 4)
    ]


def test_a_training_that_would_hardly_end() -> None:
    with pytest.raises(ConfigError, match=r"saves every 2.78 h would take more than 100 times its work\. Save more"):
        saves_report(FAILING, [100, 10_000], 10)
    with pytest.raises(ConfigError, match="more than 100 times"):
        saves_report(FAILING, [1e300], 1)
    with pytest.raises(ConfigError, match=r"saves every 100 ms would take more than 100 times its work\. Save less"):
        saves_report(FAILING, [0.1, 100], 1)


def test_intervals_around_dalys_of_a_training_that_fails_often() -> None:
    """Those with which it would not end are left out. If Daly's is one of them, no interval helps."""
    often = replace(FAILING, save_seconds=800.0, restart_seconds=2000.0)
    ends = [
        every for every in (factor * daly_seconds(often) for factor in (0.25, 0.5, 1, 2, 4))
        if expected_seconds(often, every) <= 100 * often.work_seconds
    ]  # fmt: skip
    assert daly_seconds(often) in ends
    assert len(ends) < 5
    assert [row["every_seconds"] for row in saves_report(often, None, 1).rows] == ends
    never = replace(FAILING, save_seconds=10_000.0)
    for intervals in (None, [100.0]):
        with pytest.raises(ConfigError, match=r"times its work\. Take shorter saves and restarts, or fewer nodes$"):
            saves_report(never, intervals, 1)


_PATH = Path(__file__).parents[2] / "benchmarks" / "published_scaling.py"


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_scaling", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its NamedTuple looks for the module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "num_nodes", [8, pytest.param(32, marks=pytest.mark.nightly), pytest.param(64, marks=pytest.mark.nightly)]
)
def test_parameter_servers(published: ModuleType, num_nodes: int) -> None:
    """Within 15 % of 93.5, 84.5 and 51.0 %, the published efficiencies."""
    row = published.parameter_servers(num_nodes)
    assert row.published == pytest.approx({8: 0.93457, 32: 0.84456, 64: 0.50957}[num_nodes], abs=1e-5)
    assert abs(row.error) < 0.15


def test_without_the_fitted_rate_parameter_servers_do_not_agree(published: ModuleType) -> None:
    """With a tenth of it, 8 nodes would be as bad as 64 are."""
    assert published.parameter_servers(8, halves_gbit=published.HALVES_GBIT / 10).error < -0.3


@pytest.mark.skipif(not can_compile(), reason="without Numba, this takes minutes")
@pytest.mark.parametrize(
    ("model", "num_gpus"),
    [("VGG-16", 16), ("Inception V3", 16), ("Inception V3", 512)]
    + [pytest.param(model, 512, marks=pytest.mark.nightly) for model in ("ResNet-101", "VGG-16")],
)
def test_horovod(published: ModuleType, model: str, num_gpus: int) -> None:
    """Two fitted numbers for all models and sizes. All but VGG-16 on 128 GPUs are within 5 %."""
    row = published.horovod(model, num_gpus)
    assert row.num_nodes == num_gpus // 4
    assert abs(row.error) < 0.05
