"""What the policy does after each event: its rows. The sequences are those of real faults."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from history import ABC, History, absent, answers, early, killed, left, lost, names, said, transcript, widen

from mpitrain.launch import events
from mpitrain.launch.changes import DIFFERENT_SECONDS, FIRST_SECONDS, MOST_SECONDS, is_open
from mpitrain.launch.events import Event, Limits, Pause
from mpitrain.launch.lost_wait import ASK_SECONDS
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.where import ASIDE_SECONDS, WAIT_SECONDS

DOCS = Path(__file__).parents[2] / "docs"
FIVE, ONCE = Limits(5), Limits(1)
DONE = events.Done(0.0)
B_LEAVES = events.LeaveAsked(0.0, ("b",))
READY = events.Ready(0.0)
IS_OVER = events.Waited(WAIT_SECONDS)  # the wait for lost hosts
TOLD = said(0.0, 2)  # SIGTERM has told rank 2 to end, on b

AFTER_FAILURES: dict[str, tuple[Limits, tuple[Any, ...], str]] = {
    "it starts again": (
        FIVE,
        (killed(2, 7), DONE),
        """\
start abc
say: attempt 1 of 6 failed at step 7: rank 2 on b was killed by signal 9; starting again on a, b, c
start abc
say: attempt 2 of 6 succeeded
end 0
""",
    ),
    "without the hosts that are lost, or do not answer": (
        FIVE,
        (lost("b", step=9, first=5), absent("c"), DONE),
        """\
start abc
say: attempt 1 of 6, from step 4, failed at step 9: b fell silent; starting again on a, c with 4 ranks, without b
start ac
say: no answer; starting again on a with 2 ranks, without b, c
start a
say: attempt 2 of 6 succeeded
end 0
""",
    ),
    "the code is that of the last failure": (
        ONCE,
        (killed(2, 7, 137), killed(4, 8, 5)),
        """\
start abc
say: attempt 1 of 2 failed at step 7: rank 2 on b was killed by signal 9; starting again on a, b, c
start abc
say: attempt 2 of 2 failed at step 8: rank 4 on c was killed by signal 9; not started again: no attempt is left
end 5
""",
    ),
    "too few hosts are left: it saves": (
        Limits(3, min_nodes=2),
        (killed(2, 7), absent("b", "c"), IS_OVER, left(6)),
        """\
start abc
say: attempt 1 of 4 failed at step 7: rank 2 on b was killed by signal 9; starting again on a, b, c
start abc
say: no answer; only a of a, b, c can take part, and the job needs 2. Waiting for b, c, up to 300 s; \
`mpitrain tell JOB stop` saves the state and ends the job
wait
say: b, c have not come back in time; only a of a, b, c can take part, and the job needs 2. \
Starting again on a only to save the state
start a, only to save
say: only a of a, b, c can take part, and the job needs 2: the job has ended after step 6, which is saved
end 137
""",
    ),
    "no host is left": (
        Limits(3, min_nodes=2),
        (killed(2, 7), absent("a", "b", "c"), IS_OVER),
        """\
start abc
say: attempt 1 of 4 failed at step 7: rank 2 on b was killed by signal 9; starting again on a, b, c
start abc
say: no answer; no host can take part, and the job needs 2. Waiting for a, b, c, up to 300 s; \
`mpitrain tell JOB stop` ends the job
wait
say: a, b, c have not come back in time; not started again: no host can take part, and the job needs 2
end 137
""",
    ),
    "nobody has said how often: there is a checkpoint": (
        Limits(None),
        (
            killed(2, 7, has_checkpoint=True),
            killed(0, 8),
            killed(2, 9),
            killed(0, 10),
        ),
        """\
start abc
say: attempt 1 of 4 failed at step 7: rank 2 on b was killed by signal 9; starting again on a, b, c
start abc
say: attempt 2 of 4 failed at step 8: rank 0 on a was killed by signal 9; starting again on a, b, c
start abc
say: attempt 3 of 4 failed at step 9: rank 2 on b was killed by signal 9; starting again on a, b, c
start abc
say: attempt 4 of 4 failed at step 10: rank 0 on a was killed by signal 9; not started again: no attempt is left
end 137
""",
    ),
    "nobody has said how often: there is none": (Limits(None), (killed(2, 7),), "start abc\nend 137\n"),
    "it may not": (Limits(), (killed(2, 7),), "start abc\nend 137\n"),
    "a signal to the launcher": (FIVE, (events.Interrupted(0.0, 130),), "start abc\nend 130\n"),
    "its time was up": (FIVE, (events.Done(0.0, 138),), "start abc\nend 138\n"),
    "a host that does not answer at the start": (FIVE, (absent("b"),), "start abc\nraise the error\n"),
    "what no other attempt would change": (
        FIVE,
        (killed(2, 7), absent()),
        """\
start abc
say: attempt 1 of 6 failed at step 7: rank 2 on b was killed by signal 9; starting again on a, b, c
start abc
leave the state
raise the error
""",
    ),
    "no more hosts than the most": (
        Limits(5, 1, 2),
        (lost("b"), DONE),
        """\
start ab
say: attempt 1 of 6 failed at step 7: b fell silent; starting again on a, c with 4 ranks, without b
start ac
say: attempt 2 of 6 succeeded
end 0
""",
    ),
    "another launcher continues without silent hosts": (
        FIVE,
        (events.JobBegun(0.0, ("b",)), killed(0, 9)),
        """\
