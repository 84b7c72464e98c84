"""The sentences about ranks that wait for each other, what a rank does in a word, and short text for several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpitrain.watching.hang_report import as_stacks_show, doing, importing, is_by_design, meeting_of, place_of, report
from mpitrain.watching.ranges import rank_ranges, ranks_in
from mpitrain.watching.rank_record import (
    BEGUN,
    BUSY,
    CALLED,
    DONE,
    ENDED,
    FAILED,
    PARTED,
    STARTED,
    WAITS,
    WORKS,
    RankRecord,
)
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


def before_init(rank: int) -> RankView:
    return RankView(RankRecord(rank), 100 + rank, state="S", host="node2")


SHOWN = [
    "    rank 3 on node2, most recent call first:",
    '      File "/venv/lib/python3.11/site-packages/numpy/core.py", line 5 in dot',
    '      File "/home/me/dataloader.py", line 88 in load',
    '      File "/home/me/train.py", line 20 in <module>',
]


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (does(3), "runs in dataloader.py:88 (load), after call 380"),
        (does(3, "S"), "sleeps in dataloader.py:88 (load), after call 380"),
        (does(3, "T"), "is stopped (SIGSTOP?): kill -CONT 103"),
        (does(3, "T", status=WAITS, words="mean"), "is stopped in mean (SIGSTOP?): kill -CONT 103"),
        (does(3, "t"), "is held by a debugger"),
        (does(3, "D"), "is stuck in the kernel (nfs_wait): does a disk or a network file system not answer?"),
        (does(3, "gone"), "has lost its process (103 has ended)"),
        (
            does(3, "S", status=BUSY, words="save a checkpoint"),
            "is in save a checkpoint, for which the others wait by design, now in dataloader.py:88 (load)",
        ),
        (before_init(3), "sleeps, before init()"),
    ],
)
def test_the_rank_that_the_others_wait_for(view: RankView, expected: str) -> None:
    first, *rest = report([waits(0), waits(1), waits(2, host="node2"), view], {})
    others = "ranks 0-2 on node1,node2 wait in mean (call 381)"
    assert first == f"no progress for 10 s: {others}; rank 3 on node2 {expected}"
    assert rest == ([] if not view.stack else SHOWN)


def said(*views: RankView, absent: dict[int, str] | None = None, **more: Any) -> str:
    line = report(list(views), absent or {}, **more)[0]
    assert line.startswith("no progress for 10 s: ")
    return line.removeprefix("no progress for 10 s: ")


def test_several_that_others_wait_for() -> None:
    others = "rank 0 on node1 waits in mean (call 381); "
    running = "ranks 1,2 on node2 run in dataloader.py:88 (load), after call 380"
    assert said(waits(0), does(1), does(2)) == others + running
    assert said(waits(0), before_init(1), before_init(2)) == f"{others}ranks 1,2 on node2 sleep, before init()"
    assert said(waits(0), absent={1: "node2", 2: "node3", 3: "node3"}, silent={"node3": 9.8}) == (
        f"{others}rank 1 on node2 cannot be asked; ranks 2,3 on node3: no message from this host for 10 s: it lost "
        "power or its network, or it is frozen"
    )
    not_called = said(waits(0), absent={1: "node1"}, answered={"node1"})
    assert not_called == f"{others}rank 1 on node1 has not called init(), or has ended before it"
    not_called = said(waits(0), absent={1: "node1", 2: "node1"}, answered={"node1"})
    assert not_called == f"{others}ranks 1,2 on node1 have not called init(), or have ended before it"


def test_all_wait() -> None:
    two, all_there = [waits(1), waits(2, host="node2")], "wait in mean (call 381); all ranks are there"
    assert said(*two, unreachable={"node1": [], "node2": []}) == (
        f"ranks 1,2 on node1,node2 {all_there}, and their hosts answer each other: is the load too high, the memory "
        "full, or a direct MPI call long? If not, `mpitrain check-cluster` examines the network"
    )
    assert said(*two, unreachable={"node2": ["node1"], "node1": ["node2", "node3"], "node3": []}) == (
        f"ranks 1,2 on node1,node2 {all_there}, but node2 does not answer node1, node3 does not answer node1, node1 "
        "does not answer node2 on the high ports that MPI uses: is a cable, a switch or a firewall at fault?"
    )
    assert said(waits(0), waits(1)) == (  # where there is no cable
        f"ranks 0,1 on node1 {all_there}, on one machine: is the load too high, the memory full, or a direct MPI call "
        "long?"
    )
    assert said(waits(0, "send to rank 1 on node1"), waits(1, "send to rank 0 on node1")) == (
        "rank 0 on node1 waits in send to rank 1 on node1 (call 381); rank 1 on node1 waits in send to rank 0 on node1 "
        "(call 381); they wait for each other: do all ranks make the same calls in the same order?"
    )


def test_the_end_of_a_job() -> None:
    first, *_ = report([waits(0), does(1)], {}, hang_seconds=600.0)
    assert first.startswith(
        "nothing has moved for 600 s (hang_seconds), and the job is ended: rank 0 on node1 waits in "
    )
    done = [waits(rank, "", status=ENDED) for rank in range(2)]
    first, *_ = report([*done, does(2)], {})
    assert first == (
        "not all ranks have finished yet: ranks 0,1 on node1 have finished; rank 2 on node2 runs in dataloader.py:88 "
        "(load), after call 380"
    )
    head = "all ranks have finished, but not all of their processes have ended for 10 s: "
    assert report(done, {})[0] == f"{head}ranks 0,1 on node1 have finished"
    gone = replace(done[0], state="gone", record=replace(done[0].record, phase=PARTED))
    assert report([gone, done[1]], {})[0] == f"{head}rank 1 on node1 has finished"


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
    """The innermost line of one's own is named, unless there is none."""
    assert place_of(STACK.replace("/home/me/", "/usr/lib/python3.11/")) == "core.py:5 (dot)"
    assert place_of("") == ""
    assert importing(stack) == module
    lines = report([waits(0), replace(does(1), stack=stack)], {})
    assert (f"; rank 1 on node2 imports {module}" in lines[0]) == bool(module)
    assert "<frozen" not in "".join(lines)


