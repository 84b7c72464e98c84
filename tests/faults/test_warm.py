"""Restarts of `mpitrain run`: a warm interpreter forks the ranks of the next attempt, or they start cold."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from faults import training
from faults.conftest import Undisturbed
from faults.failing import HERE, nightly
from faults.outcome import failed, succeeded
from faults.training import result, tries
from jobs import REPOSITORY, TOKEN, VENVS, Job, run_command, until
from keeping import drop_kept
from mpitrain.context import WARM_NAME

During = Callable[[subprocess.Popen[str], Callable[[str], int]], None]

# Before init(), each process leaves a file that says how it has found itself. A fork has the mark of its holder.
BEFORE_INIT = """
print("begins")
import random, resource
with open("/proc/self/environ", "rb") as file:
    kind = "warm" if b"_MPITRAIN_WARM=" in file.read() else "cold"
try:
    input()
except EOFError:
    ended = True
mask = os.umask(0o77)
os.umask(mask)
found = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": str(sys.flags),
    "main": [__name__, __file__, str(__spec__), sys.modules["__main__"].__dict__ is globals()],
    "folder": os.getcwd(),
    "input_ends": ended,
    "is_at_the_bottom": sys._getframe().f_back is None,
    "comm": pathlib.Path("/proc/self/comm").read_text(),
    "names": sorted(name for name in os.environ if not name.startswith(("PMI", "OMPI", "PRTE", "_MPITRAIN_FAIL"))),
    "umask": mask,
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "ignored": [int(one) for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN],
    "output": [sys.stdout.isatty(), sys.stdout.seekable(), sys.stdout.line_buffering],
}
drawn = random.random(), numpy.random.random()
(folder / f"{kind}-{os.getpid()}").write_text(json.dumps([found, drawn]))
"""
AFTER_INIT = "(folder / f'rank-{rank}-{os.getpid()}').touch()"
# A training rank waits at a step until the test lets it continue, and is killed there.
KILL = """if rank == 1 and step == {step} and once("kill-{step}"):
        wait_for("go-{step}")
        kill()
