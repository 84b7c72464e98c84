"""`mpitrain run --notify`: a real command and a real server are told how a job goes; the job waits for neither."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from free_ports import free_port
from jobs import run_command
from mpitrain.errors import ConfigError
from mpitrain.launch import notify
from mpitrain.launch.notify import checked, deliver

RUN = [sys.executable, "-m", "mpitrain", "run"]
HOST = socket.gethostname()

# Rank 1 computes for so long that rank 0 hangs, and then fails.
STANDS = """
import sys, time
import mpitrain as mt
world = mt.init()
record = mt.record_loop("record")
record(1, loss=0.5)
record(2, loss=float("nan"))
if world.rank == 1:
    time.sleep(float(sys.argv[1]))
    raise ValueError("bang")
world.barrier()
"""
DONE = """
import mpitrain as mt
world = mt.init()
record = mt.record_loop("record")
record(7, loss=0.25)
"""


@contextmanager
def server(status: int = 200) -> Iterator[tuple[str, list[tuple[dict[str, str], Any]]]]:
    """A server that answers so: its address, and the headers and the JSON of what was posted."""
    posted: list[tuple[dict[str, str], Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append((dict(self.headers), json.loads(body)))
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_GET = do_POST  # noqa: N815 (of somebody who follows)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}/secret", posted
        finally:
            listening.shutdown()


def test_a_command_hears_of_a_loss_that_is_not_finite_a_hang_and_a_failure(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STANDS)
    (tmp_path / "tell.sh").write_text("cat >> told; echo >> told\n")
    variables = {"MPITRAIN_STALL_SECONDS": "2"}
    command = [*RUN, "-n", "2", "--notify", "sh tell.sh", "train.py", "20"]
    job = run_command(command, cwd=tmp_path, env=variables)
    assert job.code != 0 and job.left == [], job.output
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [one["event"] for one in told] == ["loss_not_finite", "stalled", "failed"], job.output
    job_id = told[0]["job"]
    assert re.fullmatch(r"\w{8}", job_id)
    for one in told:
        assert (one["job"], one["ids"], one["host"]) == (job_id, [job_id], HOST)
        assert (one["script"], one["arguments"]) == ("train.py", ["20"])
        assert (one["step"], one["last_step"], one["metrics"]) == (2, None, {"loss": "NaN"})
        assert one["record"] == str(tmp_path / "record")
        assert one["at"] - one["seconds"] == pytest.approx(told[0]["at"] - told[0]["seconds"])
    begin = rf"train\.py 20 on {re.escape(HOST)} %s at step 2, after 0:\d\d:\d\d: %s"
    texts = [
        begin % ("has a loss that is not finite", "the loss is NaN"),
        begin % ("hangs", r"no progress for .* rank 0 .* waits in barrier.*"),
        begin % ("has failed", "rank 1 .*ValueError: bang"),
    ]
    for one, text in zip(told, texts, strict=True):
        assert re.fullmatch(text, one["text"], re.S), one["text"]
    assert [one["exit_code"] for one in told] == [None, None, job.code]


def test_a_server_hears_that_a_job_is_done(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DONE)
    with server() as (url, posted):
        job = run_command([*RUN, "-n", "1", "--notify", url, "train.py"], cwd=tmp_path)
    assert (job.code, job.left) == (0, []), job.output
    [(headers, told)] = posted
    assert headers["Content-Type"] == "application/json"
    assert (told["event"], told["exit_code"], told["metrics"]) == ("done", 0, {"loss": 0.25})
    text = rf"train\.py on {re.escape(HOST)} is done at step 7, after .*: the job has ended, and has done its work"
    assert re.fullmatch(text, told["text"])
    assert "--notify" not in job.stderr


def test_a_job_whose_message_nobody_takes_has_done_its_work(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DONE)
    url = f"http://127.0.0.1:{free_port()}/secret"
    job = run_command([*RUN, "-n", "1", "--notify", url, "train.py"], cwd=tmp_path)
    assert (job.code, job.left) == (0, []), job.output
    line = "mpitrain: --notify: http://127.0.0.1 was not told 'done': [Errno 111] Connection refused\n"
    assert line in job.stderr and "secret" not in job.stderr


@pytest.mark.parametrize("status", [302, 500])
def test_a_server_that_refuses(status: int) -> None:
    """And one that sends elsewhere: there the message would be left out."""
    with server(status) as (url, posted):
        assert deliver(url, b"{}").startswith(f"it answers {status} ")
    assert len(posted) == 1


def test_a_command_that_fails_or_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert deliver("sh -c 'echo no; echo mail >&2; exit 3'", b"{}") == "it ended with exit code 3: no; mail"
    assert deliver(str(tmp_path / "gone"), b"{}") == "No such file or directory"
    assert deliver("sh -c 'sleep 9 & exit 0'", b"{}") == "", "what it has left behind is not waited for"
    monkeypatch.setattr(notify, "MOST_SECONDS", 0.5)
    since = time.monotonic()
    assert deliver("sh -c 'sleep 600; true'", b"{}") == "it has not ended within 0.5 s, and was killed"
    assert time.monotonic() - since < 300


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("no-such-program --now", "there is no program 'no-such-program' here; allowed is a command that is here"),
        ("sh -c 'unended", "No closing quotation; allowed is"),
        ("ftp://example.org/x", "; allowed is a command that is here, or a URL that begins with https:// or http://"),
        ("https://", "; allowed is"),
        ("http://[1", "; allowed is"),
        (" ", "there is no program '' here"),
    ],
)
def test_what_is_refused_before_the_start(target: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=r"^--notify ") as caught:
        checked(target)
    assert problem in str(caught.value)


@pytest.mark.parametrize("target", ["curl -sd @- https://ntfy.sh/mine", "https://ntfy.sh/mine?tpl=1&m={{.text}}"])
def test_what_is_taken(target: str) -> None:
    if target.startswith("curl"):
        target = target.replace("curl", "cat")  # which is everywhere
    assert checked(target) == target
