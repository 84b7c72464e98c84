"""The command itself: what it lists, and what it does not load."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpitrain
import test_docs_quotes
from jobs import REPOSITORY, run_command
from mpitrain.cli import COMMANDS, main

# What a person sees at once.
MOST_LINES = 42


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"mpitrain {mpitrain.__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Also bare: by what they are for, with examples, in one screen."""
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"^  {name}\s", out, re.M)
    assert main([]) == 0
    assert capsys.readouterr().out == out
    lines = out.splitlines()
    assert len(lines) <= MOST_LINES and max(map(len, lines[:-1])) <= 80


def has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command has one line in the list, and a help of one screen that begins with this line and names a page."""
    module = importlib.import_module(COMMANDS[name])
    assert module.HELP.strip() == module.HELP
    assert "\n" not in module.HELP
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    text = capsys.readouterr().out
    assert f"{module.HELP[0].upper()}{module.HELP[1:]}." in " ".join(text.split())
    *lines, last = text.splitlines()
    assert len(lines) < MOST_LINES and max(map(len, lines)) <= 80
    assert Path(last.removeprefix("More: ")).is_file()


def refuses_an_unknown_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([name, "--no-such-option"])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "error:" in lines[0] and lines[1].startswith(f"mpitrain {name}")


CONTRACT = [has_help, refuses_an_unknown_option]


@pytest.mark.parametrize("holds", CONTRACT, ids=lambda holds: holds.__name__)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command(name: str, holds: Any, capsys: pytest.CaptureFixture[str]) -> None:
    holds(name, capsys)


def test_a_command_that_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new command inherits the tests of every command and of the documents, and can fail them."""
    monkeypatch.syspath_prepend(tmp_path)
    source = (REPOSITORY / "tests/added/greet.py").read_text()
    for module, text in (("greet_somebody", ', help="in capitals"'), ("greet_silently", "")):
        (tmp_path / f"{module}.py").write_text(source.replace(', help="in capitals"', text))
        monkeypatch.setitem(COMMANDS, "greet", module)
        assert main(["greet", "you", "--loud"]) == 3
        assert capsys.readouterr().out == "HELLO you\n"
        for holds in CONTRACT:
            holds("greet", capsys)
        if text:
            test_docs_quotes.test_every_option_says_what_it_is("greet")
        else:
            with pytest.raises(AssertionError):
                test_docs_quotes.test_every_option_says_what_it_is("greet")
    with pytest.raises(AssertionError):  # docs/reference/status.md does not have it
        test_docs_quotes.test_status_has_every_command_and_no_other()
    monkeypatch.delitem(COMMANDS, "greet")
    test_docs_quotes.test_status_has_every_command_and_no_other()


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["rnu", "-n", "2"])
    assert "there is no command 'rnu'; did you mean run?; known: new, run, " in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["xyzzy"])
    assert "there is no command 'xyzzy'; known: new, run, " in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--version"], ["run", "--help"], ["check-cluster", "--explain", "all"]])
def test_a_full_disk_for_the_output(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "mpitrain", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (1, "mpitrain: the output cannot be written: No space left on device\n")


def test_two_dashes_before_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--", "run", "--help"])
    assert capsys.readouterr().out.startswith("usage: mpitrain run ")


def test_a_help_loads_no_array_and_no_mpi_library() -> None:
    """Nor what a command needs only while it runs: the time of a help is that of its imports."""
    heavy = ("numpy", "mpi4py", "cupy", "torch", "jax", "importlib.metadata", "hashlib", "asyncio", "mpitrain.launch")
    source = f"""\
import sys
from mpitrain.cli import main
main(["--help"])
print([name for name in {heavy} if name in sys.modules])"""
    job = run_command([sys.executable, "-c", source], timeout=60.0)
    assert job.stdout.splitlines()[-1] == "[]", job.output


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run", "-np", "0", "train.py"], "argument -n/-np: '0' is not a whole number above 0"),
        (
            ["bench", "-hosts", "a,b"],
            "-hosts is another launcher's; here it is --hosts A,B or -H A,B, with --ppn N for",
        ),
        (
            ["run", "--machinefile", "f", "x.py"],
            "--machinefile is another launcher's; here it is --hostfile FILE, or an",
        ),
        (["run", "--hostfile", "/nowhere", "x.py"], "--hostfile: /nowhere cannot be read: No such file or directory"),
        (["run", "-H", "a", "--hostfile", "/dev/null", "x.py"], "argument --hostfile: /dev/null names no host"),
        (["run", "--nproc-per-node=4", "x.py"], "--nproc-per-node is another launcher's; here it is --ppn N\n"),
        (["verify", "-ppn", "1", "x.py"], "-ppn is another launcher's; here it is --ppn N\n"),
        (["run", "--num-nodes", "2", "x.py"], "--num-nodes is another launcher's; here it is --nnodes N\n"),
        (["bench", "--nnodes", "2"], "--nnodes is another launcher's; here it is --hosts A,B, or --ppn N for"),
        (["run", "--restarts", "2", "x.py"], "--restarts is now --max-restarts N\n"),
        (["run", "--elastic", "2:4", "x.py"], "--elastic is now --nnodes MIN:MAX\n"),
        (["run", "--min-nodes=2", "x.py"], "--min-nodes is now the MIN of --nnodes MIN:MAX\n"),
        (["run", "--resume", "1a2b3c4d"], "--resume is now another command: mpitrain resume JOB\n"),
        (["join", "1a2b3c4d", "--hosts", "a"], "join is now mpitrain scale JOB +HOST\n"),
        (["leave", "1a2b3c4d", "--hosts", "a"], "leave is now mpitrain scale JOB -HOST\n"),
        (["run", "--hots", "a,b", "x.py"], "unknown argument --hots; did you mean --hosts?"),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["run", "-n", "2"], ["verify"], ["run", "-n", "2", "-m"]])
def test_a_script_is_asked_for(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    said = f"mpitrain {argv[0]}: name a script, as in `mpitrain run -n 4 train.py`, or -m MODULE\n"
    assert capsys.readouterr().err == said
