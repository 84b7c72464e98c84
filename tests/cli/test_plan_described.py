"""`mpitrain plan` without a script: its tables, its files, and what it refuses before it writes anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mpitrain.cli import main

QUICK = ["plan", "--parameters", "1e5", "--ranks", "1,2,4"]


def test_table_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    argv = [*QUICK, "--algorithms", "ring,direct", "--spread", "0.1", "--seeds", "2", "--steps", "2"]
    pytest.importorskip("matplotlib")
    assert main([*argv, "--json", str(rows), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].strip() == "1 a node, 0.936 Gbit/s, 50 us"
    assert out.splitlines()[1].split()[:3] == ["ranks", "algorithm", "step"]
    assert [line.split()[:2] for line in out.splitlines()[2:8]] == [
        [number, name] for number in "124" for name in ("ring", "direct")
    ]
    content = json.loads(rows.read_text())
    assert content["machines"] == "1 a node, 0.936 Gbit/s, 50 us"
    assert content["settings"]["spread"] == 0.1
    assert content["answers"] == out.splitlines()[8:]
    for row in content["rows"]:
        assert row["lowest_seconds"] < row["step_seconds"] < row["highest_seconds"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_rounds_end_with_their_loss(capsys: pytest.CaptureFixture[str]) -> None:
    for steps, text in ((50, "60 rounds, 3 seeds)"), (40, "rounds of 40 steps: none of them is known to lose nothing")):
        assert main([*QUICK, "--sync-every", str(steps)]) == 0
        assert capsys.readouterr().out.splitlines()[-1].endswith(text)


def test_nothing_may_be_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--spread", "0.0", "--latency", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[0].strip() == "1 a node, 0.936 Gbit/s, 0 us"


def test_a_file_of_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = tmp_path / "lab.toml"
    lab.write_text("[nodes]\ncount = 2\ngbit = 1\nranks = 2\n")
    assert main([*QUICK, "--machines", str(lab)]) == 0
    assert str(lab) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "numbers", "answer"),
    [
        (
            ["--servers", "2,1", "--workers", "3", "--parameters", "1e5", "--rounds", "2"],
            [("num_servers", 1), ("num_servers", 2)],
            "3 workers: 90% of the most samples/s with ",
        ),
        (
            ["--every", "60s,0.5min", "--mtbf", "16h", "--work", "2h", "--seeds", "3"],
            [("every_seconds", 30), ("every_seconds", 60)],
            "a failure every 3600 s on average",
        ),
    ],
)
def test_other_actions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], numbers: list[tuple[str, int]], answer: str
) -> None:
    rows = tmp_path / "rows.json"
    assert main(["plan", *words, "--json", str(rows)]) == 0
    content = json.loads(rows.read_text())
    assert [(name, row[name]) for row, (name, _) in zip(content["rows"], numbers, strict=True)] == numbers
    assert content["answers"][0].startswith(answer)
    assert capsys.readouterr().out.endswith("\n".join(content["answers"]) + "\n")


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """The command ends with 2 and this text, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.toml").write_text("[nodes]\ncount = 8\ngbit = 1\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "wrong.toml").write_text("[nodes]\ncount = 8\ngbit = 0\n")

    def refuses(words: list[str], problem: str) -> None:
        try:
            code: object = main([words[0], "--json", "rows.json", *words[1:]])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        assert (code, out, problem in err) == (2, "", True), err
        assert not (tmp_path / "rows.json").exists()

    return refuses


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--servers", "0"], "0 is not a whole number of at least 1"),
        (["--servers", "1", "--mode", "bound"], "there is no mode 'bound' in simulations; known: sync, bounded, async"),
        (
            ["--machines", "lab.toml", "--servers", "4,1", "--workers", "5"],
            "4 servers and 5 workers are 9 ranks; lab.toml has room for 8. Take fewer",
        ),
        (["--mtbf", "2000h", "--every", "0s"], "'0s' is not from 1e-06s to 1e+12s"),
        (["--mtbf", "2000h", "--compute", "1s"], "--compute: not together with --mtbf"),
        (["--servers", "1", "--codec", "int8", "--steps", "3"], "--codec, --steps: not together with --servers"),
        (["--mode", "sync"], "--mode: needs --servers"),
        (["--save", "3s", "--nodes", "2"], "--nodes, --save: needs --mtbf"),
        ([], "name a script, as in `mpitrain plan train.py`; or describe a training and its machines"),
        (["-n", "4", "--compute", "1s"], "-n: without a script, nothing is started; name one, or leave it out"),
        (["--compute", "1s", "--writes", "--hosts", "a"], "--hosts, --writes: without a script, nothing is started"),
        (["--compute", "1s", "train.py"], "--compute: the training is described where no script is named"),
        (["--mtbf", "2000h", "--every", "1e7s"], "would take more than 100 times its work"),
        ([*QUICK[1:], "--ranks", "0"], "0 is not a whole number of at least 1"),
        ([*QUICK[1:], "--ranks", "2,x"], "x is not a whole number of at least 1"),
        ([*QUICK[1:], "--compute=-1s"], "'-1s' is not from 1e-06s"),
        ([*QUICK[1:], "--compute", "nans"], "'nans' is not a number with a unit, as in 10s or 1.5h; units: us, ms, s,"),
        ([*QUICK[1:], "--compute", "0.3"], "'0.3' is not a number with a unit"),
        ([*QUICK[1:], "--bucket", "4MB"], "'4MB' is not a number with a unit, as in 25MiB; units: KiB, MiB, GiB"),
        ([*QUICK[1:], "--gbit", "1"], "--gbit is now --link, with a unit: --link 1Gbit/s"),
        ([*QUICK[1:], "--spread", "10"], "10 is not a number from 0 to 2; a spread of 0.1 is about 10 %"),
        ([*QUICK[1:], "--spread", "-0.1"], "-0.1 is not a number from 0 to 2"),
        ([*QUICK[1:], "--algorithms", "rign"], "there is no allreduce algorithm 'rign'; known: "),
        ([*QUICK[1:], "--algorithms", "ring,native"], "native is MPI's own allreduce"),
        ([*QUICK[1:], "--codec", "int9"], "the codec 'int9' cannot be simulated; known: none, bf16"),
        ([*QUICK[1:], "--codec", "int8:3"], "int8 takes no setting"),
        ([*QUICK[1:], "--machines", "missing.toml"], "missing.toml cannot be read"),
        (
            [*QUICK[1:], "--machines", "lab.toml", "--link", "1Gbit/s"],
            "--machines, --link: a file has all of it; give one",
        ),
        ([*QUICK[1:], "--machines", "lab.toml", "--ranks", "2,9"], "lab.toml has room for 1 to 8"),
        ([*QUICK[1:], "--machines", "wrong.toml"], "wrong.toml, line 3: gbit is 0; it must be a number from 1e-06 to"),
        ([*QUICK[1:], "--latency=-1s"], "'-1s' is not from 1e-06s"),
        ([*QUICK[1:], "--plot", "folder"], "folder cannot be written: it is a folder; give the name of a file"),
        ([*QUICK[1:], "--plot", "nowhere/picture.png"], "there is no folder nowhere; make it first"),
    ],
)
def test_wrong_use(refused: Callable[..., None], words: list[str], problem: str) -> None:
    refused(["plan", *words], problem)


def test_a_picture_without_matplotlib(refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before the simulation."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    refused([*QUICK, "--plot", "picture.png"], "the picture needs matplotlib")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["simulate", "steps"], "mpitrain plan --machines FILE, without a script; --servers N,N asks for the table of"),
        (["testbed", "up"], "scripts/testbed of a checkout"),
        (["chaos"], "scripts/testbed chaos of a checkout"),
    ],
)
def test_commands_of_other_names(refused: Callable[..., None], words: list[str], says: str) -> None:
    refused(words, f"{words[0]} is now {says}")
