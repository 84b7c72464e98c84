"""Connections of chaos to hosts: one that hangs, and one that never comes about."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs import HANG_SECONDS, clean_environment, until
from testbed.chaos import crew
from testbed.chaos.crew import Crew, RealHosts

pytestmark = pytest.mark.nightly  # they wait for silence, and chaos is a tool of the nightly tests


@contextmanager
def crew_here() -> Iterator[tuple[Crew, str]]:
    """Chaos on this host alone."""
    site = RealHosts("localhost", None)
    (host,) = site.hosts
    with Crew(site, "nowhere 1 2", "", breaks_nodes=False) as messenger:
        yield messenger, host


def told(messenger: Crew, is_enough: Callable[[list[str], list[str]], bool]) -> tuple[list[str], list[str]]:
    """Keep up the connections until it is enough. Return the news, and the hosts whose connections have closed."""
    news: list[str] = []
    closed: list[str] = []

    def step() -> bool:
        closed.extend(host for host, message in messenger.exchange(0.1) if "closed" in message)
        messenger.reconnect()
        news.extend(messenger.news())
        return is_enough(news, closed)

    until(step, "no news")
    return news, closed


def wait_for(messenger: Crew, key: str) -> None:
    until(lambda: any(key in message for _, message in messenger.exchange(0.1)), f"no message with {key}")


def test_a_saboteur_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_SILENT_SECONDS", 12.0)
    with crew_here() as (messenger, host):
        wait_for(messenger, "ranks")
        process = messenger._connections[host].process
        os.kill(process.pid, signal.SIGSTOP)
        news, closed = told(messenger, lambda news, _: len(news) == 2)
        assert process.poll() == -signal.SIGKILL
    why = "the saboteur there sent nothing for 12 s"
    assert news == [f"{host}: not heard for 12 s; chaos connects anew: {why}", f"{host}: heard again"]
    assert closed == [host]


def test_a_saboteur_that_never_starts_is_told_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_SILENT_SECONDS", 5.0)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no Python today' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with crew_here() as (messenger, host):
        news, _ = told(messenger, lambda news, closed: bool(news) and len(closed) > 2)
    assert news == [f"{host}: not heard for 5 s; chaos connects anew: {host}: no Python today"]


def test_a_reason_is_forgotten_when_the_host_is_heard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its first report, a new connection has shown nothing of the job."""
    monkeypatch.setattr(crew, "_AGAIN_SECONDS", 0.0)
    with crew_here() as (messenger, host):
        assert messenger.seen_after(messenger.now()) == {host}
        wait_for(messenger, "ranks")
        assert messenger.seen_after(messenger.now()) == set()
        os.kill(messenger._connections[host].process.pid, signal.SIGKILL)
        wait_for(messenger, "closed")
        messenger.reconnect()
        assert host in messenger._why
        began = messenger.now()
        assert messenger.seen_after(began) == {host}
        wait_for(messenger, "ranks")
        assert messenger.seen_after(began) == {host}
        assert messenger.seen_after(messenger.now()) == set()
        assert messenger._why == {}


SUSPENDED = """
import sys
from testbed.chaos import crew
from testbed.chaos.crew import RealHosts

crew._SILENT_SECONDS, crew._SUSPENDED_SECONDS = 12.0, 5.0
site = RealHosts("localhost", None)
with crew.Crew(site, "nowhere 1 2", "", breaks_nodes=False) as messenger:
    began, reports, news = [], 0, []
    while reports < 3:
        for _, message in messenger.exchange(0.1):
            reports += "ranks" in message
            assert "closed" not in message
            if reports == 1 and not began:
                began = list(messenger._connections.values())
                print("reports", flush=True)
        messenger.reconnect()
        news += messenger.news()
    assert list(messenger._connections.values()) == began
    print(news)
"""


def test_a_suspension_of_chaos_is_no_silence_of_a_host() -> None:
    line = [sys.executable, "-c", SUSPENDED]
    with subprocess.Popen(line, env=clean_environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "reports\n"
            process.send_signal(signal.SIGSTOP)
            time.sleep(14.0)  # longer than a host may be silent
            process.send_signal(signal.SIGCONT)
            said, _ = process.communicate(timeout=HANG_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert re.search(r"chaos itself was suspended for \d\d+ s", said), said
    assert "not heard" not in said