def seen(phase: str, status: int, state: str = "S", **fields: float) -> RankView:
    return RankView(RankRecord(0, phase, status=status), 100, state=state, **fields)


@pytest.mark.parametrize(
    ("view", "word"),
    [
        (seen(STARTED, WORKS, "R"), "starts"),
        (seen(CALLED, WAITS, seconds=3.0, doing_seconds=3.0), "starts"),
        (seen(BEGUN, WORKS, "R"), "computes"),
        (seen(BEGUN, WORKS, ""), "computes"),  # nobody has looked at its process
        (seen(BEGUN, WAITS, seconds=0.2, doing_seconds=0.2), "waits"),  # nothing has moved since the wait began
        (seen(BEGUN, WAITS, seconds=0.2, doing_seconds=0.3), "wire"),
        (seen(BEGUN, WAITS, seconds=1.5, doing_seconds=9.0), "waits"),  # nothing has moved for long
        (seen(BEGUN, BUSY, "S"), "busy"),
        (seen(BEGUN, BUSY, "D"), "disk"),
        (seen(BEGUN, WAITS, "T", seconds=9.0), "stopped"),
        (seen(CALLED, WORKS, "t"), "stopped"),
        (seen(DONE, ENDED), "done"),
        (seen(PARTED, ENDED), "done"),
        (seen(FAILED, WORKS, "T"), "failed"),
        (seen(BEGUN, WORKS, "Z"), "ended"),
        (seen(FAILED, WORKS, "gone"), "ended"),
        (seen(BEGUN, WORKS, "S", ended_seconds=0.0), "ended"),
    ],
)
def test_the_word(view: RankView, word: str) -> None:
    assert doing(view) == word


