"""Prints what the ranks wrote to stdout and stderr, and repeats the first failure at the end."""

from __future__ import annotations

import re
import shutil
import sys
from collections import defaultdict
from typing import BinaryIO

from mpitrain.context import BAR_START
from mpitrain.launch.job_logs import LOGS
from mpitrain.launch.log import KEPT, note
from mpitrain.launch.output import MPIEXEC, LineCutter, Merger, OutputPiece, Stream, Tag, TagDecoder
from mpitrain.watching.ranges import rank_ranges

_TRACEBACK = b"Traceback (most recent call last):"
_BROKEN_IMPORTS = (b"ImportError", b"ModuleNotFoundError")
_NEXT_TRACEBACK = re.compile(rb"(During handling of|The above exception was)|$")
_FRAME_OF_TRACEBACK = re.compile(rb'  File "(?:[^<].*/)?([^/<][^/]*)", (line \d+)')


class Interrupts:
    """Shortens what one rank writes to stderr after Ctrl-C."""

    def __init__(self) -> None:
        self._held: list[OutputPiece] = []
        self._has_ended = False  # what may follow is about the same interrupt
        self._is_import = False  # an import that was interrupted: NumPy's error has 30 more lines of advice

    def shorten(self, piece: OutputPiece) -> list[OutputPiece]:
        """Take in a line; return what is to be printed now."""
        if self._is_import:
            return []
        if not self._held:
            if piece.text == _TRACEBACK:
                self._held = [piece]
                return []
            return [] if self._has_ended and _NEXT_TRACEBACK.match(piece.text) else [piece]
        self._held.append(piece)
        if piece.text.startswith(b" ") or not piece.end:
            return []
        held, self._held = self._held, []
        kind = piece.text.split(b":")[0]
        self._is_import = kind in _BROKEN_IMPORTS  # code in C may lose the KeyboardInterrupt itself
        if self._has_ended:
            return []
        if kind != b"KeyboardInterrupt" and not self._is_import:
            return held
        self._has_ended = True
        places = [frame[1] + b", " + frame[2] for line in held if (frame := _FRAME_OF_TRACEBACK.match(line.text))]
        return [OutputPiece(b"interrupted before init(), in " + places[-1] if places else piece.text, piece.end)]

    def rest(self) -> list[OutputPiece]:
        """Return what is still held at the end of the output."""
        held, self._held = self._held, []
        return held


_INFINITY = float("inf")
_TO_MARGIN = b"\r\x1b[K"  # also clears the line
# Open MPI writes this of a collective that the loss of a rank has ended. `--recover` says itself what happened.
_NOISE_OF_LOSS = re.compile(rb"NBC_Progress: an error -?\d+ was found during schedule .* - aborting the schedule.*")
# MPICH and Intel MPI write this where a rank has ended early, often with the number of a healthy one. So it is printed
# only if nothing better is known.
_BANNER = re.compile(
    rb"$|=+$|=   |YOUR APPLICATION TERMINATED WITH THE EXIT|This typically refers to a problem with your app"
    rb"|Please see the FAQ page for debugging"
)
_STYLE = re.compile(rb"\x1b\[[0-9;]*m")


class FirstFailure:
    """Keeps the first report of a failing rank on stderr, as written by `mpitrain.job.failure`, to repeat it.

    The report begins with `mpitrain: rank R on HOST failed:` and ends with `mpitrain: end of the failure of
    rank R ...`. Later messages of mpiexec about the end of the job would hide the report.

    Attributes:
        rank: the rank that failed first; None: no rank has reported a failure.
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        self._lines: list[bytes] = []
        self._is_complete = False
        self._is_last = False

    def see(self, ranks: tuple[int, ...], piece: OutputPiece) -> None:
        """Examine what has just been printed."""
        if self.rank is None:
            begun = re.match(rb"mpitrain: rank (\d+) on .* failed:", piece.text)
            if begun and int(begun[1]) in ranks:
                self.rank = int(begun[1])
        self._is_last = False
        if self.rank in ranks and not self._is_complete:
            self._lines.append(piece.text + piece.end)
            self._is_complete = bool(re.match(rb"mpitrain: end of the failure of rank \d+", piece.text))
            self._is_last = self._is_complete

    @property
    def report(self) -> bytes:
        """The report, as far as it was seen."""
        return b"".join(self._lines)

    @property
    def hidden_report(self) -> bytes:
        """Return the report if something was printed after it; else empty."""
        return b"" if self._is_last else self.report


class _BottomLine:
    """The progress bar of a rank (mpitrain.training.hooks.log), in the last line of the terminal.

    `take` sets its text, `hide` makes room for other output, `show` draws the bar again.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._text = b""
        self._is_shown = False

    def take(self, text: bytes) -> None:
        """Draw a new text; an empty text ends the bar."""
        self.hide()
        self._text = text

    def hide(self) -> None:
        if self._is_shown:
            self._file.write(_TO_MARGIN)
            self._file.flush()  # the next line may go to the other stream
            self._is_shown = False

    def show(self) -> None:
        if self._is_shown or not self._text:
            return
        columns = shutil.get_terminal_size().columns
        plain = _STYLE.sub(b"", self._text).decode(errors="replace")
        # The terminal may have become narrower since the job began.
        fitting = self._text if len(plain) < columns else plain[: columns - 1].encode()
        self._file.write(_TO_MARGIN + fitting + b"\r")
        self._file.flush()
        self._is_shown = True


