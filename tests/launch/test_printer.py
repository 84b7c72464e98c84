"""The final text on the screen; of tracebacks of Ctrl-C during imports, a line each."""

from __future__ import annotations

import pytest

from mpitrain.launch.output import OutputPiece, Stream, Tag
from mpitrain.launch.printer import Interrupts, Printer

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
    assert (out, err) == (b"[0-2] a\n[1] b\n", b"[0,2] c\nown words\n")
    assert printed(capfdbinary, 1, ("stdout", b"<0>a\n"), ("stdout", b"<0>no end"))[0] == b"a\nno end\n"
    assert printed(capfdbinary, 2, ("stdout", b"<0>\xff\xfe\n"))[0] == b"[0] \xff\xfe\n"  # no text


@pytest.mark.parametrize("recovers", [True, False])
def test_what_open_mpi_writes_of_a_loss(capfdbinary: pytest.CaptureFixture[bytes], recovers: bool) -> None:
    noise = b"NBC_Progress: an error 75 was found during schedule 0x1f at row-offset 48 - aborting the schedule\n"
    printer = Printer(TAG, 2, recovers=recovers)
    printer.feed(0.0, "stderr", b"<0>a\n<1>" + noise + b"<0>b\n")
    printer.close()
    assert (noise in capfdbinary.readouterr().err) is not recovers


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        ([b"<0>load", b"<0>ing ", b"<1>hi\n<0>done\n"], b"[0] loading \n[1] hi\n[0] done\n"),
        # The end of a line that another rank has interrupted is no line.
        ([b"<0>load", b"", b"<1>hi\n", b"<0>\n", b"<0>\n<1>x"], b"[0] load\n[1] hi\n[0] \n[1] x\n"),
        # Progress overwrites itself, as that of tqdm does, and nothing else.
        ([b"<0>\r10 %", b"<0>\r20 %", b"<0>\n"], b"[0] 10 %\r[0] 20 %\n"),
        ([b"<0>10 %\r", b"<1>hi\n", b"<0>20 %\r"], b"[0] 10 %\r\n[1] hi\n[0] 20 %\r\n"),
    ],
)
def test_pieces_of_lines(capfdbinary: pytest.CaptureFixture[bytes], texts: list[bytes], shown: bytes) -> None:
    assert printed(capfdbinary, 2, *(("stdout", text) for text in texts))[0] == shown


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
    shown = [first, b"[1] hi\n" + first, first, b"[0] half a line\n" + second, b"[0] end\n"]
    assert out == clear.join(shown)
    assert err == b"[1] a warning\n"


def test_the_first_failure_is_the_last_word(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """It is repeated, also if its report was cut off, unless it is the last word already."""
    second = REPORT.replace(b"rank 1", b"rank 0").replace(b"ValueError", b"KeyError")
    _, err = printed(capfdbinary, 2, ("stderr", tagged(1, REPORT)), ("stderr", tagged(0, second)), ("stdout", b"bye\n"))
    assert err.endswith(b"[0] mpitrain: end of the failure of rank 0 on node7\n" + REPORT)
    _, err = printed(capfdbinary, 2, ("stderr", b"<0>warning\n"), ("stderr", tagged(1, REPORT)))
    assert err == b"[0] warning\n" + b"".join(b"[1] " + line for line in REPORT.splitlines(keepends=True))
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


FRAMES = """Traceback (most recent call last):
  File "/home/me/train.py", line 1, in <module>
    import torch
  File "<frozen importlib._bootstrap>", line 1176, in _find_and_load
  File "/venv/torch/__init__.py", line 445, in <module>
  File "<frozen importlib._bootstrap>", line 241, in _call
"""
CHAIN = "\nDuring handling of the above exception, another exception occurred:\n\n"
SHORT = ["interrupted before init(), in __init__.py, line 445"]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        (FRAMES + "KeyboardInterrupt\n", SHORT),
        (FRAMES + "KeyboardInterrupt\n" + CHAIN + FRAMES + "ImportError: no core\n", SHORT),
        # An import in C may lose the KeyboardInterrupt; NumPy then has much advice.
        (FRAMES + "ImportError: no datetime\n" + CHAIN + FRAMES + "ImportError: \n\nPLEASE READ\n", SHORT),
        ("before\n" + FRAMES + "KeyboardInterrupt: \nafter\n", ["before", *SHORT, "after"]),
        (FRAMES + "ValueError: bang\n", [*FRAMES.splitlines(), "ValueError: bang"]),
        (FRAMES, FRAMES.splitlines()),
    ],
)
def test_interrupts(text: str, printed: list[str]) -> None:
    interrupts = Interrupts()
    pieces = [piece for line in text.splitlines() for piece in interrupts.shorten(OutputPiece(line.encode(), b"\n"))]
    assert [piece.text.decode() for piece in [*pieces, *interrupts.rest()]] == printed