@pytest.mark.parametrize("ranks", [[0], [0, 1], [0, 1, 2], [3, 5, 6, 7, 8, 99_999], list(range(100_000))])
def test_ranks_there_and_back(ranks: list[int]) -> None:
    assert sorted(ranks_in(rank_ranges(ranks))) == ranks


def test_text_for_several_ranks() -> None:
    groups = [(0,), (0, 1), (0, 1, 2, 3), (0, 2), (0, 1, 2, 5, 7, 8, 9)]
    assert [rank_ranges(ranks) for ranks in groups] == ["0", "0,1", "0-3", "0,2", "0-2,5,7-9"]
    assert ranks_in(" 5 , 0 - 2,1-3") == {0, 1, 2, 3, 5}  # spaces, and ranks named twice


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no ranks"),
        ("1,", "names no ranks"),
        ("-1", "names no ranks"),
        ("100000", "names no ranks"),
        ("0,5-2", "has the range 5-2; write the lower number first: 2-5"),
        ("0-99999,0", "names more than 100,000 numbers"),
        ("0-99999," * 500, "names more than 100,000 numbers"),
    ],
)
def test_what_names_no_ranks(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ranks_in(text)


TORCH = "/venv/lib/python3.11/site-packages/torch"
MINE = '  File "/home/me/train.py", line 20 in main\n'


def stack(*frames: str) -> str:
    return "Current thread 0x1 (most recent call first):\n" + "".join(f'  File "{frame}\n' for frame in frames) + MINE


ALL_REDUCE = stack(
    f'{TORCH}/distributed/distributed_c10d.py", line 3252 in all_reduce',
    f'{TORCH}/distributed/c10d_logger.py", line 83 in wrapper',
)
# DDP exchanges gradients in the backward pass.
BACKWARD = stack(
    f'{TORCH}/autograd/graph.py", line 829 in _engine_run_backward',
    f'{TORCH}/autograd/__init__.py", line 364 in backward',
    f'{TORCH}/_tensor.py", line 630 in backward',
)
MEETS = [
    (ALL_REDUCE, "all_reduce at train.py:20 (main)"),
    (BACKWARD, "backward at train.py:20 (main)"),
    (
        stack(
            f'{TORCH}/distributed/rendezvous.py", line 189 in _create_c10d_store',
            f'{TORCH}/distributed/distributed_c10d.py", line 1700 in init_process_group',
            f'{TORCH}/distributed/c10d_logger.py", line 95 in wrapper',
        ),
        "init_process_group at train.py:20 (main)",
    ),
    (stack(), ""),
    # It waits for its own data, and the others for it.
    (stack(f'{TORCH}/utils/data/dataloader.py", line 1448 in _get_data'), ""),
    ("", ""),
]


@pytest.mark.parametrize(("text", "call"), MEETS)
def test_the_call_in_which_a_script_for_torchrun_waits(text: str, call: str) -> None:
    assert meeting_of(text) == call


def test_a_script_for_torchrun_that_hangs() -> None:
    """Nobody has called init(): who is to blame is in the stacks."""
    views = [
        as_stacks_show(RankView(RankRecord(rank), 100 + rank, state="S", stack=text, host="node1", idle_seconds=12.0))
        for rank, text in enumerate([ALL_REDUCE, stack(), ALL_REDUCE])
    ]
    assert report(views, {})[0] == (
        "no progress for 12 s: ranks 0,2 on node1 wait in all_reduce at train.py:20 (main); "
        "rank 1 on node1 sleeps in train.py:20 (main)"
    )
    views[1] = RankView(RankRecord(1), 101, state="gone", host="node1", ended_seconds=9.0, code=0)
    assert report(views, {})[0].endswith("; rank 1 on node1 has left with exit code 0")
