"""Files of a job's MPI library on this host, so that they can be removed when the job's processes are gone.

MPI libraries keep one in /dev/shm as long as a job runs (MPICH's mpich_shm_*, Open MPI's sm_segment.*), and leave it
when the ranks are killed. MPICH's daemon keeps a description of the machine in /tmp, wherever TMPDIR is, and leaves it
when it is killed. Whose a file is, its name does not tell. It is the job's if a process of the job has mapped it or has
it open, as that daemon has as long as it lives; and where a job was over before anybody could look, a file of an MPI
library that came while the job ran, and that no process has at its end, is of use to nobody. (In the moment between a
file's making and its mapping it looks the same, so it has to be some seconds old. A file that is mapped is used on,
whether its name is removed or not.)

Sent to the guards as text, so it imports nothing of ours and does with an old Python.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

FOLDER = "/dev/shm"
# What MPI libraries call their files there: MPICH, Open MPI 5 and 4, UCX, Intel MPI.
OF_MPI = ("mpich_shm_", "sm_segment.", "vader_segment.", "ucx_shm_posix_", "Intel_MPI_")
# What Python and PyTorch call what their processes share. Files of other names are the user's own, and stay.
OF_PYTHON = ("psm_", "sem.mp-", "torch_")
# What the daemon of MPICH's mpiexec (hydra_pmi_proxy) calls its file; the whole path is fixed.
OF_DAEMON = "/tmp/hydra_hwloc_xmlfile_"
_OLD_SECONDS = 2.0


class SharedFiles:
    """Those of one job. Look now and then while it runs; `remove` when its processes are gone."""

    def __init__(self, since: float = float("inf"), of_job: Iterable[tuple[str, int]] = ()) -> None:
        """The job began at `since`, by time.time(), or begins now; files known to be the job's are `of_job`."""
        self._before = {file for file, made in files().items() if made < since}
        self._foreign = set(self._before)
        self.of_job: set[tuple[str, int]] = set(of_job)

    def look(self, find: Callable[[], Iterable[int]]) -> None:
        """See which files the job has; `find` gives its processes. Nearly free where there is no new file."""
        now = time.time()
        new = {file: made for file, made in files().items() if file not in self._foreign and file not in self.of_job}
        if not new:
            return
        for pid in find():
            self.of_job.update(held(pid).intersection(new))
        # Whoever makes a file has it at once. What was not ours then, never will be.
        self._foreign.update(file for file, made in new.items() if now - made > _OLD_SECONDS)
        self._foreign -= self.of_job

    def remove(self) -> None:
        """Remove what is the job's; takes some two seconds where a file is too young to tell."""
        deadline = time.monotonic() + 2 * _OLD_SECONDS
        while True:
            there = {file: made for file, made in files().items() if file not in self._before}
            left = {file for file in there if _is_of_mpi(file[0])}
            left |= {file for file in there if file in self.of_job and _name(file[0]).startswith(OF_PYTHON)}
            for entry in os.listdir("/proc") if left else []:  # noqa: PTH208 (names are wanted)
                if entry.isdigit():
                    left -= held(int(entry))
            now = time.time()
            sure = {file for file in left if file in self.of_job or not 0 <= now - there[file] <= _OLD_SECONDS}
            for path, _ in sure:
                with contextlib.suppress(OSError):
                    Path(path).unlink()
            if sure == left or time.monotonic() > deadline:
                return
            time.sleep(0.1)


def remove_mine() -> None:
    """Remove those of MPI that this process has mapped: for a rank that ends its job."""
    for path, _ in _mapped(os.getpid()):
        if _is_of_mpi(path):
            with contextlib.suppress(OSError):
                Path(path).unlink()


def files() -> dict[tuple[str, int], float]:
    """This user's files that may be a job's, by path and inode: when each was made, in seconds since the epoch."""
    made = {}
    for folder, begin in ((FOLDER, ""), os.path.split(OF_DAEMON)):
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                if not entry.name.startswith(begin):
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == os.geteuid() and entry.is_file(follow_symlinks=False):
                        made[entry.path, status.st_ino] = status.st_ctime
    return made


def held(pid: int) -> set[tuple[str, int]]:
    """Path and inode of the files of this kind that a process has mapped or has open."""
    return {*_mapped(pid), *_opened(pid)}


def _mapped(pid: int) -> Iterator[tuple[str, int]]:
    with contextlib.suppress(OSError), Path(f"/proc/{pid}/maps").open(errors="replace") as file:
        for line in file:
            # address permissions offset device inode path
            fields = line.rstrip("\n").split(None, 5)
            if len(fields) == 6 and fields[5].startswith(FOLDER + "/"):
                yield fields[5], int(fields[4])


def _opened(pid: int) -> Iterator[tuple[str, int]]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(OF_DAEMON):  # noqa: PTH115 (Path.readlink is of Python 3.9)
                    yield os.readlink(entry.path), entry.stat().st_ino  # noqa: PTH115


def _is_of_mpi(path: str) -> bool:
    return path.startswith(OF_DAEMON) or _name(path).startswith(OF_MPI)


def _name(path: str) -> str:
    return os.path.basename(path)  # noqa: PTH119 (called often)
