"""Connections of chaos to hosts: one that hangs, and one that never comes about."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import until
from mpitrain.chaos import crew
from mpitrain.chaos.crew import Crew
from mpitrain.chaos.sites import RealHosts


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


def test_a_saboteur_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_SILENT_SECONDS", 12.0)
    site = RealHosts("localhost", None)
    (host,) = site.hosts
    with Crew(site, "nowhere 1 2", "", breaks_nodes=False) as messenger:
        until(lambda: any("ranks" in message for _, message in messenger.exchange(0.1)), "no report came")
        process = messenger._connections[host].process
        os.kill(process.pid, signal.SIGSTOP)
        news, closed = told(messenger, lambda news, _: len(news) == 2)
        assert process.poll() == -signal.SIGKILL
    why = "the saboteur there sent nothing for 12 s"
    lost = f"{host}: not heard for 12 s; chaos connects anew: {why}"
    assert news == [lost, f"{host}: heard again"]
    assert closed == [host]


def test_a_saboteur_that_never_starts_is_told_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_SILENT_SECONDS", 5.0)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no Python today' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    site = RealHosts("localhost", None)
    (host,) = site.hosts
    with Crew(site, "nowhere 1 2", "", breaks_nodes=False) as messenger:
        news, _ = told(messenger, lambda news, closed: bool(news) and len(closed) > 2)
    why = f"{host}: no Python today"
    assert news == [f"{host}: not heard for 5 s; chaos connects anew: {why}"]
