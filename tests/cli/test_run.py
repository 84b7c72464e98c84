"""`mpitrain run` from outside: how jobs end, what is printed, what is refused, and that nothing is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import VENVS, Job, run_command, until

DEADLINE_SECONDS = 60.0

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


def run(python: Path, *arguments: str | Path, during: Callable[[subprocess.Popen[str]], None] | None = None) -> Job:
    command = [str(python), "-m", "mpitrain", "run", *map(str, arguments)]
    return run_command(command, timeout=DEADLINE_SECONDS, during=during)


def codes(code: int, python: Path) -> set[int]:
    """The codes that `mpitrain run` may return if one rank has left with `code` while others wait for it."""
    # MPICH's mpiexec kills these, and now and then tells of one of them.
    return {code} if python.is_relative_to(VENVS["openmpi"]) else {code, 128 + signal.SIGKILL}


def script(folder: Path, source: str) -> Path:
    path = folder / "script.py"
    path.write_text(source)
    return path


def wait_until_ready(folder: Path, num_ranks: int) -> None:
    until(lambda: len(list(folder.glob("ready.*"))) == num_ranks, "the ranks did not start")


def test_success(python: Path, tmp_path: Path) -> None:
    source = START + "print('world of', comm.allreduce(1), os.environ['_MPITRAIN_EXPECTED_SIZE'], sys.argv[1:])"
    job = run(python, "-n", "3", script(tmp_path, source), "--", "--show", "-n", "--", "a b")
    assert job.code == 0, job.output
    # There is one line if the ranks were not far apart. However many lines there are, every rank is in one of them.
    lines = job.stdout.splitlines()
    assert {line.partition("] ")[2] for line in lines} == {"world of 3 3 ['--', '--show', '-n', '--', 'a b']"}, (
        job.output
    )
    assert job.left == []


def test_devices_on_this_machine(python: Path, tmp_path: Path) -> None:
    source = """
