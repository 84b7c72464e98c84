"""What each of several servers has: shown before a job by `--show`, and while it runs by `mpitrain ps JOB`."""

from __future__ import annotations

import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from commands import Commands, processes
from counting import NUM_SAMPLES
from hands import Served, lines_of, mean, of, say, trained
from listing import line_with, table_in, table_with, tokens_of

import mpitrain as mt
from jobs import HANG_SECONDS, run_command
from mpitrain.cli import workers_table
from mpitrain.launch import served

HOST = socket.gethostname()

# 2 MiB in w, 1 MiB in v. What comes after the Trainer writes a file.
SCRIPT = """
import sys
from pathlib import Path
import numpy
import mpitrain as mt

print("reads the data", flush=True)

def zero(parameters, batch, on_gradient):
    for name, value in parameters.items():
        on_gradient(name, numpy.zeros_like(value))
    return 1.0

def build(world):
    assert world.size == 1
    data = mt.data.ArrayData(world, numpy.arange(24), global_batch=8)
    shapes = {"w": (512, 1024), "b": (0,), "v": (256, 1024)}
    values = {name: numpy.zeros(shape, "float32") for name, shape in shapes.items()}
    return mt.Parts(mt.ArrayFunction(zero, values, mt.optim.SGD(1.0)), mt.ParameterServer("async"), data)

class Tell(mt.Hook):
    def after_step(self, trainer, step):
        if step.number % 10 == 0:
            print("step", step.number, flush=True)

trainer = mt.Trainer(build, [mt.StopAtStep(10**9), Tell()])
Path(sys.argv[1]).touch()
trainer.run()
"""
# Of three servers, the first two have a part of w each. The third one has its end, and v.
THIRD = "1.0 MB of parameters; whole tensors: {}, in part: {}, the largest: {} with 1.0 MB"
LINES = [THIRD.format(0, 1, "w"), THIRD.format(0, 1, "w"), THIRD.format(1, 0, "v")]


def test_show_runs_the_script_up_to_its_trainer(tmp_path: Path) -> None:
    script, trains = tmp_path / "train.py", tmp_path / "trains"
    script.write_text(SCRIPT)
    port = 5100
    words = {
        "serve": ["--servers", "3", "--port", str(port)],
        "run": ["-n", "5", "--servers", "3", "--hosts", "localhost"],
    }
    for command, options in words.items():
        job = run_command([sys.executable, "-m", "mpitrain", command, *options, "--show", str(script), str(trains)])
        assert job.code == 0, job.output
        ports = [f", port {port + number}" if command == "serve" else "" for number in range(3)]
        shown = [f"server {number}{where}: {LINES[number]}" for number, where in enumerate(ports)]
        assert job.stdout.splitlines()[-3:] == shown, job.output
        assert "reads the data" not in job.stdout
        said = r"mpitrain: the script runs up to its Trainer, .* nothing is trained\nreads the data\n"
        assert re.match(said, job.stderr), job.output
        assert job.left == []
    assert not trains.exists()


# A child that goes on, then what the script does.
CHILD = "import os, signal, subprocess, time; subprocess.Popen(['sleep', '1000']); "
SHOWS = (
    "from mpitrain.launch import served; served._MOST_SIZES_SECONDS = {}; served.show_sizes(['-c', {!r}], ['a', 'b'])"
)
UNKNOWN = "LaunchError: how the servers divide the parameters is not known: {}. Once it runs, `mpitrain ps JOB` shows"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("print(5)", UNKNOWN.format("the script has ended without a Trainer")),
        ("raise SystemExit(3)", UNKNOWN.format("the script ended with exit code 3 before it had one with Param.*")),
        ("os.abort()", UNKNOWN.format("the script was killed by signal 6 before it had one with ParameterServer")),
        ("time.sleep(1000)", UNKNOWN.format("the script has made no Trainer within 3 s")),
        ("os.kill(os.getppid(), signal.SIGINT); time.sleep(2000)", "KeyboardInterrupt"),
    ],
    ids=["ended", "failed", "killed", "timeout", "Ctrl-C"],
)
def test_a_script_without_sizes_leaves_no_process(code: str, problem: str) -> None:
    seconds = 3.0 if "(1000)" in code else HANG_SECONDS
    job = run_command([sys.executable, "-c", SHOWS.format(seconds, CHILD + code)])
    assert job.code != 0 and re.search(problem, job.stderr), job.output
    assert job.left == []


