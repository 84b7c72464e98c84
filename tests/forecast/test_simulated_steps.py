"""Steps against their arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from mpitrain.allreduce import ALGORITHMS, Entry
from mpitrain.compression.kernels import can_compile
from mpitrain.forecast import scaling
from mpitrain.forecast import training as training_module
from mpitrain.forecast.events import Events, Pending
from mpitrain.forecast.machines import equal_machines
from mpitrain.forecast.scaling import scaling_report
from mpitrain.forecast.training import SimulatedTraining, least_messages, simulate_steps

B, L = 1e8, 1e-3
MACHINES = equal_machines(8, bytes_per_second=B, latency_seconds=L)
ADD = MACHINES.costs.add_bytes_per_second
# One bucket, one piece a segment on 2 ranks.
SMALL = SimulatedTraining(100_000, 0.3, 32, "ring", bucket_mib=1)
SUM_2 = 2 * (L + 200_000 / B) + 200_000 / ADD


def test_one_rank_only_computes() -> None:
    run = simulate_steps(MACHINES, 1, SMALL, 3)
    assert run.step_seconds == (0.3,) * 3
    assert (run.compute_share, run.link, run.bound) == (pytest.approx(1), "", "compute")


def test_one_bucket_is_never_hidden() -> None:
    run = simulate_steps(MACHINES, 2, SMALL, 4)
    assert run.step_seconds == pytest.approx((0.3 + SUM_2,) * 4, rel=1e-9)
    assert run.compute_share == pytest.approx(0.3 / (0.3 + SUM_2), rel=1e-9)
    assert run.link_share == pytest.approx(400_000 / B / (0.3 + SUM_2), rel=1e-9)


def test_all_but_the_last_bucket_hide_behind_the_backward_pass() -> None:
    """Four buckets are ready at 0.15, 0.2, 0.25 and 0.3 s, and each sum is shorter than 0.05 s."""
    training = replace(SMALL, num_parameters=400_000, bucket_mib=400_000 / 2**20)
    assert simulate_steps(MACHINES, 2, training, 1).mean_seconds == pytest.approx(0.3 + SUM_2, rel=1e-9)


def test_a_link_that_is_too_slow_works_from_the_first_bucket_on() -> None:
    """The sums of four buckets, each longer than what is between them, begin at 0.15 s."""
    slow = replace(MACHINES, link_bytes_per_second=(4e6,) * 8)
    training = replace(SMALL, num_parameters=400_000, bucket_mib=400_000 / 2**20)
    one = 2 * (L + 200_000 / 4e6) + 200_000 / ADD
    run = simulate_steps(slow, 2, training, 1)
    assert run.mean_seconds == pytest.approx(0.15 + 4 * one, rel=1e-9)
    assert run.bound == "link of node 0"


def test_buckets_that_were_measured() -> None:
    """Of unequal size, ready at 0.06 and 0.27 s: the first one is hidden; the second one continues behind the pass."""
    training = replace(SMALL, num_parameters=300_000, buckets=((200_000, 0.2), (300_000, 0.9)))
    assert simulate_steps(MACHINES, 2, training, 1).mean_seconds == pytest.approx(max(0.3, 0.27 + SUM_2), rel=1e-9)
    together = replace(training, buckets=((200_000, 1.0), (300_000, 1.0)))
    assert simulate_steps(MACHINES, 2, together, 1).mean_seconds > 0.3 + SUM_2 + 400_000 * 2 / B
    even = replace(SMALL, num_parameters=400_000, bucket_mib=400_000 / 2**20)
    shares = [(end, 1 / 3 + 2 / 3 * end / 400_000) for end in range(100_000, 400_001, 100_000)]
    measured = simulate_steps(MACHINES, 2, replace(even, buckets=tuple(shares)), 2)
    assert measured.step_seconds == pytest.approx(simulate_steps(MACHINES, 2, even, 2).step_seconds, rel=1e-9)


def test_on_one_node_nothing_is_hidden() -> None:
    node = replace(equal_machines(1, ranks_per_node=2), inside_latency_seconds=0.0)
    training = replace(SMALL, num_parameters=400_000, algorithm="shared_memory", bucket_mib=400_000 / 2**20)
    costs = node.costs
    memory = 4 * (200_000 / costs.add_bytes_per_second + 200_000 / costs.copy_bytes_per_second)
    assert simulate_steps(node, 2, training, 1).mean_seconds == pytest.approx(0.3 + memory, rel=1e-9)


def test_rounds() -> None:
    """One sum, after all steps of a round."""
    run = simulate_steps(MACHINES, 2, replace(SMALL, sync_every=5), 2)
    assert run.step_seconds == pytest.approx(((5 * 0.3 + SUM_2) / 5,) * 2, rel=1e-9)


def test_a_straggler_and_a_slow_node_hold_up_all() -> None:
    run = simulate_steps(MACHINES, 2, replace(SMALL, straggler=3.0), 2)
    assert run.step_seconds == pytest.approx((0.9 + SUM_2,) * 2, rel=1e-9)
    assert run.bound == "the slowest rank"
    slow = replace(MACHINES, speeds=(1.0, 1.0, 0.5) + (1.0,) * 5)
    assert simulate_steps(slow, 2, SMALL, 2).mean_seconds == pytest.approx(0.3 + SUM_2, rel=1e-9)
    # On three ranks, of segments with a third of an element more or less.
    assert simulate_steps(slow, 3, SMALL, 2).mean_seconds == pytest.approx(0.6 + 4 * (L + 133_333 / B), rel=1e-3)


def test_steps_that_are_not_computed_are_as_those_that_are() -> None:
    """33 elements more than 4 ranks divide: ranks end at different times."""
    training = replace(SMALL, num_parameters=1_000_033, bucket_mib=1)
    repeated = simulate_steps(MACHINES, 4, training, 6)
    # A spread of nothing but rounding computes all steps.
    computed = simulate_steps(MACHINES, 4, replace(training, spread=1e-15), 6)
    assert repeated.step_seconds == pytest.approx(computed.step_seconds, rel=1e-6)


@pytest.mark.parametrize("name", ["ring", "direct"])
@pytest.mark.parametrize("p", [2, 3, 4, 5, 7, 8])
def test_one_rank_for_all(name: str, p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all ranks do the same, one of them has the times of all: three buckets of several pieces."""
    training = replace(SMALL, algorithm=name, num_parameters=840 * 900, bucket_mib=840 * 300 * 4 / 2**20)
    one = simulate_steps(MACHINES, p, training, 3)
    monkeypatch.setattr("mpitrain.forecast.training._are_alike", lambda *_: False)
    every = simulate_steps(MACHINES, p, training, 3)
    assert one.step_seconds == pytest.approx(every.step_seconds, rel=1e-9)
    assert (one.num_ranks, one.bound) == (every.num_ranks, every.bound)
    assert one.link_share == pytest.approx(every.link_share, rel=1e-9)