import mpitrain as mt
world = mt.init()
print(f"device {world.context.device(world.rank)} of {world.rank}")
"""
    job = run(python, "--hosts", "localhost/cuda:1x2,localhost/cpu", script(tmp_path, source))
    assert job.code == 0, job.output
    assert {line.partition("] ")[2] for line in job.stdout.splitlines()} == {
        "device cuda:1 of 0",
        "device cuda:1 of 1",
        "device cpu of 2",
    }


def test_a_machine_that_is_no_node_says_so(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/hosts").write_text(
        "[head]\nnode1 ansible_host=198.51.100.1\n[workers]\n[cluster:children]\nhead\nworkers\n"
    )
    path = script(tmp_path, START + "print('size', comm.size)")
    command = [str(VENVS["mpich"] / "bin/python"), "-m", "mpitrain", "run", "-n", "2", str(path)]
    job = run_command(command, timeout=DEADLINE_SECONDS, cwd=tmp_path)
    assert job.code == 0, job.output
    assert "this machine is not a node of cluster/hosts, so the job runs here alone; start it on node1" in job.stderr
    job = run_command([*command[:-1], "--hosts", "localhost", str(path)], timeout=DEADLINE_SECONDS, cwd=tmp_path)
    assert job.code == 0, job.output
    assert "no node" not in job.stderr


def test_a_rank_that_exits_with_a_code(python: Path, tmp_path: Path) -> None:
    source = START + "if comm.rank == 1: os._exit(3)\ncomm.Barrier()"
    job = run(python, "-n", "2", script(tmp_path, source))
    assert job.code in codes(3, python), job.output
    assert job.left == []


def test_a_rank_that_is_killed(python: Path, tmp_path: Path) -> None:
    source = START + "if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ncomm.Barrier()"
    job = run(python, "-n", "4", script(tmp_path, source))
    assert job.code == 128 + signal.SIGKILL, job.output
    assert job.left == []


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)]
)
def test_a_signal_ends_the_whole_job(python: Path, tmp_path: Path, number: signal.Signals) -> None:
    def during(process: subprocess.Popen[str]) -> None:
        wait_until_ready(tmp_path, 3)
        process.send_signal(number)

    job = run(python, "-n", "3", script(tmp_path, SLEEP), tmp_path, during=during)
    assert job.code == 128 + number, job.output
    assert f"{number.name}: ending the job" in job.stderr
    assert job.left == []


def test_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    python = VENVS["mpich"] / "bin/python"
    path = script(tmp_path, START + "time.sleep(1); pathlib.Path(sys.argv[1], 'ready.0').touch(); time.sleep(1)")

    def during(process: subprocess.Popen[str]) -> None:
        wait_until_ready(tmp_path, 1)
        process.send_signal(signal.SIGHUP)

    command = ["nohup", str(python), "-m", "mpitrain", "run", "-n", "1", str(path), str(tmp_path)]
    job = run_command(command, timeout=DEADLINE_SECONDS, during=during)
    assert job.code == 0, job.output


def test_ranks_that_ignore_signals_are_killed(python: Path, tmp_path: Path) -> None:
    ignore = START + "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"

    def during(process: subprocess.Popen[str]) -> None:
        wait_until_ready(tmp_path, 2)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)  # the second one: at once

    job = run(python, "-n", "2", script(tmp_path, ignore + SLEEP), tmp_path, during=during)
    assert job.code == 128 + signal.SIGTERM, job.output
    assert job.left == []


def test_a_killed_launcher_leaves_nothing(python: Path, tmp_path: Path) -> None:
    def during(process: subprocess.Popen[str]) -> None:
        wait_until_ready(tmp_path, 2)
        process.kill()

    job = run(python, "-n", "2", script(tmp_path, SLEEP), tmp_path, during=during)
    assert job.code == -signal.SIGKILL
    assert job.left == []


@MOSTLY_MPICH
def test_a_process_that_a_rank_left_behind_is_ended_and_named(python: Path, tmp_path: Path) -> None:
    # (With the rank's stdout still open in it, mpiexec itself would go on, and rightly.)
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
    job = run_command(["bash", "-c", pipe], timeout=DEADLINE_SECONDS)
    assert job.code == 128 + signal.SIGPIPE, job.output
    assert job.left == []


def test_the_first_failure_is_the_last_word(python: Path, tmp_path: Path) -> None:
    report = "mpitrain: rank 1 on here failed:\\nValueError: x\\nmpitrain: end of the failure of rank 1 on here\\n"
    source = START + f"if comm.rank == 1: os.write(2, b'{report}'); time.sleep(0.5); os._exit(5)\ncomm.Barrier()"
    job = run(python, "-n", "2", script(tmp_path, source))
    assert job.code in codes(5, python), job.output
    assert job.stderr.replace("[1] ", "").endswith(report.replace("\\n", "\n")), job.output


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


def test_show_runs_nothing(python: Path, tmp_path: Path) -> None:
    path = script(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    job = run(python, "-n", "2", "--show", path, "a b")
    assert job.code == 0, job.output
    assert f"{python.parent / 'mpiexec'} -n 2 " in job.stdout
    assert job.stdout.endswith(f"{path} 'a b'\n")
    assert "_MPITRAIN_EXPECTED_SIZE=2 " in job.stdout
    assert not (tmp_path / "ran").exists()


def test_what_show_prints_can_be_run(python: Path, tmp_path: Path) -> None:
    path = script(tmp_path, START + "print('size', comm.size)")
    shown = run(python, "-n", "2", "--show", path)
    job = run_command(["sh", "-c", shown.stdout], timeout=DEADLINE_SECONDS)
    assert job.code == 0, job.output
    assert job.stdout.count("size") == 2


@MOSTLY_MPICH
def test_a_file_of_variables(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mpi.env"
    file.write_text("GLOO_SOCKET_IFNAME=lo\nFROM_THE_FILE=yes\nMINE=no\n")
    path = script(tmp_path, "import os; print(os.environ['FROM_THE_FILE'], os.environ['MINE'])")
    monkeypatch.setenv("MINE", "mine")
    job = run(python, "--env-file", file, "-n", "2", path)
    # Equal lines that come at about the same time are one.
    assert job.code == 0, job.output
    assert job.stdout in ("[0,1] yes mine\n", "[0] yes mine\n[1] yes mine\n", "[1] yes mine\n[0] yes mine\n")
    # The variable is read too.
    command = [str(python), "-m", "mpitrain", "run", "-n", "2", "--show", str(path)]
    job = run_command(command, timeout=DEADLINE_SECONDS, env={"MPITRAIN_ENV_FILE": str(tmp_path / "none")})
    assert job.code == 2 and "cannot be read" in job.output


def test_a_file_of_variables_that_does_not_fit(tmp_path: Path) -> None:
    python = Path(sys.executable)
    file = tmp_path / "mpi.env"
    file.write_text("FI_TCP_IFACE=eth77\n")
    job = run(python, "--env-file", file, "-n", "1", script(tmp_path, "print('ran')"))
    assert job.code == 1 and "ran" not in job.stdout
    assert "FI_TCP_IFACE names eth77, which does not exist here" in job.output
    job = run(python, "--env-file", tmp_path / "none", "-n", "1", script(tmp_path, ""))
    assert job.code == 2 and "cannot be read: No such file" in job.output


def test_the_mpiexec_of_another_mpi_is_refused(tmp_path: Path) -> None:
    other = VENVS["openmpi"] / "bin/mpiexec"
    if not other.exists():
        pytest.skip(f"no openmpi: {other} is not there (scripts/test makes it)")
    python = VENVS["mpich"] / "bin/python"
    job = run(python, "-n", "2", "--mpiexec", other, script(tmp_path, "print('ran')"), "--lr", "1")
    assert job.code == 1, job.output
    assert "is of Open MPI 5" in job.stderr
    assert "mpi4py loads MPICH" in job.stderr
    assert f"mpitrain run -n 2 --mpiexec {python.parent / 'mpiexec'} {tmp_path}/script.py --lr 1" in job.stderr
    assert "ran" not in job.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2", "nowhere.py"], "there is no script 'nowhere.py'"),
        (["-n", "0", __file__], "'0' is not a whole number above 0"),
        (["-n", "two", __file__], "'two' is not a whole number above 0"),
        ([__file__], "how many ranks? Say -n N for the whole job, --ppn N for each host, or name devices"),
        (["--ppn", "0", __file__], "'0' is not a whole number above 0"),
        (
            ["-n", "2", "--start-seconds", "soon", __file__],
            "'soon' is not a number of seconds, 0 or from 0.001 to 1e+06",
        ),
        (["-n", "2", "--hosts", "a/gpu", __file__], "'a/gpu' in --hosts a/gpu is not a known form"),
        (["-n", "3", "--hosts", "localhost/cpux2", __file__], "-n is 3, but the devices in --hosts are for 2 ranks"),
        (["-n", "2", "-i", "nowhere", __file__], "nowhere: there is no such file"),
        (["-n", "2", "--shwo", __file__], "unknown argument --shwo; did you mean --show?"),
        ([__file__, "-n", "2"], f"-n stands behind {__file__} and belongs to the script; options of mpitrain come bef"),
        (["-m", "json.tool", "--ppn=2"], "--ppn stands behind json.tool and belongs to the script"),
        (["--resume", "1a2b"], "'1a2b' is not the id of a job; an id has 8 characters"),
    ],
)
def test_wrong_use(arguments: list[str], message: str) -> None:
    job = run(VENVS["mpich"] / "bin/python", *arguments)
    assert job.code == 2, job.output
    assert message in job.stderr


def test_options_behind_the_script(python: Path, tmp_path: Path) -> None:
    """They reach the script, which may have options of the same name. A line says so."""
    script = tmp_path / "shows.py"
    script.write_text("import sys; print(sys.argv[1:])")
    job = run(python, "-n", "1", str(script), "--restarts=2", "-n", "4", "--verbose")
    assert (job.code, job.left) == (0, []), job.output
    assert "['--restarts=2', '-n', '4', '--verbose']" in job.stdout
    assert job.stderr == (
        f"mpitrain: --restarts stands behind {script} and belongs to the script; options of mpitrain come before the "
        "script\n"
    )
