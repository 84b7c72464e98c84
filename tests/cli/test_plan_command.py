"""`mpitrain plan` of scripts: measured from outside, planned with made-up times, and refused."""

from __future__ import annotations

import importlib.util
import json
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import Job, run_command
from mpitrain.cli import main
from mpitrain.errors import DataError
from mpitrain.forecast.measured_steps import HostTimes, PartTimes, read_times
from mpitrain.last_word import keep_word, last_word
from mpitrain.profile import fingerprint, to_json

TRAINER = """
import argparse, sys, time
import numpy
import mpitrain as mt

parser = argparse.ArgumentParser()
parser.add_argument("--milliseconds", type=float, required=True)
parser.add_argument("--fault", default="")
options = parser.parse_args()
gradients = {name: numpy.ones(250_000, numpy.float32) for name in ("first", "last")}
made = []

def function(_, batch, on_gradient):
    made.append(len(batch))
    if options.fault == "crash" and len(made) == 3:
        raise RuntimeError("the third step")
    seconds = len(batch) * options.milliseconds / 1000
    time.sleep(seconds)
    on_gradient("last", gradients["last"])
    time.sleep(seconds)
    on_gradient("first", gradients["first"])
    return 0.0

def build(world):
    assert world.size == 1
    data = mt.data.ArrayData(world, numpy.zeros((4096, 1), numpy.float32), global_batch=8)
    adapter = mt.ArrayFunction(function, {name: one.copy() for name, one in gradients.items()}, mt.optim.SGD(0.1))
    return mt.Parts(adapter, mt.Sync(), data)

record = mt.Record([mt.writers.JsonLines("record")])
mt.Trainer(build, [mt.StopAtStep(10**6), record, mt.Checkpoint("saved", 1)]).run()
raise AssertionError("plan must end the script before")
"""

LOOP = """
import time
import torch
import mpitrain.torch as mtt

model = torch.nn.Linear(1000, 500)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4096, 1000)), batch_size=64)
model, optimizer, data = mtt.prepare(model, optimizer, data)
for epoch in range(1000):
    for (x,) in data:
        optimizer.zero_grad()
        time.sleep(0.05)
        model(x).square().mean().backward()
        optimizer.step()
        mtt.save(model.state_dict(), "model.pt")
raise AssertionError("plan must end the script before")
"""


def profile(folder: Path, *hosts: str, ppn: int = 1) -> Path:
    """A profile of these hosts, with links of 100 MB/s."""
    rates = {f"{operation}_bytes_per_second": 9e9 for operation in ("encode", "add", "decode")}
    measured = {
        "latency_between_nodes_us": 50.0,
        "link_bytes_per_second": [[0.0 if a == b else 1e8 for b in hosts] for a in hosts],
        "copy_bytes_per_second": 5e9,
        "add_bytes_per_second": 4e9,
        "codecs": {"bf16": rates},
        "native_below_bytes": 0,
    }
    path = folder / "cluster.json"
    names = [host for host in hosts for _ in range(ppn)]
    here = fingerprint(names, [node for node in range(len(hosts)) for _ in range(ppn)], "any")
    path.write_text(to_json(measured, hosts, here, {}))
    return path


def plan(folder: Path, *words: str, source: str = TRAINER, options: tuple[str, ...] = ()) -> Job:
    """Plan a script in a folder, with a profile of this machine and another one."""
    folder.joinpath("train.py").write_text(source)
    given = profile(folder, socket.gethostname(), "other")
    command = [sys.executable, "-m", "mpitrain", "plan", "--profile", given.name, *options, "train.py", *words]
    return run_command(command, cwd=folder, env={"XDG_STATE_HOME": str(folder / "state")})


def nothing_written(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} <= {"train.py", "cluster.json"}