@pytest.mark.parametrize("entry", [entry for entry in ALGORITHMS.values() if entry.over is not None and entry.is_alike])
def test_ranks_that_are_not_alike_are_all_simulated(entry: Entry) -> None:
    """Each condition by itself: without it, one rank would be simulated."""
    name = next(name for name, one in ALGORITHMS.items() if one is entry)
    training = replace(SMALL, algorithm=name)
    assert training_module._are_alike(MACHINES, 4, training, [400, 800])
    for other in ({"spread": 0.1}, {"straggler": 2.0}, {"codec": "int8"}, {"algorithm": "halving_doubling"}):
        assert not training_module._are_alike(MACHINES, 4, replace(training, **other), [400, 800])
    assert not training_module._are_alike(MACHINES, 4, training, [400, 801])
    for change in (
        {"speeds": (1.0, 0.9) + (1.0,) * 6}, {"link_bytes_per_second": (1e8, 2e8) + (1e8,) * 6},
        {"nodes_per_rack": 2}, {"ranks_per_node": 2}, {"pairs": ((1e8,) * 8,) * 8},
    ):  # fmt: skip
        assert not training_module._are_alike(replace(MACHINES, **change), 4, training, [400, 800])


def test_random_times() -> None:
    """The same seed, the same times; the mean of the computations stays, and a step waits for the longest."""
    training = replace(SMALL, num_parameters=100, spread=0.2)
    run = simulate_steps(MACHINES, 8, training, 200, seed=1)
    assert run == simulate_steps(MACHINES, 8, training, 200, seed=1)
    assert run.step_seconds != simulate_steps(MACHINES, 8, training, 200, seed=2).step_seconds
    # 1600 draws, of standard deviation 0.2: the mean is within 4 x 0.2 / 40 of itself.
    assert run.compute_share * sum(run.step_seconds) / 200 == pytest.approx(0.3, rel=0.02)
    # The largest of 8, by drawing a million of them here.
    factors = numpy.random.default_rng(7).lognormal(-0.02, 0.2, (125_000, 8)).max(axis=1)
    sums = simulate_steps(MACHINES, 8, replace(training, spread=0.0), 1).mean_seconds - 0.3
    assert run.mean_seconds == pytest.approx(0.3 * factors.mean() + sums, rel=4 * factors.std() / 200**0.5)


