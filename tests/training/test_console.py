"""The console: a bar on a real terminal, plain lines elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import pytest

from free_ports import free_port
from jobs import HANG_SECONDS, clean_environment

PROGRAM = """
import sys, time
import numpy
import mpitrain as mt

def build(world):
    def function(parameters, batch, on_gradient):
        on_gradient("w", parameters["w"] * 0)
        return 0.5

    data = mt.data.ArrayData(world, [numpy.arange(10.0)], global_batch=2)
    return mt.Parts(mt.ArrayFunction(function, {"w": numpy.zeros(1)}, mt.optim.SGD(0.1)), mt.Sync(), data)

class Slow(mt.Hook):
    def after_step(self, trainer, step):
        time.sleep(0.05)
        if step.number == 4 and trainer.world.rank == trainer.world.size - 1:
            print("a line", flush=True)
            print("of the last rank", file=sys.stderr, flush=True)
        if step.number == 9 and "fail" in sys.argv:
            raise ValueError("on purpose")

evaluate = mt.Evaluation(6, lambda trainer: {"accuracy": 0.25})
hooks = [mt.StopAtStep(12), mt.Log(), Slow(), evaluate]
if "unknown" in sys.argv:
    hooks = [evaluate, mt.StopWhen("accuracy", at_least=0.2), mt.Log(), Slow()]
mt.Trainer(build, hooks).run()
print("after")
"""


def on_a_terminal(columns: int, *arguments: str, under: Sequence[str] = (), **variables: str) -> tuple[int, str]:
    """Exit code and what came to a terminal of so many columns; `under`: the words of a launcher."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = clean_environment()
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    environment |= {"TERM": "xterm-256color"} | variables
    program = [*under, *arguments] if under else [sys.executable, "-c", PROGRAM, *arguments]
    process = subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 65536):
            output += chunk
    except OSError:  # the process has closed its side
        pass
    finally:
        os.close(ours)
    return process.wait(timeout=HANG_SECONDS), output.decode()


