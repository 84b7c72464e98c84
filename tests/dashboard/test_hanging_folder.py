"""A folder that does not answer holds up no other one, and is named. The hang is the kernel's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from records_made import lines, make_record, rows_made

from mpitrain.dashboard.record_reader import run_id
from serving import Dashboard, dashboard, refused

pytest.importorskip("starlette", reason="needs Starlette and uvicorn: pip install 'mpitrain[dashboard]'")
pytest.importorskip("uvicorn", reason="needs Starlette and uvicorn: pip install 'mpitrain[dashboard]'")


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
            "/api/runs",
            lambda answer: (steps(served, answer, "first"), steps(served, answer, "second")) == ([7], [4]),
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
        assert (status, str(share / "kept") in text, "is a disk or network share lost?" in text) == (503, True, True)


def test_a_folder_that_cannot_be_looked_at(tmp_path: Path) -> None:
    code, errors = refused(tmp_path, "x" * 300)
    assert (code, "cannot be looked at: File name too long" in errors, "Traceback" in errors) == (2, True, False), (
        errors
    )


def test_an_inventory_that_does_not_answer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hosts")
    code, errors = refused(tmp_path, str(tmp_path), "-i", str(tmp_path / "hosts"))
    assert (code, "has not answered for 3 s: is it a pipe" in errors) == (2, True), errors