say: starting again on a, c with 4 ranks, without b
start ac
say: attempt 1 of 6 failed at step 9: rank 0 on a was killed by signal 9; starting again on a, c with 4 ranks, without b
start ac
""",
    ),
    "another launcher has too few hosts": (
        Limits(5, 3),
        (events.JobBegun(0.0, ("b",)),),
        "say: the job does not continue: only a, c of a, b, c can take part, and the job needs 3\nend 1\n",
    ),
}
FEW = "only a of a, b, c can take part, and --nnodes is 2:3"
WAITS = f"{FEW}. Waiting for b, c, up to 300 s; `mpitrain tell JOB stop` saves the state and ends the job"
LOST = f"""\
start abc
say: attempt 1 of 6 failed at step 7: b and c fell silent; {WAITS}
wait
"""
LOSSES: dict[str, tuple[Limits, tuple[Any, ...], str]] = {
    "enough hosts come back": (
        Limits(5, 2, 3),
        (lost("b", "c"), events.Waited(59.9), events.Waited(60.0), *answers(60.0, "bc", "c"), said(70.0), DONE),
        f"""\
{LOST}ask bc
say: c answers; starting again on a, c with 4 ranks, without b
start ac
say: attempt 2 of 6 succeeded
end 0
""",
    ),
    "one after the other": (
        Limits(5, 3, 3),
        (lost("b"), events.Waited(60.0), *answers(60.0, "b", ""), events.Waited(64.0), events.Waited(65.0))
        + answers(65.0, "b", "b"),
        """\
start abc
say: attempt 1 of 6 failed at step 7: b fell silent; only a, c of a, b, c can take part, and --nnodes is 3. \
Waiting for b, up to 300 s; `mpitrain tell JOB stop` saves the state and ends the job
wait
ask b
ask b
say: b answers; starting again on a, b, c
start abc
""",
    ),
    "a host that joins counts, also one that was lost": (
        Limits(5, 2, 3),
        (lost("b", "c"), "b", DONE),
        f"""\
{LOST}accepted: b joins; it starts again
say: b joins; starting again on a, b with 4 ranks, without c
start ab
say: attempt 2 of 6 succeeded
end 0
""",
    ),
    "a new host joins, and is not enough": (
        Limits(5, 3, 3),
        (lost("b", "c"), "d"),
        """\
start abc
say: attempt 1 of 6 failed at step 7: b and c fell silent; only a of a, b, c can take part, and --nnodes is 3. \
Waiting for b, c, up to 300 s; `mpitrain tell JOB stop` saves the state and ends the job
wait
accepted: d joins; it still waits for b, c
""",
    ),
    "somebody tells it to stop": (
        Limits(5, 2, 3),
        (lost("b", "c"), events.StopAsked(1.0), left(6)),
        f"""\
{LOST}accepted: it waits no longer for b, c; it saves its state and ends
say: told to stop; {FEW}. Starting again on a only to save the state
start a, only to save
say: {FEW}: the job has ended after step 6, which is saved
end 1
""",
    ),
    "its time in a batch system is nearly over": (
        Limits(5, 2, 3),
        (lost("b", "c"), events.StopAsked(1.0, 138), absent("a", at=2.0)),
        f"""\
{LOST}accepted: it waits no longer for b, c; it saves its state and ends
say: told to stop; {FEW}. Starting again on a only to save the state
start a, only to save
say: no answer; not started again: no host can take part, and --nnodes is 2:3
end 1
""",
    ),
    "a signal to the launcher ends the wait": (
        Limits(5, 2, 3),
        (lost("b", "c"), events.Interrupted(1.0, 143)),
        f"{LOST}say: a signal ends the job, which waited for lost hosts\nend 143\n",
    ),
    # They answer, and then cannot take part. The limit is that of the first wait.
    "the hosts that come back are lost again before a step": (
        Limits(5, 2, 3),
        (lost("b", "c"), events.Waited(60.0), *answers(60.0, "bc", "bc"), absent("b", "c", at=100.0))
        + (events.Waited(165.0), *answers(165.0, "bc", "b"), lost("b", step=None, at=200.0))
        + (absent("c", at=200.0), events.Waited(300.0)),
        f"""\
{LOST}ask bc
say: b, c answer; starting again on a, b, c
start abc
say: no answer; {WAITS.replace("300", "200")}
wait
ask bc
say: b answers; starting again on a, b with 3 ranks, without c
start ab
say: attempt 2 of 6 failed before its first step: b fell silent; starting again on a, c with 4 ranks, without b
start ac
say: no answer; {WAITS.replace("300", "100")}
wait
say: b, c have not come back in time; {FEW}. Starting again on a only to save the state
start a, only to save
""",
    ),
    "they are lost again after a step: it waits as long as the first time": (
        Limits(5, 2, 3),
        (lost("b", "c"), events.Waited(60.0), *answers(60.0, "bc", "bc"), lost("b", "c", step=9, at=400.0)),
        f"""\
{LOST}ask bc
say: b, c answer; starting again on a, b, c
start abc
say: attempt 2 of 6 failed at step 9: b and c fell silent; {WAITS}
wait
""",
    ),
    "no attempt is left: it does not wait": (
        Limits(0, 2, 3),
        (lost("b", "c"),),
        "start abc\nend 1\n",
    ),
}
RECORDED = {
    # What a job of 2 ranks sent in which a rank was killed in step 7, and once more in step 13.
    "a rank is killed twice": (
        Limits(2),
        (
            said(0.1, run=0),
            said(0.9),
            said(1.5, is_ending=True),
            killed(1, 7, at=1.9, has_checkpoint=True),
            said(2.0, run=0),
            said(2.9),
            killed(2, 13, at=3.9, has_checkpoint=True),
            said(4.0, run=0),
            said(5.1),
            said(5.9, run=0),
            said(6.2, run=0, is_ending=True),
            events.Done(6.9),
        ),
        """\