def test_the_table() -> None:
    """A ring gives way to halving and doubling where its 2 (p - 1) latencies count."""
    far = replace(equal_machines(32), latency_seconds=5e-3)
    trainings = {name: replace(SMALL, algorithm=name) for name in ("ring", "halving_doubling")}
    report = scaling_report(far, trainings, [1, 2, 32, 4], num_steps=2, num_seeds=1)
    assert [(row["num_ranks"], row["algorithm"]) for row in report.rows] == [
        (number, name) for number in (1, 2, 4, 32) for name in trainings
    ]
    for row in report.rows:
        assert row["samples_per_second"] == pytest.approx(32 * row["num_ranks"] / row["step_seconds"])
        assert row["efficiency"] == pytest.approx(0.3 / row["step_seconds"])
    assert report.answers == [
        "ring: an efficiency of 80% up to 4 ranks",
        "halving_doubling: an efficiency of 80% up to 32 ranks",
        "fastest: ring from 2 ranks, halving_doubling from 4 ranks",
        "as fast within noise: halving_doubling with 2 ranks",
    ]


def test_the_efficiency_with_a_straggler() -> None:
    """Alone, one straggler is as fast as it is; beside it, the other of two ranks would make twice as much."""
    report = scaling_report(MACHINES, {"ring": replace(SMALL, straggler=2.0)}, [1, 2], num_steps=1, num_seeds=1)
    assert [row["efficiency"] for row in report.rows] == pytest.approx([1, 2 / (0.6 + SUM_2) / (1.5 / 0.3)])
    alone = scaling_report(MACHINES, {"ring": SMALL}, [1], num_steps=1, num_seeds=1)
    assert alone.answers == ["ring: an efficiency of 80% up to 1 rank"]


@pytest.mark.parametrize("name", ["ring", "direct", "halving_doubling", "auto"])
@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_at_least_so_many_messages(name: str, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buckets, the longer one of several pieces; and a bucket of one piece a segment."""
    sent = 0
    send = Events.send

    def counting(self: Events, *message: object) -> Pending:
        nonlocal sent
        sent += 1
        return send(self, *message)  # type: ignore[arg-type]

    monkeypatch.setattr(Events, "send", counting)
    for num_ranks in (1, 2, 5, 8):
        for count in (840, 840_000):
            training = replace(SMALL, algorithm=name, num_parameters=count, bucket_mib=2, spread=spread)
            sent = 0
            simulate_steps(MACHINES, num_ranks, training, 1)
            least, of_bucket = least_messages(MACHINES, num_ranks, training)
            assert of_bucket <= least <= sent <= 9 * least


def test_a_long_simulation_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step, by 2 p (p - 1) messages of direct, of 20 us and 900 bytes; nothing else is."""
    said: list[str] = []

    def begin(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(scaling, "simulate_steps", begin)
    many = equal_machines(1024)
    small = replace(SMALL, algorithm="direct")
    for training in (small, replace(small, straggler=2.0), replace(small, num_parameters=175_000_000_000)):
        with pytest.raises(NotImplementedError):
            scaling_report(many, {"direct": training}, [16, 1024], num_steps=10, num_seeds=1, tell=said.append)
    # 1,024 ranks do not divide 100,000 parameters, so all are simulated. One of 16 stands for all, but for a straggler.
    assert [text.partition(" messages")[0] for text in said[:2]] == [
        f"this simulates at least {2 * 1024 * 1023 + more:,}" for more in (2 * 15, 2 * 16 * 15)
    ]
    assert "about 41.9 s of processor time or more; direct with 1024 ranks needs about 1.9 GB of memory" in said[0]
    with pytest.raises(NotImplementedError):
        scaling_report(many, {"direct": small}, [16], num_steps=10, num_seeds=1, tell=said.append)
    assert len(said) == 3


@pytest.mark.skipif(not can_compile(), reason="without Numba, all messages are events")
def test_a_long_ring_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.1 million messages of one bucket are recorded at 4 us, for two lengths, and then cost 10 ns a step."""
    said: list[str] = []

    def begin(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(scaling, "simulate_steps", begin)
    many = equal_machines(1024)
    for spread, num_steps in ((0.1, 100), (0.1, 1000), (0.0, 1000)):
        with pytest.raises(NotImplementedError):
            trainings = {"ring": replace(SMALL, spread=spread)}
            scaling_report(many, trainings, [1024], num_steps=num_steps, num_seeds=1, tell=said.append)
    assert len(said) == 1
    messages = 2 * 1024 * 1023 * 1000
    assert f"at least {messages:,} messages, which take about 37.7 s of processor time or more; " in said[0]
    assert "ring with 1024 ranks needs about 104.8 MB of memory" in said[0]
