"""Which folders are looked at; one that hangs holds up no other, and is named; answers of threads that hang."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import types
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from records_made import lines, make_record, rows_made

from mpitrain.dashboard import shared_answers
from mpitrain.dashboard.catalogue import Catalogue
from mpitrain.dashboard.folder_watch import FolderWatch
from mpitrain.dashboard.index import RunIndex
from mpitrain.dashboard.record_reader import run_id
from mpitrain.dashboard.shared_answers import SharedAnswers
from mpitrain.errors import DataError
from serving import Dashboard, dashboard


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunIndex]:
    monkeypatch.setattr(FolderWatch, "begin", lambda _: None)
    made = RunIndex(tmp_path / "index.sqlite")
    yield made
    made.close()


def write(catalogue: Catalogue, *folders: Path) -> None:
    """One job writes in each of these folders, and no other does."""
    jobs: Any = {str(folder): types.SimpleNamespace(look={"record": str(folder)}) for folder in folders}
    catalogue.live.jobs.clear()
    catalogue.live.jobs.update(jobs)
    catalogue._look_for_folders()


def test_a_job_that_writes_again_where_one_has_ended(tmp_path: Path, index: RunIndex) -> None:
    """Its folder has a thread of its own again, because the shared one may hang."""
    catalogue, folder = Catalogue(index, []), tmp_path / "a"
    found = {run_id(folder): folder}
    write(catalogue, folder)
    catalogue._of_jobs[folder].folders = found
    write(catalogue)
    assert (catalogue._former.roots, list(catalogue._of_jobs)) == ([folder], [folder])
    catalogue._former.folders = found
    write(catalogue)
    assert (catalogue._former.roots, list(catalogue._of_jobs)) == ([folder], [])
    write(catalogue, folder)
    assert (catalogue._former.roots, list(catalogue._of_jobs)) == ([], [folder])
    catalogue._of_jobs[folder].folders = found
    write(catalogue)  # what the shared thread has found before does not count: it looks there no more
    assert (catalogue._former.roots, list(catalogue._of_jobs)) == ([folder], [folder])


def test_runs_of_the_index_until_the_first_search_has_ended(tmp_path: Path, index: RunIndex) -> None:
    shown, other = make_record(tmp_path / "runs/a"), make_record(tmp_path / "other/b")
    for folder in (shown, other):
        assert index.update(folder)
    catalogue = Catalogue(index, [tmp_path / "runs"])
    assert list(catalogue._folders()) == [run_id(shown)]
    run, _ = catalogue.find(run_id(shown))
    assert run is not None and run.folder == str(shown)
    assert catalogue.find(run_id(other)) == (None, None)
    catalogue._watches[0].has_searched = True  # and it has found nothing
    assert catalogue._folders() == {}


def steps(served: Dashboard, answer: Any, name: str) -> list[Any]:
    return [run["last"].get("step") for run in answer["runs"] if run["folder"].endswith(f"/good/{name}")]


def test_a_record_that_does_not_answer(tmp_path: Path) -> None:
    """To open a pipe without a writer takes until there is one, as on a share without its server."""
    hung, good = tmp_path / "hung", tmp_path / "good"
    make_record(hung / "a")
    (hung / "a/metrics.jsonl").unlink()
    os.mkfifo(hung / "a/metrics.jsonl")
    make_record(good / "first", rows_made(1, 2))
    with dashboard(tmp_path / "cache", str(hung), str(good)) as served:
        served.wait_for("/api/runs", lambda answer: steps(served, answer, "first") == [2])
        answer = served.wait_for("/api/runs", lambda answer: str(hung / "a") in answer["problem"])
        assert "has not answered for" in answer["problem"] and str(good) not in answer["problem"]
        with (good / "first/metrics.jsonl").open("a") as file:
            file.write(lines(rows_made(3, 7)))
        make_record(good / "second", rows_made(1, 4))
        served.wait_for(
            "/api/runs", lambda answer: (steps(served, answer, "first"), steps(served, answer, "second")) == ([7], [4])
        )
        assert str(hung / "a") in served.get("/api/runs")["problem"]
        (hung / "a/metrics.jsonl").open("w").close()  # it answers
        served.wait_for("/api/runs", lambda answer: str(hung) not in answer["problem"])


# A file system whose server never answers. It goes with the process that has its descriptor open.
MOUNTS = """
import ctypes, os, sys
library = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result:
        sys.exit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