"""
KILL_7 = KILL.format(step=7)
STAYS = KILL_7 + "    if step == 10 and once('there'): time.sleep(100)"


def train(
    folder: Path, wrong: str, *options: str, at_start: str = "", during: During | None = None, **how: object
) -> Job:
    """Run the training. `during` gets a function that says how often stderr has a text."""
    errors = folder / "stderr"
    errors.touch()
    begins = {"first": BEFORE_INIT + at_start, "before": AFTER_INIT}
    # With `exec`, a signal to the process goes to the launcher.
    told = ["-c", f"import os, sys; os.dup2(os.open({str(errors)!r}, os.O_WRONLY), 2); "]
    told[1] += "os.execv(sys.executable, [sys.executable, '-m', 'mpitrain', *sys.argv[1:]])"
    waits = None if during is None else lambda process: during(process, lambda text: errors.read_text().count(text))
    job = training.train(folder, wrong, *options, launcher=told, during=waits, **begins, **how)
    return Job(job.code, job.stdout, errors.read_text(), job.left)


def processes(process: subprocess.Popen[str]) -> dict[int, list[bytes]]:
    """The processes of a started job, each with its variables."""
    variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    mark = next((one for one in variables if one.startswith(f"{TOKEN}=".encode())), None)  # None: during an exec
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            of_it = (entry / "environ").read_bytes().split(b"\0")
            if mark in of_it:
                found[int(entry.name)] = of_it
    return found


def interpreters(process: subprocess.Popen[str]) -> list[int]:
    """The warm interpreters of the job that are ready."""
    found = []
    for pid in processes(process):
        with suppress(OSError):
            found += [pid] * (Path(f"/proc/{pid}/comm").read_text().strip() == WARM_NAME)
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def let_go(folder: Path) -> During:
    """Let the training kill a rank when the interpreter is ready, and wait until its forks train."""

    def during(process: subprocess.Popen[str], _: Callable[[str], int]) -> None:
        until(lambda: interpreters(process))
        (folder / "go-7").touch()
        until((folder / "there").exists)

    return during


def began(folder: Path, kind: str) -> dict[int, list[Any]]:
    """What the processes that began "warm" or "cold" have found and drawn at random, by process."""
    return {int(path.name.partition("-")[2]): json.loads(path.read_text()) for path in folder.glob(f"{kind}-*")}


def ranks_of(folder: Path) -> set[int]:
    """The processes that were ranks."""
    return {int(path.name.split("-")[2]) for path in folder.glob("rank-*")}


def printed(stdout: str, line: str) -> Counter[int]:
    """How often each rank printed this line. mpitrain prints equal lines once, with the ranks in front."""
    found: Counter[int] = Counter()
    for named in re.findall(rf"^\[([\d,-]+)\] {line}$", stdout, re.M):
        for first, _, last in (part.partition("-") for part in named.split(",")):
            found.update(range(int(first), int(last or first) + 1))
    return found


@pytest.fixture
def quit_is_ignored() -> Iterator[None]:
    """By what a test starts, as by a job of a shell in the background."""
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGQUIT, before)


@pytest.mark.usefixtures("quit_is_ignored")
@pytest.mark.parametrize(
    ("vendor", "ranks", "steps"),
    [("mpich", 2, [7]), *nightly(("mpich", 3, [7, 13]), ("openmpi", 3, [7, 13]))],
    indirect=["vendor"],
)
def test_killed_ranks(tmp_path: Path, vendor: str, ranks: int, steps: list[int], undisturbed: Undisturbed) -> None:
    """One interpreter forks the ranks, of several attempts. They begin as cold ones do, but for what is random.

    MPICH's mpiexec does not pass on that the launcher ignores a signal.
    """
    seen: list[list[int]] = []

    def during(process: subprocess.Popen[str], _: Callable[[str], int]) -> None:
        for step in steps:
            until(lambda step=step: interpreters(process) and (tmp_path / f"kill-{step}").exists())
            seen.append(interpreters(process))
            (tmp_path / f"go-{step}").touch()

    wrong = "\n    ".join(KILL.format(step=step) for step in steps)
    job = train(tmp_path, wrong, ranks=ranks, vendor=vendor, during=during)
    succeeded(job)
    assert result(tmp_path)[0] == undisturbed(ranks, vendor)[0]
    assert len({tuple(pids) for pids in seen}) == 1, seen
    cold, warm = began(tmp_path, "cold"), began(tmp_path, "warm")
    assert (len(cold), len(warm)) == (ranks, ranks * len(steps)), job.output
    assert {*cold, *warm} == ranks_of(tmp_path)
    first, _ = next(iter(cold.values()))
    for found, _ in warm.values():
        assert {key: (value, first[key]) for key, value in found.items() if value != first[key]} == {}
    drawn = [number for _, numbers in [*cold.values(), *warm.values()] for number in numbers]
    assert len(set(drawn)) == len(drawn)
    lives = len(steps) + 1
    assert printed(job.stdout, "begins") == dict.fromkeys(range(ranks), lives), job.output
    *killed, last = tries(job)
    assert last == f"attempt {lives} of 3 succeeded"
    # mpiexec may name a rank that it has ended itself.
    how = rf"rank 1 on {HERE} (was killed by signal 9|ended without a message \(os\._exit, or killed\?\))"
    for number, (step, line) in enumerate(zip(steps, killed, strict=True), 1):
        since = "" if number == 1 else ", from step 6,"
        assert re.fullmatch(
            rf"attempt {number} of 3{since} failed at step {step}: {how}; starting again on {HERE}", line
        )


@pytest.mark.nightly
def test_no_interpreter_is_ready(tmp_path: Path, undisturbed: Undisturbed) -> None:
    job = train(tmp_path, "if rank == 1 and step == 7 and once('killed'): kill()")
    succeeded(job)
    assert result(tmp_path)[0] == undisturbed()[0]
    assert len(tries(job)) == 2, job.output


def stop(process: subprocess.Popen[str], _: Path) -> None:
    os.kill(interpreters(process)[0], signal.SIGSTOP)


def end(process: subprocess.Popen[str], _: Path) -> None:
    os.kill(interpreters(process)[0], signal.SIGKILL)


def touch(_: subprocess.Popen[str], folder: Path) -> None:
    os.utime(folder / "site-packages" / "installed.py")


KILLED = "the warm interpreter was killed by signal 9. Ranks start cold from now on"
THREAD = "import _thread, time\n_thread.start_new_thread(time.sleep, (999,))"
SETS = "os.environ['OMP_NUM_THREADS'] = '2'"
DIES = "import os\nif 'PMI_RANK' not in os.environ:\n    print('no rank', flush=True)\n    os._exit(3)"


@pytest.mark.parametrize(
    ("installed", "at_start", "does", "said"),
    [
        ("", "", end, KILLED),
        *nightly(
            ("", "", stop, "the rank starts cold: no warm interpreter answered within 5 s"),
            ("", "", touch, "ranks start cold: FOLDER/site-packages/installed.py has changed"),
            (THREAD, "", None, "ranks start cold: an import has started 1 thread(s) (python"),
            ("", SETS, None, "ranks start cold: the program sets OMP_NUM_THREADS in its environment"),
            (DIES, "", None, "the warm interpreter ended with exit code 3: no rank. Ranks start cold from now on"),
        ),
    ],
)
def test_a_cold_start(
    tmp_path: Path,
    installed: str,
    at_start: str,
    does: Callable[[subprocess.Popen[str], Path], None] | None,
    said: str,
    undisturbed: Undisturbed,
) -> None:
    """A line says why, once; the training is right."""

    def during(process: subprocess.Popen[str], has_said: Callable[[str], int]) -> None:
        if does:
            until(lambda: interpreters(process))
            does(process, tmp_path)
        if does is None or does is end:
            until(lambda: has_said(said))
        (tmp_path / "go-7").touch()

    said = said.replace("FOLDER", str(tmp_path))
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "installed.py").write_text(installed)
    path = {"PYTHONPATH": f"{packages}:{REPOSITORY}"}
    job = train(tmp_path, KILL_7, at_start=f"import installed\n{at_start}", during=during, env=path)
    succeeded(job)
    assert result(tmp_path)[0] == undisturbed()[0]
    times = 2 if does is stop and f"[0,1] mpitrain: {HERE}: {said}" not in job.stderr else 1  # by the ranks
    assert job.stderr.count(f"{HERE}: {said}") == times, job.output
    assert len(re.findall(r"\bcold\b", job.stderr)) == times, job.output
    assert len(tries(job)) == 2, job.output
    assert (len(began(tmp_path, "cold")), began(tmp_path, "warm")) == (4, {})


# What a forked rank can still do: processes of its own by all methods, threads of libraries, compilation.
USES = """
import multiprocessing
for method in ("fork", "spawn", "forkserver"):
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
loader = torch.utils.data.DataLoader(list(range(20)), batch_size=4, num_workers=2)
assert sum(int(batch.sum()) for batch in loader) == 190
x = torch.randn(300, 300, requires_grad=True)
(x @ x).sum().backward()
assert float(jax.jit(lambda a: (a * 2).sum())(jax.numpy.arange(10.0))) == 90
assert float(torch.compile(lambda a: (a + 1).sum())(torch.ones(10))) == 20
print("seed", torch.initial_seed())
"""


@pytest.mark.nightly
def test_frameworks_in_forks(tmp_path: Path) -> None:
    """PyTorch, JAX and multiprocessing have been imported before the fork, and work after it."""
    for name in ("torch", "jax"):
        pytest.importorskip(name)
    script = "if __name__ == '__main__':\n" + "".join(
        f"    {line}\n" for line in training.source(KILL_7, BEFORE_INIT, AFTER_INIT, USES).splitlines()
    )
    (tmp_path / "train.py").write_text("import jax, jax.numpy, torch\n" + script)
    command = [sys.executable, "-m", "mpitrain", "run", "-n", "2", "--max-restarts", "1"]

    def during(process: subprocess.Popen[str]) -> None:
        until(lambda: interpreters(process))
        (tmp_path / "go-7").touch()

    job = run_command([*command, str(tmp_path / "train.py"), str(tmp_path)], cwd=tmp_path, during=during)
    succeeded(job)
    assert (len(began(tmp_path, "cold")), len(began(tmp_path, "warm"))) == (2, 2), job.output
    assert len(set(re.findall(r"seed (\d+)", job.stdout))) == 2, job.output


@pytest.mark.nightly
def test_an_exit_code(tmp_path: Path) -> None:
    """A fork leaves. Its exit code is that of the job."""
    wrong = KILL_7 + "    if rank == 1 and step > 7 and not once('there'): os._exit(7)"
    job = train(tmp_path, wrong, "--max-restarts", "1", during=let_go(tmp_path))
    failed(job)
    assert job.code in (7, 137), job.output  # MPICH may return the code of a rank that it has killed itself
    assert len(tries(job)) == 2, job.output


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    """The signal comes when forks are the ranks."""

    def during(process: subprocess.Popen[str], said: Callable[[str], int]) -> None:
        let_go(tmp_path)(process, said)
        process.send_signal(number)
        if number == signal.SIGKILL:
            drop_kept(tmp_path)

    job = train(tmp_path, STAYS, during=during)
    failed(job)
    assert job.code == (-number if number == signal.SIGKILL else 128 + number), job.output


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["holder", "interpreter", "daemon"])
def test_what_has_started_them_is_killed(tmp_path: Path, victim: str, undisturbed: Undisturbed) -> None:
    """The job starts again. The agent blames mpiexec's daemon, which has started the stubs, not ranks or holder."""

    def during(process: subprocess.Popen[str], said: Callable[[str], int]) -> None:
        let_go(tmp_path)(process, said)
        if victim in ("holder", "interpreter"):
            child = next(pid for pid in ranks_of(tmp_path) if Path(f"/proc/{pid}").exists())
            child = parent_of(child) if victim == "holder" else child
        else:  # of a stub
            lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in processes(process)}
            child = next(pid for pid, words in lines.items() if words[1:3] == [b"-I", b"-S"])
        os.kill(parent_of(child), signal.SIGKILL)

    job = train(tmp_path, STAYS, during=during)
    succeeded(job)
    assert result(tmp_path)[0] == undisturbed()[0]
    assert len(tries(job)) == 3, job.output
    blamed = rf"failed at step 10: the process of mpiexec on {HERE} that started ranks 0,1 "
    assert victim != "daemon" or re.search(blamed, job.stderr), job.output


@pytest.mark.nightly
def test_the_roster_knows_them(tmp_path: Path) -> None:
    """`mpitrain ps` lists forks as ranks, and `mpitrain kill` ends them."""
    listed = []

    def during(process: subprocess.Popen[str], said: Callable[[str], int]) -> None:
        let_go(tmp_path)(process, said)
        mpitrain = [str(VENVS["mpich"] / "bin/python"), "-m", "mpitrain"]
        # Not its exit code: a job of another test may have a server whose list cannot be read.
        done = subprocess.run(
            [*mpitrain, "ps", "--hosts", "localhost"], check=False, stdout=subprocess.PIPE, text=True, timeout=100
        )
        listed.extend(line for line in done.stdout.splitlines() if str(tmp_path) in line)
        subprocess.run([*mpitrain, "kill", "--hosts", "localhost", listed[0].split()[0]], check=True, timeout=100)

    failed(train(tmp_path, STAYS, during=during))
    assert len(listed) == 1, listed
    assert f"0,1 on {HERE}" in listed[0]
