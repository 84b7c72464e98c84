"""The agent, started here as on a node: its answers, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from jobs import HANG_SECONDS, until
from mpitrain.check.agent import BAIT, BOOT, bundle, in_a_word
from mpitrain.check.node import shell

# Stands for a sudo that waits for a directory server, or for one that refuses.
_HANGS = '#!/bin/sh\necho asked >> "$0.asked"\nexec sleep 60\n'
_REFUSES = "#!/bin/sh\necho 'sudo: a password is required' >&2; exit 1\n"


class Talk:
    """An agent and its messages."""

    def __init__(self, *, bait: bytes = BAIT, **environment: str) -> None:
        boot = in_a_word(BOOT)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-u", "-c", boot],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(bait)
        self._write(bundle())
        self.hello = self._read()
        self._number = 0

    def ask(self, call: str, user: str = "login", **wish: Any) -> None:
        self._number += 1
        self._write({"id": self._number, "as": user, "call": call, "wish": wish})

    def answer(self, call: str, user: str = "login", **wish: Any) -> dict[str, Any]:
        self.ask(call, user, **wish)
        return self._read()

    def _write(self, what: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def hang_up(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(HANG_SECONDS)
        self.process.stdout.close()


@pytest.fixture
def talk() -> Iterator[Talk]:
    agent = Talk()
    yield agent
    if agent.process.poll() is None:
        agent.hang_up()


def folders(share: Path) -> list[str]:
    return [path.name for path in share.iterdir()]


def test_it_says_who_it_is(talk: Talk) -> None:
    assert talk.hello["family"] in ("", "Debian", "RedHat")
    assert talk.answer("become")["result"] == talk.hello["hello"]
    assert talk.answer("nothing of the kind")["error"].startswith("KeyError")


def test_a_shell_that_took_the_first_line_is_told_of(talk: Talk) -> None:
    assert talk.hello["swallowed_by"] == ""
    other = Talk(bait=b"")
    assert other.hello["swallowed_by"]
    assert other.answer("become")["result"] == other.hello["hello"]
    other.hang_up()


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="no bash")
@pytest.mark.parametrize("line", ["read answer", "exec no-such-shell", "exec sh", "exit 3"])
def test_the_startup_file_that_keeps_a_shell_from_its_command(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "_own_shell", lambda: "/bin/bash")
    monkeypatch.setattr(shell, "_STARTUP_SECONDS", HANG_SECONDS)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".bashrc"
    file.write_text("echo welcome\n")
    assert shell.startup() == ""
    file.write_text(f"{line}\n")
    assert shell.startup() == "~/.bashrc"
    file.write_text(f"[ -t 0 ] || return\n{line}\n")  # the repair
    assert shell.startup() == ""


def test_a_file_for_another_node_goes_with_the_agent_and_what_is_not_ours_stays(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / ".mpitrain-check-2").mkdir()
    wish = {"share": str(tmp_path), "run": "1"}
    for action, token in (("begin", ""), ("end", ""), ("begin", "t"), ("write", "t")):
        assert talk.answer("share_step", action=action, token=token, **wish)["result"] == ""
    assert sorted(folders(tmp_path)) == [".mpitrain-check-1", ".mpitrain-check-2"]
    talk.hang_up()
    assert folders(tmp_path) == [".mpitrain-check-2"]


def test_a_write_that_is_under_way_is_ended_and_removed(talk: Talk, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / ".mpitrain-check-4"  # a share that cannot be written
    assert "FileNotFoundError" in talk.answer("share speed", folder=str(missing), bytes=1 << 20)["error"]
    folder = tmp_path / ".mpitrain-check-3"
    talk.ask("share speed", folder=str(folder), bytes=1 << 30)
    until((folder / "large").exists)
    talk.hang_up()
    assert folders(tmp_path) == []


def sudo(folder: Path, text: str) -> str:
    """A PATH in which another program is sudo."""
    (folder / "sudo").write_text(text)
    (folder / "sudo").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root asks no sudo")
def test_a_sudo_that_hangs_is_asked_once(tmp_path: Path) -> None:
    talk = Talk(PATH=sudo(tmp_path, _HANGS))
    assert talk.answer("sudo")["result"] == {"hangs": True}
    assert talk.answer("account", user="root", uid=0)["result"]["expired"] is None
    other = next(name for name in ("nobody", "daemon") if name != talk.hello["hello"])
    assert talk.answer("become", user=other)["error"].endswith(f"cannot become {other}: sudo hangs")
    assert (tmp_path / "sudo.asked").read_text() == "asked\n"
    talk.hang_up()


def test_a_sudo_that_refuses(tmp_path: Path) -> None:
    talk = Talk(PATH=sudo(tmp_path, _REFUSES))
    other = next(name for name in ("nobody", "daemon") if name != talk.hello["hello"])
    for _ in range(2):
        error = talk.answer("become", user=other)["error"]
        assert error == f"{talk.hello['hello']} cannot become {other}: sudo: a password is required"
    talk.hang_up()


def test_an_agent_that_is_cut_off_ends_with_what_it_runs(talk: Talk, tmp_path: Path) -> None:
    """The agent loses its stdout first, as when sshd is killed."""
    folder = tmp_path / ".mpitrain-check-5"
    talk.ask("share speed", folder=str(folder), bytes=1 << 30)
    until((folder / "large").exists)
    assert talk.process.stdout is not None
    talk.process.stdout.close()
    talk.ask("become")
    talk.process.wait(HANG_SECONDS)
    talk.hang_up()
    assert folders(tmp_path) == []
    assert talk.process.returncode != -signal.SIGKILL