folder, *command = sys.argv[1:]
check(library.unshare(0x20000))  # CLONE_NEWNS
check(library.mount(b"none", b"/", None, 0x4000 | 0x40000, None))  # MS_REC | MS_PRIVATE
descriptor = os.open("/dev/fuse", os.O_RDWR)
os.set_inheritable(descriptor, True)
options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0"
check(library.mount(b"none", folder.encode(), b"fuse.lost", 0, options.encode()))
os.execv(command[0], command)
"""


def test_a_share_without_a_server(tmp_path: Path) -> None:
    """It is lost before the dashboard starts again. Every access hangs, as on NFS."""
    share, good = tmp_path / "share", tmp_path / "good"
    share.mkdir()
    make_record(good / "first", rows_made(1, 2), checkpoints=[str(share / "kept")])
    make_record(share / "old", rows_made(1, 9))
    mounts = [sys.executable, "-c", MOUNTS, str(share)]
    tried = subprocess.run([*mounts, "/bin/true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"needs the right to mount FUSE, such as root has: {tried.stderr.strip()[-200:]}")
    with dashboard(tmp_path / "cache", str(share)) as served:
        served.wait_for("/api/runs", lambda answer: [run["last"].get("step") for run in served.records(answer)] == [9])
    with dashboard(tmp_path / "cache", str(share), str(good), before=mounts) as served:
        served.wait_for("/api/runs", lambda answer: steps(served, answer, "first") == [2])
        problem = served.wait_for("/api/runs", lambda answer: answer["problem"])["problem"]
        assert f"{share} has not answered for" in problem
        (old,) = served.records(served.get("/api/runs"))
        assert (old["folder"], old["last"]["step"]) == (str(share / "old"), 9), "as it was before"
        assert served.get(f"/api/runs/{old['id']}")["run"]["id"] == old["id"]
        status, _, text = served.ask(f"/api/runs/{run_id(good / 'first')}/files")
        assert (status, str(share / "kept") in text, "is a disk or network file system lost?" in text) == (
            503,
            True,
            True,
        )


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run this in an event loop; not in this thread, which has that of Playwright."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


@pytest.fixture
def goes_on() -> Any:
    """Calls that wait for this end at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def fails() -> None:
    raise OSError("the disk is gone")


def test_all_who_ask_meanwhile_get_one_answer(goes_on: threading.Event) -> None:
    calls = []

    def call() -> int:
        calls.append(1)
        goes_on.wait()
        return 7

    async def ask() -> list[int]:
        answers = SharedAnswers()
        asked = [asyncio.create_task(answers.get("a", call)) for _ in range(3)]
        await asyncio.sleep(0)
        goes_on.set()
        found = list(await asyncio.gather(*asked))
        return [*found, await answers.get("a", lambda: 8)]

    assert (run(ask()), calls) == ([7, 7, 7, 8], [1])


def test_an_error_reaches_whoever_asks() -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        run(SharedAnswers().get("a", fails))


def test_no_answer_in_time(monkeypatch: pytest.MonkeyPatch, goes_on: threading.Event) -> None:
    """The call that hangs is not made again; it may end after all."""
    monkeypatch.setattr(shared_answers, "_ANSWER_SECONDS", 0.05)
    calls = [goes_on.wait]

    def call() -> bool:
        return calls.pop()()

    async def ask() -> object:
        answers = SharedAnswers()
        for _ in range(2):
            with pytest.raises(DataError, match=r"no answer for 0\.05 s from the folder /lost: is a disk"):
                await answers.get("the folder /lost", call)
        goes_on.set()
        while True:
            try:
                return await answers.get("the folder /lost", lambda: 8)
            except DataError:
                await asyncio.sleep(0.01)

    assert run(ask()) in (True, 8)


def test_not_more_than_a_few_hang(monkeypatch: pytest.MonkeyPatch, goes_on: threading.Event) -> None:
    monkeypatch.setattr(shared_answers, "_MOST_ASKED", 2)

    async def ask() -> None:
        answers = SharedAnswers()
        asked = [asyncio.create_task(answers.get(name, goes_on.wait)) for name in ("a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(DataError, match="2 answers are waited for, which is the limit; the oldest is a"):
            await answers.get("c", fails)
        goes_on.set()
        assert await asyncio.gather(*asked) == [True, True]
        with pytest.raises(OSError, match="the disk is gone"):
            await answers.get("c", fails)

    run(ask())


def test_the_end_waits_for_nothing(goes_on: threading.Event) -> None:
    async def ask() -> None:
        answers = SharedAnswers()
        asked = asyncio.create_task(answers.get("a", goes_on.wait))
        await asyncio.sleep(0)
        answers.end()
        with pytest.raises(DataError, match="the dashboard ends"):
            await asked

    run(ask())
