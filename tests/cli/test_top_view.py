"""The picture of `mpitrain top`, without a job: order, shares, widths, and text that a script has chosen."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from mpitrain.cli.top_screen import TopHistory, picture, rows_for


def rank(
    number: int, phase: str, step: int = 10, host: str = "node1", call: str = "", waited: float = 0.0
) -> dict[str, Any]:
    numbers = {"rank": number, "pid": 100 + number, "since": 2.5, "still": 0.0, "step": step, "waited": waited}
    return {**numbers, "host": host, "phase": phase, "call": call, "epoch": 3, "samples_per_second": 1.0}


def look(at: float, *ranks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    hosts: dict[str, Any] = {}
    for entry in ranks:
        hosts.setdefault(entry["host"], {"silence": 0.0, "ranks": []})["ranks"].append(entry["rank"])
    answer = {"at": at, "job": "1a2b3c4d", "script": "train.py", "arguments": ["--epochs", "5"], "since": 0.0}
    answer |= {"state": "trains", "tries": 1, "hosts": hosts, "ranks": list(ranks), "stall": None, "events": []}
    return {**answer, "metrics": {"loss": 0.25, "samples/s": 1503.4}, "served": None, **fields}


def drawn(answer: dict[str, Any], width: int = 80, height: int = 0, first: int = 0, **looks: Any) -> list[str]:
    history = looks.pop("history", None) or TopHistory()
    history.add(answer)
    file = io.StringIO()
    console = Console(file=file, width=width, height=height or 25, color_system=None)
    console.print(picture(answer, history, looks.pop("order", "slowest"), width, height or None, first, "keys"))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_the_slowest_comes_first() -> None:
    """What is marked, then who is behind, then who has waited least, which is whom the others wait for."""
    history = TopHistory()
    for second in range(4):
        history.add(look(100.0 + second, rank(0, "waits"), rank(1, "computes"), rank(2, "waits"), rank(3, "computes")))
    ranks = [rank(0, "waits"), rank(1, "computes", step=9), rank(2, "computes", step=8), rank(3, "stopped", host="a")]
    history.add(look(104.0, *ranks))
    assert [entry["rank"] for entry in history.sort(ranks, "slowest")] == [3, 2, 1, 0]
    assert [entry["rank"] for entry in history.sort(ranks, "rank")] == [0, 1, 2, 3]
    assert [entry["rank"] for entry in history.sort(ranks, "host")] == [3, 0, 1, 2]


def test_shares_are_of_the_last_ten_seconds_of_this_try() -> None:
    history = TopHistory()
    for at, phase in ((100.0, "disk"), (102.0, "waits"), (106.0, "computes"), (110.0, "computes"), (112.0, "waits")):
        history.add(look(at, rank(0, phase)))
    assert history.shares(0) == {"waits": 0.5, "computes": 0.5}
    assert history.shares(1) == {}
    history.add({**look(113.0, rank(0, "starts")), "job": "another"})
    assert history.shares(0) == {"starts": 1.0}
    history.add({**look(50.0, rank(0, "computes")), "job": "another"})  # the clock was set back
    assert history.shares(0) == {"computes": 1.0}


def test_what_is_drawn() -> None:
    ranks = [rank(0, "computes"), rank(1, "waits", call="mean of 4 float32")]
    lines = drawn(look(3725.0, *ranks, state="restarts", tries=2, events=[{"at": 0.0, "text": "rank 2 was lost"}]))
    assert lines[0] == "job 1a2b3c4d  restarts  1:02:05  attempt 2"
    assert lines[1:3] == ["train.py --epochs 5", "step 10  loss 0.25  1,503 samples/s  epoch 3"]
    assert lines[3].endswith(" rank 2 was lost")
    assert lines[5].split() == ["RANK", "HOST", "PHASE", "FOR", "STEP", "LAST", "10", "S", "IN"]
    assert lines[6].split() == ["0", "node1", "computes", "2.5", "s", "10", "c" * 16]
    assert lines[7].split() == ["1", "node1", "waits", "2.5", "s", "10", "." * 16, "mean", "of", "4", "float32"]
    assert lines[9:] == [
        "hosts: node1 (2)",
        "last 10 s: c computes  . waits  w wire  b busy  d disk  s stopped  p paused",
        "keys",
    ]


@pytest.mark.parametrize("width", [80, 140])
def test_how_far_the_run_is(width: int) -> None:
    """The same at each width, down to the epoch; and in a pause no time is left that runs down."""
    begun = [{**rank(number, "computes", step=132_932), "last_step": 900_000, "left": 88_690.4} for number in (0, 1)]
    line = "step 132,932 / 900,000  14 %  1 d 0 h left  loss 0.25  1,503 samples/s"
    assert drawn(look(9.0, *begun), width)[2] == line + "  epoch 3"
    paused = drawn(look(9.0, *begun, paused=WHO), width)[2]
    assert paused == "step 132,932 / 900,000  14 %  loss 0.25  epoch 3"
    unknown = [{**entry, "last_step": None, "left": None} for entry in begun]
    assert drawn(look(9.0, *unknown), width)[2] == "step 132,932  loss 0.25  1,503 samples/s  epoch 3"


def test_a_job_of_a_server() -> None:
    assert "2 workers, 1 gone" in drawn(look(9.0, rank(0, "computes"), served={"here": 2, "joined": 3}))[2]


def test_a_stall_and_a_silent_host() -> None:
    answer = look(
        9.0, rank(0, "waits"), rank(1, "unknown", host="b"), stall="no progress for 4 s: " + "who waits " * 40
    )
    answer["hosts"]["b"]["silence"] = 4.2
    lines = drawn(answer)
    assert lines[3].startswith("no progress for 4 s: who waits")
    assert lines[6].endswith("…")  # at most four lines of it
    assert "!    1 b     unknown" in "\n".join(lines)
    assert "hosts: b (1) silent for 4 s, node1 (1)" in lines


WHO = "paused by ada on lab1 on 2026-11-26 11:02:37, after step 10"


def in_the_pause(number: int) -> dict[str, Any]:
    return rank(number, "paused")


def test_a_pause_is_neither_slow_nor_silent() -> None:
    """Who saves a checkpoint in it is busy; who is stopped in it is marked, and the stall is shown too."""
    ranks = [in_the_pause(0), rank(1, "busy", call="write a checkpoint"), in_the_pause(2), rank(3, "stopped")]
    history = TopHistory()
    lines = drawn(look(9.0, *ranks, paused=WHO, stall="rank 3 is stopped"), history=history)
    assert lines[0] == "job 1a2b3c4d  paused  0:00:09"
    assert lines[2:5] == ["step 10  loss 0.25  epoch 3", WHO, "rank 3 is stopped"]
    rows = [line.split() for line in lines[7:11]]
    assert rows[0] == ["!", "3", "node1", "stopped", "2.5", "s", "10", "s" * 16]
    assert rows[1] == ["1", "node1", "busy", "2.5", "s", "10", "b" * 16, "write", "a", "checkpoint"]
    assert rows[2] == ["0", "node1", "paused", "-", "10", "p" * 16]
    assert rows[3] == ["2", "node1", "paused", "-", "10", "p" * 16]
    phases = ("paused", "busy", "paused", "stopped")
    assert [history.shares(number) for number in range(4)] == [{phase: 1.0} for phase in phases]


def test_who_has_paused_it_takes_the_lines_that_it_needs() -> None:
    answer = look(9.0, *map(in_the_pause, range(30)), paused=WHO, events=[{"at": 0.0, "text": "rank 2 was lost"}])
    assert drawn(look(9.0, rank(0, "done"), paused=WHO, state="ends"))[0] == "job 1a2b3c4d  ends  0:00:09"
    for width, height in ((30, 20), (60, 24), (200, 24)):
        lines = drawn(answer, width, height)
        assert WHO in " ".join(lines)
        assert "rank 2 was lost" not in " ".join(lines)
        assert (len(lines), max(map(len, lines)) <= width) == (height, True)


@pytest.mark.parametrize("width", [20, 30, 43, 44, 60, 75, 76, 80, 200])
@pytest.mark.parametrize("num_ranks", [1, 5, 100])
def test_it_fits(width: int, num_ranks: int) -> None:
    host = "a-host-with-a-long-name"
    ranks = [rank(number, "computes", host=f"{host}-{number}", call="word " * 30) for number in range(num_ranks)]
    answer = look(9.0, *ranks, stall="wait " * 50, script="script" * 30)
    for height in (12, 24):
        lines = drawn(answer, width, height)
        assert max(map(len, lines)) <= width
        assert len(lines) <= max(height, 15)  # one rank at least
        assert sum("computes" in line or "comput" in line for line in lines[5:-2]) >= 1
        assert rows_for(answer, width, height) >= 1


def test_a_slow_rank_is_named_at_80_columns() -> None:
    """Its own waits are short, and those of the others too: only the sums tell."""
    history = TopHistory()
    for at in range(3):
        waits = (0.8 * at, 0.82 * at, 0.01 * at, 0.81 * at)
        ranks = [rank(number, "computes", waited=waited) for number, waited in enumerate(waits)]
        said = {"at": 0.0, "text": "rank 2 on node1 is 5.0x slower: 3 ranks wait for it, 80% of the time"}
        answer = look(9.0 + at, *ranks, events=[said])  # which the launcher has said is not said twice
        lines = drawn(answer, history=history, width=80)
        assert (lines[3] == "rank 2 on node1 is 5.2x slower: 3 ranks wait for it, 81% of the time") == (at > 0), lines
    rows = [line.split() for line in lines[5:9]]
    assert lines[4].split()[5:] == ["WAITS", "LAST", "10", "S", "IN"]
    assert [(row[0], row[6], row[7]) for row in rows] == [
        ("2", "1%", "c" * 16),
        ("0", "80%", "ccc" + "." * 13),
        ("3", "81%", "ccc" + "." * 13),
        ("1", "82%", "ccc" + "." * 13),
    ]
    assert drawn(look(13.0, *(rank(number, "computes", waited=9.0) for number in range(4))), history=history)[3] == ""


def test_a_rank_that_makes_steps_computes_since_the_last_one() -> None:
    """The slowest rank never waits long enough to publish it, so its record says that it computes since minutes."""
    history = TopHistory()
    rows = []
    for at, step in ((100.0, 10), (101.0, 10), (102.0, 11), (102.4, 11)):
        lines = drawn(look(at, {**rank(0, "computes", step=step), "since": 61.0}), history=history)
        rows.append(next(line for line in lines if "node1" in line).split()[3:5])
    assert rows == [["61", "s"], ["61", "s"], ["0.0", "s"], ["0.4", "s"]]


def test_scrolled() -> None:
    answer = look(9.0, *(rank(number, "computes") for number in range(30)))
    lines = drawn(answer, 80, 20, first=7, order="rank")
    shown = [int(line.split()[0]) for line in lines if " node1 " in f"{line} " and "computes" in line]
    assert shown == list(range(7, 7 + rows_for(answer, 80, 20)))
    assert f"ranks 8 to {7 + len(shown)} of 30; {30 - len(shown)} are not shown" in lines
    assert len(lines) == 20


def test_what_a_script_says_is_only_text() -> None:
    """Markup and control characters of names and errors do not reach the terminal."""
    evil = "\x1b[2J[red]x[/red]\x07"
    answer = look(9.0, rank(0, evil, host=evil, call=evil), script=evil, stall=evil)
    answer["metrics"] = {"loss": "NaN"}
    text = "\n".join(drawn(answer, 200))
    assert "[2J[red]x[/red]" in text
    assert "loss NaN" in text
    assert all(letter.isprintable() or letter == "\n" for letter in text)
