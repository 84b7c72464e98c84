"""What the dashboard passes on to jobs, from whom, and how much of it at once."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records_made import make_record, rows_made
from visiting import MARKUP

from faults.telling import CHECKPOINT, Teller, events_of, script, train
from jobs import HANG_SECONDS, until
from mpitrain.dashboard.commands import Commands
from mpitrain.dashboard.record_reader import run_id
from mpitrain.dashboard.shown_jobs import ShownJob
from mpitrain.launch.live import Live
from mpitrain.launch.processes import launcher_name
from mpitrain.launch.roster import NOT_TOLD
from serving import Dashboard, dashboard

TOO_FAST = "5 commands a second are passed on, of all operators together"


def in_a_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run this in an event loop; not in this thread, which has that of Playwright."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


class Operator:
    """Tells the job of one run something over HTTP."""

    def __init__(self, served: Dashboard, id_: str) -> None:
        self.served, self.path = served, f"/api/runs/{id_}/tell"

    def post(self, body: str, **options: Any) -> tuple[int, str]:
        """Return status and text."""
        options = {"token": self.served.operator, "method": "POST", "body": body, **options}
        status, _, text = self.served.ask(self.path, **options)
        return status, text

    def tell(self, kind: str, name: str = "", value: str = "") -> dict[str, Any]:
        """Return the launcher's answer. A command that comes too fast is told again."""
        body = json.dumps({"kind": kind, "name": name, "value": value})
        while True:
            status, text = self.post(body)
            if status == 200:
                answer: dict[str, Any] = json.loads(text)
                return answer
            assert (status, TOO_FAST in text) == (429, True), text

    def can(self) -> dict[str, Any]:
        """What it can be told."""
        status, _, text = self.served.ask(self.path, token=self.served.operator)
        assert status == 200, text
        answer: dict[str, Any] = json.loads(text)["can"]
        return answer


@contextlib.contextmanager
def shown(tmp_path: Path) -> Iterator[tuple[Dashboard, str]]:
    """A dashboard, and the id of the run that `train` will make in tmp_path/"job"."""
    (tmp_path / "runs").mkdir()
    with dashboard(tmp_path / "cache", str(tmp_path / "runs")) as served:
        yield served, run_id(tmp_path / "job/record")


def is_live(answer: dict[str, Any], id_: str) -> bool:
    return any(run["id"] == id_ and run["is_live"] and run["last"] for run in answer["runs"])


@pytest.mark.nightly
def test_a_job_is_told_and_ends(tmp_path: Path) -> None:
    with shown(tmp_path) as (served, id_):
        operator = Operator(served, id_)

        def during(_: Teller) -> None:
            served.wait_for("/api/runs", lambda answer: is_live(answer, id_))
            _what_is_refused(operator)
            _what_is_applied(operator)
            _a_command_that_waits(operator)
            _too_many(operator)
            assert "the run ends, and is saved, applied after step" in operator.tell("stop")["accepted"]

        job = train(tmp_path / "job", during, source=script(hooks=CHECKPOINT))
        assert (job.code, job.left) == (0, []), job.output
        served.wait_for(f"/api/runs/{id_}", lambda one: one["live"] is None)
        status, text = operator.post('{"kind": "pause"}')
        assert (status, "no launcher here has it: the job has ended" in text) == (409, True)
    told = events_of(tmp_path / "job")
    assert all(event["teller"].endswith(f"on the dashboard of {socket.gethostname()}") for event in told), told
    assert [(event["source"], event["text"]) for event in (told[0], told[-1])] == [
        ("told", "the learning rate is multiplied by 0.5, so by 0.5 in all"),
        ("told", "the run ends, and is saved"),
    ]


def _what_is_refused(operator: Operator) -> None:
    """The reasons are those of the launcher and of the ranks. Markup comes back as it is, and as JSON."""
    can = operator.can()
    assert (can["rate_factor"], can["paused"], can["saves"]) == (1.0, "", True)
    assert can["tunables"] == {"decay": 0.25, "loud": False, "label": "first"}
    for order, why in (
        (("dance",), "there is no order 'dance'"),
        (("set", MARKUP, "1"), f"there is no tunable {MARKUP}; declared are decay (0.25)"),
        (("resume",), "it is not paused"),
    ):
        assert why in operator.tell(*order)["refused"]


def _what_is_applied(operator: Operator) -> None:
    answer = operator.tell("rate", "", "0.5")
    text = "the learning rate is multiplied by 0.5, so by 0.5 in all"
    assert answer == {"accepted": f"{text}, applied after step {answer['step']}", "step": answer["step"]}
    assert operator.can()["rate_factor"] == 0.5


