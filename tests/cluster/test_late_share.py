"""A share shows a change some seconds late on other hosts: they are asked again before they are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpitrain.errors import LaunchError
from mpitrain.launch import agents, over_hosts, watch
from mpitrain.launch.conditions import Condition, Refusal, perhaps_late
from mpitrain.launch.placement import Place, Placement

Check = Callable[[], None]


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The script as the other host sees it."""
    (tmp_path / "there").mkdir()
    return tmp_path / "there/train.py"


@pytest.fixture
def check(tmp_path: Path, there: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Compare two hosts, which are both this machine; each has a script of its own."""
    send = watch.AttemptOnHosts._send
    here = tmp_path / "here/train.py"
    here.parent.mkdir()
    here.write_text("print('new')\n")

    def sent(attempt: watch.AttemptOnHosts, connection: Any, message: dict[str, Any]) -> None:
        if connection.host == "there" and "wish" in message:
            wish = {**message["wish"], "script": str(there), "roll_call": str(tmp_path / "roll-call")}
            message = {**message, "wish": wish}
        send(attempt, connection, message)

    connect = agents.connect
    monkeypatch.setattr(agents, "connect", lambda host, _, *rest, **more: connect(host, True, *rest, **more))
    monkeypatch.setattr(watch.AttemptOnHosts, "_send", sent)
    places = Place("here", 0, 1), Place("there", 1, 1)
    placement = Placement(places, dict.fromkeys(("here", "there"), "127.0.0.1"), "here")
    return lambda: over_hosts.check(placement, str(here), {})


def test_a_change_that_is_seen_late(
    check: Check, there: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    there.write_text("print('old')\n")
    ask_again = watch.AttemptOnHosts.ask_again

    def seen_by_now(attempt: watch.AttemptOnHosts, hosts: set[str]) -> None:
        there.write_text("print('new')\n")
        ask_again(attempt, hosts)

    monkeypatch.setattr(watch.AttemptOnHosts, "ask_again", seen_by_now)
    check()
    said = capfd.readouterr().err
    assert re.fullmatch(
        r"mpitrain: waited \d+\.\d s for the shared folder, which showed a change late: on there, train.py differs; "
        r"now all hosts have the same\n",
        said,
    ), said


def test_a_true_difference_is_refused_soon(
    check: Check, there: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """How soon is a number: it is asked again while `_LATE_SECONDS` are not over."""
    there.write_text("print('another')\n")
    assert over_hosts._LATE_SECONDS <= 5.0
    monkeypatch.setattr(over_hosts, "_LATE_SECONDS", 0.1)
    with pytest.raises(LaunchError, match=r"no host has joined: .*\n    there: train.py differs\n") as refused:
        check()
    assert refused.value.different == {"there": "train.py differs"}
    assert capfd.readouterr().err == ""


def test_only_what_a_share_may_show_late_is_asked_again() -> None:
    script, python = Refusal(Condition.SCRIPT, "b", "a.py differs"), Refusal(Condition.PYTHON, "b", "Python 3.9")
    package = Refusal(Condition.PACKAGES, "c", "six 1, here 2")
    missing = Refusal(Condition.FILES, "d", "/share is empty")
    assert perhaps_late([script, package, missing]) == {"b": "a.py differs", "c": "six 1, here 2"}
    assert perhaps_late([script, python]) == {}  # this host stays refused