def test_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured here with memory and codecs, for neighbours on links of 100 MB/s."""
    tmp_path.joinpath("train.py").write_text(TRAINER)
    command = [sys.executable, "-m", "mpitrain", "plan", "--link", "800Mbit/s", "--ranks", "1,2", "--steps", "6"]
    env = {"XDG_STATE_HOME": str(tmp_path / "state"), "MPITRAIN_PROFILE": ""}
    job = run_command([*command, "--json", "plan.json", "train.py", "--milliseconds", "4"], cwd=tmp_path, env=env)
    assert (job.code, job.left) == (0, []), job.output
    assert not (tmp_path / "record").exists()
    assert not (tmp_path / "saved").exists()
    one, *two = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert (one["num_ranks"], one["speedup"], one["wire_bytes"]) == (1, 1.0, 0.0)
    assert one["step_seconds"] >= 0.064  # 8 samples sleep for 4 ms each, twice
    assert {row["num_ranks"] for row in two} == {2}
    plain = next(row for row in two if row["codec"] == "none" and row["sync_every"] == 1)
    # 2 MB at 100 MB/s: 20 ms, of which the last bucket, here the only one, is not hidden.
    assert plain["step_seconds"] >= 0.032 + 0.020
    assert plain["wire_bytes"] == 2_000_000
    said = job.stdout.splitlines()
    (place,) = (
        number for number, line in enumerate(said) if line.startswith("With these 0.5 M parameters, 0.8 Gbit/s")
    )
    assert " and 8 samples a step, 2 ranks are " in said[place]
    commands = [line.removeprefix("2 ranks: ") for line in said[:place]]
    assert plain["command"] in commands or "MPITRAIN_COMPRESSION" in commands[-1]
    # The script makes a million steps with a Trainer, so what lost nothing in 3000 is offered.
    assert said[-1].startswith("2 ranks: add MPITRAIN_COMPRESSION=int8 before the command: ") or (
        said[-1].startswith("2 ranks: add mt.DiLoCo(") and " as the strategy of mt.Parts(): " in said[-1]
    )
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    kept = last_word("plan", tmp_path / "train.py")
    assert kept is not None
    assert kept.arguments == ["--milliseconds", "4"]
    assert kept.lines == [line.rstrip() for line in kept.lines]
    assert kept.lines[-1] == said[-1]
    line = next(line for line in said if line.startswith("1 rank: "))
    assert line == "1 rank: mpitrain run -n 1 --hosts localhost train.py --milliseconds 4"


def made_up(num_ranks: int) -> PartTimes:
    """Steps of 8 samples take 64 ms, and the last of two gradients is ready after half of it."""
    seconds = 0.064 / num_ranks
    return PartTimes(num_ranks, 8 / num_ranks, seconds, (seconds, seconds / 2), seconds, seconds, 10)


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which neither the script nor this machine is measured."""
    own = socket.gethostname()

    def measured(_request: object, _path: Path, _steps: int, ranks: list[int], *_: object) -> list[HostTimes]:
        parts = tuple(map(made_up, ranks))
        sizes = (("first", 1_000_000), ("last", 1_000_000))
        return [HostTimes(own, sizes, parts, False, 10**8, 2.0, 1.0, {})]

    def bench(_arguments: object, path: Path) -> None:
        content = json.loads(profile(path.parent, own).read_text())
        content["measured"] |= {"link_bytes_per_second": None, "latency_between_nodes_us": None}
        path.write_text(json.dumps(content))

    monkeypatch.setattr("mpitrain.cli.plan._measured", measured)
    monkeypatch.setattr("mpitrain.cli.plan._bench", bench)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MPITRAIN_PROFILE", raising=False)
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("train.py").write_text(TRAINER)
    return tmp_path


