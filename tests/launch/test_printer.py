"""The final text on the screen."""

from __future__ import annotations

import pytest

from mpitrain.launch.output import Stream, Tag
from mpitrain.launch.printer import Printer

TAG = Tag(*"<", r"(\d+)", ">")
REPORT = b"mpitrain: rank 1 on node7 failed:\nValueError: x\nmpitrain: end of the failure of rank 1 on node7\n"


def tagged(rank: int, text: bytes) -> bytes:
    return b"".join(b"<%d>%s" % (rank, line) for line in text.splitlines(keepends=True))


def printed(
    capfdbinary: pytest.CaptureFixture[bytes], num_ranks: int, *written: tuple[Stream, bytes], shows_bar: bool = False
) -> list[bytes]:
    printer = Printer(TAG, num_ranks, shows_bar=shows_bar)
    for second, (stream, data) in enumerate(written):
        printer.feed(float(second), stream, data)
        printer.print_due(second + 0.15)
        printer.print_due(second + 0.3)
    printer.close()
    return list(capfdbinary.readouterr())


def test_prefixes(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    out, err = printed(capfdbinary, 3, ("stdout", b"<0>a\n<1>a\n<2>a\n<1>b\n"), ("stderr", b"<0>c\n<2>c\nown words\n"))
    assert out == b"[0-2] a\n[1] b\n"
    assert err == b"[0,2] c\nown words\n"


def test_what_open_mpi_writes_of_a_loss(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    noise = b"NBC_Progress: an error 75 was found during schedule 0x1f at row-offset 48 - aborting the schedule\n"
    for recovers in (True, False):
        printer = Printer(TAG, 2, recovers=recovers)
        printer.feed(0.0, "stderr", b"<0>a\n<1>" + noise + b"<0>b\n")
        printer.close()
        assert (noise in capfdbinary.readouterr().err) is not recovers


def test_one_rank_has_no_prefix(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert printed(capfdbinary, 1, ("stdout", b"<0>a\n"), ("stdout", b"<0>no end"))[0] == b"a\nno end\n"


def test_bytes_that_are_no_text_pass_unchanged(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert printed(capfdbinary, 2, ("stdout", b"<0>\xff\xfe\n"))[0] == b"[0] \xff\xfe\n"


def test_a_line_that_another_rank_interrupts(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    out, _ = printed(capfdbinary, 2, ("stdout", b"<0>load"), ("stdout", b"<0>ing "), ("stdout", b"<1>hi\n<0>done\n"))
    assert out == b"[0] loading \n[1] hi\n[0] done\n"


def test_the_end_of_a_line_that_another_rank_has_interrupted_is_no_line(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    texts = b"<0>load", b"", b"<1>hi\n", b"<0>\n", b"<0>\n<1>x"
    out, _ = printed(capfdbinary, 2, *(("stdout", text) for text in texts))
    assert out == b"[0] load\n[1] hi\n[0] \n[1] x\n"


def test_progress_overwrites_itself_and_nothing_else(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    tqdm = [("stdout", b"<0>\r10 %"), ("stdout", b"<0>\r20 %"), ("stdout", b"<0>\n")]
    assert printed(capfdbinary, 2, *tqdm)[0] == b"[0] 10 %\r[0] 20 %\n"  # type: ignore[arg-type]
    own = [("stdout", b"<0>10 %\r"), ("stdout", b"<1>hi\n"), ("stdout", b"<0>20 %\r")]
    assert printed(capfdbinary, 2, *own)[0] == b"[0] 10 %\r\n[1] hi\n[0] 20 %\r\n"  # type: ignore[arg-type]


def test_a_bar_stays_below_all_other_output(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    draw, clear = b"\r\x1b[K%s\r", b"\r\x1b[K"
    # The second text is now longer than the terminal: it is cut, and loses its colours.
    long = b"\x1b[31mstep 2\x1b[0m of many, and more"
    out, err = printed(
        capfdbinary,
        2,
        ("stdout", b"<0>\x1b[2Kstep 1\r"),
        ("stdout", b"<1>hi\n"),
        ("stderr", b"<1>a warning\n"),
        ("stdout", b"<0>half\x1b[2K%s\r" % long),
        ("stdout", b"<0> a line\n"),
        ("stdout", b"<0>\x1b[2K\r"),
        ("stdout", b"<0>end\n"),
        shows_bar=True,
    )
    first, second = draw % b"step 1", draw % b"step 2 of many, and"
    assert out == (
        first
        + clear
        + b"[1] hi\n"
        + first
        + clear
        + first
        + clear
        + b"[0] half a line\n"
        + second
        + clear
        + b"[0] end\n"
    )
    assert err == b"[1] a warning\n"


def test_the_first_failure_is_the_last_word(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    second = REPORT.replace(b"rank 1", b"rank 0").replace(b"ValueError", b"KeyError")
    _, err = printed(capfdbinary, 2, ("stderr", tagged(1, REPORT)), ("stderr", tagged(0, second)), ("stdout", b"bye\n"))
    assert err.endswith(b"[0] mpitrain: end of the failure of rank 0 on node7\n" + REPORT)


def test_a_failure_that_is_the_last_word_already_is_not_repeated(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    _, err = printed(capfdbinary, 2, ("stderr", b"<0>warning\n"), ("stderr", tagged(1, REPORT)))
    assert err == b"[0] warning\n" + b"".join(b"[1] " + line for line in REPORT.splitlines(keepends=True))


def test_a_report_that_was_cut_off_is_repeated(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    begun = b"".join(REPORT.splitlines(keepends=True)[:2])
    assert printed(capfdbinary, 2, ("stderr", tagged(1, begun)), ("stdout", b"bye\n"))[1].endswith(begun)


BANNER = b"=" * 83 + b"\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n" + b"=" * 83 + b"\n"


@pytest.mark.parametrize(("said", "is_printed"), [(b"", True), (b"<1>mpitrain: rank 1 on a left\n", False)])
def test_what_mpich_says_of_a_rank(capfdbinary: pytest.CaptureFixture[bytes], said: bytes, is_printed: bool) -> None:
    printer = Printer(TAG, 2)
    printer.feed(0.0, "stdout", BANNER)
    printer.feed(0.0, "stderr", said)
    printer.close()
    assert BANNER not in capfdbinary.readouterr().out
    assert BANNER in printer.mpiexec_said
    printer.print_banner()
    assert (capfdbinary.readouterr().out == BANNER) is is_printed
