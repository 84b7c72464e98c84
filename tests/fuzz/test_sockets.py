"""Sockets of our processes continue serving, whatever rejected_peers send: garbage, nothing, slowly, or too much."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dashboard.serving import dashboard
from fuzz.mutations import mutated
from fuzz.parsers import PARSERS
from mpitrain.launch import control, live_jobs
from mpitrain.launch.control import ask, socket_of
from mpitrain.launch.kept import KeeperLine, Kept
from mpitrain.launch.live import Live
from mpitrain.launch.live_jobs import LiveLine
from mpitrain.launch.processes import launcher_name
from mpitrain.watching.census import Census
from mpitrain.watching.roll_call import appear

NUM_INPUTS = 40
PATIENCE_SECONDS = 60.0


def attack(connect: Callable[[], socket.socket], inputs: list[bytes]) -> None:
    """Send each input on a line of its own, some byte by byte; some lines stay open; some say nothing."""
    opened = []
    for number, data in enumerate([b"", *inputs]):
        line = connect()
        opened.append(line)
        line.settimeout(0.2)
        with suppress(OSError):  # it has hung up, or takes no more
            if number % 10 == 1:
                for byte in data[:300]:
                    line.send(bytes([byte]))
            else:
                line.sendall(data)
        if number % 2:
            line.close()
    for line in opened:
        line.close()


@contextmanager
def looked_at(look: Callable[[], None]) -> Iterator[None]:
    """Inside, a thread calls this all the time; what it raises fails the test."""
    stop, errors = threading.Event(), []

    def run() -> None:
        while not stop.wait(0.002):
            try:
                look()
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not errors, errors


def unix(address: str, kind: int) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, kind)
    line.connect(address)
    return line


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def inputs_of(name: str) -> list[bytes]:
    return [mutated(PARSERS[name].examples, seed) for seed in range(NUM_INPUTS)] + [b"[" * 5000 + b"\n", b"x" * 60000]


def test_the_live_socket(capsys: pytest.CaptureFixture[str]) -> None:
    """Also of those who tell the job something."""
    launcher = launcher_name(os.getpid())
    with Live("train.py", [], 0.0) as live, live.telling(lambda wish: {"accepted": wish["leave"]}, lambda: None):
        path = socket_of(launcher)
        attack(lambda: unix(str(path), socket.SOCK_STREAM), inputs_of("live"))
        line = LiveLine(path, {"look": 1})
        answer = line.receive(PATIENCE_SECONDS)
        line.close()
        for _ in range(20):  # its threads may be busy with the others for a while
            if "accepted" in (told := ask(launcher, {"leave": "a"})):
                break
    assert answer is not None and answer["script"] == "train.py"
    assert told == {"accepted": "a"}
    assert "Traceback" not in capsys.readouterr().err


def test_the_keeper() -> None:
    name = f"mpitrain-keeper-fuzz-{os.getpid()}"
    kept = Kept(name)
    descriptors = num_descriptors()
    with looked_at(kept.look):
        attack(lambda: unix("\0" + name, socket.SOCK_SEQPACKET), inputs_of("keeper"))
        line = KeeperLine(name)
        assert isinstance(line.names(), list)
        line.close()
    kept.look()
    assert num_descriptors() <= descriptors
    kept.close()


def test_the_roll_call(tmp_path: Path) -> None:
    path = tmp_path / "roll"
    census = Census(str(path))
    with looked_at(census.look):
        attack(lambda: unix(str(path), socket.SOCK_SEQPACKET), inputs_of("roll call"))
    line = appear(str(path), 777)
    while 777 not in {view.record.rank for view in census.views()}:
        census.look()
    assert line is not None
    line.close()
    census.close()


HEADS = (
    b"GET / HTTP/1.1\r\nHost: %s\r\n",
    b"POST /api/runs/x/tell HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Length: 1073741824\r\n\r\n{",
    b"GET /api/runs/%%00%%ff HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nCookie: %%s=\xff; a=\xd9\xa3\r\n\r\n",
    b"GET /api/runs/x/series?name=%%ed%%a0%%80&from=1e999&to=nan&pixels=-9e99 HTTP/1.1\r\nHost: %s\r\n\r\n",
    b"GET /api/compare?runs=,,%%00 HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n",
    b"GET /?token=\xff HTTP/1.1\r\nHost: %s\r\nX: " + b"y" * 100_000,
)


def test_the_dashboard(tmp_path: Path) -> None:
    """Its records are damaged too: NaN, half of a character, a number of 5,000 digits."""
    for number, data in enumerate(mutated(PARSERS["rows shown"].examples, seed) for seed in range(30)):
        folder = tmp_path / f"runs/{number}"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_bytes(data)
        (folder / "run.json").write_bytes(mutated(PARSERS["run.json"].examples, number))
    (tmp_path / "runs/0/metrics.jsonl").write_bytes(
        b'{"step": 1, "a\\ud800": 1}\n{"step": 2, "x": 1e999}\n{"step": 1e999}\n'
    )
    with dashboard(tmp_path / "cache", "runs", cwd=tmp_path) as served:
        host, token = f"127.0.0.1:{served.port}".encode(), served.operator.encode()
        filled = [head % ((host, token)[: head.count(b"%s") - head.count(b"%%s")]) for head in HEADS]
        cut = [mutated(filled, seed) for seed in range(NUM_INPUTS)]
        attack(lambda: socket.create_connection(("127.0.0.1", served.port)), [*filled, *cut])
        runs = served.records(served.wait_for("/api/runs", lambda answer: len(served.records(answer)) >= 30))
        for run in runs:
            for path in ("", "/files", "/series?name=loss&name=x"):
                status, _, text = served.ask(f"/api/runs/{run['id']}{path}")
                assert status == 200, text
                json.loads(text, parse_constant=pytest.fail)
        for path in ("/metrics", "/api/cluster", f"/api/compare?runs={runs[0]['id']},{runs[1]['id']}"):
            assert served.ask(path)[0] == 200, path
        status, _, text = served.ask("/api/runs/x/tell", served.operator, "POST", body="[" * 3000)
        assert status == 404 or "Traceback" not in text


def test_a_stranger_at_a_live_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks for jobs finds the others beside a socket whose answers are none."""
    monkeypatch.setattr(live_jobs, "_ANSWER_SECONDS", PATIENCE_SECONDS)
    with tempfile.TemporaryDirectory() as folder:  # where no other program looks, and takes the answer
        monkeypatch.setattr(control, "OF_SOCKETS", folder)
        path = socket_of("here 1 2")
        with Live("train.py", [], 0.0), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen()

            def answer() -> None:
                line, _ = listener.accept()
                with line:
                    line.recv(1000)  # who closes first may be taken for one that has just ended
                    line.sendall(b'[1]\n{"ids": 5}\n')

            thread = threading.Thread(target=answer)
            thread.start()
            live, wrong = live_jobs.find()
            thread.join()
    assert any("its answer is no look, but {'ids': 5}" in line for line in wrong)
    assert any(job.answer["script"] == "train.py" for job in live)
