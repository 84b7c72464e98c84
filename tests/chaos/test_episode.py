"""How a job continued after a fault, from points in time; and the report and the picture of such an episode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpitrain.watching.rank_record import DONE, PARTED
from testbed.chaos.conduct import _failure
from testbed.chaos.episode import Episode, Hit, Point, WentOn, kept, rate, samples_per_second, went_on
from testbed.chaos.plan import Fault
from testbed.chaos.report import draw, is_good, numbers, text

TRY = "mpitrain: attempt 1 of 5 failed at step 21: rank 2 on b was killed by signal 9; starting again on a, b"


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
        ("mpitrain: ranks 0,1,3 continued after 0.02 s", False),
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
    assert "rank: the job continued after 1 of 1: median 4.50 s, worst 4.50 s, named 1 of 1\n" in said
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
    assert "the job continues; all faults are undone" in text(numbers(Episode(), "1a2b", {}))


def test_what_is_good() -> None:
    assert is_good(episode())
    for change in ({"error": "x"}, {"left": {"a": ["x"]}}, {"has_ended": False}):
        seen = episode()
        vars(seen).update(change)
        assert not is_good(seen)


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


def points(*steps: tuple[float, int, int], first: int = 1, ranks: int = 4) -> list[Point]:
    """Points from (seconds, attempt, step)."""
    return [
        Point(seconds, attempt, first if attempt > 1 else 1, step, ranks, 100.0 * step)
        for seconds, attempt, step in steps
    ]


def test_how_it_went_on() -> None:
    seen = points((1.0, 1, 4), (2.0, 1, 5), (2.1, 1, 6), (2.5, 1, 6), (2.75, 1, 7))
    # In place: the others may end step 5, in which the victim was, but not step 6.
    assert went_on(seen, 2.05, 1, 5) == WentOn(pytest.approx(0.7))
    assert went_on(seen[:-1], 2.05, 1, 5) is None
    assert went_on(seen, 2.05, 1, 4) == WentOn(pytest.approx(0.05))
    # A new attempt continues when it has made its first step, step 4. It repeats steps 4 and 5.
    seen = points((1.0, 1, 5), (2.0, 1, 6), (4.0, 2, 0), (5.0, 2, 4), (5.5, 2, 5), first=4)
    assert went_on(seen, 2.0, 1, 5) == WentOn(3.5, 4, 2)
    assert went_on(seen[:-1], 2.0, 1, 5) is None
    # The end of the program counts.
    seen = [*points((1.0, 1, 9), (2.0, 1, 10)), Point(3.0, 1, 1, 10, 4, is_done=True)]
    assert went_on(seen, 1.5, 1, 9) == WentOn(1.5)


def test_rates_count_no_step_twice() -> None:
    seen = points((0.0, 1, 10), (5.0, 1, 20), (6.0, 2, 15), (10.0, 2, 30))
    assert rate(seen, 0.0, 5.0) == 2.0
    assert rate(seen, 5.0, 10.0) == 2.0
    assert rate(seen, 5.5, 6.5) == 0.0
    assert rate(seen, 20.0, 30.0) == 0.0
    assert samples_per_second(seen, 0.0, 10.0) == 1750.0
    assert samples_per_second(seen, 20.0, 30.0) == 0.0


def test_what_is_kept() -> None:
    """2 steps/s before the fault at 10 s; 10 s without a step; then 2 steps/s again, with half of the ranks."""
    before = points(*((float(second), 1, 1 + 2 * second) for second in range(11)))
    after = points(*((float(second), 1, 1 + 2 * (second - 10)) for second in range(20, 31)), ranks=2)
    share, of_capacity = kept([*before, *after], [10.0])
    assert share == pytest.approx(40 / 60)
    assert of_capacity == pytest.approx(40 / (2 * (10 + 20 / 2)))
    assert kept(before, []) == (1.0, 1.0)
    assert kept([], [1.0]) == (1.0, 1.0)
