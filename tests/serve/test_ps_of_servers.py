"""`mpitrain ps` and `mpitrain kill` with real servers and workers, and with faults of them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import TRAIN, Command, Commands, contexts_of, processes

from jobs import Job, run_command, until
from mpitrain.launch.roster import served
from mpitrain.watching.served_record import NAME

HOST = socket.gethostname()
ENDLESS = [*TRAIN, "--epochs", "100000"]
COLUMNS = ["JOB", "SINCE", "STATE", "STEP", "METRICS", "RANKS", "SCRIPT"]

# With an argument, a hook that never ends comes after the first update that is made 3 s after the begin.
ENDLESS_SCRIPT = """
import sys, time
import numpy
import mpitrain as mt

class Halt(mt.Hook):
    def before_run(self, trainer):
        self.begun = time.monotonic()

    def after_step(self, trainer, step):
        if sys.argv[1:] and time.monotonic() - self.begun > 3:
            print("halts after step", step.number, flush=True)
            time.sleep(1000)

def loss(parameters, batch, on_gradient):
    on_gradient("w", parameters["w"])
    return 0.5

def build(world):
    data = mt.ArrayData(world, (numpy.zeros((4, 1)),), global_batch=4)
    model = mt.ArrayFunction(loss, {"w": numpy.zeros(1)}, mt.Sgd(0.1))
    return mt.Parts(model, mt.ParameterServer(), data)