def test_a_script_with_a_thread_a_child_and_odd_names(tmp_path: Path) -> None:
    """It ends at its Trainer all the same, and what it has printed is not lost."""
    script = tmp_path / "train.py"
    begins = "import subprocess, threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"
    begins += "subprocess.Popen(['sleep', '1000'])\nprint('a line', end='')\n"
    script.write_text(begins + SCRIPT.replace('"w"', r'"a\u2028b\x1cc\nd"'))
    command = [sys.executable, "-m", "mpitrain", "serve", "--servers", "3", "--show", str(script), str(tmp_path / "no")]
    job = run_command(command)
    assert job.code == 0, job.output
    lines = [line.replace("largest: w", "largest: a?b?c?d") for line in LINES]
    shown = [f"server {number}, port {5000 + number}: {line}" for number, line in enumerate(lines)]
    assert job.stdout.split("\n")[-4:] == [*shown, ""], job.output
    assert "a line" in job.stderr
    assert job.left == []


def test_one_server_has_all(capfd: pytest.CaptureFixture[str]) -> None:
    """So nothing is run."""
    served.show_sizes(["-c", "print(5)"], ["a"])
    assert capfd.readouterr() == ("", "")


def test_the_table_of_servers() -> None:
    """24 float64 are divided into 12 and 12. A worker pulls and pushes once."""
    served = Served(1, mt.ParameterServer("async"), num_servers=2)
    with trained(served, 1) as (worker,), lines_of(worker, served) as (line,):
        job = worker.pull()
        say(line, "pull", version=-1, at_least=0, **of(worker, job))
        assert line.receive(60).kind == "parameters"  # type: ignore[union-attr]
        say(line, "push", [mean(job)[:12]], **of(worker, job))
        shards = served.strategy._server._shards  # type: ignore[union-attr]
        worker.push(job, mean(job)[:12])
    of_both = {"num_bytes": 96, "num_whole": 0, "num_cut": 1, "largest": "count", "largest_bytes": 96}
    of_both |= {"bytes_in": 96, "bytes_out": 96}
    assert NUM_SAMPLES * 8 == 2 * 96
    names = [f"server {number} on {HOST}" for number in range(2)]
    assert shards.parts() == [{"name": name, **of_both} for name in names]
    nothing = {"workers": [], "joined": 0, "here": 0, "staleness": {}}
    counted = ("units", "samples", "samples_per_second", "pulled_bytes", "pushed_bytes", "refused", "dropped")
    everyone = dict.fromkeys(counted, 0)
    queue = {"epoch": 0, "samples": 24, "left": 16, "out": 1, "answered": 2}
    lines = workers_table.lines_of({**nothing, "all": everyone, "queue": queue, "parts": shards.parts()})
    rows = [re.split(r"  +", row) for row in lines[3:6]]
    assert rows[0] == ["SERVER", "PARAMETERS", "WHOLE TENSORS", "IN PART", "LARGEST", "OF", "SENT", "RECEIVED"]
    assert rows[1:] == [[name, "96 B", "0", "1", "96 B", "count", "96 B", "96 B"] for name in names]
    one = workers_table.lines_of({**nothing, "all": everyone, "queue": queue, "parts": []})
    assert one == [*lines[:2], *lines[6:]]


def test_ps_shows_the_servers_of_a_job_that_ctrl_c_ends(tmp_path: Path) -> None:
    """Nothing is left: see Commands."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Commands(tmp_path) as commands:
        options = ["--servers", "3", "--plain", "lo", "--hosts", "localhost/cpu"]
        servers = commands.serve(*options, program=[str(script), str(tmp_path / "trains")])
        servers.until("step 10\n")
        assert len(processes(servers, "shard")) == 2
        line_with(servers, RANKS=f"3 servers on {re.escape(HOST)}, 1 worker")
        (token,) = tokens_of(servers)
        job, _ = table_with(token, lambda rows: any(re.match("computes, |waits, ", row[2]) for row in rows[1:2]))
        rows = table_in(job, "SERVER")[1:4]
        assert [row[:6] for row in rows] == [
            [f"server {number} on {HOST}", "1.0 MB", *counts, "1.0 MB", name]
            for number, (*counts, name) in enumerate([("0", "1", "w"), ("0", "1", "w"), ("1", "0", "v")])
        ]
        # The gradients are zero, so parameters are pulled once, by the one worker.
        assert {row[6] for row in rows} == {"1.0 MB"}
        assert all(re.fullmatch(r"[\d.,]+ [MG]B", row[7]) for row in rows)
        servers.signal(signal.SIGINT)
        assert servers.end() == 130, servers.output
