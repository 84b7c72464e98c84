"""Files in /dev/shm: those of the job are removed when its processes have ended, others are not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mpitrain.launch.shared_files import FOLDER, OF_DAEMON, OF_SESSIONS, SharedFiles
from mpitrain.watching.proc import read

HAS_IT = "import mmap, sys; f = open(sys.argv[1], 'r+b'); {}; print(flush=True); input()"
MAPS, OPENS = HAS_IT.format("m = mmap.mmap(f.fileno(), 0)"), HAS_IT.format("pass")
ALLOCATES = HAS_IT.format("b = bytes(range(256)) * (1 << 19)")

Start = Callable[..., "subprocess.Popen[str]"]
Made = Callable[[str | Path], Path]


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that have a file open, or mapped. They end with the test."""
    processes = []

    def start(path: Path, program: str = OPENS) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        processes.append(
            subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=pipe, stdout=pipe, text=True)
        )
        assert processes[-1].stdout is not None
        processes[-1].stdout.readline()
        return processes[-1]

    yield start
    for process in processes:
        with suppress(ValueError):  # its pipes are closed
            end(process)


@pytest.fixture
def made() -> Iterator[Made]:
    """Makes files, and folders where the name ends in "/". They go with the test."""
    paths = []

    def made(path: str | Path) -> Path:
        paths.append(Path(path))
        if str(path).endswith("/"):
            (paths[-1] / "1").mkdir(parents=True)
            (paths[-1] / "1/pmix-gds-shmem2").write_text("job")
        else:
            paths[-1].write_bytes(bytes(4096))
        return paths[-1]

    yield made
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)


def python_s() -> str:
    """A file name as Python makes it for shared memory. No MPI library makes such a name."""
    return f"{FOLDER}/psm_{uuid.uuid4().hex}"


def test_what_a_process_of_the_job_has_mapped(start: Start, made: Made) -> None:
    shared, path = SharedFiles(), made(python_s())
    first, second = start(path, MAPS), start(path, MAPS)
    shared.look(lambda: [first.pid])
    end(first)
    shared.remove()
    assert path.exists()  # the second process still has it open
    end(second)
    shared.remove()
    assert not path.exists()


def test_what_mpichs_daemon_has_open_in_tmp(start: Start, made: Made) -> None:
    """A daemon of another job has its own file. Both are killed, and each job's file is removed with its job."""
    shared = SharedFiles()
    ours, theirs = (made(f"{OF_DAEMON}{uuid.uuid4().hex[:6]}") for _ in range(2))
    our_daemon, their_daemon = start(ours), start(theirs)
    shared.look(lambda: [our_daemon.pid])
    shared.remove()
    assert ours.exists()
    end(our_daemon)
    shared.remove()
    assert (ours.exists(), theirs.exists()) == (False, True)
    end(their_daemon)


@pytest.mark.parametrize("whose", ["the user's own", "another process's", "from before"])
def test_what_stays(start: Start, made: Made, whose: str) -> None:
    shared = SharedFiles()
    path = made(python_s() if "own" not in whose else f"{FOLDER}/data-{uuid.uuid4().hex}")
    if "before" in whose:
        shared = SharedFiles()
    process = start(path, MAPS)
    shared.look(lambda: [] if "another" in whose else [process.pid])
    end(process)
    shared.remove()
    assert path.exists()


@pytest.mark.parametrize(("name", "program"), [("mpich_shm_{}_test", MAPS), ("sm_segment.{}", OPENS)])
def test_what_an_mpi_library_has_made(start: Start, made: Made, name: str, program: str) -> None:
    """Nobody has looked before it was left; and another job may not yet have mapped what it has made.

    On a busy machine, a process may have to wait for a core between the two.
    """
    shared, path = SharedFiles(), made(f"{FOLDER}/{name.format(uuid.uuid4().hex[:8])}")
    maker = start(path, program)
    if program == OPENS:
        time.sleep(2.5)  # old enough to be judged
    shared.remove()
    assert path.exists()
    end(maker)
    shared.remove()
    assert not path.exists()


@pytest.mark.parametrize("begin", OF_SESSIONS)
def test_the_folder_of_open_mpis_daemon(start: Start, made: Made, begin: str) -> None:
    """The folder's name has the daemon's process id. If no process here has it, a process in a container may."""
    shared, path = SharedFiles(), made(python_s())
    processes = ours, _, gone = [start(path) for _ in range(3)]
    folders = [made(f"/tmp/{begin}{process.pid}/") for process in processes]
    end(gone)
    shared.look(lambda: [ours.pid])
    shared.remove()
    assert all(folder.exists() for folder in folders)
    ours.kill()
    os.waitid(os.P_PID, ours.pid, os.WEXITED | os.WNOWAIT)  # dead, but not reaped
    shared.remove()
    assert [folder.exists() for folder in folders] == [False, True, True]


@pytest.mark.parametrize("how", ["its memory is freed", "it is reaped after /proc was listed", "in TMPDIR"])
def test_an_ended_daemon_does_not_keep_its_folder(
    start: Start, made: Made, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its memory is freed, the process is not yet a zombie: it still has its id, but no environment."""
    if how == "in TMPDIR":
        monkeypatch.setenv("TMPDIR", str(tmp_path))
    shared, path = SharedFiles(), made(python_s())
    daemon = start(path, ALLOCATES if "memory" in how else OPENS)
    folder = made(f"{tmp_path if how == 'in TMPDIR' else '/tmp'}/prted.{daemon.pid}/")
    shared.look(lambda: [daemon.pid])
    if "memory" in how:
        daemon.kill()
        while read(f"/proc/{daemon.pid}/environ"):
            pass
    else:
        end(daemon)
    if "listed" in how:
        monkeypatch.setattr(os, "listdir", lambda _: [str(daemon.pid)])
    shared.remove()
    assert not folder.exists()


@pytest.mark.parametrize("swept", [False, True])
def test_the_folder_that_a_parameter_of_open_mpi_names(
    start: Start, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swept: bool
) -> None:
    """Only the ranks know that folder, and later the process that takes over from the agent."""
    shared, folder = SharedFiles(), made(f"{tmp_path}/prted.4711/")
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(folder))
    rank = start(made(python_s()))
    monkeypatch.delenv("PMIX_SERVER_TMPDIR")
    shared.look(lambda: [rank.pid], [rank.pid])
    shared.remove()
    assert folder.exists()
    end(rank)
    if swept:
        shared = SharedFiles(0.0, shared.of_job)
    shared.remove()
    assert not folder.exists()