mt.Trainer(build, [mt.StopAtStep(10**9), mt.Log(), Halt()]).run()
"""


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with Commands(tmp_path) as made:
        yield made


def ps(*arguments: str, code: int = 0) -> Job:
    job = run_command([sys.executable, "-m", "mpitrain", "ps", "--hosts", "localhost", *arguments])
    assert job.code == code, job.output
    return job


def line_of(command: Command) -> dict[str, str]:
    """What `mpitrain ps` says of the job of this command; {} if it does not list it."""
    (token,) = tokens_of(command) or ("",)
    lines = [line for line in ps().stdout.splitlines() if line.startswith(f"{token} ")] if token else []
    return dict(zip(COLUMNS, re.split(r"  +", lines[0], maxsplit=6), strict=True)) if lines else {}


def tokens_of(command: Command) -> set[str]:
    return {context.job for context in contexts_of(command).values()}


def table_in(job: Job) -> list[list[str]]:
    """The rows of the table of workers, with the titles."""
    lines = job.stdout.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("WORKER "))
    return [re.split(r"  +", row) for row in lines[begin:]]


def test_a_server_with_known_workers(commands: Commands, tmp_path: Path) -> None:
    """It is listed while it trains; a worker that is killed is shown as gone; nothing is listed once it is killed."""
    server = commands.serve("--hosts", "localhost/cpux3", program=[*ENDLESS, "--run", str(tmp_path / "run")])
    server.until("step 24")
    server.until("3 here")
    until(lambda: line_of(server).get("RANKS") == f"server on {HOST}, 3 workers")
    line = line_of(server)
    assert line["STATE"] == "runs"
    assert int(line["STEP"]) >= 24
    assert re.match(r"loss [\d.e-]+, samples/s [\d.e+]+", line["METRICS"])
    assert line["SCRIPT"] == " ".join([*ENDLESS, "--run", str(tmp_path / "run")])

    os.kill(processes(server, "worker")[1], signal.SIGKILL)
    until(lambda: line_of(server)["RANKS"] == f"server on {HOST}, 2 workers (1 gone)")
    job = ps(line["JOB"])
    # The list has the first metrics only.
    assert line["METRICS"].endswith(", ...")
    metrics = re.search(r"^\nmetrics: (.*)\n$", job.stdout, re.M)
    assert metrics and re.fullmatch(r"loss .*, samples/s .*, workers 2, .*, test accuracy [\d.]+", metrics[1]), (
        job.stdout
    )
    rows = table_in(job)
    (first, second, gone, everyone) = rows[1:5]
    assert rows[0][:5] == ["WORKER", "HOST", "STATE", "JOBS", "SAMPLES"]
    for row in (first, second):
        assert re.fullmatch(r"worker [123]", row[0])
        assert row[1] == HOST
        assert re.fullmatch(r"(computes|waits), \d+\.\d s", row[2])
        assert all(float(number.replace(",", "")) > 0 for number in row[3:6])
    assert gone[2] == "gone"
    assert everyone[:2] == ["all", "2 here, 1 gone"]
    counts = [int(row[3].replace(",", "")) for row in (first, second, gone)]
    assert sum(counts) == int(everyone[2].replace(",", ""))
    assert re.search(r"\nqueue: \d jobs? out, .* samples up to the end of epoch [\d,]+ have not gone out\n", job.stdout)
    assert re.search(r"\nstaleness: mean [\d.]+, largest \d+, of [\d,]+ gradients\n", job.stdout)

    (own,) = processes(server, "server")
    os.kill(own, signal.SIGKILL)
    assert server.end() == 128 + signal.SIGKILL
    assert line["JOB"] not in ps().stdout
    assert f"there is no job {line['JOB']} of yours on {HOST}" in ps(line["JOB"], code=1).stderr

    with (tmp_path / "run/metrics.jsonl").open() as file:
        records = [json.loads(text) for text in file]
    assert {"workers", "waiting_share", "staleness", "largest_staleness", "pulled_bytes", "pushed_bytes"} <= set(
        records[1]
    )
    assert not {"communication_share", "wire_seconds"} & set(records[1])
    assert {row["workers"] for row in records} == {1, 2, 3} or {row["workers"] for row in records} == {2, 3}
    assert all(0 <= row["waiting_share"] <= 1 for row in records)


def test_a_server_alone_and_a_worker_that_joins(commands: Commands) -> None:
    """Its worker is not of the job, but is shown. A text that others have written to is named. `kill` ends it."""
    server = commands.serve(program=ENDLESS)
    until(lambda: line_of(server).get("STATE") == "waits for workers")
    assert line_of(server)["RANKS"] == f"server on {HOST}, 0 workers"
    assert "staleness: no gradient has made an update yet" in ps(line_of(server)["JOB"]).stdout
    worker = commands.work(*ENDLESS)
    until(lambda: line_of(server)["RANKS"] == f"server on {HOST}, 1 worker")
    assert line_of(server)["STATE"] == "runs"

    server.signal(signal.SIGSTOP)  # so that it does not write the text again
    until(lambda: line_of(server)["STATE"] == "server stopped")
    pid = server.process.pid
    paths = [path for path in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(path).startswith(f"/memfd:{NAME} ")]  # noqa: PTH115
    assert len(paths) == 1
    assert served(pid)["here"] == 1
    with paths[0].open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    job = ps(code=1)
    (token,) = tokens_of(server)
    assert f"mpitrain ps: job {token}: its server's list of workers cannot be read: its text does not" in job.stderr
    assert re.search(rf"^{token} .* server stopped +\d+ .* server on {HOST} ", job.stdout, re.M), job.stdout
    server.signal(signal.SIGCONT)
    until(lambda: "1 worker" in line_of(server).get("RANKS", ""))

    job = run_command([sys.executable, "-m", "mpitrain", "kill", "--hosts", "localhost", token])
    assert (job.code, job.stdout) == (0, f"job {token} has ended on {HOST}\n"), job.output
    assert server.end() == -signal.SIGTERM
    assert line_of(server) == {}
    worker.signal(signal.SIGINT)
    assert worker.end() == -signal.SIGINT
    assert worker.output.endswith("mpitrain: interrupted\n"), worker.output
    assert "Traceback" not in worker.output


def test_a_server_in_a_hook(commands: Commands, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDLESS_SCRIPT)
    server = commands.serve("--hosts", "localhost/cpu", program=[str(script), "halts"])
    halted = re.search(r"halts after step (\d+)\n", server.until("halts after step .*\n"))
    assert halted
    until(lambda: re.fullmatch(r"server in a hook or an update, since \d+ s", line_of(server).get("STATE", "")))
    line = line_of(server)
    assert (line["STEP"], line["RANKS"]) == (halted[1], f"server on {HOST}, 1 worker")
    wish = ["mpitrain", "join", line["JOB"], "--hosts", "localhost"]
    job = run_command([sys.executable, "-m", *wish])
    assert job.code == 1, job.output
    assert "it is of `mpitrain serve`, whose workers come and go: `mpitrain work` adds one" in job.stderr
    job = run_command([sys.executable, "-m", "mpitrain", "kill", "--hosts", "localhost", line["JOB"]])
    assert job.code == 0, job.output
    assert server.end() == 128 + signal.SIGTERM


def test_ranks(commands: Commands, tmp_path: Path) -> None:
    """`mpitrain run --servers`: the record of rank 0 has the workers, which are ranks."""
    script = tmp_path / "script.py"
    script.write_text(ENDLESS_SCRIPT)
    run = commands.start(["mpitrain", "run", "--hosts", "localhost", "-n", "3", "--servers", "1", str(script)])
    until(lambda: line_of(run).get("RANKS") == f"0-2 on {HOST}, 2 workers")
    line = line_of(run)
    assert line["STATE"] == "runs"
    assert int(line["STEP"]) >= 1
    rows = table_in(ps(line["JOB"]))
    assert sorted(row[:2] for row in rows[1:3]) == [["rank 1", HOST], ["rank 2", HOST]]
    run.signal(signal.SIGINT)
    assert run.end() == 130, run.output
    assert line_of(run) == {}