start abc
say: attempt 1 of 3 failed at step 7: rank 1 on a was killed by signal 9; starting again on a, b, c
start abc
say: attempt 2 of 3 failed at step 13: rank 2 on b was killed by signal 9; starting again on a, b, c
start abc
say: attempt 3 of 3 succeeded
end 0
""",
    ),
}
CHANGES: dict[str, tuple[Limits, tuple[Any, ...], str]] = {
    "a host leaves, another joins, and both count after a failure": (
        ONCE,
        (said(), B_LEAVES, READY, left(7, is_ready=True), said(), "d", left(9), killed(0, 12), DONE),
        """\
start abc
tell: prepares
prepare ac
accepted: b leaves after the next copy of its state; then it continues on a, c
tell: leaves
say: b leaves after step 7; continuing on a, c with 4 ranks
take over ac
tell: prepares
prepare acd
accepted: d joins after the next copy of its state; then it continues on a, c, d
drop
say: d joins after step 9; continuing on a, c, d with 6 ranks
start acd
say: attempt 1 of 2 failed at step 12: rank 0 on a was killed by signal 9; starting again on a, c, d
start acd
say: attempt 2 of 2 succeeded
end 0
""",
    ),
    "a host that joins does not answer": (
        ONCE,
        (said(), "d", left(7, is_ready=True), absent("d"), DONE),
        """\
start abc
tell: prepares
prepare abcd
accepted: d joins after the next copy of its state; then it continues on a, b, c, d
say: d joins after step 7; continuing on a, b, c, d with 7 ranks
take over abcd
say: the job continues as before, without d: no answer
start abc
end 0
""",
    ),
    "the job fails before its first step on a host that joins": (
        ONCE,
        (said(), "d", left(7, is_ready=True), early(5, "d"), DONE),
        """\
start abc
tell: prepares
prepare abcd
accepted: d joins after the next copy of its state; then it continues on a, b, c, d
say: d joins after step 7; continuing on a, b, c, d with 7 ranks
take over abcd
say: with d, the job failed before its first step: rank 5 on d failed: OSError: x
say: continuing as before, on a, b, c with 5 ranks
start abc
end 0
""",
    ),
    # The training has made steps before, so this fault does not come every time.
    "the job fails before its first step after a host has left": (
        ONCE,
        (said(), B_LEAVES, left(7, is_ready=True), early(0, "a"), DONE),
        """\
start abc
tell: prepares
prepare ac
accepted: b leaves after the next copy of its state; then it continues on a, c
say: b leaves after step 7; continuing on a, c with 4 ranks
take over ac
say: attempt 1 of 2 failed before its first step: rank 0 on a failed: OSError: x; starting again on a, c
start ac
say: attempt 2 of 2 succeeded
end 0
""",
    ),
    "a failure while a change is under way": (
        ONCE,
        (said(), B_LEAVES, killed(0, 7), DONE),
        """\
start abc
tell: prepares
prepare ac
accepted: b leaves after the next copy of its state; then it continues on a, c
drop
say: attempt 1 of 2 failed at step 7: rank 0 on a was killed by signal 9; starting again on a, c
start ac
say: attempt 2 of 2 succeeded
end 0
""",
    ),
    # The ranks have left: their exit code is 0, but the work is not done.
    "the change was dropped at that moment": (
        ONCE,
        (said(), B_LEAVES, READY, said(run=0), left(7), killed(0, 12)),
        """\
start abc
tell: prepares
prepare ac
accepted: b leaves after the next copy of its state; then it continues on a, c
tell: leaves
drop
say: the training ended before the hosts of the job could change: b leaves
tell: stays
say: the ranks had left after step 7; starting again on a, b, c with 5 ranks
start abc
say: attempt 1 of 2 failed at step 12: rank 0 on a was killed by signal 9; starting again on a, b, c
start abc
""",
    ),
    "hosts that have joined and made steps are hosts like others": (
        ONCE,
        (said(), "d", left(7, is_ready=True), said(), B_LEAVES, READY, said(run=0), left(9), absent("d")),
        """\
start abc
tell: prepares
prepare abcd
accepted: d joins after the next copy of its state; then it continues on a, b, c, d
say: d joins after step 7; continuing on a, b, c, d with 7 ranks
take over abcd
tell: prepares
prepare acd
accepted: b leaves after the next copy of its state; then it continues on a, c, d
tell: leaves
drop
say: the training ended before the hosts of the job could change: b leaves
tell: stays
say: the ranks had left after step 9; starting again on a, b, c, d with 7 ranks
start abcd
say: no answer; starting again on a, b, c with 5 ranks, without d
start abc
""",
    ),
    "who was to leave has the only copy of the state": (
        ONCE,
        (said(), events.LeaveAsked(0.0, ("a",)), lost("b", "c")),
        """\