def _a_command_that_waits(operator: Operator) -> None:
    """A step that does not end holds up its command, and nobody else. The pause is to be seen by viewers."""
    served, run = operator.served, operator.path.removesuffix("/tell")
    pid = served.get(run)["live"]["ranks"][1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(operator.tell, "pause")
            served.wait_for(run, lambda one: one["run"]["state"] == "stalled")
            assert not told.done()
            os.kill(pid, signal.SIGCONT)
            assert "the training is paused" in told.result()["accepted"]
    finally:
        os.kill(pid, signal.SIGCONT)
    answer = served.wait_for(run, lambda one: one["run"]["state"] == "paused")
    assert answer["run"]["why"].startswith("by ") and "on the dashboard of" in answer["run"]["why"]
    assert answer["live"]["paused"] == operator.can()["paused"] == f"paused {answer['run']['why']}"
    assert "the training is resumed" in operator.tell("resume")["accepted"]
    served.wait_for(run, lambda one: one["run"]["state"] == "trains")


def _too_many(operator: Operator) -> None:
    """More than 5 in a second, of all operators together. What is refused does not reach the job."""

    def tell(_: int) -> tuple[int, dict[str, str], str]:
        body = '{"kind": "rate", "value": "1"}'
        return operator.served.ask(operator.path, operator.served.operator, "POST", body=body)

    def some_refused() -> bool:
        with ThreadPoolExecutor(20) as pool:
            refused = [answer for answer in pool.map(tell, range(20)) if answer[0] == 429]
        assert all(headers["retry-after"] == "1" for _, headers, _ in refused)
        return bool(refused)

    until(some_refused)


@pytest.mark.nightly
def test_a_job_is_killed(tmp_path: Path) -> None:
    with shown(tmp_path) as (served, id_):
        operator = Operator(served, id_)

        def during(teller: Teller) -> None:
            served.wait_for("/api/runs", lambda answer: is_live(answer, id_))
            assert operator.tell("save")["refused"].startswith("its Trainer has no mt.Checkpoint")
            _another_dashboard_ends(tmp_path, operator, teller.launcher)
            assert operator.tell("kill") == {"accepted": "the job has ended, without a save"}

        job = train(tmp_path / "job", during)
        assert job.code != 0 and job.left == [], job.output


def _another_dashboard_ends(tmp_path: Path, operator: Operator, launcher: int) -> None:
    """A dashboard ends while one of its commands waits. The job has the command."""
    path = operator.path.removesuffix("/tell")
    pid = operator.served.get(path)["live"]["ranks"][1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with dashboard(tmp_path / "cache", str(tmp_path / "runs")) as other:
            other.wait_for(
                "/api/runs", lambda answer: any(run["folder"] == str(tmp_path / "job/record") for run in answer["runs"])
            )
            other.wait_for(path, lambda one: one["run"]["state"] == "stalled")
            line = http.client.HTTPConnection("127.0.0.1", other.port, timeout=HANG_SECONDS)
            before = _num_lines(launcher)
            line.request("POST", operator.path, '{"kind": "pause"}', {"Authorization": f"Bearer {other.operator}"})
            until(lambda: _num_lines(launcher) > before)  # the launcher has it
            begun = time.monotonic()
            other.process.send_signal(signal.SIGINT)
            answer = line.getresponse()
            text = answer.read().decode()
            assert (answer.status, "the dashboard ends" in text) == (200, True), text
            print(f"the dashboard has answered {time.monotonic() - begun:.1f} s after Ctrl-C")
            line.close()
    finally:
        os.kill(pid, signal.SIGCONT)
    operator.served.wait_for(path, lambda one: one["run"]["state"] == "paused")


def _num_lines(launcher: int) -> int:
    """How many watch the job, or tell it something."""
    return Path("/proc/net/unix").read_text().count(f"~{launcher}~")


def test_a_run_without_a_job_and_a_dashboard_that_ends_within_a_command(tmp_path: Path) -> None:
    """Half of the command has come. The page gets a sentence, and stderr no traceback."""
    folder = make_record(tmp_path / "runs/a", rows_made(1, 2))
    with dashboard(tmp_path / "cache", str(tmp_path / "runs")) as served:
        served.wait_for("/api/runs", lambda answer: len(served.records(answer)) == 1)
        operator = Operator(served, run_id(folder))
        assert operator.post('{"kind": "stop"}')[0] == 409
        for question in ("tell", "output"):
            status, _, text = served.ask(f"/api/runs/{run_id(folder)}/{question}", token=served.operator)
            assert (status, list(json.loads(text))) == (200, ["refused"]), question
        assert operator.post('{"kind": "stop"}', token=served.viewer)[0] == 403
        assert operator.post('{"kind": "stop"}', token="wrong")[0] == 401
        status, _, text = served.ask(operator.path)
        assert (status, "a viewer cannot do this" in text) == (403, True), "also what it can be told"
        wrong = ["", "pause", "[]", "{}", '{"kind": 1}', '{"kind": "rate", "value": 2}', '{"kind": "save", "more": ""}']
        for body in (*wrong, "[" * 4000, '{"kind": "set", "value": "\\ud800"}', '{"kind": null}'):
            status, text = operator.post(body)
            assert (status, "a command is a JSON object of texts" in text) == (400, True), body
        assert operator.post(json.dumps({"kind": "set", "value": "x" * 4096}))[0] == 413
        order = {"token": served.operator, "method": "POST", "body": '{"kind": "stop"}'}
        assert served.ask("/api/runs/0000/tell", **order)[0] == 404
        assert served.ask(operator.path, **{**order, "method": "PUT"})[0] == 405
        line = http.client.HTTPConnection("127.0.0.1", served.port, timeout=HANG_SECONDS)
        headers = {"Authorization": f"Bearer {served.operator}", "Content-Length": "17"}
        line.request("POST", f"/api/runs/{run_id(folder)}/tell", '{"kind": ', headers)
        served.get("/api/runs")  # so that the other request has begun
        served.process.send_signal(signal.SIGINT)
        answer = line.getresponse()
        text = answer.read().decode()
        assert (answer.status, text) == (503, "the dashboard ends, and the command was not passed on")
        line.close()


@pytest.fixture
def launcher() -> Iterator[SimpleNamespace]:
    """This process answers as a launcher, when `may_answer` is set. `asked` has what it was asked."""
    made = SimpleNamespace(name=launcher_name(os.getpid()), may_answer=threading.Event(), asked=list[Any]())

    def answer(wish: Mapping[str, Any]) -> dict[str, Any]:
        made.asked.append(wish)
        made.may_answer.wait()
        return {"accepted": "yes"}

    with Live("train.py", [], 0.0) as live, live.telling(answer, made.may_answer.set):
        yield made


def test_how_many_wait(launcher: SimpleNamespace) -> None:
    """Eight at once, also of commands whose browsers have gone; and those who ask for the list share an answer."""

    async def tell() -> None:
        commands, job = Commands(), ShownJob({"ids": []}, 0.0, launcher.name)
        told = [asyncio.create_task(commands.tell(job, {"kind": "save"})) for _ in range(8)]
        while len(launcher.asked) < 8:
            await asyncio.sleep(0.01)
        told.pop().cancel()
        lists = [asyncio.create_task(commands.can(job)) for _ in range(3)]
        while len(launcher.asked) < 9:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.1)  # the other limit is one of time
        assert commands.why_not() == "8 commands wait for their answers, which is the limit; wait for one"
        launcher.may_answer.set()
        assert await asyncio.gather(*told, *lists) == [{"accepted": "yes"}] * 10
        while commands.why_not():
            await asyncio.sleep(0.01)

    in_a_loop(tell())
    place = f"the dashboard of {socket.gethostname()}"
    assert sorted(wish["tell"]["kind"] for wish in launcher.asked) == ["list"] + ["save"] * 8
    assert {wish["from"] for wish in launcher.asked} == {place}


def test_how_many_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("mpitrain.dashboard.commands.time", SimpleNamespace(monotonic=lambda: now[0]))

    async def tell() -> None:
        commands, served = Commands(), ShownJob({"ids": ["1a2b3c4d"]}, 0.0)
        for at in (100.0, 100.25, 100.25, 100.5, 100.75):
            now[0] = at
            assert commands.why_not() == ""
            assert await commands.tell(served, {"kind": "pause"}) == {"refused": NOT_TOLD}
        for at, is_refused in ((100.75, True), (100.9375, True), (101.0, False)):
            now[0] = at
            assert (TOO_FAST in commands.why_not()) == is_refused, at
        await commands.tell(served, {"kind": "pause"})
        for at, is_refused in ((101.0, True), (101.25, False)):
            now[0] = at
            assert (TOO_FAST in commands.why_not()) == is_refused, at

    in_a_loop(tell())
