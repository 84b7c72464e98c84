"""The faults of a plan: their kinds, times and victims; and the options of `scripts/testbed chaos`."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from mpitrain.errors import ConfigError
from mpitrain.launch.connections import Connection
from mpitrain.launch.jobs import RunningJob
from testbed.chaos import crew
from testbed.chaos.plan import KINDS, Fault, parse_kinds, plan
from testbed.command import main


def test_the_seed_alone_makes_the_plan() -> None:
    first, again, other = ([*islice(plan(KINDS, 30.0, seed), 60)] for seed in (1, 1, 2))
    assert first == again
    assert [fault.kind for fault in first] != [fault.kind for fault in other]
    assert [fault.seconds for fault in first] != [fault.seconds for fault in other]


def test_every_kind_once_in_a_round_and_no_two_faults_close_together() -> None:
    faults = [*islice(plan(("rank", "freeze", "link"), 10.0, 3), 300)]
    assert [fault.number for fault in faults] == [*range(1, 301)]
    for begin in range(0, 300, 3):
        assert {fault.kind for fault in faults[begin : begin + 3]} == {"rank", "freeze", "link"}
    assert all(5.0 <= after.seconds - before.seconds <= 15.0 for before, after in pairwise(faults))
    assert abs(faults[-1].seconds - 3000.0) <= 2.5
    assert {fault.is_of_host for fault in faults if fault.kind == "freeze"} == {True, False}


RANKS = {0: "a", 1: "a", 2: "b", 5: "c"}


@pytest.mark.parametrize(
    ("kind", "is_of_host", "picks"),
    [
        ("rank", True, {(0, "a"), (1, "a"), (2, "b"), (5, "c")}),
        ("freeze", False, {(0, "a"), (1, "a"), (2, "b"), (5, "c")}),
        ("freeze", True, {(None, "a"), (None, "b"), (None, "c")}),
        ("link", False, {(None, "b"), (None, "c")}),
        ("host", False, {(None, "b"), (None, "c")}),
        ("disk", False, {(None, "b")}),
    ],
)
def test_each_victim_comes_and_no_other(kind: str, is_of_host: bool, picks: set[tuple[int | None, str]]) -> None:
    faults = [Fault(1, 1.0, kind, pick / 100, is_of_host) for pick in range(100)]
    assert {fault.victim(RANKS, apart="a", folders=["b"]) for fault in faults} == picks


def test_nobody_to_hit_and_unknown_kinds() -> None:
    with pytest.raises(LookupError, match="no rank is between its start and its end"):
        Fault(1, 1.0, "rank", 0.5, False).victim({}, "a", [])
    with pytest.raises(LookupError, match="all ranks are on a, where the launcher is"):
        Fault(1, 1.0, "link", 0.5, False).victim({0: "a"}, "a", [])
    assert parse_kinds("rank,disk") == ("rank", "disk")
    with pytest.raises(ConfigError, match=r"no fault 'cable'; known: rank, freeze, link, host, disk"):
        parse_kinds("rank,cable")
    with pytest.raises(ConfigError, match="name each kind once"):
        parse_kinds("rank,rank")


HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with the id 1a2b3c4d, which nothing is done to."""
    running = RunningJob("1a2b3c4d", launcher=f"{HERE} 4711 1")
    elsewhere = RunningJob("3c4d5e6f", launcher="another 4711 1")

    def connect(_: object, host: str, wish: Mapping[str, Any]) -> Connection:
        raise AssertionError("a saboteur is started")

    monkeypatch.setattr(crew, "find_jobs", lambda _: ([running, elsewhere], {}))
    monkeypatch.setattr(crew.RealHosts, "connect", connect)


REFUSED = {
    "1a2b3c4d": f"job 1a2b3c4d runs on real hosts ({HERE}): --show prints what would be done to it, --yes does it",
    "5e6f7a8b --yes": f"there is no job 5e6f7a8b of yours on {HERE}; running: 1a2b3c4d, 3c4d5e6f. `mpitrain ps` lists",
    "3c4d5e6f --yes": f"the launcher of job 3c4d5e6f is on another, and chaos looks on {HERE}: name its host in",
    "1a2b3c4d --faults rank,link --yes": "chaos does not cut the cable of a real host, because nothing is sure to",
    "1a2b3c4d --faults host --yes": "chaos does not switch off a real host, because nothing is sure to bring it",
    "1a2b3c4d --faults disk --yes": "--faults disk and --disk DIR belong together: DIR is the folder of the check",
    "1a2b3c4d --disk /tmp --yes": "--faults disk and --disk DIR belong together",
    "1a2b3c4d --faults cable": "there is no fault 'cable'; known: rank, freeze, link, host, disk",
    "1a2b3c4d --bed nobody": "--bed names the hosts: leave out --hosts and -i",
}


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in REFUSED.items():
        assert main(["chaos", "--hosts", "localhost", *words.split()]) == 2
        assert said in capsys.readouterr().err, words
    for words in ("--every soon", "--every 0s", "--hold -1s", "--count 0", "--seed x"):
        with pytest.raises(SystemExit, match="2"):
            main(["chaos", "1a2b3c4d", *words.split()])
        assert f"argument {words.split()[0]}: " in capsys.readouterr().err
    assert main(["chaos", "1a2b3c4d", "--bed", f"no-bed-{Path(__file__).stem}"]) == 2
    assert "scripts/testbed: " in capsys.readouterr().err


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for seed in ("1", "1", "2"):
        words = ["chaos", "1a2b3c4d", "--hosts", "localhost", "--show", "--every", "1m", "--count", "4", "--seed", seed]
        assert main(words) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]
    head, *lines = shown[0].splitlines()
    assert head == f"job 1a2b3c4d on {HERE}; nothing is done now"
    assert len(lines) == 4
    assert sum(line.endswith("rank: kill -9 of one rank") for line in lines) == 2
    assert sum(line.endswith("stopped for 5 s") for line in lines) == 2
    assert main(["chaos", "1a2b3c4d", "--hosts", "localhost", "--show"]) == 0  # it has an end
    lines = capsys.readouterr().out.splitlines()
    assert (len(lines), lines[-1]) == (22, "and so on, until the job ends")
