"""`mpitrain serve --servers`: several servers and their workers as real processes, with real faults."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from commands import TRAIN, Commands, processes
from counting import COUNTING_SCRIPT, check_counts, worker_key
from hands import Hand, Served, train_once

import mpitrain as mt
from jobs import HANG_SECONDS
from mpitrain.context import JobContext, ServeTask
from mpitrain.errors import LaunchError
from mpitrain.launch import serving
from mpitrain.launch.served import handed_over
from mpitrain.launch.serving import started
from mpitrain.server.security import server_token
from mpitrain.server.shard import ShardServer
from mpitrain.server.wire import MOST_HEADER_BYTES

HOST = socket.gethostname()
CONTEXTS = [JobContext(serve=ServeTask("server")), JobContext(serve=ServeTask("shard", 1))]


@pytest.mark.parametrize(
    ("mode", "killed", "code", "text"),
    [
        ("sync", "shard", 1, "server 1 was killed by signal 9; the job ends with it"),
        pytest.param(
            *("async", "server", 137, "server 0 was killed by signal 9; the other servers end too"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_lost_server_ends_all_and_workers_wait_for_the_next_ones(
    commands: Commands, tmp_path: Path, mode: str, killed: str, code: int, text: str
) -> None:
    """Three servers follow two. The workers come back by themselves, and every sample counts once."""
    script, saved = tmp_path / "train.py", tmp_path / "saved"
    script.write_text(COUNTING_SCRIPT.replace("MODE", repr(mode)))
    program = [str(script), str(saved), "0", "0.01"]
    servers = commands.serve("--servers", "2", program=program)
    servers.until("MPITRAIN_KEY=")
    workers = [commands.work(*program) for _ in range(2)]
    servers.until(r"2 here[^\0]*step \d+\n[^\0]*step \d+\n")
    (lost,) = processes(servers, killed)
    os.kill(lost, signal.SIGKILL)
    assert servers.end() == code, servers.output
    assert f"mpitrain: {text}" in servers.output
    assert f"server 0 on {HOST}: 96 B, server 1 on {HOST}: 96 B of 192 B of parameters" in servers.output
    if killed == "shard":
        gone = rf"server 1 on {HOST} is gone \(its connection has ended\), and its part of the parameters with it"
        assert re.search(gone, servers.output), servers.output

    again = commands.serve("--servers", "3", program=program)
    again.until(r"2 here[^\0]*step \d+\n")
    (saved / "stop").touch()
    for command in (again, *workers):
        assert command.end() == 0, command.output
    resumed = re.search(r"resumed from .* at step (\d+)", again.output)
    assert resumed, again.output
    assert 0 < int(resumed[1]) < check_counts(again.output)
    assert f"server 2 on {HOST}: " in again.output
    assert "2 workers (0 gone)" in again.output
    # The servers that are not the first one, and the workers, end with the training.
    assert again.output.count("end [") == 1
    assert not any("end [" in worker.output for worker in workers)


def test_the_port_of_a_further_server_is_in_use(commands: Commands) -> None:
    with socket.create_server(("", commands.port + 1)):
        servers = commands.serve("--servers", "2", program=TRAIN)
        assert servers.end() == 2
    assert f"port {commands.port + 1} is in use on this machine" in servers.output
    assert "MPITRAIN_KEY" not in servers.output


def test_a_worker_is_not_taken_for_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the key, and says all that a server says, but for the proof. The real server comes after it."""
    goes_on = threading.Event()
    begin = ShardServer._begin

    def late(self: Any) -> None:
        assert goes_on.wait(HANG_SECONDS)
        begin(self)

    monkeypatch.setattr(ShardServer, "_begin", late)
    served = Served(1, mt.ParameterServer("async"), num_servers=2)
    optimizer = served.strategy._participant.optimizer
    liar = Hand(served.address, served.facts)
    said = {"server": 1, "where": "a liar", "facts": served.facts, "optimizer": optimizer, "port": 1}
    proofs: list[Any] = [None, 5, "", server_token("", 1), server_token(worker_key().text, 1), "\u00e9"]
    # The last one, as long as a header may be, is longer when it is shown.
    for number, shown in [*((1, proof) for proof in proofs), ("\\" * (MOST_HEADER_BYTES // 2 - 1000), "")]:
        # What is said before the connection is there is lost.
        while True:
            liar.say("shard", **{**said, "server": number, "token": shown})
            if (message := liar._link.receive(0.5)) is not None:
                break
        assert message.kind == "refused"
        assert (
            f"a peer that is not a server of this job says that it is server {str(number)[:100]};"
            in message.fields["text"]
        )
    goes_on.set()
    train_once(served)
    liar.close()
    output = capsys.readouterr().out
    assert "a liar" not in output
    # However often it comes: see RejectedPeers.
    assert "before they had joined: 1; the last one because it says that it is server 1, but does not have" in output
    assert len(output) < 10_000


# A further server crashes when it ends. The first one continues after its run until the file "go" is there.
CRASH_SCRIPT = """
import atexit, os, sys, time
from mpitrain.job.start import the_job

SCRIPT

if the_job().role.kind == "shard":
    atexit.register(os.abort)
trainer.run()
print("the run has ended", flush=True)
while not os.path.exists(folder + "/go"):
    time.sleep(0.05)
time.sleep(2.0)
print("all is done", flush=True)
"""


def test_a_further_server_that_crashes_at_its_end_ends_nothing(commands: Commands, tmp_path: Path) -> None:
    """The first one no longer needs it. It continues for longer than a first server that does not notice."""
    script, saved = tmp_path / "train.py", tmp_path / "saved"
    built = COUNTING_SCRIPT.replace("MODE", "'async'").partition("trainer.run()")[0]
    script.write_text(CRASH_SCRIPT.replace("SCRIPT", built))
    words = ["serve", "--port", str(commands.port), "--servers", "2", str(script), str(saved), "12", "0"]
    launcher = (
        "from mpitrain.cli import main; from mpitrain.launch import serving; "
        f"serving._NOTICE_SECONDS = 0.5; raise SystemExit(main({words!r}))"
    )
    servers = commands.start([sys.executable, "-c", launcher])
    servers.until("MPITRAIN_KEY=")
    worker = commands.work(*words[5:])
    servers.until(r"mpitrain: server 1 was killed by signal 6 after the run; server 0 continues without it\n")
    (saved / "go").touch()
    assert servers.end() == 0, servers.output
    assert servers.output.endswith("all is done\n"), servers.output
    assert worker.end() == 0, worker.output


def run_servers(program: str, *signals: int, are_gone: bool = False) -> tuple[int, int]:
    """Run this code in two servers. Signals come when the first one has said that it is there. Return both codes."""
    read, write = os.pipe()
    with started([sys.executable, "-c", program.replace("LINE", str(write))], CONTEXTS, write) as servers:
        if signals:
            assert os.read(read, 1) == b"."
        os.close(read)
        for number in signals:
            servers.signal(number)
        for process in (servers._first, *servers._others) if are_gone else ():
            process.wait()
        while (code := servers.look()) is None:
            pass
        return code, servers.finish()


SERVERS = """
import os, signal, sys, time
from pathlib import Path
from mpitrain.watching.served_record import ServedPage

def publish(stage, has_failed):
    page = ServedPage()
    page.write({"at": time.monotonic(), "stage": stage, "has_failed": has_failed})
    Path("PATH").touch()
    while not (pid := Path("PATH.pid")).exists() or Path("/proc", pid.read_text()).exists():
        time.sleep(0.01)
    time.sleep(2.0)  # the launcher has seen the end of the other one
    sys.exit(has_failed)

if os.environ["_MPITRAIN_SERVE_KIND"] == "server":
    FIRST
while not Path("PATH").exists() and IS_TOLD:
    time.sleep(0.01)
Path("PATH.new").write_text(str(os.getpid()))
Path("PATH.new").rename("PATH.pid")
sys.exit(3)
"""
ENDS_IT, GOES_ON = "; the job ends with it", " after the run; server 0 continues without it"


@pytest.mark.parametrize(
    ("first", "codes", "text"),
    [
        # It waits in vain for the other one, which has not joined, and does not hear signals.
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)", (-signal.SIGKILL, 3), ENDS_IT),
        # Its own failure is due to that of the other one, also if both are gone when the launcher looks.
        ("sys.exit(1)", (1, 1), ENDS_IT),
        # It may have heard of the failure before the launcher has seen it, and ends by itself.
        *((f"publish('{stage}', 1)", (1, 1), ENDS_IT) for stage in ("leaves", "over")),
        *((f"publish('{stage}', 0)", (0, 0), GOES_ON) for stage in ("leaves", "over")),
    ],
)
def test_a_further_server_that_fails(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    first: str,
    codes: tuple[int, int],
    text: str,
) -> None:
    monkeypatch.setattr(serving, "_NOTICE_SECONDS", 0.5 if "SIG_IGN" in first else 0.2)
    program = SERVERS.replace("FIRST", first).replace("PATH", str(tmp_path / "go"))
    program = program.replace("IS_TOLD", str("publish" in first))
    assert run_servers(program, are_gone=first == "sys.exit(1)") == codes
    assert f"mpitrain: server 1 ended with exit code 3{text}\n" in capfd.readouterr().err


SLOW_END = """
import os, sys, time
if os.environ["_MPITRAIN_SERVE_KIND"] == "server":
    try:
        os.write(LINE, b".")
        time.sleep(1000)
    except KeyboardInterrupt:
        time.sleep(2.0)
        sys.exit(9)
time.sleep(1000)
"""


def test_a_first_server_that_ends_slowly_ends_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal does not wait."""
    monkeypatch.setattr(serving, "_OTHERS_END_SECONDS", 0.1)
    assert run_servers(SLOW_END, signal.SIGINT) == (9, 128 + signal.SIGINT)
    assert run_servers(SLOW_END, signal.SIGINT, signal.SIGINT) == (-signal.SIGKILL, 128 + signal.SIGINT)


def test_servers_end_if_one_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = serving.subprocess.Popen

    def one(*args: Any, **options: Any) -> Any:
        if made:
            raise OSError(11, "too many processes")
        made.append(real(*args, **options))
        return made[0]

    monkeypatch.setattr(serving.subprocess, "Popen", one)
    with (
        pytest.raises(LaunchError, match="too many processes"),
        started([sys.executable, "-c", "import time; time.sleep(1000)"], CONTEXTS, handed_over("")),
    ):
        pass
    assert made[0].poll() == -signal.SIGKILL
