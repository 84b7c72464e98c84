"""What a launcher needs to know of another's job: which copies count, where and how it ran, and what has changed."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mpitrain.context import JobContext
from mpitrain.launch.events import Pause
from mpitrain.launch.jobs import RunningJob, kept_jobs
from mpitrain.launch.keepers import code_of, hosts_of, new_estate
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.resume import _end_rest
from mpitrain.launch.start import Heritage, Request, _environment, _signals_end_in_order

THREE = [["a", 2, []], ["b", 2, []], ["c", 2, []]]


def entry(
    keeper: str, *tries: str, step: int = 7, lost_ms: int = 0, until_ms: int = 0, launched: bool = False
) -> dict[str, Any]:
    """What a keeper reports. With `lost_ms` 0, the keeper still hears its launcher."""
    loss = {"lost_ms": lost_ms, "until_ms": until_ms} if lost_ms else {}
    estate = {"tries": list(tries), "places": THREE, "since": 1.0}
    return {"keeper": keeper, "estate": estate, "is_launched_here": launched, "step": step, **loss}


def test_keepers_of_one_job() -> None:
    """The copy that is kept for the shortest time says how long all of them can be used."""
    told = {
        "c": [entry("k1", "1", "2", step=8, lost_ms=20, until_ms=110)],
        "a": [entry("k1", "1", "2", lost_ms=10, until_ms=120), entry("other", "9", lost_ms=5, until_ms=105)],
    }
    other, job = sorted(kept_jobs(told), key=lambda job: len(job.keepers))
    assert job.keepers == {"a": "k1", "c": "k1"}
    assert list(job.keepers) == ["a", "c"]  # in the order of the job's hosts, whoever answers first
    assert (job.token, job.step, job.lost_ms, job.until_ms, job.is_lost) == ("2", 8, 20, 110, True)
    assert (other.token, other.keepers) == ("9", {"a": "other"})


def test_a_keeper_that_was_cut_off_before_the_last_try() -> None:
    """Other hosts have repeated the steps of its copy, perhaps with other bits."""
    told = {"a": [entry("k1", "1", lost_ms=10, until_ms=99)], "b": [entry("k1", "1", "2", lost_ms=30, until_ms=130)]}
    (job,) = kept_jobs(told)
    assert job.keepers == {"b": "k1"}


def test_a_job_that_has_its_launcher() -> None:
    heard = kept_jobs({"a": [entry("k1", "1", lost_ms=10, until_ms=99)], "b": [entry("k1", "1")]})
    alive = kept_jobs({"a": [entry("k1", "1", lost_ms=10, until_ms=99, launched=True)]})
    last = entry("k1", "1")
    last["estate"]["waits"] = "c until 12:00:00"
    (job,) = kept_jobs({"a": [entry("k1", "1", lost_ms=10, until_ms=99)], "b": [last]})
    assert job.estate == last["estate"]  # what one that was cut off has not heard
    older = kept_jobs({"a": [entry("k1", "1", launched=True)], "b": [entry("k1", "1", "2", lost_ms=10, until_ms=99)]})
    assert [job.is_lost for (job,) in (heard, alive, older)] == [False, False, False]


def test_an_estate_survives_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next launcher gets the environment of the first one, but not what belongs to its login."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_JOB", "1")
    monkeypatch.setenv("SSH_AUTH_SOCK", "first")
    placement = Placement((Place("a", 0, 2, ("cuda:0", "cpu")), Place("b", 2, 1, ("cpu",))), {"a": "", "b": ""}, "a")
    estate = new_estate({"script": "train.py", "inventory": Path("hosts")}, "train.py", {"FROM_FILE": "2"})
    estate.update(hosts_of(placement))
    estate = json.loads(json.dumps(estate))
    assert estate["request"]["inventory"] == "hosts"
    assert estate["places"] == [["a", 2, ["cuda:0", "cpu"]], ["b", 1, ["cpu"]]]
    monkeypatch.delenv("OF_THE_JOB")
    monkeypatch.setenv("SSH_AUTH_SOCK", "second")
    monkeypatch.setenv("OF_ANOTHER", "3")
    before = dict(os.environ)
    heritage = Heritage(estate, {}, placement, (), Pause("", None, 0.0))
    with _environment(Request(program=[], script="", typed=[]), heritage) as from_file:
        assert from_file == {"FROM_FILE": "2"}
        assert os.environ["OF_THE_JOB"] == "1"
        assert os.environ["SSH_AUTH_SOCK"] == "second"
        assert "OF_ANOTHER" not in os.environ
    assert dict(os.environ) == before


def test_code_that_changes(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("import part")  # the name of a script need not end in .py
    (tmp_path / "part.py").write_text("")
    (tmp_path / "data.txt").write_text("")
    before = code_of(str(tmp_path / "train"))
    assert set(before) == {"train", "part.py"}
    (tmp_path / "data.txt").write_text("x")
    assert code_of(str(tmp_path / "train")) == before
    (tmp_path / "part.py").write_text("x")
    after = code_of(str(tmp_path / "train"))
    assert [name for name in before if after[name] != before[name]] == ["part.py"]


def test_sigterm_between_two_tries() -> None:
    """The signal ends the launcher in good order, so its keepers hear a goodbye."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, _signals_end_in_order():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM


def test_the_ranks_of_a_next_try_that_no_estate_names() -> None:
    """The launcher of these ranks was lost just when they were to take over."""
    here = Placement((Place(socket.gethostname(), 0, 1),), own=socket.gethostname())
    token, launcher = secrets.token_hex(4), f"{socket.gethostname()} 1 {secrets.randbits(40)}"
    variables = JobContext(job=token, launcher=launcher).variables()
    rank = subprocess.Popen(["sleep", "1000"], env={**os.environ, **variables})
    try:
        of_job = [RunningJob(token, launcher=launcher)]
        _end_rest(here, of_job, {"tries": ["one"], "launcher": f"{launcher}0"})
        assert rank.poll() is None
        _end_rest(here, of_job, {"tries": ["one"], "launcher": launcher})
        assert rank.wait(60) == -signal.SIGKILL
    finally:
        rank.kill()
        rank.wait()