start abc
tell: prepares
prepare bc
accepted: a leaves after the next copy of its state; then it continues on b, c
drop
say: attempt 1 of 2 failed at step 7: b and c fell silent; starting again on a with 2 ranks, without b, c
start a
""",
    ),
    "the job ends before the change": (
        ONCE,
        (said(), B_LEAVES, DONE),
        """\
start abc
tell: prepares
prepare ac
accepted: b leaves after the next copy of its state; then it continues on a, c
drop
say: the job ended before its hosts could change: b leaves
end 0
""",
    ),
    "SIGTERM tells a rank to end": (
        ONCE,
        (said(), TOLD, events.NotPrepared(1.0), left(7), DONE),
        """\
start abc
tell: prepares
prepare ac
say: b leaves (SIGTERM told rank 2 to end); after the next copy of the state, it continues on a, c
drop
tell: leaves
say: b leaves (SIGTERM told rank 2 to end) after step 7; continuing on a, c with 4 ranks
start ac
end 0
""",
    ),
    "SIGTERM tells ranks to end on too many hosts": (
        Limits(1, 2),
        (said(0.0, 2, 3, 4), left(7)),
        """\
start abc
tell: saves
say: SIGTERM told ranks 2,4 to end on b, c; after the next copy of the state, the job saves and ends
say: SIGTERM told ranks 2,4 to end on b, c: the job has ended after step 7
end 143
""",
    ),
    "SIGTERM where nothing can be left": (
        ONCE,
        (said(0.0, 2, run=0), events.RanksSaid(1.0, 0)),
        """\
start abc
refuse
say: SIGTERM told rank 2 to end, and the hosts of a job change in the first run of a Trainer, or loop with mt.keep, \
only; there is none now. A failure follows
""",
    ),
    "SIGTERM of mpiexec, because a rank has failed; and one that is too recent": (
        ONCE,
        (said(0.0, 0, 1, 2, is_ending=True), said(0.0, 2, since=-1.0)),
        "start abc\n",
    ),
    "SIGTERM while a change is under way": (
        ONCE,
        (said(), "d", TOLD, READY, left(7, is_ready=True), said()),
        """\
start abc
tell: prepares
prepare abcd
accepted: d joins after the next copy of its state; then it continues on a, b, c, d
tell: leaves
say: d joins after step 7; continuing on a, b, c, d with 7 ranks
take over abcd
tell: prepares
prepare acd
say: b leaves (SIGTERM told rank 2 to end); after the next copy of the state, it continues on a, c, d
""",
    ),
    "the next attempt has no room: the present one ends first": (
        ONCE,
        (said(), "d", events.NotPrepared(1.0, "d has 1 GiB", has_room=False), left(7)),
        """\
start abc
tell: prepares
prepare abcd
accepted: d joins after the next copy of its state; then it continues on a, b, c, d
drop
say: the next attempt cannot start beside this one: d has 1 GiB. It starts when this one has ended
tell: leaves
say: d joins after step 7; continuing on a, b, c, d with 7 ranks
start abcd
""",
    ),
    "the next attempt cannot be prepared: a host does not join, and leaves in any case": (
        ONCE,
        (
            said(),
            "d",
            events.NotPrepared(1.0, "rank 6 failed"),
            READY,
            B_LEAVES,
            events.NotPrepared(2.0, "rank 3 failed"),
        ),
        """\
start abc
tell: prepares
prepare abcd
accepted: d joins after the next copy of its state; then it continues on a, b, c, d
drop
say: the job continues as before, without d: rank 6 failed
tell: stays
tell: prepares
prepare ac
accepted: b leaves after the next copy of its state; then it continues on a, c
drop
say: the next attempt cannot start beside this one: rank 3 failed. It starts when this one has ended
tell: leaves
""",
    ),
    # The ranks have heard that they leave. So another attempt must follow.
    "the next attempt fails when the ranks leave": (
        ONCE,
        (said(), "d", READY, events.NotPrepared(1.0, "rank 6 failed"), left(7)),
        """\
start abc
tell: prepares
prepare abcd
accepted: d joins after the next copy of its state; then it continues on a, b, c, d
tell: leaves
drop
say: the next attempt cannot start beside this one: rank 6 failed. It starts when this one has ended
tell: leaves
say: d joins after step 7; continuing on a, b, c, d with 7 ranks
start abcd
""",
    ),
    "the next attempt is never ready": (
        ONCE,
        (said(), TOLD, said(10.0, 2), READY, said(10.5, 2), said(200.0, 2)),
        """\
start abc
tell: prepares
prepare ac
say: b leaves (SIGTERM told rank 2 to end); after the next copy of the state, it continues on a, c
tell: leaves
""",
    ),
    "the next attempt is ready too late": (
        ONCE,
        (said(), TOLD, said(10.1, 2), READY),
        """\
