"""Which hosts let this machine log in: the question is asked of all at once, and no job waits for the answer."""

from __future__ import annotations

import threading

import pytest
import taking_in
from taking_in import Ssh

from jobs import until
from mpitrain.launch.intake import that_let_in
from mpitrain.launch.processes import alive_below

# A fixture: pytest finds it by this name.
ssh = taking_in.ssh


def test_those_that_answer(ssh: Ssh, capfd: pytest.CaptureFixture[str]) -> None:
    ssh.up("b", "d")
    assert that_let_in(["b", "c", "d"], threading.Event()) == {"b", "d"}
    assert sorted(ssh.asked()) == ["b", "c", "d"]
    assert capfd.readouterr() == ("", "")


def test_one_that_never_answers_is_not_waited_for(ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.launch.intake._LOGIN_SECONDS", 0.0)
    before = alive_below(set())
    assert that_let_in(["slow"], threading.Event()) == set()
    assert alive_below(set()) == before


def test_the_question_is_no_process_of_the_job(ssh: Ssh) -> None:
    """Otherwise a job that ends meanwhile would kill that process as its own, and fail."""
    stop = threading.Event()
    results: list[set[str]] = []
    asking = threading.Thread(target=lambda: results.append(that_let_in(["slow1", "slow2"], stop)))
    before = alive_below(set())
    asking.start()
    until(lambda: len(ssh.asked()) == 2)
    assert alive_below(set()) == before
    stop.set()
    asking.join()
    assert results == [set()]
    assert alive_below(set()) == before
