"""A job that really runs, on the pages: its ranks, a stopped rank, its end; and what the record of a failed one has."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from jobs import Job, run_command, until
from mpitrain.dashboard.record_reader import run_id
from mpitrain.training.run_document import read_document
from mpitrain.training.writers.json_lines import read_events
from serving import Dashboard, dashboard, require

RANKS = 3
# The training begins when there is no file `hold`, and ends when there is one `go-on`; or rank 1 fails, as the
# first argument says.
SCRIPT = r"""
import os, pathlib, signal, sys, time
import numpy
import mpitrain as mt

how, folder = sys.argv[1], pathlib.Path(sys.argv[2])

def build(world):
    def function(parameters, batch, on_gradient):
        time.sleep(0.05 if how == "ends" else 0.01)
        on_gradient("w", parameters["w"] - batch[0].mean())
        return 0.5 + world.rank

    data = mt.data.ArrayData(world, [numpy.arange(10.0)], global_batch=5)
    return mt.Parts(mt.ArrayFunction(function, {"w": numpy.zeros(1)}, mt.optim.SGD(0.1)), mt.Sync(), data)

class Gate(mt.Hook):
    ends_run = True
    is_told = False

    def after_step(self, trainer, step):
        if how == "ends":
            if trainer.world.broadcast_object((folder.parent / "go-on").exists()):
                trainer.last_step = step.number
            return
        was_told, self.is_told = self.is_told, trainer.steering.rate_factor != 1.0
        # After an order one step later, so that rank 0 has noted it.
        if trainer.world.rank == 1 and (was_told if how == "told" else step.number >= 20):
            print("the last words of rank 1", flush=True)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("it is not a number")

world = mt.init()
print("begins")
print(f"loss of rank {world.rank}: \x1b[31m0.{world.rank}\x1b[0m", file=sys.stderr)
if world.rank == 1:
    sys.stdout.buffer.write(b"<b>caf\xc3\xa9</b> \xff\x07" + b"x" * 10_000 + b"\n")
sys.stdout.flush()
while (folder.parent / "hold").exists():
    time.sleep(0.05)

