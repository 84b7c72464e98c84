"""Output of ranks: whole lines are written, tags are recognised however the pipe cuts them, equal lines are merged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.context import JOB
from mpitrain.launch.dialects import JobSpec, command_for
from mpitrain.launch.libraries import Mpiexec, Vendor
from mpitrain.launch.output import MERGE_SECONDS, MPIEXEC, PARTIAL_SECONDS, LineCutter, Merger, OutputPiece, TagDecoder
from mpitrain.launch.placement import Place, Placement

LONG = 1000.0


def lines(merger: Merger, now: float) -> list[tuple[tuple[int, ...], str]]:
    return [(ranks, piece.text.decode()) for ranks, piece in merger.ready(now)]


def feed(merger: Merger, now: float, rank: int, *texts: str) -> None:
    for text in texts:
        merger.feed(now, rank, OutputPiece(text.encode(), b"\n"))


def test_equal_lines_of_all_ranks_leave_at_once_as_one() -> None:
    merger = Merger(3)
    for rank in (2, 0, 1):
        feed(merger, 0.0, rank, "loss 0.3")
    assert lines(merger, 0.0) == [((0, 1, 2), "loss 0.3")]
    assert not merger.is_waiting


def test_a_line_of_some_ranks_waits_for_the_others_but_not_long() -> None:
    merger = Merger(3)
    feed(merger, 0.0, 0, "loss 0.3")
    feed(merger, 0.05, 2, "loss 0.3")
    assert lines(merger, MERGE_SECONDS - 0.01) == []
    assert lines(merger, MERGE_SECONDS) == [((0, 2), "loss 0.3")]
    feed(merger, LONG, 1, "loss 0.3")
    assert lines(merger, 2 * LONG) == [((1,), "loss 0.3")]


def test_the_order_of_every_rank_is_kept() -> None:
    for of_0, of_1, merged in (
        ("xxx", "xx", [((0, 1), "x"), ((0, 1), "x"), ((0,), "x")]),  # no rank is merged with itself
        ("ab", "ba", [((0,), "a"), ((0, 1), "b"), ((1,), "a")]),
    ):
        merger = Merger(2)
        feed(merger, 0.0, 0, *of_0)
        feed(merger, 0.0, 1, *of_1)
        assert lines(merger, LONG) == merged
    feed(merger, 0.0, 0, "only 0", "both")
    feed(merger, 0.0, 1, "both")
    assert lines(merger, 0.0) == []  # a complete line does not overtake
    assert lines(merger, MERGE_SECONDS) == [((0,), "only 0"), ((0, 1), "both")]
    feed(merger, 0.0, MPIEXEC, "bad", "bad")  # what mpiexec says does not wait
    assert lines(merger, 0.0) == [((MPIEXEC,), "bad"), ((MPIEXEC,), "bad")]


def test_a_flood_is_passed_on() -> None:
    merger = Merger(2)
    feed(merger, 0.0, 0, *(str(i) for i in range(1000)))
    passed_on = [text for _, text in lines(merger, 0.0)]
    assert len(passed_on) > 700
    assert passed_on + [text for _, text in lines(merger, LONG)] == [str(i) for i in range(1000)]


def test_cutter_joins_what_the_pipe_has_cut() -> None:
    cutter = LineCutter()
    assert list(cutter.feed(0.0, 0, b"lo")) == []
    assert list(cutter.feed(0.0, 1, b"other\n")) == [OutputPiece(b"other", b"\n")]
    assert list(cutter.feed(0.0, 0, b"ss\r\n\n50 %\rrest")) == [
        OutputPiece(b"loss", b"\n"),
        OutputPiece(b"", b"\n"),
        OutputPiece(b"50 %", b"\r"),
    ]
    assert cutter.is_waiting


def test_a_prompt_is_shown_although_its_line_has_no_end() -> None:
    cutter = LineCutter()
    assert list(cutter.feed(1.0, 0, b"continue? ")) == []
    assert list(cutter.overdue(1.0)) == []
    assert list(cutter.overdue(1.0 + PARTIAL_SECONDS)) == [(0, OutputPiece(b"continue? ", b""))]
    assert not cutter.is_waiting
    assert list(cutter.feed(LONG, 0, b"yes\n")) == [OutputPiece(b"yes", b"\n")]


def test_a_very_long_line_takes_no_quadratic_time() -> None:
    cutter = LineCutter()
    for _ in range(64):
        assert list(cutter.feed(0.0, 0, b"x" * 65536)) == []
    assert [len(piece.text) for piece in cutter.feed(0.0, 0, b"\n")] == [64 * 65536]


def decoded(vendor: Vendor, *reads: bytes) -> dict[int, bytes]:
    mpiexec, placement = Mpiexec(Path("mpiexec"), vendor, "5.0"), Placement((Place("a", 0, 2),))
    job = JobSpec(mpiexec=mpiexec, program=["python"], placement=placement, num_cores=2, as_root=False)
    decoder = TagDecoder(command_for(job, {}).tag)
    by_rank: dict[int, bytes] = {}
    for pieces in [*(decoder.feed(data) for data in reads), decoder.close()]:
        for rank, text in pieces:
            assert text
            by_rank[rank] = by_rank.get(rank, b"") + text
    return by_rank


# Real output of each mpiexec: Hydra tags pieces of lines, and Open MPI lines.
HYDRA = b"<mpitrain-rank-1>hello<mpitrain-rank-1> <mpitrain-rank-0>hel<mpitrain-rank-1>1\n<mpitrain-rank-0>lo 0\n"
HYDRA += b"\n= BAD TERMINATION\n"
OPEN_MPI = b"[1,0]<stdout>: a [1/2]\n[1,1]<stdout>: \nprterun noticed\n[1,0]<stdout>: end[1,1]<stdout>: end"
TAGGED: dict[Vendor, tuple[bytes, dict[int, bytes]]] = {
    "mpich": (HYDRA, {0: b"hello 0\n", 1: b"hello 1\n", MPIEXEC: b"\n= BAD TERMINATION\n"}),
    "openmpi": (OPEN_MPI, {0: b"a [1/2]\nend", 1: b"\nend", MPIEXEC: b"prterun noticed\n"}),
}


def test_a_read_may_end_anywhere_in_what_is_tagged() -> None:
    for vendor, (data, whole) in TAGGED.items():
        assert decoded(vendor, *(data[i : i + 1] for i in range(len(data)))) == whole
        for cut in range(len(data)):
            assert decoded(vendor, data[:cut], data[cut:]) == whole
    # What only looks like the beginning of a tag is not lost.
    assert decoded("openmpi", b"[1,0]<stdout>: x\n[1") == {0: b"x\n", MPIEXEC: b"[1"}


@pytest.mark.parametrize("job", [{JOB: "one"}, {}], ids=["mpitrain run", "mpiexec"])
def test_a_print_of_several_words_is_one_write(job: dict[str, str]) -> None:
    """Another rank's line would come between two of them."""
    reading, writing = os.pipe2(os.O_DIRECT)  # each read returns one write
    source = "import sys, mpitrain\nprint('loss', 0.5)\nprint('a', 1, file=sys.stderr)\nprint('no', 'end', end='')"
    rank = {"PMI_RANK": "0", "PYTHONUNBUFFERED": "1"}
    environment = {**os.environ, **rank, **job}
    subprocess.run([sys.executable, "-c", source], env=environment, stdout=writing, stderr=writing, check=True)
    os.close(writing)
    assert [os.read(reading, 100) for _ in range(4)] == [b"loss 0.5\n", b"a 1\n", b"no end", b""]
    os.close(reading)
