"""Files of a job's MPI library on this host, so that they can be removed after the job's processes are gone.

MPI libraries keep a file in /dev/shm while a job runs (MPICH's mpich_shm_*, Open MPI's sm_segment.*), and leave it
behind if the ranks are killed. MPICH's daemon keeps a description of the machine in /tmp, wherever TMPDIR is, and
leaves it behind if the daemon is killed. The daemons of Open MPI 5 and its mpiexec do the same with a folder whose name
has their process number, in TMPDIR or where parameters of Open MPI put it: each of their ranks has its path in a
variable. The name of any other file does not tell which job owns the file. A file is the job's
if a process of the job has mapped or opened it; the daemon keeps its file open. A job may be over before anybody could
look. Therefore a file of an MPI library that appeared while the job ran also counts as the job's, if no process has
mapped or opened the file at the job's end: nobody needs it. (The file must also be some seconds old, because a process
may be between two such steps. A mapped file stays usable, even if its name is removed.)

A rank of Open MPI keeps its file in a folder of its own while MPI starts (job/segments.py), and removes both then. If
it is killed before, the folder's name tells whose it is, and nobody holds the folder's lock.

Sent to the agents as text. So this module imports only a module that comes with it, and must run with old Pythons.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mpitrain.watching.proc import opened, stat_of

FOLDER = "/dev/shm"
# The names that MPI libraries give their files there: MPICH, Open MPI 5 and 4, UCX, Intel MPI.
OF_MPI = ("mpich_shm_", "sm_segment.", "vader_segment.", "ucx_shm_posix_", "Intel_MPI_")
# The names that Python and PyTorch give the files shared by their processes. Other files are the user's own, and stay.
OF_PYTHON = ("psm_", "sem.mp-", "torch_")
# The name that the daemon of MPICH's mpiexec (hydra_pmi_proxy) gives its file; the whole path is fixed.
OF_DAEMON = "/tmp/hydra_hwloc_xmlfile_"
# What Open MPI's mpiexec and its daemons call the folders of their sessions; a process number follows.
OF_SESSIONS = ("ompi.", "prted.")
# Where these folders are: in the first of these that is set, else in /tmp. In each rank another variable has the path.
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")
_SESSION_VARIABLE = b"PMIX_SERVER_TMPDIR="
_SESSION = re.compile("(?:{})[0-9]+".format("|".join(map(re.escape, OF_SESSIONS))))
_OLD_SECONDS = 2.0
# What job/segments.py calls the folders of a rank; the job's id follows.
OF_RANKS = "mpitrain-segments-"
_EXITING = 0x4  # PF_EXITING of the kernel, set until a process is reaped


class SharedFiles:
    """The files of one job. Look now and then while the job runs; `remove` when its processes are gone."""

    def __init__(self, since: float = float("inf"), of_job: Iterable[tuple[str, int]] = ()) -> None:
        """The job began at `since`, by time.time(), or begins now; files known to be the job's are `of_job`."""
        of_job = set(of_job)
        bases = {next((os.environ[name] for name in _TEMPORARY if os.environ.get(name)), "/tmp"), "/tmp"}
        self._bases = {os.path.realpath(base) for base in bases}  # of sessions
        self._bases.update(os.path.dirname(path) for path, _ in of_job if _is_session(path))  # noqa: PTH120
        self._asked: set[int] = set()  # processes that have said where their session is
        self._before = {file for file, made in files(self._bases).items() if made < since}
        self._foreign = set(self._before)
        self.of_job: set[tuple[str, int]] = of_job

    def look(self, find: Callable[[], Iterable[int]], ranks: Iterable[int] = ()) -> None:
        """Note which files the job has; `find` returns its processes. Nearly free if there is no new file.

        `ranks` are those of its processes that are known already.
        """
        for pid in set(ranks) - self._asked:
            self._asked.add(pid)
            self._bases.update(os.path.dirname(path) for path in _session_told(pid))  # noqa: PTH120
        now = time.time()
        there = files(self._bases)
        new = {file: made for file, made in there.items() if file not in self._foreign and file not in self.of_job}
        if not new:
            return
        for pid in find():
            self.of_job.update(self._held(pid).intersection(new))
        # A process uses its file right after making it. So a file that was not the job's never becomes the job's.
        self._foreign.update(file for file, made in new.items() if now - made > _OLD_SECONDS)
        self._foreign -= self.of_job

    def remove(self) -> None:
        """Remove the job's files; takes about two seconds if a file is too young to judge."""
        deadline = time.monotonic() + 2 * _OLD_SECONDS
        while True:
            there = {file: made for file, made in files(self._bases).items() if file not in self._before}
            left = {file for file in there if _is_of_mpi(file[0])}
            left |= {file for file in there if file in self.of_job and _name(file[0]).startswith(OF_PYTHON)}
            # A number means another process in a container: a folder that was not seen to be the job's may be in use.
            left |= {file for file in there if file in self.of_job and _is_session(file[0])}
            for entry in os.listdir("/proc") if left else []:  # noqa: PTH208 (names are wanted)
                if entry.isdigit():
                    left -= self._held(int(entry))
            now = time.time()
            sure = {file for file in left if file in self.of_job or not 0 <= now - there[file] <= _OLD_SECONDS}
            for path, _ in sure:
                if _is_session(path):
                    shutil.rmtree(path, ignore_errors=True)
                    continue
                with contextlib.suppress(OSError):
                    Path(path).unlink()
            if sure == left or time.monotonic() > deadline:
                return
            time.sleep(0.1)

    def _held(self, pid: int) -> set[tuple[str, int]]:
        """Path and inode of the files that a process has mapped or opened, or that have its number in their name."""
        if not _is_alive(pid):
            return set()
        # In this order: the process that makes a file has it open until it has mapped it.
        return {*_opened(pid), *_mapped(pid), *_sessions(pid, self._bases)}