def test_the_lines_of_several_ranks_on_a_node(
    planned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The profile is of 4 ranks on 2 nodes, so only a line with as many names it."""
    own = socket.gethostname()
    monkeypatch.setenv("MPITRAIN_PROFILE", profile(planned, own, "other", ppn=2).name)
    assert main(["plan", "--ppn", "2", "--ranks", "1,2,3,4", "train.py", "--milliseconds", "4"]) == 0
    said = capsys.readouterr().out.splitlines()
    lines = {line.partition(" ")[0]: line.partition(": ")[2] for line in said if ": MPITRAIN" in line}
    assert {number: "MPITRAIN_PROFILE=cluster.json" in line for number, line in lines.items()} == {
        "1": False, "2": False, "3": False, "4": True,
    }  # fmt: skip
    assert f"--hosts {own},other --ppn 2 -n 3 train.py" in lines["3"]
    assert f"--hosts {own},other --ppn 2 train.py" in lines["4"]
    words = shlex.split(lines["2"])
    begin = words.index("mpitrain")
    for setting in words[:begin]:
        monkeypatch.setenv(*setting.split("=", 1))
    assert words[begin + 1] == "run" and main(["run", "--dry-run", *words[begin + 2 :]]) == 0
    assert "-n 2 " in capsys.readouterr().out


def test_without_a_profile(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks", "1,2", "train.py", "--milliseconds", "4"]) == 0
    out = capsys.readouterr().out
    assert "assumed, because there is no --profile, --link or second host: links of 0.936 Gbit/s" in out
    assert "--hosts HOST1,HOST2 --ppn 1 train.py --milliseconds 4" in out


def test_the_line_to_add(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is last, also in what the dashboard shows; --total-steps says how many steps will be made."""
    words = ["plan", "--ranks", "1,2", "--link", "50Mbit/s", "--json", "plan.json"]
    for steps, setting in (([], "bf16"), (["--total-steps", "100"], "bf16")):
        assert main([*words, *steps, "train.py", "--milliseconds", "4"]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(f"2 ranks: add MPITRAIN_COMPRESSION={setting} before the command: ")
        assert ("only for trainings of at least 60 steps (--total-steps)" in last) == (not steps)
        assert json.loads((planned / "plan.json").read_text())["answers"][-1] == last
        kept = last_word("plan", planned / "train.py")
        assert kept is not None and kept.lines[-1] == last


def test_on_machines_that_a_file_describes(
    planned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second node computes for three times as long, and the links have 0.4 Gbit/s."""
    planned.joinpath("lab.toml").write_text(
        "[nodes]\ncount = 2\ngbit = 0.4\n[memory]\nadd_gbyte = 3\n[[unequal]]\nnodes = [1]\nspeed = 0.3333\n"
    )
    monkeypatch.setenv("MPITRAIN_PROFILE", "of another cluster")
    assert main(["plan", "--machines", "lab.toml", "--json", "plan.json", "train.py", "--milliseconds", "4"]) == 0
    content = json.loads((planned / "plan.json").read_text())
    assert content["machines"] == "lab.toml"
    assert {row["num_ranks"] for row in content["rows"]} == {1, 2}  # as many as the file has room for
    plain = next(row for row in content["rows"] if row["num_ranks"] == 2 and row["way"] == "ring")
    # 4 samples sleep for 4 ms each, twice, on the slow node three times as long; 2 MB at 50 MB/s are 40 ms.
    assert 3 * 0.032 + 0.040 <= plain["step_seconds"] < 3 * 0.032 + 0.050
    out = capsys.readouterr().out
    assert f"lab.toml; {socket.gethostname()} has speed 1" in out
    assert "0.4 Gbit/s and 8 samples a step" in out


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_a_prepared_loop(tmp_path: Path) -> None:
    job = plan(tmp_path, source=LOOP, options=("--json", "plan.json", "--steps", "4", "--ranks", "2"))
    assert job.code == 0, job.output
    assert not (tmp_path / "model.pt").exists()
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert {row["wire_bytes"] for row in rows if row["codec"] == "none" and row["sync_every"] == 1} == {500_500 * 4}
    # The loop does not say how many steps it makes.
    last = job.stdout.splitlines()[-1]
    assert "nothing to add" in last or "; only for trainings of at least " in last, job.output
    assert next(row for row in rows if row["way"] == "DiLoCo(50)")["advice"] == (
        "strategy mt.DiLoCo(sync_every=50, outer=mt.optim.SGD(1.0, momentum=0.8, nesterov=True)) in the script"
    )


VIEWS = """
        from mpitrain.launch import live_jobs, roster
        job = mt.init().context.job
        answer, = (one.answer for one in live_jobs.find()[0] if one.answer["job"] == job)
        print(answer["script"], answer["arguments"], *(one["script"] for one in roster.jobs() if one["id"] == job))
        raise RuntimeError("the third step")
"""


def test_a_script_that_is_not_python(tmp_path: Path) -> None:
    job = plan(tmp_path, source="import mpitrain as mt\ndef f(:\n")
    assert job.code == 1, job.output
    assert "def f(:" in job.stderr and "SyntaxError: invalid syntax" in job.stderr
    assert "rehearse.py" not in job.output


def test_a_script_that_fails(tmp_path: Path) -> None:
    """The views show it as it was named, not by the words with which the plan starts it."""
    words = ["--milliseconds", "1", "--fault", "crash"]
    job = plan(tmp_path, *words, source=TRAINER.replace('        raise RuntimeError("the third step")', VIEWS))
    assert job.code == 1, job.output
    assert "train.py failed with exit code 1 before its steps" in job.stderr.splitlines()[-1], job.output
    assert "the third step" in job.stderr
    assert f"train.py {words} {['train.py', *words]}" in job.stdout, job.output
    assert nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (None, "train.py never called mpitrain"),
        ([], "train.py made no step on here"),
        ([0.1], "train.py ended after 1 step, too few to measure on here"),
        (
            [0.1] * 5 + [0.21] * 5,
            "the steps of train.py differ too much on here to plan with them: of 10 steps with 8 ",
        ),
        ([0.1] * 5 + [0.19] * 5, ""),
    ],
)
def test_times_that_cannot_be_planned_with(tmp_path: Path, steps: list[float] | None, expected: str) -> None:
    path = tmp_path / "times.json"
    entry: dict[str, Any] = {
        "host": "here", "parameters": [["p", 4000]], "num_steps": len(steps or []), "is_fixed": False,
        "memory_bytes": 1, "cores": 2.0, "busy_cores": 1.0, "sums": {}, "front": "", "total_steps": 0, "parts": [],
    }  # fmt: skip
    if steps:
        timed = [{"seconds": seconds, "ready": [0.0]} for seconds in steps]
        entry["parts"] = [{"ranks": 1, "samples": 8.0, "steps": timed}]
    if steps is not None:
        path.write_text(json.dumps([entry]))
    if not expected:
        assert len(read_times(path, "train.py")) == 1
        return
    with pytest.raises(DataError, match=expected):
        read_times(path, "train.py")


def test_wrong_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before the script runs."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    foreign = str(profile(tmp_path, "node1", "node2"))
    for words, expected in [
        ([str(script)], "there is no script"),
        (["--profile", foreign, str(script)], f"it has node1, node2, and this machine is {socket.gethostname()}"),
        (["--profile", foreign, "--link", "1Gbit/s", str(script)], "both have the rate of the links"),
        (["--ppn", "2", "--profile", foreign, str(script)], "has 1 ranks on each node, and the plan 2"),
        (["--machines", "lab.toml", "--profile", foreign, str(script)], "--machines, --profile: the file has all of"),
        (["--machines", "lab.toml", str(script)], "lab.toml cannot be read"),
        (["--steps", "1", str(script)], "--steps is 1; of a script, at least"),
        (["-n", "4", str(script)], "give the numbers of ranks to plan with --ranks"),
        (["--json", str(tmp_path), str(script)], "cannot be written"),
        (["--hosts", f"192.0.2.1,{socket.gethostname()}", str(script)], "the first host must be this machine"),
        (["--hosts", f"{socket.gethostname()},192.0.2.1", "--ranks", "2,4", str(script)], "2 hosts with --ppn 1 have"),
        (["--profile", str(tmp_path / "none"), str(script)], "cannot be read: No such file"),
    ]:  # fmt: skip
        assert main(["plan", *words]) == 2, words
        assert expected in capsys.readouterr().err
        script.write_text("raise AssertionError('it must not run')")
    assert nothing_written(tmp_path)


def test_the_plan_is_kept_for_each_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert last_word("plan", tmp_path / "a.py") is None
    keep_word("plan", tmp_path / "a.py", ["--epochs", "5"], ["a table"])
    keep_word("plan", tmp_path / "b.py", [], ["another"])
    kept = last_word("plan", tmp_path / "a.py")
    assert kept is not None
    assert (kept.script, kept.arguments, kept.lines) == (str(tmp_path / "a.py"), ["--epochs", "5"], ["a table"])
