"""tests/everything.py ends a part and all the jobs in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import everything
from jobs import REPOSITORY

# A part that will not end by SIGTERM, with a job in a session of its own, as the tests start them.
PART = f"""
import os, pathlib, signal, sys
sys.path.insert(0, {str(REPOSITORY / "tests")!r})
from jobs import run_command
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], "part").write_text(str(os.getpid()))
run_command(["sh", "-c", 'echo $$ > "$0/job.new" && mv "$0/job.new" "$0/job" && exec sleep 1000', sys.argv[1]])
"""


def test_every_folder_of_tests_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run on all ranks of a job are modules to run, one for each world size; no other part collects them."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    modules = {f"tests.{path.parent.name}" for path in (REPOSITORY / "tests").glob("*/__main__.py")}
    commands = {name: command for name, command, _, _ in everything.parts(full=False)}
    assert {command[command.index("-m") + 1] for name, command in commands.items() if " ranks, " in name} == modules
    assert {f"--ignore={module.replace('.', '/')}" for module in modules} <= set(commands["one process"])
    assert "3 ranks, torch" in commands


def pids(folder: Path) -> list[int]:
    deadline = time.monotonic() + 30
    while not (folder / "job").exists():
        assert time.monotonic() < deadline, "the job did not start"
        time.sleep(0.02)
    return [int((folder / name).read_text()) for name in ("part", "job")]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "GRACE_SECONDS", 0.3)


def test_a_part_that_hangs(tmp_path: Path) -> None:
    counts = everything.run([sys.executable, "-c", PART, str(tmp_path)], is_pytest=False, deadline_seconds=5.0)
    assert counts["failed"] == 1
    assert [is_alive(pid) for pid in pids(tmp_path)] == [False, False]


def test_ctrl_c(tmp_path: Path) -> None:
    def interrupt() -> None:
        pids(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        everything.run([sys.executable, "-c", PART, str(tmp_path)], is_pytest=False, deadline_seconds=60.0)
    thread.join()
    assert [is_alive(pid) for pid in pids(tmp_path)] == [False, False]


def test_sigterm(tmp_path: Path) -> None:
    """As a user or a CI runner ends it; Ctrl-C is ignored where a script has started it in the background."""
    source = f"""
import signal, sys
sys.path.insert(0, {str(REPOSITORY / "tests")!r})
signal.signal(signal.SIGINT, signal.SIG_IGN)
import everything
everything.GRACE_SECONDS = 0.3
everything.parts = lambda full: [("a part", [sys.executable, "-c", {PART!r}, {str(tmp_path)!r}], False, 60.0)]
sys.argv = ["everything"]
everything.main()
"""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.DEVNULL) as process:
        found = pids(tmp_path)
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert [is_alive(pid) for pid in found] == [False, False]