def of_ranks(job: str) -> str:
    """Return how the names of the folders in FOLDER begin that the ranks of the job with this id make for MPI_Init."""
    return f"{OF_RANKS}{job}-"


def folders_of_ranks(job: str) -> list[str]:
    """Return the paths of these folders."""
    return glob.glob(f"{FOLDER}/{of_ranks(job)}*")  # noqa: PTH207 (paths are wanted)


def remove_of_ranks(job: str) -> None:
    """Remove these folders, which ranks leave that are killed in MPI_Init. All ranks of the job must have ended."""
    for path in folders_of_ranks(job):
        shutil.rmtree(path, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the folders of this user that ranks of any job have left, as far as these ranks have ended."""
    for path in glob.glob(f"{FOLDER}/{OF_RANKS}*"):  # noqa: PTH207 (paths are wanted)
        descriptor = lock(path)
        if descriptor >= 0:
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)


def lock(folder: str) -> int:
    """Lock a folder of this user. Return the descriptor that holds the lock; -1: another one has it, or it is gone."""
    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that had the lock before may have removed the folder.
        if os.fstat(descriptor).st_uid == os.geteuid() and os.path.samestat(os.fstat(descriptor), os.lstat(folder)):
            return descriptor
    except OSError:
        pass
    if descriptor >= 0:
        os.close(descriptor)
    return -1


def remove_mine() -> None:
    """Remove the MPI files that this process has mapped: for a rank that ends its job."""
    for path, _ in _mapped(os.getpid()):
        if _is_of_mpi(path):
            with contextlib.suppress(OSError):
                Path(path).unlink()


def files(bases: Iterable[str] = ()) -> dict[tuple[str, int], float]:
    """Return this user's files that may be a job's, by path and inode: each file's time in seconds since the epoch.

    The sessions of Open MPI are in the folders `bases`.
    """
    made = {}
    places = [(FOLDER, ""), os.path.split(OF_DAEMON), *((base, begin) for base in bases for begin in OF_SESSIONS)]
    for folder, begin in places:
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                if not entry.name.startswith(begin):
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    is_session = begin in OF_SESSIONS and entry.is_dir(follow_symlinks=False)
                    is_one = is_session or entry.is_file(follow_symlinks=False)
                    if status.st_uid == os.geteuid() and is_one:
                        made[entry.path, status.st_ino] = status.st_ctime
    return made


def _mapped(pid: int) -> Iterator[tuple[str, int]]:
    with contextlib.suppress(OSError), Path(f"/proc/{pid}/maps").open(errors="replace") as file:
        for line in file:
            # address permissions offset device inode path
            fields = line.rstrip("\n").split(None, 5)
            if len(fields) == 6 and fields[5].startswith(FOLDER + "/"):
                yield fields[5], int(fields[4])


def _opened(pid: int) -> Iterator[tuple[str, int]]:
    for path, what in opened(pid):
        if what.startswith((OF_DAEMON, f"{FOLDER}/")):
            with contextlib.suppress(OSError):
                yield what, os.stat(path).st_ino  # noqa: PTH116 (called often)


def _sessions(pid: int, bases: Iterable[str]) -> Iterator[tuple[str, int]]:
    for path in [*(f"{base}/{begin}{pid}" for base in bases for begin in OF_SESSIONS), *_session_told(pid)]:
        with contextlib.suppress(OSError):
            yield path, os.lstat(path).st_ino


def _is_alive(pid: int) -> bool:
    """Return False if a process is gone, or has begun to exit; it keeps its number until it is reaped.

    A killed process loses its environment before its memory is freed, so processes.py no longer finds it. On a busy
    machine the rest of its exit may take a tenth of a second. It may also be reaped after /proc was listed.
    """
    fields = stat_of(pid)
    return bool(fields) and not int(fields[6]) & _EXITING


def _session_told(pid: int) -> Iterator[str]:
    """The path of the session that a process is a rank of."""
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if word.startswith(_SESSION_VARIABLE):
                path = os.path.realpath(os.fsdecode(word[len(_SESSION_VARIABLE) :]))
                if _is_session(path):
                    yield path


def _is_session(path: str) -> bool:
    return bool(_SESSION.fullmatch(_name(path)))


def _is_of_mpi(path: str) -> bool:
    return path.startswith(OF_DAEMON) or _name(path).startswith(OF_MPI)


def _name(path: str) -> str:
    return os.path.basename(path)  # noqa: PTH119 (called often)
