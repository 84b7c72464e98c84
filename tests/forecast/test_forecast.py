"""Forecasts against times that follow from the model by arithmetic alone, and what is read of measured steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mpitrain as mt
from mpitrain.errors import ConfigError, DataError
from mpitrain.forecast.machines import Machines, equal_machines
from mpitrain.forecast.measured_steps import HostTimes, PartTimes, described, read_times
from mpitrain.forecast.planner import Planner, plan_report
from mpitrain.forecast.report import IDEAL
from mpitrain.forecast.ways import ExchangeWay
from mpitrain.job.step_times import SUM_BYTES
from mpitrain.profile import DEFAULT
from mpitrain.strategies.strategy import check_planned

MB = 2**20
RATE = 100 * MB  # bytes a second of each link
NO_WORK = replace(DEFAULT, add_bytes_per_second=1e16, copy_bytes_per_second=1e16, codecs=(("int8", 1e15),))


def machines(num_nodes: int = 4, latency: float = 0.0, **changes: object) -> Machines:
    plain = equal_machines(num_nodes, bytes_per_second=RATE, latency_seconds=latency)
    return replace(plain, **{"costs": NO_WORK, **changes})  # type: ignore[arg-type]


def part(num_ranks: int, samples: float, seconds: float, *ready: float) -> PartTimes:
    return PartTimes(num_ranks, samples, seconds, ready, seconds, seconds, 10)


def host(*parts: PartTimes, sizes: tuple[int, ...] = (4 * MB, 4 * MB), **changes: object) -> HostTimes:
    parameters = tuple((f"p{number}", size) for number, size in enumerate(sizes))
    plain = HostTimes("one", parameters, parts, False, 10**8, 2.0, 1.0, {})
    return replace(plain, **changes)  # type: ignore[arg-type]


def planner(*hosts: HostTimes, on: Machines | None = None) -> Planner:
    return Planner(hosts, on or machines(), is_profiled=False)


def test_a_sum_that_begins_when_its_bucket_is_ready() -> None:
    """Two buckets of 4 MiB on 2 ranks: each sends 2 MiB twice, 40 ms a bucket."""
    last_first = host(part(1, 8, 0.4, 0.4, 0.4), part(2, 4, 0.2, 0.2, 0.1))  # the last parameter is ready at 100 ms
    row = planner(last_first).forecast(2, ExchangeWay("direct"))
    assert row.step_seconds == pytest.approx(0.2 + 0.04, rel=1e-3)  # only the bucket of p0 is not hidden
    late = host(part(1, 8, 0.4, 0.4, 0.4), part(2, 4, 0.2, 0.2, 0.2))
    assert planner(late).forecast(2, ExchangeWay("direct")).step_seconds == pytest.approx(0.2 + 0.08, rel=1e-3)
    early = host(part(1, 8, 0.4, 0.1, 0.1), part(2, 4, 0.2, 0.05, 0.05))
    assert planner(early).forecast(2, ExchangeWay("direct")).step_seconds == pytest.approx(0.2, rel=1e-3)
    assert row.samples == 8
    assert row.speedup == pytest.approx(0.4 / 0.24, rel=1e-3)
    assert row.efficiency == pytest.approx(0.2 / 0.24, rel=1e-3)
    assert row.wire_bytes == 8 * MB


def test_machines_of_different_speed() -> None:
    """A file says that node 1 has half the speed of the host that was measured."""
    measured = host(part(1, 8, 0.4, 0.0, 0.0), part(2, 4, 0.2, 0.0, 0.0))
    row = planner(measured, on=machines(2, speeds=(1.0, 0.5))).forecast(2, ExchangeWay("direct"))
    assert row.step_seconds == pytest.approx(0.4, rel=1e-3)


def test_parts_between_two_measured_ones() -> None:
    measured = host(part(1, 12, 1.2, 0.9, 0.6), part(4, 3, 0.3, 0.3, 0.3))
    three = measured.part(3)
    assert three is not None
    assert three.samples == 4
    assert three.seconds == pytest.approx(0.4)  # a ninth of the way from 3 samples to 12
    assert three.ready == pytest.approx((0.3 + 0.6 / 9, 0.3 + 0.3 / 9))
    assert measured.part(4) == measured.parts[1]
    assert measured.part(8) is None
    fixed = replace(measured, parts=measured.parts[:1], is_fixed=True)
    assert fixed.part(8) == measured.parts[0]
    assert planner(fixed).forecast(4, ExchangeWay("direct")).samples == 48


def test_ranks_that_do_not_divide_the_batch() -> None:
    """Of 8 samples on 7 ranks, rank 0 has 2; all together have 8."""
    measured = host(part(1, 8, 0.8, 0.0, 0.0), part(4, 2, 0.2, 0.0, 0.0), part(8, 1, 0.1, 0.0, 0.0))
    plan = planner(measured, on=machines(7))
    row = plan.forecast(7, ExchangeWay("direct"))
    assert row.samples == 8
    assert row.speedup == pytest.approx(0.8 / row.step_seconds, rel=1e-9)
    seven, five = measured.part(7), measured.part(5)
    assert seven is not None
    assert five is not None
    assert (seven.samples, seven.seconds) == (2, pytest.approx(0.2))
    assert (five.samples, five.seconds) == (2, pytest.approx(0.2))
    assert plan.forecast(6, ExchangeWay(servers=1)).samples == 8
    weighted = host(part(1, 7.5, 0.8, 0.0, 0.0), part(4, 1.875, 0.2, 0.0, 0.0)).part(3)
    assert weighted is not None
    assert weighted.samples == 2.5


def test_a_profile_is_of_all_machines() -> None:
    times = (part(1, 8, 0.4, 0.0, 0.0), part(4, 2, 0.1, 0.0, 0.0))
    plan = Planner([host(*times)], machines(4), is_profiled=True)
    assert [plan.has_profile(number) for number in (1, 2, 3, 4)] == [False, False, False, True]
    assert not planner(host(*times)).has_profile(4)


def test_what_cannot_be_planned() -> None:
    many = host(part(1, 8, 0.4, 0.0, 0.0), part(4, 2, 0.1, 0.0, 0.0))
    few = host(part(1, 8, 0.4, 0.0, 0.0), part(2, 4, 0.2, 0.0, 0.0), host="two")
    for hosts in ([many, few], [few, many]):
        plan = planner(*hosts, on=machines(4, ranks_per_node=2, link_bytes_per_second=(RATE, RATE)))
        assert plan.best(4) == []
        assert plan.best(2) != []
        with pytest.raises(
            ConfigError, match="not planned: 4 ranks, because the script ended on two before a part among"
        ):
            plan_report(plan, hosts, [4], str, shows_all=False, tell=lambda _: None)
    with pytest.raises(ConfigError, match="not planned: 16 ranks, because a step has only 8 samples"):
        plan_report(planner(many), [many], [16], str, shows_all=False, tell=lambda _: None)


def test_the_vote_and_the_latency() -> None:
    """On 4 nodes a vote needs 2 messages. The sums are hidden."""
    measured = host(part(1, 8, 0.8, 0.0, 0.0), part(4, 2, 0.5, 0.0, 0.0))
    row = planner(measured, on=machines(latency=0.01)).forecast(4, ExchangeWay("ring"))
    assert row.step_seconds == pytest.approx(0.52, rel=1e-3)


def test_the_slowest_host_and_link_count() -> None:
    fast = host(part(1, 8, 0.4, 0.4, 0.4), part(2, 4, 0.2, 0.2, 0.2))
    slow = host(part(1, 8, 0.6, 0.6, 0.6), part(2, 4, 0.3, 0.3, 0.3))
    row = planner(fast, slow, on=machines(2)).forecast(2, ExchangeWay("direct"))
    assert row.step_seconds == pytest.approx(0.3 + 0.08, rel=1e-3)
    assert row.speedup == pytest.approx(0.4 / 0.38, rel=1e-3)  # of the fast host alone
    uneven = machines(2, link_bytes_per_second=(RATE, RATE / 2))
    assert planner(fast, fast, on=uneven).forecast(2, ExchangeWay("direct")).step_seconds == pytest.approx(
        0.36, rel=1e-3
    )


def test_work_of_the_thread_takes_time_where_no_core_is_free() -> None:
    costs = replace(NO_WORK, codecs=(("int8", 80 * MB),))  # 100 ms for 8 MiB
    times = (part(1, 8, 0.4, 0.0, 0.0), part(2, 4, 0.5, 0.0, 0.0))
    for busy, expected in ((1.0, 0.5), (1.5, 0.55), (2.0, 0.6)):
        row = planner(host(*times, busy_cores=busy), on=machines(costs=costs)).forecast(2, ExchangeWay("auto", "int8"))
        assert row.step_seconds == pytest.approx(expected, rel=1e-3), busy
    # The messages of 4 MiB took 30 ms of a core on 2 nodes, those of 8 MiB take twice as long.
    sums = {"direct": (0.04, 0.03)}
    row = planner(host(*times, busy_cores=1.5, sums=sums), on=machines(2)).forecast(2, ExchangeWay("direct"))
    assert row.step_seconds == pytest.approx(0.5 + 0.03, rel=1e-3)
    # Half a core has to do 250 ms of the step, and 60 ms for messages.
    crowded = host(*times, cores=0.5, busy_cores=0.5, sums=sums)
    row = planner(crowded, on=machines(2)).forecast(2, ExchangeWay("direct"))
    assert (row.bound, row.step_seconds) == ("processors", pytest.approx(0.31 / 0.5, rel=1e-9))


def test_links_that_carry_less_at_once() -> None:
    """4 MiB on 2 nodes takes 40 ms alone. Where all at once need 80 ms, a step needs twice as long for its sums."""
    assert SUM_BYTES == 4 * MB
    times = (part(1, 8, 0.4, 0.4, 0.4), part(2, 4, 0.2, 0.2, 0.2))
    slower = planner(host(*times, sums={"ring": (0.12, 0.0), "direct": (0.08, 0.0)}), on=machines(2))
    assert slower.forecast(2, ExchangeWay("direct")).step_seconds == pytest.approx(0.2 + 0.16, rel=1e-3)
    assert slower.forecast(2, ExchangeWay("ring")).step_seconds == pytest.approx(0.2 + 0.24, rel=1e-3)
    assert slower.forecast(2, ExchangeWay("auto", "int8")).step_seconds == pytest.approx(
        0.2 + 0.16 * ExchangeWay("auto", "int8").bytes_sent(8 * MB, 2) / (8 * MB), rel=0.01
    )
    faster = planner(host(*times, sums={"direct": (0.01, 0.0)}), on=machines(2))  # a link is not faster than alone
    assert faster.forecast(2, ExchangeWay("direct")).step_seconds == pytest.approx(0.2 + 0.08, rel=1e-3)
    assert slower.with_links(2).plain(2).step_seconds == pytest.approx(0.2 + 0.08, rel=1e-3)


def test_rounds_and_servers() -> None:
    measured = host(part(1, 8, 0.4, 0.4, 0.4), part(2, 4, 0.2, 0.2, 0.2), part(4, 2, 0.1, 0.1, 0.1))
    plan = planner(measured)
    rounds = plan.forecast(2, ExchangeWay("direct", sync_every=10))
    assert rounds.step_seconds == pytest.approx(0.2 + 0.08 / 10, rel=1e-3)
    assert rounds.wire_bytes == pytest.approx(0.8 * MB)
    served = plan.forecast(3, ExchangeWay(servers=1))  # two workers, whose 8 MiB come and go over the server's link
    assert served.samples == 8
    # At least until the second worker has its parameters, has computed and has sent; at most one after the other.
    assert 0.16 + 0.2 + 0.08 <= served.step_seconds <= 0.16 + 0.2 + 0.16


def test_servers_on_unequal_hosts() -> None:
    fast = host(part(1, 8, 0.4, 0.4, 0.4), part(2, 4, 0.2, 0.2, 0.2))
    slow = host(part(1, 8, 2.0, 2.0, 2.0), part(2, 4, 1.0, 1.0, 1.0))
    served = planner(fast, fast, slow, on=machines(3)).forecast(3, ExchangeWay(servers=1))
    assert served.step_seconds >= 1.0 + 0.08  # the slow worker computes, and its gradients go to the server
    lowered = replace(fast, sums={"direct": (10.0, 0.0)})  # far less than the links carried one by one
    half = planner(lowered, fast, fast, on=machines(3)).forecast(3, ExchangeWay(servers=1))
    assert half.step_seconds > 2 * planner(fast, on=machines(3)).forecast(3, ExchangeWay(servers=1)).step_seconds


def test_the_best_first_and_each_with_its_line() -> None:
    measured = host(part(1, 8, 0.4, 0.4, 0.4), part(2, 4, 0.2, 0.2, 0.2), part(4, 2, 0.1, 0.1, 0.1))
    rows = planner(measured).best(4)
    speeds = [row.samples_per_second for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert {row.way.codec for row in rows} == {"none", "int8"}  # of the others no time is known
    warnings = {str(row.way): row.way.warning for row in rows}
    assert (warnings["int8"], warnings["DiLoCo(10)"], warnings["1 server"]) == (
        "compare the loss", "no loss with 300 rounds", "",
    )  # fmt: skip
    assert (ExchangeWay("auto", "bf16").warning, ExchangeWay("auto", "top_k").warning) == ("", "costs loss")
    int8 = next(row.way for row in rows if row.way.codec == "int8")
    assert int8.command(2, ["--hosts", "a,b", "--ppn", "1"], "c d.json", ["train.py", "--epochs", "5"]).startswith(
        "MPITRAIN_PROFILE='c d.json' MPITRAIN_COMPRESSION=int8 "
    )
    assert ExchangeWay("ring", bucket_mib=16).command(2, ["-n", "2"], "", ["t.py"]) == (
        "MPITRAIN_ALGORITHM=ring MPITRAIN_BUCKET_MIB=16 mpitrain run -n 2 t.py"
    )
    assert planner(measured).best(8) == []
    assert [row.way for row in planner(measured).best(1)] == [ExchangeWay()]


@pytest.mark.parametrize(
    ("spread", "size", "expected", "says"),
    [
        (0.27, MB // 2, "MPITRAIN_ALGORITHM=", True),  # a few ms of 200 ms: less than the noise
        (0.0, MB // 64, "MPITRAIN_ALGORITHM=", True),  # less than 2 %
        (0.27, 16 * MB, "MPITRAIN_COMPRESSION=bf16", False),
        (0.0, MB, "MPITRAIN_COMPRESSION=bf16", False),
    ],
)
def test_within_the_noise_the_plain_way_is_kept(spread: float, size: int, expected: str, says: bool) -> None:
    def spread_part(num_ranks: int, samples: float, seconds: float) -> PartTimes:
        quarters = (seconds * (1 - spread / 2), seconds * (1 + spread / 2))
        return PartTimes(num_ranks, samples, seconds, (seconds, seconds), *quarters, 10)

    measured = host(spread_part(1, 8, 0.4), spread_part(2, 4, 0.2), sizes=(size, size))
    plan = planner(measured, on=machines(2, costs=replace(NO_WORK, codecs=(("bf16", 1e15),))))
    report = plan_report(
        plan, [measured], [2], lambda row: row.way.command(2, [], "", ["t.py"]), shows_all=False, tell=lambda _: None
    )
    assert report.answers[0].startswith(f"2 ranks: {expected}"), report.answers
    assert ("equal within the noise of the measured steps" in " ".join(report.answers)) is says
    assert ("bf16 makes it" in report.title) is not says
    assert report.panels[0].lines[IDEAL] == [(2, *[pytest.approx(2 * 8 / 0.4)] * 3)]


def part_of(ranks: int, samples: float, num_steps: int) -> dict[str, Any]:
    step = {"seconds": samples / 10, "ready": [samples / 20]}
    return {"ranks": ranks, "samples": samples, "steps": [step] * num_steps}


def entry(host: str, *parts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    plain = {
        "host": host, "parameters": [["p", 4000]], "parts": parts, "num_steps": 20, "is_fixed": False,
        "memory_bytes": 10**8, "cores": 2.0, "busy_cores": 1.0, "sums": {}, "front": "", "total_steps": 0,
    }  # fmt: skip
    return {**plain, **changes}


def read(folder: Path, *entries: dict[str, Any]) -> list[HostTimes]:
    path = folder / "times.json"
    path.write_text(json.dumps(entries))
    return read_times(path, "train.py")


def test_few_steps(tmp_path: Path) -> None:
    (one,) = read(tmp_path, entry("a", part_of(1, 8.0, 5), part_of(2, 4.0, 4), part_of(4, 2.0, 3)))
    assert [part.num_ranks for part in one.parts] == [1, 2]
    assert "half of only 5 steps within 0%" in described([one])
    (many,) = read(tmp_path, entry("a", part_of(1, 8.0, 10)))
    assert "half of the steps within 0%" in described([many])
    with pytest.raises(
        DataError, match=r"train.py ended after 6 steps, too few to measure on b\. .* at least 4 of them"
    ):
        read(tmp_path, entry("a", part_of(1, 8.0, 4)), entry("b", part_of(1, 8.0, 3), num_steps=6))


@pytest.mark.parametrize(
    ("changed", "samples", "expected"),
    [
        ({"is_fixed": True}, 8.0, "8 samples a rank, however many ranks there are on b, and 1 gradients"),
        ({"parameters": [["p", 400]]}, 8.0, r"1 gradients \(p to p\) of 400 bytes, 8 samples a step on b, and "),
        ({}, 6.0, "6 samples a step on b, and "),
    ],
)
def test_hosts_that_train_otherwise(tmp_path: Path, changed: dict[str, Any], samples: float, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        read(tmp_path, entry("a", part_of(1, 8.0, 4)), entry("b", part_of(1, samples, 4), **changed))


def test_only_sync_without_virtual_ranks() -> None:
    planned: Any = SimpleNamespace(watch=object(), name=lambda: "rank 0 on here")
    other: Any = SimpleNamespace(watch=None)
    check_planned(planned, mt.Sync())
    for strategy, kind in [
        (mt.Sync(virtual_ranks=4), r"mt\.Sync\(virtual_ranks=4\)"),
        (mt.LocalSGD(10), "LocalSGD"),
        (mt.ShardedSync(), "ShardedSync"),
    ]:
        check_planned(other, strategy)
        with pytest.raises(ConfigError, match=f"rank 0 on here: mpitrain plan found the strategy {kind}; allowed is "):
            check_planned(planned, strategy)
