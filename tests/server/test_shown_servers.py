"""What mpitrain says of jobs with servers: sizes before a job by --dry-run, and ps, kill and join of real ones."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import TRAIN, Command, Commands, contexts_of, processes
from counting import NUM_SAMPLES
from hands import Served, lines_of, mean, of, say, trained

import mpitrain as mt
from jobs import HANG_SECONDS, Job, run_command, until
from mpitrain.cli import workers_table
from mpitrain.launch.roster import served
from mpitrain.launch.served import show_sizes
from mpitrain.watching.served_record import NAME

COLUMNS = ["JOB", "SINCE", "STATE", "STEP", "METRICS", "RANKS", "SCRIPT"]


def ps(*arguments: str) -> Job:
    """Run `mpitrain ps` here. Without the id of a job, the exit code may be due to a job of another test."""
    return run_command([sys.executable, "-m", "mpitrain", "ps", "--hosts", "localhost", *arguments])


def line_of(command: Command) -> dict[str, str]:
    """What the list says of the job of this command; {} if it does not have it."""
    (token,) = tokens_of(command) or ("",)
    lines = [line for line in ps().stdout.splitlines() if line.startswith(f"{token} ")] if token else []
    return dict(zip(COLUMNS, re.split(r"  +", lines[0], maxsplit=6), strict=True)) if lines else {}


def line_with(command: Command, **columns: str) -> dict[str, str]:
    """Wait until the list has these patterns in these columns for the job of this command. Return the line.

    All of them at once: what the list reads was written up to a second earlier, or more on a busy machine.
    """
    found: dict[str, str] = {}

    def fits() -> bool:
        found.clear()
        found.update(line_of(command))
        return bool(found) and all(re.fullmatch(pattern, found[name]) for name, pattern in columns.items())

    until(fits, f"the list has no line of that job with {columns}")
    return found


def tokens_of(command: Command) -> set[str]:
    """The ids of the jobs below this command."""
    return {context.job for context in contexts_of(command).values()}


def table_in(job: Job, title: str = "WORKER") -> list[list[str]]:
    """The rows from the one with this title to the end of what `mpitrain ps JOB` has printed; [] without it."""
    lines = job.stdout.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith(f"{title} ")), len(lines))
    return [re.split(r"  +", row) for row in lines[begin:]]


def table_with(token: str, fits: Callable[[list[list[str]]], object]) -> tuple[Job, list[list[str]]]:
    """Wait until the table of workers of this job fits. Return what `mpitrain ps JOB` has printed, and the table."""
    found: list[tuple[Job, list[list[str]]]] = []

    def is_there() -> bool:
        job = ps(token)
        found[:] = [(job, table_in(job))]
        return bool(fits(found[0][1]))

    until(is_there, f"the table of job {token} does not come to that")
    return found[0]


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
        job = run_command([sys.executable, "-m", "mpitrain", command, *options, "--dry-run", str(script), str(trains)])
        assert job.code == 0, job.output
        ports = [f", port {port + number}" if command == "serve" else "" for number in range(3)]
        shown = [f"server {number}{where}: {LINES[number]}" for number, where in enumerate(ports)]
        assert job.stdout.splitlines()[-3:] == shown, job.output
        assert "reads the data" not in job.stdout
        said = r"mpitrain: the script runs up to its Trainer, .* nothing is trained\nreads the data\n"
        assert re.match(said, job.stderr), job.output
        assert job.left == []
    assert not trains.exists()


# A child that continues, then what the script does.
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
    command = [
        sys.executable,
        "-m",
        "mpitrain",
        "serve",
        "--servers",
        "3",
        "--dry-run",
        str(script),
        str(tmp_path / "no"),
    ]
    job = run_command(command)
    assert job.code == 0, job.output
    lines = [line.replace("largest: w", "largest: a?b?c?d") for line in LINES]
    shown = [f"server {number}, port {5000 + number}: {line}" for number, line in enumerate(lines)]
    assert job.stdout.split("\n")[-4:] == [*shown, ""], job.output
    assert "a line" in job.stderr
    assert job.left == []


def test_one_server_has_all(capfd: pytest.CaptureFixture[str]) -> None:
    """So nothing is run."""
    show_sizes(["-c", "print(5)"], ["a"])
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


NAMED = re.escape(HOST)
ENDLESS = [*TRAIN, "--epochs", "100000"]


def test_a_server_with_known_workers(commands: Commands, tmp_path: Path) -> None:
    """It is listed while it trains; a worker that is killed is shown as gone; nothing is listed once it is killed."""
    server = commands.serve("--hosts", "localhost/cpux3", program=[*ENDLESS, "--run", str(tmp_path / "run")])
    server.until("step 24")
    server.until("3 here")
    line = line_with(server, STATE="trains", RANKS=f"server on {NAMED}, 3 workers")
    assert int(line["STEP"]) >= 24
    assert re.match(r"loss [\d.e-]+, samples/s [\d.e+]+", line["METRICS"])
    assert line["SCRIPT"] == " ".join([*ENDLESS, "--run", str(tmp_path / "run")])

    os.kill(processes(server, "worker")[1], signal.SIGKILL)
    line_with(server, RANKS=rf"server on {NAMED}, 2 workers \(1 gone\)")
    # On a busy machine a worker may be there for long before it has had a job. test_status.py has the table itself.
    job, rows = table_with(
        line["JOB"],
        lambda rows: all(
            re.fullmatch(r"(computes|waits), \d+\.\d s", row[2])
            and all(float(number.replace(",", "")) > 0 for number in row[3:6])
            for row in rows[1:3]
        ),
    )
    # The list has the first metrics only.
    assert line["METRICS"].endswith(", ...")
    assert re.search(r"^\nmetrics: loss .*, samples/s .*, workers 2, .*, test accuracy [\d.]+\n$", job.stdout, re.M)
    assert [row[:2] for row in rows[3:5]] == [[rows[3][0], HOST], ["all", "2 here, 1 gone"]]
    assert rows[3][2] == "gone"
    assert sum(int(row[3].replace(",", "")) for row in rows[1:4]) == int(rows[4][2].replace(",", ""))

    (own,) = processes(server, "server")
    os.kill(own, signal.SIGKILL)
    assert server.end() == 128 + signal.SIGKILL
    assert line["JOB"] not in ps().stdout
    none = ps(line["JOB"])
    assert (none.code, none.stdout) == (1, ""), none.output
    assert f"there is no job {line['JOB']} of yours on {HOST}" in none.stderr

    records = [json.loads(text) for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {2, 3} <= {row["workers"] for row in records} <= {1, 2, 3}  # test_answers.py has the rest


def test_a_server_alone_and_a_worker_that_joins(commands: Commands) -> None:
    """Its worker is not of the job, but is shown. A text that others have written to is named. `kill` ends it."""
    server = commands.serve(program=ENDLESS)
    line = line_with(server, STATE="waits for workers", RANKS=f"server on {NAMED}, 0 workers")
    listed = ps(line["JOB"])
    assert listed.code == 0, listed.output
    assert "staleness: no gradient has made an update yet" in listed.stdout
    worker = commands.work(*ENDLESS)
    line_with(server, STATE="trains", RANKS=f"server on {NAMED}, 1 worker")

    server.signal(signal.SIGSTOP)  # so that it does not write the text again
    line_with(server, STATE="server stopped")
    pid = server.process.pid
    paths = [path for path in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(path).startswith(f"/memfd:{NAME} ")]  # noqa: PTH115
    assert len(paths) == 1
    assert served(pid)["here"] == 1
    with paths[0].open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    job = ps()
    assert job.code == 1, job.output
    (token,) = tokens_of(server)
    assert f"mpitrain ps: job {token}: its server's list of workers cannot be read: its text does not" in job.stderr
    assert re.search(rf"^{token} .* server stopped +\d+ .* server on {HOST} ", job.stdout, re.M), job.stdout
    server.signal(signal.SIGCONT)
    # If the looks have taken long, the worker has lost its connection meanwhile, and comes again as another one.
    line_with(server, RANKS=r".*, 1 worker( \(\d+ gone\))?")

    job = run_command([sys.executable, "-m", "mpitrain", "scale", token, "+localhost"])
    assert job.code == 1, job.output
    assert "it is of `mpitrain serve`, whose workers come and go: `mpitrain work` adds one" in job.stderr
    job = run_command([sys.executable, "-m", "mpitrain", "kill", "--hosts", "localhost", token])
    assert (job.code, job.stdout) == (0, f"job {token} has ended on {HOST}\n"), job.output
    assert server.end() == -signal.SIGTERM
    assert line_of(server) == {}
    worker.signal(signal.SIGINT)
    assert worker.end() == -signal.SIGINT
    assert worker.output.endswith("mpitrain: interrupted\n"), worker.output
    assert "Traceback" not in worker.output


@pytest.mark.nightly
def test_ranks(commands: Commands) -> None:
    """`mpitrain run --servers`: the record of rank 0 has the workers, which are ranks."""
    run = commands.start(["mpitrain", "run", "--hosts", "localhost", "-n", "3", "--servers", "1", *ENDLESS])
    line = line_with(run, STATE="trains", STEP=r"[1-9]\d*", RANKS=f"0-2 on {NAMED}, 2 workers")
    workers = [["rank 1", HOST], ["rank 2", HOST]]
    table_with(line["JOB"], lambda rows: sorted(row[:2] for row in rows[1:3]) == workers)
    run.signal(signal.SIGINT)
    assert run.end() == 130, run.output
    assert line_of(run) == {}
