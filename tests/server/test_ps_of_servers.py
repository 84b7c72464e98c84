"""`mpitrain ps` and `mpitrain kill` with real servers and workers, and with faults of them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

from commands import TRAIN, Commands, processes
from listing import line_of, line_with, ps, table_with, tokens_of

from jobs import run_command
from mpitrain.launch.roster import served
from mpitrain.watching.served_record import NAME

HOST = socket.gethostname()
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
    assert {2, 3} <= {row["workers"] for row in records} <= {1, 2, 3}  # test_record_of_servers.py has the rest


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

    job = run_command([sys.executable, "-m", "mpitrain", "join", token, "--hosts", "localhost"])
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


def test_ranks(commands: Commands) -> None:
    """`mpitrain run --servers`: the record of rank 0 has the workers, which are ranks."""
    run = commands.start(["mpitrain", "run", "--hosts", "localhost", "-n", "3", "--servers", "1", *ENDLESS])
    line = line_with(run, STATE="trains", STEP=r"[1-9]\d*", RANKS=f"0-2 on {NAMED}, 2 workers")
    workers = [["rank 1", HOST], ["rank 2", HOST]]
    table_with(line["JOB"], lambda rows: sorted(row[:2] for row in rows[1:3]) == workers)
    run.signal(signal.SIGINT)
    assert run.end() == 130, run.output
    assert line_of(run) == {}
