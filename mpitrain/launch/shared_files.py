"""Files in /dev/shm of a job on this host, so that they can be removed when its processes are gone.

MPI libraries keep one there as long as a job runs (MPICH's mpich_shm_*, Open MPI's sm_segment.*), and leave it when
the ranks are killed. Whose a file is, its name does not tell. It is the job's if a process of the job has mapped it;
and where a job was over before anybody could look, a file of an MPI library that came while the job ran, and that no
process has mapped at its end, is of use to nobody. (In the moment between a file's making and its mapping it looks the
same, so it has to be some seconds old. A file that is mapped is used on, whether its name is removed or not.)

Sent to the guards as text, so it imports nothing of ours and does with an old Python.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

FOLDER = "/dev/shm"
# What MPI libraries call their files: MPICH, Open MPI 5 and 4, UCX, Intel MPI.
OF_MPI = ("mpich_shm_", "sm_segment.", "vader_segment.", "ucx_shm_posix_", "Intel_MPI_")
# What Python and PyTorch call what their processes share. Files of other names are the user's own, and stay.
OF_PYTHON = ("psm_", "sem.mp-", "torch_")
_OLD_SECONDS = 2.0


class SharedFiles:
    """Those of one job. Look now and then while it runs; `remove` when its processes are gone."""

    def __init__(self) -> None:
        self._before = set(files())
        self._foreign = set(self._before)
        self._of_job: set[tuple[str, int]] = set()

    def look(self, find: Callable[[], Iterable[int]]) -> None:
        """See which files the job has mapped; `find` gives its processes. Nearly free where there is no new file."""
        now = time.time()
        new = {file: made for file, made in files().items() if file not in self._foreign and file not in self._of_job}
        if not new:
            return
        for pid in find():
            self._of_job.update(mapped(pid).intersection(new))
        # Whoever makes a file maps it at once. What was not ours then, never will be.
        self._foreign.update(file for file, made in new.items() if now - made > _OLD_SECONDS)
        self._foreign -= self._of_job

    def remove(self) -> None:
        """Remove what is the job's; takes some two seconds where a file is too young to tell."""
        deadline = time.monotonic() + 2 * _OLD_SECONDS
        while True:
            there = {file: made for file, made in files().items() if file not in self._before}
            left = {file for file in there if file[0].startswith(OF_MPI)}
            left |= {file for file in there if file in self._of_job and file[0].startswith(OF_PYTHON)}
            for entry in os.listdir("/proc") if left else []:  # noqa: PTH208 (names are wanted)
                if entry.isdigit():
                    left -= mapped(int(entry))
            now = time.time()
            sure = {file for file in left if file in self._of_job or not 0 <= now - there[file] <= _OLD_SECONDS}
            for name, _ in sure:
                with contextlib.suppress(OSError):
                    Path(FOLDER, name).unlink()
            if sure == left or time.monotonic() > deadline:
                return
            time.sleep(0.1)


def remove_mine() -> None:
    """Remove those of MPI that this process has mapped: for a rank that ends its job."""
    for name, _ in mapped(os.getpid()):
        if name.startswith(OF_MPI):
            with contextlib.suppress(OSError):
                Path(FOLDER, name).unlink()


def files() -> dict[tuple[str, int], float]:
    """This user's files there by name and inode: when each was made, in seconds since the epoch."""
    made = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(FOLDER):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.geteuid() and entry.is_file(follow_symlinks=False):
                    made[entry.name, status.st_ino] = status.st_ctime
    return made


def mapped(pid: int) -> set[tuple[str, int]]:
    """Name and inode of the files there that a process has mapped."""
    mappings = set()
    with contextlib.suppress(OSError), Path(f"/proc/{pid}/maps").open(errors="replace") as file:
        for line in file:
            # address permissions offset device inode path
            fields = line.rstrip("\n").split(None, 5)
            if len(fields) == 6 and fields[5].startswith(FOLDER + "/"):
                mappings.add((fields[5][len(FOLDER) + 1 :], int(fields[4])))
    return mappings
