"""The sentences about ranks that wait for each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpitrain.watching.hang_report import importing, is_by_design, place_of, report
from mpitrain.watching.rank_record import BUSY, ENDED, PARTED, WAITS, WORKS, RankRecord
from mpitrain.watching.view import RankView

STACK = """\
Thread 0x00007f2 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/home/me/writer.py", line 7 in run

Current thread 0x00007f1 (most recent call first):
  File "/venv/lib/python3.11/site-packages/numpy/core.py", line 5 in dot
  File "/home/me/dataloader.py", line 88 in load
  File "/home/me/train.py", line 20 in <module>
"""


def waits(rank: int, words: str = "mean", *, host: str = "node1", calls: int = 381, status: int = WAITS) -> RankView:
    record = RankRecord(rank, calls=calls, status=status, words=words)
    return RankView(record, 100 + rank, seconds=10.2, state="S", host=host)


def does(rank: int, state: str = "R", *, status: int = WORKS, words: str = "", calls: int = 380) -> RankView:
    record = RankRecord(rank, calls=calls, status=status, words=words)
    stack = STACK if state in "RS" else ""
    return RankView(record, 100 + rank, state=state, kernel="nfs_wait", stack=stack, host="node2")


def test_the_innermost_line_of_ones_own() -> None:
    assert place_of(STACK) == "dataloader.py:88 (load)"
    assert place_of(STACK.replace("/home/me/", "/usr/lib/python3.11/")) == "core.py:5 (dot)"
    assert place_of("") == ""


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (does(3), "runs in dataloader.py:88 (load), after call 380"),
        (does(3, "S"), "sleeps in dataloader.py:88 (load), after call 380"),
        (does(3, "T"), "is stopped (SIGSTOP?): kill -CONT 103"),
        (does(3, "T", status=WAITS, words="mean"), "is stopped in mean (SIGSTOP?): kill -CONT 103"),
        (does(3, "t"), "is held by a debugger"),
        (does(3, "D"), "is stuck in the kernel (nfs_wait): does a disk or a network share not answer?"),
        (does(3, "gone"), "has lost its process (103 has ended)"),
        (
            does(3, "S", status=BUSY, words="save a checkpoint"),
            "is in save a checkpoint, for which the others wait by design, now in dataloader.py:88 (load)",
        ),
        (RankView(RankRecord(3), 103, state="S", host="node2"), "sleeps, before init()"),
    ],
)
def test_the_rank_that_the_others_wait_for(view: RankView, expected: str) -> None:
    views = [waits(0), waits(1), waits(2, host="node2"), view]
    first, *rest = report(views, {})
    assert (
        first == f"no progress for 10 s: ranks 0-2 on node1,node2 wait in mean (call 381); rank 3 on node2 {expected}"
    )
    assert bool(rest) == bool(view.stack)
    if view.stack:
        assert rest == [
            "    rank 3 on node2, most recent call first:",
            '      File "/venv/lib/python3.11/site-packages/numpy/core.py", line 5 in dot',
            '      File "/home/me/dataloader.py", line 88 in load',
            '      File "/home/me/train.py", line 20 in <module>',
        ]


def test_two_in_one_place() -> None:
    first, *_ = report([waits(0), does(1), does(2)], {})
    assert first.endswith("; ranks 1,2 on node2 run in dataloader.py:88 (load), after call 380")


def test_two_that_have_not_begun() -> None:
    views = [RankView(RankRecord(rank), 100 + rank, state="S", host="node2") for rank in (1, 2)]
    first, *_ = report([waits(0), *views], {})
    assert first.endswith("; ranks 1,2 on node2 sleep, before init()")


def test_ranks_that_wait_for_each_other() -> None:
    first, *_ = report([waits(0, "send to rank 1 on node1"), waits(1, "send to rank 0 on node1")], {})
    assert first == (
        "no progress for 10 s: rank 0 on node1 waits in send to rank 1 on node1 (call 381); rank 1 on node1 waits in "
        "send to rank 0 on node1 (call 381); they wait for each other: do all ranks make the same calls in the same "
        "order?"
    )


def test_all_wait_in_the_same() -> None:
    (line,) = report([waits(1), waits(2, host="node2")], {}, unreachable={"node1": [], "node2": []})
    assert line == (
        "no progress for 10 s: ranks 1,2 on node1,node2 wait in mean (call 381); all ranks are there, and their "
        "hosts answer each other: is the load too high, the memory full, or a direct MPI call long? If not, "
        "`mpitrain check-cluster` examines the network"
    )


def test_all_wait_and_a_host_does_not_answer() -> None:
    unreachable = {"node2": ["node1"], "node1": ["node2", "node3"], "node3": []}
    (line,) = report([waits(1), waits(2, host="node2")], {}, unreachable=unreachable)
    assert line == (
        "no progress for 10 s: ranks 1,2 on node1,node2 wait in mean (call 381); all ranks are there, but node2 does "
        "not answer node1, node3 does not answer node1, node1 does not answer node2 on the high ports that MPI uses: "
        "is a cable, a switch or a firewall at fault?"
    )


def test_all_wait_on_one_machine_where_there_is_no_cable() -> None:
    (line,) = report([waits(0), waits(1)], {})
    assert line == (
        "no progress for 10 s: ranks 0,1 on node1 wait in mean (call 381); all ranks are there, on one machine: is "
        "the load too high, the memory full, or a direct MPI call long?"
    )


def test_a_host_that_is_silent_and_one_that_cannot_be_asked() -> None:
    first, *_ = report([waits(0)], {1: "node2", 2: "node3", 3: "node3"}, silent={"node3": 9.8})
    assert first == (
        "no progress for 10 s: rank 0 on node1 waits in mean (call 381); rank 1 on node2 cannot be asked; ranks "
        "2,3 on node3: no message from this host for 10 s: it lost power or its network, or it is frozen"
    )


@pytest.mark.parametrize(
    ("absent", "said"),
    [
        ({1: "node1"}, "rank 1 on node1 has not called init(), or has ended before it"),
        ({1: "node1", 2: "node1"}, "ranks 1,2 on node1 have not called init(), or have ended before it"),
    ],
)
def test_a_rank_of_which_its_host_does_not_know(absent: dict[int, str], said: str) -> None:
    first, *_ = report([waits(0, "init()")], absent, answered={"node1"})
    assert first.endswith(f"; {said}")


def test_the_last_words() -> None:
    first, *_ = report([waits(0), does(1)], {}, hang_seconds=600.0)
    assert first.startswith(
        "nothing has moved for 600 s (hang_seconds), and the job is ended: rank 0 on node1 waits in "
    )


def test_ranks_that_have_ended() -> None:
    first, *_ = report([waits(0, "", status=ENDED), waits(1, "", status=ENDED), does(2)], {})
    assert first == (
        "not all ranks have finished yet: ranks 0,1 on node1 have finished; rank 2 on node2 runs in dataloader.py:88 "
        "(load), after call 380"
    )


def test_what_ends_no_job() -> None:
    assert not is_by_design([waits(0), does(1)])
    assert is_by_design([waits(0), does(1, "S", status=BUSY, words="save a checkpoint")])
    assert is_by_design([waits(0), does(1, "D", status=BUSY, words="save a checkpoint")])
    assert not is_by_design([waits(0), does(1, "T", status=BUSY, words="save a checkpoint")])
    assert is_by_design([waits(0, status=ENDED), does(1)])


IMPORTING = """\
Current thread 0x00007f1 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/_dynamo/__init__.py", line 13 in <module>
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "/home/me/train.py", line 3 in <module>
"""
READING = """\
  File "<frozen importlib._bootstrap_external>", line 1073 in get_data
  File "/home/me/train.py", line 3 in <module>
"""


@pytest.mark.parametrize(
    ("stack", "module"),
    [
        (IMPORTING, "torch._dynamo"),
        (READING, "a module of train.py:3 (<module>)"),
        (
            IMPORTING.replace("/venv/lib/python3.11/site-packages/torch/_dynamo/__init__", "/home/me/net/layers"),
            "net/layers.py",
        ),
        (STACK, ""),
        ("", ""),
    ],
)
def test_a_rank_that_imports(stack: str, module: str) -> None:
    assert importing(stack) == module
    lines = report([waits(0), replace(does(1), stack=stack)], {})
    assert (f"; rank 1 on node2 imports {module}" in lines[0]) == bool(module)
    assert "<frozen" not in "".join(lines)


def test_all_programs_have_finished() -> None:
    done = [waits(rank, status=ENDED) for rank in range(2)]
    head = "all ranks have finished, but not all of their processes have ended for 10 s: "
    assert report(done, {})[0] == f"{head}ranks 0,1 on node1 have finished"
    gone = replace(done[0], state="gone", record=replace(done[0].record, phase=PARTED))
    assert report([gone, done[1]], {})[0] == f"{head}rank 1 on node1 has finished"