class Printer:
    """Prints the output of the ranks, each line with its ranks in front."""

    def __init__(
        self,
        tag: Tag | None,
        num_ranks: int,
        shows_ranks: bool = True,
        shows_bar: bool = False,
        *,
        recovers: bool = False,
    ) -> None:
        """
        Args:
            tag: the form of mpiexec's tags; None: `take` gets what ranks write, and `feed` nothing.
            num_ranks: the number of ranks of the job.
            shows_ranks: print ranks in front of each line.
            shows_bar: stdout is a terminal, and the ranks know it.
            recovers: the job continues behind the loss of a rank. What MPI itself writes of a loss is left out.
        """
        self.first_failure = FirstFailure()
        self.mpiexec_said = b""  # only the end of it
        self._shows_ranks = shows_ranks and num_ranks > 1
        self._num_ranks = num_ranks
        self._recovers = recovers
        streams: tuple[Stream, Stream] = ("stdout", "stderr")
        self._files: dict[Stream, BinaryIO] = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
        self._decoders = {stream: TagDecoder(tag) for stream in streams if tag is not None}
        self._cutters = {stream: LineCutter() for stream in streams}
        self._mergers: dict[Stream, Merger[OutputPiece]] = {stream: Merger(num_ranks) for stream in streams}
        # A terminal shows both streams, so only one unfinished line at a time is possible.
        self._unfinished: tuple[Stream, tuple[int, ...]] | None = None
        self._finished_here: set[tuple[Stream, int]] = set()  # who has begun a line that was ended here, for another's
        self.has_reason = False
        self._interrupts: dict[int, Interrupts] | None = None
        self._banner: list[tuple[Stream, OutputPiece]] = []
        self._is_at_margin = True
        self._bar = _BottomLine(self._files["stdout"]) if shows_bar else None

    def feed(self, now: float, stream: Stream, data: bytes) -> None:
        """Take in what mpiexec wrote to one of its pipes."""
        for rank, text in self._decoders[stream].feed(data):
            self.take(now, stream, rank, text)

    def take(self, now: float, stream: Stream, rank: int, text: bytes) -> None:
        """Take in what a rank, or mpiexec itself, has written."""
        if rank == MPIEXEC:
            self.mpiexec_said = (self.mpiexec_said + text)[-4096:]
        for piece in self._cutters[stream].feed(now, rank, text):
            if not (self._recovers and _NOISE_OF_LOSS.match(piece.text)):
                self._merge(now, stream, rank, piece)

    def print_due(self, now: float) -> None:
        """Print what need not wait any longer."""
        for stream, cutter in self._cutters.items():
            merger = self._mergers[stream]
            for rank, piece in cutter.overdue(now):
                self._merge(now, stream, rank, piece)
            for ranks, piece in merger.ready(now):
                self._print(stream, ranks, piece)
            self._files[stream].flush()
        self._show_bar()

    def say(self, text: str) -> None:
        """Print a line of mpitrain's own on stderr, and note it."""
        note(text)
        self._hide_bar()
        self._finish_line()
        self._write("stderr", f"mpitrain: {text}\n".encode(errors="backslashreplace"))
        self._files["stderr"].flush()
        self.first_failure.see((), OutputPiece(b"", b"\n"))
        self._show_bar()

    def shorten_interrupts(self) -> None:
        """From now on, print a line in place of a traceback that ends with KeyboardInterrupt."""
        self._interrupts = self._interrupts or defaultdict(Interrupts)

    def print_banner(self) -> None:
        """Print what mpiexec has said of the end of a rank, if no rank has said why. Call this after `close`."""
        if self.has_reason:
            return
        for stream, piece in self._banner:
            self._write(stream, piece.text + (piece.end or b"\n"))
            self._files[stream].flush()

    def close(self) -> None:
        """Print all the rest. Repeat the first failure unless it is the last text on the screen."""
        for stream, decoder in self._decoders.items():
            for rank, text in decoder.close():
                self.take(0.0, stream, rank, text)
        for rank, interrupts in (self._interrupts or {}).items():
            for piece in interrupts.rest():
                self._take(0.0, "stderr", rank, piece)
        self.print_due(_INFINITY)
        KEPT.end_lines()
        self._hide_bar()
        self._bar = None
        self._finish_line()
        self._write("stderr", self.first_failure.hidden_report)
        self._files["stderr"].flush()

    @property
    def is_waiting(self) -> bool:
        """True while `print_due` must be called soon, even without new input."""
        return any(part.is_waiting for parts in (self._cutters, self._mergers) for part in parts.values())

    def _merge(self, now: float, stream: Stream, rank: int, piece: OutputPiece) -> None:
        self.has_reason |= stream == "stderr" and piece.text.startswith((b"Traceback (", b"mpitrain: rank "))
        if rank == MPIEXEC and _BANNER.match(piece.text):
            self._banner.append((stream, piece))
            return
        if stream == "stderr" and self._interrupts is not None:
            for one in self._interrupts[rank].shorten(piece):
                self._take(now, stream, rank, one)
            return
        self._take(now, stream, rank, piece)

    def _take(self, now: float, stream: Stream, rank: int, piece: OutputPiece) -> None:
        KEPT.take(rank, stream, piece, self._num_ranks)
        LOGS.take(rank, stream, piece)
        self._mergers[stream].feed(now, rank, piece)

    def _print(self, stream: Stream, ranks: tuple[int, ...], piece: OutputPiece) -> None:
        if self._bar is not None and piece.end == b"\r" and BAR_START in piece.text:
            begun, _, bar = piece.text.rpartition(BAR_START)
            if begun:  # the bar interrupted an unfinished line
                self._print(stream, ranks, OutputPiece(begun, b""))
            self._bar.take(bar)
            return
        self._hide_bar()
        owner = (stream, ranks)
        if self._unfinished != owner:
            owners = {(stream, rank) for rank in ranks}
            is_ended = piece == OutputPiece(b"", b"\n") and owners <= self._finished_here
            self._finished_here -= owners
            if is_ended:
                return
            self._finish_line()
        if not self._unfinished:
            self._is_at_margin = True
            if piece == OutputPiece(b"", b"\r"):
                return  # "\r" at the margin: tqdm starts a progress line in this way
        # The end of an unfinished line gets no second prefix.
        is_new = self._is_at_margin and bool(piece.text or not self._unfinished)
        text = (self._prefix(ranks) if is_new else b"") + piece.text + piece.end
        if piece.end == b"\r":  # a file would have it again and again
            self._files[stream].write(text)
        else:
            self._write(stream, text)
        self._unfinished = None if piece.end == b"\n" else owner
        self._is_at_margin = piece.end != b"" or (self._is_at_margin and not piece.text)
        self.first_failure.see(ranks if stream == "stderr" else (), piece)

    def _hide_bar(self) -> None:
        if self._bar is not None:
            self._bar.hide()

    def _show_bar(self) -> None:
        if self._bar is not None and not self._unfinished:
            self._bar.show()

    def _finish_line(self) -> None:
        if self._unfinished:
            stream, ranks = self._unfinished
            self._finished_here |= {(stream, rank) for rank in ranks}
            file = self._files[stream]
            file.write(b"\n")
            file.flush()  # the next line may go to the other stream
            LOGS.end_line()
            self._unfinished = None

    def _write(self, stream: Stream, text: bytes) -> None:
        """Print, also into the log of the job."""
        self._files[stream].write(text)
        LOGS.show(text)

    def _prefix(self, ranks: tuple[int, ...]) -> bytes:
        if not self._shows_ranks or MPIEXEC in ranks:
            return b""
        return f"[{rank_ranges(ranks)}] ".encode()
