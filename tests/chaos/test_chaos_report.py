"""The report and the picture of an episode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpitrain.watching.rank_record import DONE, PARTED
from testbed.chaos.conduct import _failure
from testbed.chaos.episode import Episode, Hit, Point, WentOn
from testbed.chaos.plan import Fault
from testbed.chaos.report import draw, is_good, numbers, text

TRY = "mpitrain: try 1 of 5 failed at step 21: rank 2 on b was killed by signal 9; starting again on a, b"


def episode() -> Episode:
    """2 steps/s. A rank is killed at 10 s, which costs 4 s and a step. No line names the freeze at 20 s."""
    seen = [Point(float(second), 1, 1, 1 + 2 * second, 4, 64.0) for second in range(11)]
    seen += [Point(float(second), 2, 20, 20 + 2 * (second - 14), 4, 64.0) for second in range(14, 31)]
    killed = Hit(Fault(1, 9.5, "rank", 0.5, False), 10.0, 2, "b", 1, 20, "process 7 killed")
    killed.went_on = WentOn(4.5, 20, 1)
    frozen = Hit(Fault(2, 20.0, "freeze", 0.1, True), 20.0, None, "a", 2, 32, "3 processes stopped for 1 s")
    frozen.went_on = WentOn(1.5)
    absent = Hit(Fault(3, 25.0, "rank", 0.1, False), 25.0, None, "", 2, why_not="no rank is there")
    return Episode(
        points=seen,
        hits=[killed, frozen, absent],
        said=[(1.0, "mpitrain: rank 2 waits"), (10.2, TRY)],
        hears=True,
        seconds=30.0,
        has_ended=True,
        left={"a": [], "b": []},
    )


def test_numbers() -> None:
    report = numbers(episode(), "1a2b", {"seed": 1})
    assert json.loads(json.dumps(report)) == report
    assert (report["job"], report["seed"], report["steps"]) == ("1a2b", 1, [1, 52])
    assert report["undisturbed_steps_per_second"] == 2.0
    assert report["throughput_kept"] == pytest.approx(51 / 60, abs=1e-4)
    killed, frozen, absent = report["faults"]
    assert (killed["victim"], killed["went_on_seconds"], killed["from_step"]) == ("rank 2 on b", 4.5, 20)
    assert (killed["named"], frozen["named"], absent["named"]) == (TRY, "", "")
    assert (killed["steps_per_second_before"], frozen["victim"]) == (2.0, "a")
    assert killed["samples_per_second_before"] == 64.0
    assert report["kinds"] == {
        "rank": {"count": 1, "went_on": 1, "median_seconds": 4.5, "worst_seconds": 4.5, "to_name": 1, "named": 1},
        "freeze": {"count": 1, "went_on": 1, "median_seconds": 1.5, "worst_seconds": 1.5, "to_name": 0, "named": 0},
    }


@pytest.mark.parametrize(
    ("line", "is_named"),
    [
        ("mpitrain: ranks 0-3 on b ended", True),
        ("mpitrain: ranks 0,2 on b were lost", True),
        ("mpitrain: rank 12 on b was lost", False),
        ("mpitrain: ranks 0,1,3 went on after 0.02 s", False),
    ],
)
def test_who_is_named(line: str, is_named: bool) -> None:
    seen = episode()
    seen.said = [(10.2, line)]
    assert bool(numbers(seen, "1a2b", {})["faults"][0]["named"]) == is_named


def test_text() -> None:
    seen = episode()
    said = text(numbers(seen, "1a2b", {}))
    assert "4.50 s from step 20, 1 repeated" in said
    assert "skipped: no rank is there" in said
    assert "rank: the job went on after 1 of 1: median 4.50 s, worst 4.50 s, named 1 of 1\n" in said
    assert "kept: 85.0%" in said
    assert said.endswith("the job has reached its end\nleft behind: nothing\n")
    seen.error, seen.left, seen.hears = "rank 1 on a did not reach its end", {"a": ["/dev/shm/x"]}, False
    said = text(numbers(seen, "1a2b", {}))
    assert "culprits: not known, because the launcher's stderr is not a file" in said
    assert said.endswith("the job has failed: rank 1 on a did not reach its end\nleft behind:\n    a: /dev/shm/x\n")
    seen.unseen, seen.news = ["b"], [(12.0, "b: not heard for 45 s")]
    said = text(numbers(seen, "1a2b", {}))
    assert "connections:\n    12.0 s  b: not heard for 45 s\n" in said
    assert (
        "the job has ended; whether it has failed is not known, because chaos lost sight of b; it saw: "
        f"rank 1 on a did not reach its end; the launcher's last line: {TRY}\n"
    ) in said
    assert "has failed:" not in said
    assert "the job goes on; all faults are undone" in text(numbers(Episode(), "1a2b", {}))


def test_what_is_good() -> None:
    for change, is_so in (
        ({}, True),
        ({"error": "x"}, False),
        ({"left": {"a": ["x"]}}, False),
        ({"has_ended": False}, False),
    ):
        seen = episode()
        vars(seen).update(change)
        assert is_good(seen) == is_so


def test_picture(tmp_path: Path) -> None:
    picture = tmp_path / "chaos.png"
    draw(picture, episode(), "job 1a2b")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_rank_that_dies_while_it_waits_for_the_others_has_not_ended() -> None:
    rank = {"host": "a", "error": "", "lost": [], "size": 2, "is_alive": False, "phase": PARTED}
    assert _failure({0: rank, 1: rank}) == ""
    assert _failure({0: rank, 1: {**rank, "phase": DONE, "is_alive": True}}) == ""
    assert _failure({0: rank, 1: {**rank, "phase": DONE}}) == "rank 1 on a did not reach its end"
    assert _failure({0: {**rank, "lost": [1]}, 1: {**rank, "phase": DONE}}) == ""
