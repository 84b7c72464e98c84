"""Files in /dev/shm: those of the job are removed when its processes have ended, others are not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitrain.launch.processes import read
from mpitrain.launch.shared_files import FOLDER, OF_DAEMON, OF_SESSIONS, SharedFiles

MAPS = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print(flush=True); input()"


@pytest.fixture
def path() -> Iterator[Path]:
    """A file name as Python makes it for shared memory. No MPI library makes such a name."""
    path = Path(FOLDER) / f"psm_{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def mapping(path: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", MAPS, str(path)], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_what_a_process_of_the_job_has_mapped(path: Path) -> None:
    shared = SharedFiles()
    path.write_bytes(bytes(4096))
    first, second = mapping(path), mapping(path)
    shared.look(lambda: [first.pid])
    end(first)
    shared.remove()
    assert path.exists()  # the second process still has it open
    end(second)
    shared.remove()
    assert not path.exists()


OPENS = "import sys; f = open(sys.argv[1], 'r+b'); print(flush=True); input()"


def opening(path: Path, program: str = OPENS) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_what_mpichs_daemon_has_open_in_tmp() -> None:
    """A daemon of another job has its own file. Both are killed, and each job's file is removed with its job."""
    ours, theirs = (Path(f"{OF_DAEMON}{uuid.uuid4().hex[:6]}") for _ in range(2))
    shared = SharedFiles()
    try:
        for path in (ours, theirs):
            path.write_text("<topology/>")
        our_daemon, their_daemon = opening(ours), opening(theirs)
        shared.look(lambda: [our_daemon.pid])
        shared.remove()
        assert ours.exists()
        end(our_daemon)
        shared.remove()
        assert not ours.exists()
        assert theirs.exists()
        end(their_daemon)
    finally:
        ours.unlink(missing_ok=True)
        theirs.unlink(missing_ok=True)


def test_a_file_of_the_users_own_stays(path: Path) -> None:
    own = path.with_name(f"data-{path.name}")
    shared = SharedFiles()
    own.write_bytes(bytes(4096))
    try:
        process = mapping(own)
        shared.look(lambda: [process.pid])
        end(process)
        shared.remove()
        assert own.exists()
    finally:
        own.unlink()


def test_what_another_process_has_mapped(path: Path) -> None:
    shared = SharedFiles()
    path.write_bytes(bytes(4096))
    other = mapping(path)
    shared.look(list)
    end(other)
    shared.remove()
    assert path.exists()


def test_what_was_there_before(path: Path) -> None:
    path.write_bytes(bytes(4096))
    shared = SharedFiles()
    other = mapping(path)
    shared.look(lambda: [other.pid])
    end(other)
    shared.remove()
    assert path.exists()


def test_what_an_mpi_library_has_left_before_anybody_looked() -> None:
    shared = SharedFiles()
    path = Path(FOLDER) / f"mpich_shm_{uuid.uuid4().hex[:8]}_test"
    path.write_bytes(bytes(4096))
    process = mapping(path)
    shared.remove()
    assert path.exists()
    end(process)
    shared.remove()
    assert not path.exists()


def test_what_another_job_has_made_and_not_yet_mapped() -> None:
    """On a busy machine, a process may have to wait for a core between the two."""
    shared = SharedFiles()
    path = Path(FOLDER) / f"sm_segment.{uuid.uuid4().hex}"
    path.write_bytes(bytes(4096))
    maker = opening(path)
    try:
        time.sleep(2.5)  # old enough to be judged
        shared.remove()
        assert path.exists()
        end(maker)
        shared.remove()
        assert not path.exists()
    finally:
        end(maker)
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("begin", OF_SESSIONS)
def test_the_folder_of_open_mpis_daemon(path: Path, begin: str) -> None:
    """The folder's name has the daemon's process id. If no process here has it, a process in a container may."""
    shared = SharedFiles()
    path.write_bytes(b"1")
    ours, theirs, gone = (opening(path) for _ in range(3))
    folders = [Path(f"/tmp/{begin}{process.pid}") for process in (ours, theirs, gone)]
    try:
        for folder in folders:
            (folder / "1").mkdir(parents=True)
            (folder / "1/pmix-gds-shmem2").write_text("job")
        end(gone)
        shared.look(lambda: [ours.pid])
        shared.remove()
        assert all(folder.exists() for folder in folders)
        ours.kill()
        os.waitid(os.P_PID, ours.pid, os.WEXITED | os.WNOWAIT)  # dead, but not reaped
        shared.remove()
        assert [folder.exists() for folder in folders] == [False, True, True]
    finally:
        end(ours)
        end(theirs)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


ALLOCATES = "import sys; b = bytes(range(256)) * (1 << 19); print(flush=True); input()"


def test_a_killed_process_does_not_keep_its_folder(path: Path) -> None:
    """While its memory is freed, the process is not yet a zombie: it still has its id, but no environment."""
    shared = SharedFiles()
    path.write_bytes(b"1")
    daemon = opening(path, ALLOCATES)
    folder = Path(f"/tmp/prted.{daemon.pid}")
    try:
        folder.mkdir()
        shared.look(lambda: [daemon.pid])
        daemon.kill()
        while read(f"/proc/{daemon.pid}/environ"):
            pass
        shared.remove()
        assert not folder.exists()
    finally:
        end(daemon)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_process_that_is_reaped_after_proc_was_listed_does_not_keep_its_folder(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharedFiles()
    path.write_bytes(b"1")
    daemon = opening(path)
    folder = Path(f"/tmp/prted.{daemon.pid}")
    try:
        folder.mkdir()
        shared.look(lambda: [daemon.pid])
        end(daemon)
        monkeypatch.setattr(os, "listdir", lambda _: [str(daemon.pid)])
        shared.remove()
        assert not folder.exists()
    finally:
        end(daemon)
        shutil.rmtree(folder, ignore_errors=True)


def test_the_folder_of_open_mpis_daemon_in_tmpdir(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shared = SharedFiles()
    path.write_bytes(b"1")
    daemon = opening(path)
    folder = tmp_path / f"prted.{daemon.pid}"
    folder.mkdir()
    shared.look(lambda: [daemon.pid])
    end(daemon)
    shared.remove()
    assert not folder.exists()


@pytest.mark.parametrize("swept", [False, True])
def test_the_folder_that_a_parameter_of_open_mpi_names(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swept: bool
) -> None:
    """Only the ranks know that folder, and later the process that takes over from the guard."""
    shared = SharedFiles()
    path.write_bytes(b"1")
    folder = tmp_path / "prted.4711"
    folder.mkdir()
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(folder))
    rank = opening(path)
    monkeypatch.delenv("PMIX_SERVER_TMPDIR")
    shared.look(lambda: [rank.pid], [rank.pid])
    shared.remove()
    assert folder.exists()
    end(rank)
    if swept:
        shared = SharedFiles(0.0, shared.of_job)
    shared.remove()
    assert not folder.exists()