record = mt.Record([mt.writers.JsonLines(folder)], steps={"ends": 2, "killed": 5, "told": 1000000}[how])
mt.Trainer(build, [mt.StopAtStep(1_000_000), Gate(), record]).run()
"""


def run_script(tmp_path: Path, how: str, during: Any) -> Job:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    line = [sys.executable, "-m", "mpitrain", "run", "-n", str(RANKS), "--hosts", "localhost", "--max-restarts", "0"]
    return run_command([*line, str(script), how, str(tmp_path / "elsewhere/run")], timeout=200, during=during)


def run_watched(tmp_path: Path, served: Dashboard, during: Callable[[str], None]) -> Job:
    """Run the script; meanwhile call `during` with the id of its run, and then let the script end."""
    folder = tmp_path / "elsewhere/run"

    def meanwhile(_: subprocess.Popen[str]) -> None:
        try:
            served.wait_for(
                "/api/runs", lambda answer: any(is_ours(run, folder) and run["last"] for run in answer["runs"])
            )
            during(run_id(folder))
        finally:
            (folder.parent / "go-on").touch()

    return run_script(tmp_path, "ends", meanwhile)


def is_ours(run: dict[str, Any], folder: Path) -> bool:
    return run["is_live"] and run["folder"] == str(folder)


def test_a_job_with_a_stopped_rank(tmp_path: Path) -> None:
    """The record is in no folder that the dashboard searches: the launcher says where it is."""
    (tmp_path / "runs").mkdir()
    with dashboard(tmp_path / "cache", str(tmp_path / "runs")) as served:

        def during(id_: str) -> None:
            path = f"/api/runs/{id_}"
            answer = served.wait_for(path, lambda one: one["run"]["state"] == "trains" and len(one["history"]) > 3)
            run, live = answer["run"], answer["live"]
            assert (run["ranks"], [rank["rank"] for rank in live["ranks"]]) == (RANKS, list(range(RANKS)))
            assert run["job"] == live["job"] == answer["document"]["job"] != ""
            known = [len(phases) for _, phases in answer["history"]]  # none are, before the job has its place
            assert (known, set(known) | {0}) == (sorted(known), {0, RANKS})
            ids = [one["id"] for one in served.get("/api/runs")["runs"] if one["job"] == run["job"]]
            assert ids == [id_], "a job with a record is one run"
            text = served.ask("/metrics")[2]
            assert f'mpitrain_job_ranks{{job_id="{live["ids"][0]}",phase=' in text
            assert re.search(rf'mpitrain_rank_step{{job_id="{live["ids"][0]}",rank="2",host="[^"]+"}} [1-9]', text)
            _its_output(served, path)
            pid = live["ranks"][1]["pid"]
            os.kill(pid, signal.SIGSTOP)
            try:
                # On a busy machine the host may be silent before.
                answer = served.wait_for(path, lambda one: "rank 1 stopped" in one["run"]["why"])
                assert answer["run"]["state"] == "stalled"
                assert answer["history"][-1][1][1] == "stopped"
                # At first the others may be on their way to their call.
                waits = served.wait_for(path, lambda one: one["waits"] and is_stopped_one_awaited(one["waits"]))[
                    "waits"
                ]
                assert re.match(r"Ranks? (0,2|0|2) waits? in ", waits["text"]) and "Rank 1 has " in waits["text"]
            finally:
                os.kill(pid, signal.SIGCONT)
            served.wait_for(path, lambda one: one["run"]["state"] == "trains")

        job = run_watched(tmp_path, served, during)
        assert (job.code, job.left) == (0, []), job.output
        folder = tmp_path / "elsewhere/run"
        # The record is read again a moment after the launcher has gone.
        path = f"/api/runs/{run_id(folder)}"
        answer = served.wait_for(path, lambda one: one["live"] is None and one["run"]["state"] == "done")
        assert answer["run"]["rows"] == len((folder / "metrics.jsonl").read_text().splitlines())
        assert answer["run"]["ranks"] == RANKS
        assert "The launcher of the job had the output" in output_of(served, f"/api/runs/{run_id(folder)}")["refused"]
        assert read_document(folder / "run.json").job == answer["run"]["job"]


APART = [("0", False), ("2", False)]


def is_stopped_one_awaited(waits: dict[str, Any]) -> bool:
    """True if the others wait for rank 1. One of them may have got as far as the next call."""
    rows = [(row["ranks"], row["is_awaited"]) for row in waits["rows"]]
    return rows in ([("1", True), ("0,2", False)], *([("1", True), *two] for two in permutations(APART)))


def output_of(served: Dashboard, path: str, query: str = "") -> Any:
    status, _, text = served.ask(f"{path}/output{query}", token=served.operator)
    assert status == 200, text
    return json.loads(text)


def _its_output(served: Dashboard, path: str) -> None:
    """All ranks have printed it when the first step has ended."""
    answer = output_of(served, path)
    lines = [(line["ranks"], line["stream"], line["text"]) for line in answer["lines"]]
    begin = ",".join(ranks for ranks, stream, text in lines if (stream, text) == ("stdout", "begins"))
    assert begin == "0-2" or set(begin.split(",")) == {"0", "1", "2"}, "joined, where they came together"
    for rank in range(RANKS):
        assert (str(rank), "stderr", f"loss of rank {rank}: 0.{rank}") in lines
    (odd,) = (line for line in answer["lines"] if "café" in line["text"])
    assert (odd["ranks"], odd["stream"]) == ("1", "stdout")
    assert (odd["text"], odd["cut"]) == ("<b>café</b> \\xff\\x07" + "x" * (4096 - 15), 15 + 10_000 - 4096)
    assert (answer["more"], answer["dropped"]) == (False, 0)
    found = output_of(served, path, "?ranks=1-2&text=LOSS")["lines"]
    assert {line["text"] for line in found} == {"loss of rank 1: 0.1", "loss of rank 2: 0.2"}
    assert "'one' names no ranks" in output_of(served, path, "?ranks=one")["refused"]
    assert served.ask(f"{path}/output")[0] == 403, "viewers have no output: it may have secrets"


def test_a_page_that_is_open_while_a_job_stops_and_ends(tmp_path: Path, browser: Any) -> None:
    (tmp_path / "runs").mkdir()
    with dashboard(tmp_path / "cache", str(tmp_path / "runs")) as served:
        context = browser.new_context(viewport={"width": 1200, "height": 900})
        page = context.new_page()
        page.set_default_timeout(240_000)
        page.goto(served.link)

        def during(id_: str) -> None:
            page.get_by_label("Filter").fill(str(tmp_path))  # other tests may have jobs of this name
            page.get_by_role("link", name="run", exact=True).click()
            until(lambda: page.locator("#ranks tbody tr").count() == RANKS)
            page.locator("#ranksPart summary").click()
            assert page.locator("#ranks th").all_inner_texts() == ["Rank", "Host", "Does", "For", "Step", "In"]
            until(lambda: page.locator("#ranks tbody tr:first-child td.numeric:nth-child(5)").inner_text() > "0")
            row = page.locator("#ranks tbody tr").filter(has=page.locator("td:first-child", has_text="2"))
            pid = served.get(f"/api/runs/{id_}")["live"]["ranks"][2]["pid"]
            os.kill(pid, signal.SIGSTOP)
            try:
                page.wait_for_selector("#ranks tbody tr:first-child td.red")
                until(lambda: row.locator("td.red").inner_text() == "stopped")
                until(lambda: "stalled" in page.inner_text("#state"))
                first = page.locator("#waitTable tbody tr").first
                until(lambda: first.count() and first.inner_text().endswith("is waited for"))
                # One of the others may have got as far as the next call.
                until(lambda: re.match(r"Ranks? (0,1|0|1) waits? in ", page.inner_text("#waitText")))
            finally:
                os.kill(pid, signal.SIGCONT)
            until(lambda: page.locator("#ranks td.red").count() == 0)

        job = run_watched(tmp_path, served, during)
        assert job.code == 0, job.output
        until(lambda: "done" in page.inner_text("#state"))
        until(lambda: page.locator("#live").is_hidden())
        context.close()


def test_a_page_that_is_opened_while_a_job_starts_gets_its_charts(tmp_path: Path, browser: Any) -> None:
    (tmp_path / "runs").mkdir()
    folder = tmp_path / "elsewhere/run"
    folder.parent.mkdir()
    (folder.parent / "hold").touch()
    with dashboard(tmp_path / "cache", str(tmp_path / "runs")) as served:
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(240_000)
        page.goto(served.link)

        def during(_: subprocess.Popen[str]) -> None:
            page.get_by_label("Filter").fill(str(tmp_path))
            page.locator("#runs tbody a").first.click()
            page.wait_for_url("**/run/job-*")
            (folder.parent / "hold").unlink()
            page.wait_for_selector("#charts[data-drawn]")
            assert page.url == f"{served.base}/run/{run_id(folder)}"
            (folder.parent / "go-on").touch()

        job = run_script(tmp_path, "ends", during)
        assert job.code == 0, job.output
        context.close()


def tell_half_the_rate(tmp_path: Path) -> None:
    for _ in range(100):
        words = [sys.executable, "-m", "mpitrain", "ps", "--hosts", "localhost", "--json"]
        jobs = json.loads(subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout)
        ours = [one["job"] for one in jobs["jobs"] if str(tmp_path) in one["script"] and one["step"] > 2]
        if ours:
            break
    tell = [sys.executable, "-m", "mpitrain", "tell", "--hosts", "localhost", ours[0], "rate", "0.5"]
    subprocess.run(tell, capture_output=True, timeout=60, check=False)  # the job may end before it has answered


@pytest.mark.parametrize(
    ("how", "why"), [("killed", "rank 1 on {host} was killed by signal 9"), ("told", "ValueError: it is not a number")]
)
def test_whoever_fails_the_record_says_why(tmp_path: Path, how: str, why: str) -> None:
    """And what the ranks printed last. An order because of which a run fails before its next row is in the record."""
    require()
    job = run_script(tmp_path, how, lambda _: tell_half_the_rate(tmp_path) if how == "told" else None)
    assert job.code != 0 and job.left == [], job.output
    folder = tmp_path / "elsewhere/run"
    document = read_document(folder / "run.json")
    (host,) = document.hosts
    assert why.format(host=host) in document.end
    assert document.ended is not None and document.steps == 1_000_000
    kept = folder / "output.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600, "what ranks print may have secrets"
    lines = [(line["ranks"], line["text"]) for line in json.loads(kept.read_text())["lines"]]
    assert ("1", "the last words of rank 1") in lines and len(lines) <= 200
    assert any("Traceback" in text for _, text in lines) == (how == "told")
    texts = [event.text for event in read_events(folder / "metrics.jsonl")]
    assert texts == ["the learning rate is multiplied by 0.5, so by 0.5 in all"] * (how == "told")
    with dashboard(tmp_path / "cache", str(folder)) as served:
        path = f"/api/runs/{run_id(folder)}"
        served.wait_for("/api/runs", served.records)
        answer = served.get(path)
        assert answer["run"]["state"] == "failed" and why.format(host=host) in answer["run"]["why"]
        assert [one["text"] for one in answer["events"]] == texts
        found = output_of(served, path, "?ranks=0-1&text=WORDS%20OF")["lines"]
        assert [line["text"] for line in found] == ["the last words of rank 1"]
        assert output_of(served, path, "?ranks=0,2&text=words%20of")["lines"] == []
        kept.write_text("[")
        assert "output.json" in output_of(served, path)["refused"]
        kept.unlink()
        assert "has gone with the launcher" in output_of(served, path)["refused"]