def screen(output: str) -> list[str]:
    """The lines that stand on the screen at the end: carriage returns, lines up, and lines that were cleared."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", output):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1] or 1)
        elif part in ("\x1b[2K", "\x1b[K"):
            lines[row] = ""
        elif not part.startswith("\x1b") and part != "\r":
            lines[row] += part
    return [line.rstrip() for line in lines]


def test_a_bar_on_a_terminal() -> None:
    code, output = on_a_terminal(150)
    assert code == 0, output
    assert output.count("\x1b[2K") > 2  # drawn anew
    lines = [line for line in screen(output) if line]
    assert lines[:2] == ["a line", "of the last rank"]
    assert lines[2:4] == ["step 6: accuracy 0.2500", "step 12: accuracy 0.2500"]
    assert lines[-1] == "after"
    bar = " ".join(lines[4:-1])
    assert re.search(
        r"epoch 3 step\s+12/12 ━+ +100% loss 0.5000 \| lr 0.1 \| [\d,]+ samples/s\s+\| 0:00:00 left", bar
    ), lines
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # the cursor is back


def test_a_bar_without_a_known_end() -> None:
    code, output = on_a_terminal(120, "unknown")
    assert code == 0, output
    assert "epoch 1 step 1 " in output  # and no "of how many" before the end is known
    assert re.search(r"epoch \d+ step (\d+)/\1 ━+ 100% loss 0.5000", "\n".join(screen(output)))


@pytest.fixture
def launcher(tmp_path: Path) -> list[str]:
    """`mpitrain run`, with the program in a file."""
    (tmp_path / "train.py").write_text(PROGRAM)
    return [sys.executable, "-m", "mpitrain", "run", "-n", "2", str(tmp_path / "train.py")]


# A narrow terminal has no room for all of it.
BAR = r"""(?x)epoch\ \d\ step\s+(\d+)/12\ ([╸╺━\ ]{10,})\ ([\d\ ]{3})%
    \ loss\ 0.5000(\ \|\ lr\ 0.1)?(\ \|\ [\d,]+\ samples/s)?\s+\|\ 0:00:0\d\ left"""
END = r"epoch 3 step 12/12 \| loss 0.5000 \| lr 0.1 \| [\d,]+ samples/s \| 0:00:00 left"


@pytest.mark.parametrize("columns", [80, 140])
def test_a_bar_below_what_the_ranks_print(launcher: list[str], columns: int) -> None:
    """The terminal is that of the launcher; a rank has a pipe."""
    code, output = on_a_terminal(columns, under=launcher, NO_COLOR="1")
    assert code == 0, output
    # Each bar has the last line to itself, with no rank in front, and leaves the cursor at the margin.
    drawn = [found for found in re.findall(r"\r\x1b\[K([^\r\n]*)\r(?!\n)", output) if found and found[0] != "\x1b"]
    assert drawn, output
    bars = [re.fullmatch(BAR, bar) for bar in drawn]
    assert all(its and len(its[0]) == columns - 1 and (its[4] or columns == 80) for its in bars), drawn
    shown = [(int(its[1]), int(its[3])) for its in bars if its]
    assert shown == sorted(shown)
    assert all(percent == 100 * step // 12 for step, percent in shown)
    # What stays is whole lines, each with its ranks; the ranks may come in any order.
    split = [re.fullmatch(r"\[(0,1|0|1)\] (.*)", line) for line in screen(output) if line]
    assert all(split), output
    by_rank = {rank: [line[2] for line in split if line and rank in line[1]] for rank in "01"}
    assert by_rank["0"][:2] == ["step 6: accuracy 0.2500", "step 12: accuracy 0.2500"], output
    assert re.fullmatch(END, by_rank["0"][2]) and by_rank["0"][3:] == ["after"], output
    assert sorted(by_rank["1"]) == ["a line", "after", "of the last rank"], output


def test_no_bar_below_a_launcher_at_a_dumb_terminal(launcher: list[str]) -> None:
    code, output = on_a_terminal(120, under=launcher, TERM="dumb")
    assert code == 0, output
    assert "\x1b" not in output
    assert re.search(r"^\[0\] epoch 1 step 1/12 \| loss 0.5000", output, re.M), output


def test_an_error_below_a_launcher_takes_the_bar_away(launcher: list[str]) -> None:
    code, output = on_a_terminal(120, "fail", under=launcher)
    assert code != 0
    assert "━" in output
    assert not any("━" in line for line in screen(output)), screen(output)


@pytest.mark.nightly
def test_an_error_leaves_the_terminal_as_it_was() -> None:
    code, output = on_a_terminal(80, "fail")
    assert code == 1
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    assert [line for line in screen(output) if line][-1] == "ValueError: on purpose"


# What a program of a rank inherits, whose launcher prints to a terminal.
OF_A_RANK = {"_MPITRAIN_JOB": "1a2b3c4d", "_MPITRAIN_COLUMNS": "120", "_MPITRAIN_RANK_PID": "1"}


@pytest.mark.parametrize("inherited", [{}, OF_A_RANK], ids=["alone", "started by a rank"])
def test_plain_lines_in_a_pipe(inherited: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "unknown"],
        env=clean_environment() | inherited,
        timeout=HANG_SECONDS,
        check=True,
        capture_output=True,
        text=True,
    )
    assert re.fullmatch(r"epoch 1 step 1 \| loss 0.5000 \| lr 0.1 \| [\d,]+ samples/s", done.stdout.splitlines()[0])
    assert "step 6: stopped, accuracy is 0.25" in done.stdout
    assert "\x1b" not in done.stdout and "\r" not in done.stdout
    assert done.stderr == "of the last rank\n"


def test_a_bar_of_a_server(tmp_path: Path) -> None:
    """Its terminal is that of `mpitrain serve`."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("mt.Sync()", "mt.ParameterServer()"))
    command = [sys.executable, "-m", "mpitrain", "serve", "--port", str(free_port())]
    command += ["--hosts", "localhost/cpu", str(script)]
    code, output = on_a_terminal(120, under=command, XDG_STATE_HOME=str(tmp_path))
    assert code == 0, output
    assert output.count("\x1b[2K") > 2  # drawn anew
    assert any("12/12 ━" in line for line in screen(output)), output