start abc
tell: prepares
prepare ac
say: b leaves (SIGTERM told rank 2 to end); after the next copy of the state, it continues on a, c
drop
say: the next attempt cannot start beside this one: its ranks were not ready within 10 s. It starts when this one has \
ended
tell: leaves
""",
    ),
}


ROWS = {**AFTER_FAILURES, **LOSSES, **CHANGES, **RECORDED}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    limits, happens, expected = ROWS[name]
    pause = Pause("the launcher on a was lost", 7, 0.0) if "another launcher" in name else None
    assert transcript(limits, *happens, pause=pause) == expected


def test_the_page_has_each_event() -> None:
    _, _, page = (DOCS / "dev/architecture.md").read_text().partition("\n## What follows an event\n")
    rows = [line.split("|")[1] for line in page.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    assert sorted(re.findall("`(.*?)`", " ".join(rows))) == sorted(kind.__name__ for kind in Event.__subclasses__())


def test_an_attempt_is_told_why_it_follows() -> None:
    history = History(ONCE).train()
    told = []
    for event in (B_LEAVES, left(7), said(), lost("c", step=12, at=5.0)):
        history.take(event)
        told += [action.pause for action in history.actions if isinstance(action, events.Start)]
    assert told == [Pause("b leaves", 8, 1.0), Pause("c fell silent", 12, 5.0)]


@pytest.mark.parametrize("most", [3, None])
def test_it_saves_only_where_there_is_a_state_and_an_attempt_is_left(most: int | None) -> None:
    limits = Limits(5, 3, most)
    reason = f"only a, b of a, b, c can take part, and {limits.words}"
    saves = transcript(limits, lost("c"), IS_OVER, absent("b", at=WAIT_SECONDS), left(6))
    fewer = reason.replace("a, b of", "a of")
    waits = "Waiting for c, up to 300 s; `mpitrain tell JOB stop` saves the state and ends the job"
    assert saves.splitlines() == [
        "start abc",
        f"say: attempt 1 of 6 failed at step 7: c fell silent; {reason}. {waits}",
        "wait",
        f"say: c has not come back in time; {reason}. Starting again on a, b only to save the state",
        "start ab, only to save",
        f"say: no answer; {fewer}. Starting again on a only to save the state",
        "start a, only to save",
        f"say: {fewer}: the job has ended after step 6, which is saved",
        "end 1",
    ]
    for failed, restarts in ((lost("c", step=None, first=None), 5), (lost("c"), 0)):
        assert "only to save" not in transcript(Limits(restarts, 3, most), failed, IS_OVER)
    # The training was complete, and the script has come to its end.
    assert transcript(limits, lost("c"), IS_OVER, DONE).endswith(
        "start ab, only to save\nsay: attempt 2 of 6 succeeded\nend 0\n"
    )
    # It accepts no request. A rank that SIGTERM has told to end ends when the state is saved.
    history = History(limits).train()
    history.take(lost("c"))
    history.take(IS_OVER)
    assert history.take(said(0.0, 0)) == []
    assert history.take(B_LEAVES) == [f"refused: the job only saves its state, because {reason}"]


@pytest.mark.parametrize("second", [lost("b", step=None), killed(1, 7, 5), absent()])
def test_it_saves_once_and_leaves_its_state_otherwise(second: Event) -> None:
    """The exit code is that of the failure, whatever ends the attempt that only saves. No restart is left after it."""
    *_, says, leaves, ends = transcript(Limits(1, 3), lost("c"), IS_OVER, second).splitlines()
    why = second.failure.cause if isinstance(second, events.Failed) else "no answer"
    reason = "only a, b of a, b, c can take part, and the job needs 3"
    assert (says, leaves, ends) == (f"say: {reason}; the state was not saved: {why}", "leave the state", "end 1")


def test_what_a_job_that_waits_answers() -> None:
    history = History(Limits(5, 3, 4)).train()
    history.take(events.Listed(0.0, tuple("abc")))
    history.take(lost("b", "c"))
    refused = [
        "refused: the job waits for hosts that were lost, and hosts can only join it now: `mpitrain scale JOB +HOST`"
    ]
    assert history.take(B_LEAVES) == refused
    assert history.take(events.JoinAsked(0.0, "d", ("a",))) == refused
    history.take(events.JoinAsked(0.0, "d"))
    find = history.actions[0]
    assert isinstance(find, events.Find)
    assert history.take(events.Unfit(0.0, find, "d: train.py differs")) == ["refused: d: train.py differs"]
    # The inventory gets a host, which is compared before it joins. Nobody has asked, so nobody is answered.
    assert history.take(events.Listed(1.0, tuple("abcd"))) == []
    assert history.take(events.Waited(ASK_SECONDS)) == ["ask d"]
    assert history.take(events.Answered(6.0, ("d",), frozenset("d"))) == ["find d"]
    assert history.fit(7.0) == []
    # The inventory loses one: nobody waits for it any more.
    assert history.take(events.Listed(8.0, tuple("abd"))) == []
    assert history.take(events.Waited(60.0)) == ["ask b"]
    (says, start) = history.take(events.Answered(61.0, ("b",), frozenset("b")))
    assert says == "say: b answers; starting again on a, b, d with 5 ranks, without c"
    assert start == "start abd"
    assert history.take(events.StopAsked(62.0)) == ["refused: it does not wait for hosts"]
    assert history.take(events.Waited(63.0)) == []


def test_a_host_that_is_back_in_the_inventory_may_be_the_last_that_was_missing() -> None:
    history = History(Limits(5, 3, 3)).train()
    history.take(events.Listed(0.0, tuple("abc")))
    history.take(lost("c"))
    assert history.take(events.Listed(1.0, tuple("ac"))) == []  # b is dropped
    assert history.take(events.Waited(60.0)) == ["ask c"]
    assert history.take(events.Answered(61.0, ("c",), frozenset("c"))) == []
    history.take(events.Listed(62.0, tuple("abc")))
    assert history.take(events.Waited(63.0))[-1] == "start abc"


def test_hosts_join_and_leave_at_once() -> None:
    history = History(Limits(5, 3, 4))
    history.train()
    for leave, why in (
        ("a", ""),
        ("x", "x is not a host of the job; its hosts are a, b, c"),
        ("abc", "no host would be l"),
    ):
        (answer,) = history.take(events.JoinAsked(0.0, "d", tuple(leave)))[:1]
        assert ("refused: " in answer) == bool(why) and why in answer, answer
    (answer,) = history.take(events.JoinAsked(0.0, "d", ("a", "b")))
    assert "refused: only 1 of its hosts would be left, and --nnodes is 3:4" in answer
    history.take(events.JoinAsked(0.0, "d", ("a",)))
    find = history.actions[0]
    assert isinstance(find, events.Find)
    assert find.now_on.hosts == ("b", "c")
    wider = widen(find.now_on, "d")
    assert "a leaves and d joins after the next copy" in "\n".join(history.take(events.Fit(0.0, find, wider, wider)))
    assert history.state.change is not None
    assert (history.state.change.joined, history.state.change.now_on.hosts) == (("d",), ("b", "c", "d"))


def test_what_is_refused() -> None:
    history, few = History(Limits(5, 2, 4)), "--nnodes is 2:4; `mpitrain kill` ends a job"
    again = ["refused: the job is being started again; try again in a moment"]
    assert history.take(B_LEAVES) == again
    history.take(events.JobBegun(0.0))
    assert "none does so now. If its training" in history.take(B_LEAVES)[0]
    history.take(said(run=2))
    assert "it is in run 2 of its script, and the hosts" in history.take(events.JoinAsked(0.0, "d"))[0]
    history.train()
    for hosts, why in (
        ("d", "d is not a host of the job; its hosts are a, b, c"),
        ("ab", f"only 1 of its hosts would be left, and {few}"),
        ("abc", f"no host would be left, and {few}"),
    ):
        assert history.take(events.LeaveAsked(0.0, tuple(hosts))) == [f"refused: {why}"]
    many = "it would run on 5 hosts, and --nnodes is 2:4; `mpitrain scale JOB -HOST` makes room"
    assert history.join("d,e") == [f"refused: {many}"]
    history.take(events.JoinAsked(0.0, "d"))
    find = history.actions[0]
    assert isinstance(find, events.Find)
    assert history.take(events.Unfit(0.0, find, "d: train.py differs")) == ["refused: d: train.py differs"]
    history.take(killed(0, 7))
    history.take(said())
    assert history.take(events.Fit(0.0, find, widen(ABC, "d"), widen(ABC, "d"))) == again  # asked in the last attempt
    history.take(B_LEAVES)
    assert history.take(B_LEAVES) == ["refused: another change is under way: b leaves"]


def test_a_host_that_is_set_aside_joins() -> None:
    """It is no longer set aside: it takes part after a failure, too."""
    for limits in (FIVE, Limits(5, 1, 3)):
        history = History(limits).train()
        history.take(lost("b"))
        history.train()
        history.join("b")
        assert history.take(left(9, is_ready=True))[-1] == "take over acb"
        assert sorted(history.state.hosts.hosts) == ["a", "b", "c"]
        assert history.take(killed(0, 12))[-1] in ("start acb", "start abc")


@pytest.mark.parametrize(("faulty", "bad"), [(("a",), []), (("a", "d"), ["d"]), ((), ["d"])])
def test_who_is_blamed_for_a_next_attempt_that_fails(faulty: tuple[str, ...], bad: list[str]) -> None:
    """The host that would join is not blamed if another host is the cause."""
    history = History(ONCE).train()
    history.join("d")
    history.take(events.NotPrepared(0.0, "it has failed", faulty))
    assert [host for _, host in history.state.absent] == bad


@pytest.mark.parametrize("is_recent", [False, True])
def test_sigterm_while_a_change_is_under_way_is_not_forgotten(is_recent: bool) -> None:
    """When the ranks leave, the signal may be too recent for a change of its own."""
    history = History(ONCE).train()
    history.join("d")
    if is_recent:
        history.take(left(7, is_ready=True, told=(2,)))
    else:
        history.take(TOLD)
        history.take(left(7, is_ready=True))
    assert history.take(said(run=0)) == []
    assert history.take(said())[:2] == ["tell: prepares", "prepare acd"]


# Elastic jobs.
LIMITS = Limits(5, 2, 4)


def elastic(*hosts_lost: tuple[float, str], hosts: Placement = ABC, listed: str = "", now_on: str = "ac") -> History:
    """An elastic job that trains on some of its hosts, after it has lost others."""
    history = History(LIMITS, hosts)
    if listed:
        history.take(events.Listed(0.0, tuple(listed)))
    history.train()
    now_on_places = hosts.without(set(hosts.hosts) - set(now_on))
    failures = tuple(lost(host, at=at).failure for at, host in hosts_lost)
    history.state = replace(history.state, now_on=now_on_places, failures=failures)
    return history


def look(history: History, at: float, *inside: str, listed: str | None = None) -> list[str]:
    """The inventory is read, and the hosts that the policy asks answer, if they are inside."""
    asks = history.take(events.Listed(at, None if listed is None else tuple(listed)))
    done = [line for line in asks if not line.startswith("ask")]
    for ask in [action for action in history.actions if isinstance(action, events.AskHosts)]:
        found = history.take(events.Answered(at, ask.hosts, frozenset(inside)))
        done += [f"ask {''.join(ask.hosts)}", *(history.fit(at) if found else [])]
    return done


def test_a_host_that_answers_again() -> None:
    history = elastic((100.0, "b"))
    now, wait = 100.0 + ASIDE_SECONDS, FIRST_SECONDS
    assert look(history, now - 1) == []
    for _ in range(8):
        assert look(history, now) == ["ask b"]
        assert look(history, now + wait - 1) == []  # not yet
        now, wait = now + wait, min(2 * wait, MOST_SECONDS)
    assert wait == MOST_SECONDS
    follows = "b joins after the next copy of the state, and then it continues on a, c, b"
    expected = ["ask b", "tell: prepares", "prepare acb", f"say: b answers; {follows}"]
    assert look(history, now, "b") == expected
    assert look(history, now + 10 * MOST_SECONDS) == []  # a change is under way


def test_it_looks_for_hosts_only_while_they_can_change() -> None:
    history = elastic()
    for run, is_ending in ((0, False), (2, False), (1, True)):
        history.take(said(run=run, is_ending=is_ending))
        assert not is_open(history.state)
        assert look(history, 1000.0) == []
    history.take(said())
    assert look(history, 1000.0) == ["ask b"]


def test_several_hosts_join_as_far_as_there_is_room() -> None:
    history = elastic(hosts=widen(ABC, "d,e,f"), now_on="ab")
    assert look(history, 1000.0, *"def")[:3] == ["ask cdef", "tell: prepares", "prepare abde"]
    history.take(left(7, is_ready=True))
    history.take(said())
    assert set(history.state.hosts.hosts) == set("abcdef")
    assert look(history, 9000.0, *"cf") == []  # the job has as many hosts as it may have


def test_a_host_that_differs() -> None:
    """It is asked again after a long time, is said once for each difference, and keeps no other host out."""
    history = elastic(hosts=widen(ABC, "d"))

    def differs(at: float, why: str) -> list[str]:
        (ask,) = [action for action in history.actions if isinstance(action, events.AskHosts)]
        history.take(events.Answered(at, ask.hosts, frozenset("bd")))
        (find,) = history.actions
        assert isinstance(find, events.Find)
        return history.take(events.Unfit(at, find, "they differ", (), {"b": why}))

    assert history.take(events.Listed(1000.0, None)) == ["ask bd"]
    says = differs(1000.0, "train.py differs")
    assert says == ["say: b cannot take part: train.py differs. It is asked again in 10 minutes"]
    assert history.take(events.Listed(1001.0, None)) == ["ask d"]
    assert history.take(events.Listed(1000.0 + DIFFERENT_SECONDS, None)) == ["ask bd"]
    assert differs(1600.0, "train.py differs") == []
    assert history.take(events.Listed(1600.0 + DIFFERENT_SECONDS, None)) == ["ask bd"]
    assert "b cannot take part: numpy 2.3.1." in differs(2200.0, "numpy 2.3.1")[0]
    history.join("b")  # somebody lets it in, and it is lost: what it did before does not count
    history.take(left(7, is_ready=True))
    history.take(lost("b", at=3000.0))
    history.take(said())
    assert history.take(events.Listed(3000.0 + ASIDE_SECONDS, None)) == ["ask b"]


def test_a_host_without_the_shared_folder_is_asked_soon() -> None:
    history = elastic()
    for at, asks in ((1000.0, True), (1000.0 + FIRST_SECONDS - 1, False), (1000.0 + FIRST_SECONDS, True)):
        assert history.take(events.Listed(at, None)) == (["ask b"] if asks else [])
        if asks:
            history.take(events.Answered(at, ("b",), frozenset("b")))
            (find,) = history.actions
            assert isinstance(find, events.Find)
            assert history.take(events.Unfit(at, find, "b: no such folder", ("b",), {"b": "no such folder"})) == []


def test_a_host_that_did_not_join_because_of_another_one() -> None:
    """It is asked again, each time after a longer wait."""
    history, now, wait = elastic(), 1000.0, FIRST_SECONDS
    for _ in range(3):
        assert "prepare acb" in look(history, now, "b")
        history.take(events.NotPrepared(now, "a failed", ("a",)))
        assert look(history, now + wait - 1) == []
        now, wait = now + wait, 2 * wait


def test_the_end_of_patience() -> None:
    """A host is lost, cannot join, and is lost again."""
    history = elastic((100.0, "b"))
    history.state = replace(history.state, absent=((200.0, "b"),))
    assert look(history, 200.0 + 2 * ASIDE_SECONDS - 1) == []
    history.take(events.Left(0.0, 7, 1.0))
    history.take(lost("b", at=500.0))
    history.take(said())
    gives_up = (
        "say: b was found bad 3 times, and is not taken in again by itself; `mpitrain scale JOB +HOST` lets it in"
    )
    assert [look(history, at) for at in (1e4, 1e5, 1e6)] == [[gives_up], [], []]


def test_a_host_with_devices() -> None:
    places = (Place("a", 0, 1, ("cuda:0",)), Place("b", 1, 2, ("cuda:0", "cuda:1")))
    history = elastic(hosts=Placement(places, {"a": "10.0.0.1", "b": "10.0.0.2"}, "a"), now_on="a")
    assert history.take(events.Answered(0.0, ("b",), frozenset("b"))) == ["find b/cuda:0,b/cuda:1"]


def test_it_starts_on_the_hosts_that_can_take_part() -> None:
    for end, why in ((absent("b"), "no answer"), (absent(b="x.py differs"), "b cannot take part: x.py differs")):
        history = History(Limits(5, 2, 3))
        history.take(events.JobBegun(0.0))
        assert history.take(end) == [f"say: {why}; starting on a, c with 4 ranks, without b", "start ac"]
        assert (names(history.state.hosts), history.state.absent) == ("abc", ((0.0, "b"),))
    # One does not answer, another differs: the error names both.
    assert "say: they differ; starting on a with 2 ranks, without b, c\n" in transcript(
        Limits(5, 1, 3), absent("b", c="x.py differs")
    )
    few = "say: no answer; not started: only a of a, b, c can take part, and --nnodes is 2:3\nend 1\n"
    assert transcript(Limits(5, 2, 3), absent("b", "c")) == "start abc\n" + few
    for error in (absent(a="x.py does not exist"), absent()):  # of this machine
        assert transcript(Limits(5, 1, 3), error) == "start abc\nraise the error\n"


@pytest.mark.parametrize("end", [absent("d"), early(5, "d")])
def test_a_host_that_could_not_join_is_taken_in_later(end: Event) -> None:
    history = History(Limits(1, 1, 4)).train()
    history.join("d")
    history.take(left(7, is_ready=True))
    assert history.take(end)[-1] == "start abc"
    assert (names(history.state.hosts), [host for _, host in history.state.absent]) == ("abcd", ["d"])


def test_a_host_that_was_to_leave_as_another_joined_is_still_one_of_the_job() -> None:
    history = History(Limits(1, 1, 4)).train()
    history.take(events.JoinAsked(0.0, "d", ("b",)))
    history.fit()
    assert history.take(left(7, is_ready=True))[-1] == "take over acd"
    assert history.take(absent("d"))[-1] == "start abc"
    assert names(history.state.hosts) == "abcd"


def test_the_inventory_changes() -> None:
    history = elastic(listed="abc", now_on="abc")
    assert look(history, 1000.0, listed="abc") == []
    assert "prepare abcd" in look(history, 1001.0, *"bd", listed="abcd")
    history.take(left(7, is_ready=True))
    history.take(said())
    away = "b leaves (not in the inventory any more)"
    follows = f"say: {away}; after the next copy of the state, it continues on a, c, d"
    assert look(history, 1002.0, listed="acd") == ["tell: prepares", "prepare acd", follows]
    assert history.take(left(9, is_ready=True))[0].startswith(f"say: {away} after step 9")
    history.take(said())
    assert "prepare acdb" in look(history, 1003.0, "b", listed="abcd")
    assert not history.state.outside.dropped


def test_a_host_that_is_set_aside_and_not_in_the_inventory_is_not_asked() -> None:
    assert look(elastic((100.0, "b"), listed="abc"), 1e4, "b", listed="ac") == []


def test_too_few_are_left_in_the_inventory() -> None:
    why = "b, c can no longer take part (not in the inventory any more), and --nnodes is 2:4"
    follows = f"say: {why}; after the next copy of the state, the job saves and ends"
    assert look(elastic(listed="abc", now_on="abc"), 0.0, listed="a") == ["tell: saves", follows]


def test_a_host_that_has_left_because_somebody_asked_stays_away() -> None:
    history = elastic(listed="abc", now_on="abc")
    look(history, 1000.0, *"bd", listed="abcd")
    history.take(left(7, is_ready=True))
    history.take(said())
    history.take(events.LeaveAsked(0.0, ("b", "d")))
    history.take(left(9, is_ready=True))
    history.take(said())
    assert look(history, 1e6, *"bd", listed="abcd") == []


def test_what_the_launcher_before_was_asked() -> None:
    """b has left, and d, which is not in the inventory, has joined. The launcher that resumes the job keeps that."""
    history = elastic(hosts=widen(ABC.without({"b"}), "d"), listed="abc", now_on="acd")
    assert look(history, 1000.0, *"bd", listed="abc") == []
    assert "c leaves (not in the inventory any more)" in look(history, 1001.0, listed="ab")[-1]


def test_an_inventory_that_cannot_be_read() -> None:
    history = elastic(listed="abc", now_on="abc")
    fault = "say: the hosts of the job stay as they are, because the inventory cannot be read: no [head]"
    assert history.take(events.Listed(0.0, None, "no [head]")) == [fault]
    assert history.take(events.Listed(1.0, None, "no [head]")) == []
    assert history.take(events.Listed(2.0, tuple("abc"))) == []
    assert history.take(events.Listed(3.0, None, "no [head]")) == [fault]
