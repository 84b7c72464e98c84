"""Processes and threads of a rank: how they start, what they may do, how they end, and that they are no ranks."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from faults.failing import KILL, START, a_device, nightly, run
from faults.outcome import failed, report_of, succeeded
from jobs import NO_STALLS, VENVS, Job, mpiexec, run_command, run_job
from mpitrain.job import helpers


def script(folder: Path, ranks: int, source: str, vendor: str = "mpich", before: tuple[str, ...] = ()) -> Job:
    """Run a source on so many ranks. The source is a file, like a user's script, because forkserver runs it again."""
    (folder / "script.py").write_text(source)
    command = [*before, *mpiexec(ranks, vendor), str(VENVS[vendor] / "bin/python"), str(folder / "script.py")]
    return run_command(command, timeout=300, env=NO_STALLS)


# -- no ranks ---------------------------------------------------------------------------------------------------------

NO_RANKS = """
import multiprocessing, os, subprocess, sys
import mpitrain as mt

def helps():
    helper = [sys.executable, "-c", "import mpitrain; raise RuntimeError('in a helper')"]
    assert subprocess.run(helper, check=False).returncode == 1

def fail():
    raise RuntimeError("in a process")

helps()
world = mt.init()
helps()
process = multiprocessing.Process(target=fail)
process.start()
process.join()
assert process.exitcode == 1
child = os.fork()
if child == 0:
    try:
        raise RuntimeError("in a child")
    except RuntimeError:
        sys.excepthook(*sys.exc_info())
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
world.barrier()
"""


def test_an_exception_of_a_process_is_its_own(tmp_path: Path) -> None:
    """Programs that a rank starts before and after init(), a process of multiprocessing, and a child of its own."""
    job = script(tmp_path, 2, NO_RANKS)
    succeeded(job)
    for place, times in (("a helper", 4), ("a process", 2), ("a child", 2)):
        assert job.stderr.count(f"RuntimeError: in {place}\n") == times, job.output
    assert "failed" not in job.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("start", ["subprocess.run([sys.executable, '-c', CHILD], check=True)", "os.system(LINE)"])
def test_a_program_that_a_rank_starts_is_alone(start: str, vendor: str) -> None:
    """It is no rank, with MPI and without mpitrain too; its parent continues. MPI's own spawn is not affected."""
    source = f"""
import os, shlex, subprocess, sys
import mpitrain as mt
CHILD = "import mpitrain as mt; world = mt.init(); print('alone', world.rank, world.sum(1))"
BARE = "from mpi4py import MPI; print('bare', MPI.COMM_WORLD.size)"
LINE = shlex.join([sys.executable, "-c", CHILD])
world = mt.init()
{start}
subprocess.run([sys.executable, "-c", BARE], check=True)
assert world.sum(1) == 2
"""
    job = run(2, source, vendor)
    succeeded(job)
    # The lines of two processes may mix.
    assert sorted("".join(job.stdout.split())) == sorted(2 * "alone01bare1"), job.output


def test_a_program_that_a_rank_starts_before_init_is_told_why_it_cannot_begin(tmp_path: Path) -> None:
    """MPI's own words were about PMI, with exit code 15."""
    source = """
import subprocess, sys
CHILD = [sys.executable, "-c", "import mpitrain as mt; mt.init()"]
assert subprocess.run(CHILD, check=False).returncode != 0
import mpitrain as mt
assert mt.init().sum(1) == 2
"""
    job = script(tmp_path, 2, source)
    succeeded(job)
    for rank in range(2):
        assert f"init() was called in a program that rank {rank} has started before its own init()" in job.stderr
    assert "PMI_Init" not in job.stderr


COMMUNICATES = """
import multiprocessing
from mpitrain.errors import MpitrainError

calls = [
    lambda: world.barrier(),
    lambda: world.sum(numpy.ones(3)),
    lambda: world.broadcast_object("x"),
    lambda: world.send("x", to=1 - world.rank),
    lambda: world.recv(1 - world.rank),
    lambda: mt.collectives.allgather(world, numpy.ones(3)).wait(),
    lambda: mt.init().agree("a call"),
]

def communicate(results):
    for call in calls:
        try:
            call()
        except MpitrainError as error:
            results.put(str(error))
        else:
            results.put("it communicates")

results = multiprocessing.SimpleQueue()
helper = multiprocessing.Process(target=communicate, args=(results,))
helper.start()
expected = f"{world.name()}: process {helper.pid} was forked from the rank's own ("
texts = [results.get() for _ in calls]
helper.join()
assert all(text.startswith(expected) for text in texts), texts
assert world.sum(1 + world.rank) == 3
"""


def test_a_forked_process_that_communicates(tmp_path: Path, vendor: str) -> None:
    """Every kind of call is refused before it reaches MPI. The job continues."""
    succeeded(script(tmp_path, 2, START + COMMUNICATES, vendor))


# -- how they end -----------------------------------------------------------------------------------------------------

KILLED = """
import multiprocessing, os, signal, time
import mpitrain as mt

def wait(its):
    its.send("here")
    time.sleep(10**6)

def main():
    BEGIN
    world = mt.init()
    if world.rank == 1:
        ours, its = multiprocessing.Pipe()
        if FORKS:
            if os.fork() == 0:
                wait(its)
        else:
            multiprocessing.Process(target=wait, args=(its,)).start()
        assert ours.recv() == "here"
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()

main()
"""
BY_FORKSERVER = KILLED.replace("\nmain()", "\nif __name__ == '__main__':\n    main()").replace(
    "BEGIN", 'multiprocessing.set_start_method("forkserver")'
)


@pytest.mark.parametrize(
    "source",
    [
        KILLED.replace("FORKS", "False"),
        *nightly(BY_FORKSERVER.replace("FORKS", "False"), KILLED.replace("FORKS", "world.size == 2")),
    ],
    ids=["fork", "forkserver", "os.fork"],
)
def test_a_rank_that_is_killed_while_its_process_lives(tmp_path: Path, source: str, vendor: str) -> None:
    """The process would live for ever, and it keeps the rank's output open. The job ends all the same."""
    if vendor == "openmpi" and "world.size" in source:
        pytest.skip("Open MPI's mpiexec waits for the fork; under mpitrain run the agent ends it (test_exits.py)")
    failed(script(tmp_path, 2, source.replace("BEGIN", "pass"), vendor))


def test_processes_end_with_a_rank_that_is_alone() -> None:
    """Each process ends, although those forked later keep the pipes of the earlier ones open."""
    source = f"""
import multiprocessing
for number in range(4):
    multiprocessing.Process(target=time.sleep, args=(10**6,), daemon=number % 2 == 0).start()
{KILL}
"""
    job = run_job(None, START + source, timeout=100)
    assert (job.code, job.left) == (-9, []), job.output


# A training of PyTorch without a guard, whose collate_fn is a function inside a function. One worker is killed.
LOADER = f"""
import os, signal
import torch
import torch.distributed as dist
import mpitrain.torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, number):
        if number == 63 and os.environ.get("PMI_RANK") == "1":
            {KILL}
        return torch.arange(8.0) * number / 100

def main():
    dist.init_process_group("mpitrain")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    for rows in torch.utils.data.DataLoader(Rows(), 12, num_workers=2, collate_fn=lambda rows: torch.stack(rows)):
        model(rows).square().mean().backward()

main()
"""


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    """PyTorch reports the loss on the rank of the worker. (tests/torch_ranks/test_prepare_data.py has healthy ones.)"""
    pytest.importorskip("torch")
    job = script(tmp_path, 2, LOADER)
    failed(job)
    assert re.search(r"DataLoader worker \(pid.*\d+.*\) (is killed by signal: Killed|exited unexpectedly)", job.stderr)
    assert report_of(job, "DataLoader worker (pid").rank == 1


# -- how multiprocessing starts them: by fork, or by forkserver where a fork is unsafe ---------------------------------

# No guard, functions inside a function, and sums of the ranks before, between and after.
LAMBDAS = """
import multiprocessing, os
import numpy
import mpitrain as mt

BEFORE
world = mt.init()

def main():
    values = multiprocessing.Queue()
    total = world.sum(numpy.full(100_000, 1.0 + world.rank))
    for number in range(30):
        helper = multiprocessing.Process(target=lambda: values.put(total[number]))
        helper.start()
        total = world.sum(total)
        assert values.get() == sum(range(1, world.size + 1)) * world.size**number
        helper.join()
        assert helper.exitcode == 0
    world.print(multiprocessing.get_start_method())

main()
"""
# Programs that can be pickled: BEFORE and AFTER are before and after init().
PICKLED = """
import multiprocessing, os
import mpitrain as mt

def square(number):
    return number**2, os.getpid()

if __name__ == "__main__":
    BEFORE
    world = mt.init()
    AFTER
    with multiprocessing.Pool(2) as pool:
        results = pool.map(square, range(10 * world.rank, 10 * world.rank + 5))
    assert os.getpid() not in {pid for _, pid in results}
    total = world.sum(sum(number for number, _ in results))
    world.print(*world.allgather(multiprocessing.get_start_method()), total)
"""
DEVICE = "device = os.open(NODE, os.O_PATH)"
ON_RANK_1 = f"{DEVICE} if os.environ['PMI_RANK'] == '1' else None"
LOCK = "lock = multiprocessing.Lock()"
TOTAL = sum(n**2 for n in [*range(5), *range(10, 15)])


@pytest.mark.nightly
def test_functions_inside_a_function_and_no_guard(tmp_path: Path, vendor: str) -> None:
    job = script(tmp_path, 2, LAMBDAS.replace("BEFORE", ""), vendor)
    succeeded(job)
    assert (job.stdout, job.stderr) == ("fork\n", "")


@pytest.mark.parametrize(
    ("before", "because"),
    [
        (DEVICE, "NODE is open, and a device "),
        *nightly(("import types, sys; sys.modules['jax'] = types.ModuleType('jax')", "JAX has threads, which ")),
    ],
)
def test_where_a_fork_is_unsafe(tmp_path: Path, before: str, because: str) -> None:
    """Rank 0 prints one line before the error that follows."""
    before, because = (text.replace("NODE", node) for text, node in ((before, repr(a_device())), (because, a_device())))
    job = script(tmp_path, 2, LAMBDAS.replace("BEFORE", before))
    begin = rf"mpitrain: rank 0 on \S+: multiprocessing starts processes by forkserver, because {re.escape(because)}"
    assert re.match(begin, job.stderr), job.output
    assert job.stderr.count("by forkserver, because") == 1, job.output
    failed(job, "lambda")


@pytest.mark.parametrize(
    ("before", "after", "methods", "said"),
    [
        # That rank prints the line, whether it opened the device before or after init().
        ("", ON_RANK_1, "fork forkserver", "rank 1 on S: multiprocessing starts processes by "),
        *nightly(
            ("", "", "fork fork", ""),
            # A lock made before init() keeps fork, and rank 0 says what to do. With that, the method is forkserver.
            (f"{LOCK}; {DEVICE}", "", "fork fork", "rank 0 on S: multiprocessing forks processes, though /dev/"),
            (ON_RANK_1, "", "fork forkserver", "rank 1 on S: multiprocessing starts processes by "),
            (DEVICE, LOCK, "forkserver forkserver", "rank 0 on S: multiprocessing starts processes by "),
            # After init() no rank knows of the others' devices, so each prints its line.
            ("", DEVICE, "forkserver forkserver", "rank [01] on S: multiprocessing starts processes by "),
            ("multiprocessing.set_start_method('spawn')", "", "spawn spawn", ""),  # the user has chosen it
            ("", "multiprocessing.set_start_method('spawn')", "spawn spawn", ""),
        ),
    ],
)
def test_a_pool_of_processes_in_every_rank(tmp_path: Path, before: str, after: str, methods: str, said: str) -> None:
    source = PICKLED.replace("BEFORE", before or "pass").replace("AFTER", after or "pass")
    job = script(tmp_path, 2, source.replace("NODE", repr(a_device()) if "NODE" in source else ""))
    succeeded(job)
    assert job.stdout == f"{methods} {TOTAL}\n"
    line = f"mpitrain: {said.replace('S:', r'[^ ]+:')}.*\n" if said else ""
    assert re.fullmatch(line * (2 if "[01]" in said else 1), job.stderr), job.output


@pytest.mark.nightly
def test_an_exception_in_a_process_of_a_pool_ends_the_job(tmp_path: Path) -> None:
    source = PICKLED.replace("BEFORE", "pass").replace("AFTER", "pass")
    job = script(tmp_path, 2, source.replace("return number**2", "return 1 // (number - 12)"))
    # (multiprocessing's own helper, which removes what the pool held, may print after the report.)
    failed(job, "mpitrain: rank 1 on ", " failed:\n", "ZeroDivisionError: ")


def test_memory_and_terminals_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A console of whatever kind is none either. A pseudoterminal stands for it: its number is not among the known."""
    before = helpers.open_device()
    opened = [os.open(path, os.O_PATH) for path in ("/dev/null", "/dev/urandom", "/dev/tty", "/dev/ptmx")]
    try:
        assert helpers.open_device() == before
        opened += os.openpty()
        monkeypatch.setattr(helpers, "_HARMLESS", helpers._HARMLESS - {5, *range(128, 144)})
        os.close(opened.pop(2))  # /dev/tty and /dev/ptmx have those numbers
        os.close(opened.pop(2))
        assert helpers.open_device() == before
    finally:
        for descriptor in opened:
            os.close(descriptor)


# -- threads ----------------------------------------------------------------------------------------------------------

THREADS = """
import json, sys
import numpy, threadpoolctl
import mpitrain as mt

def threads():
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]

before = threads()
world = mt.init()
world.print(json.dumps([before, world.allgather(threads())]))
"""


@pytest.mark.parametrize(
    ("ranks", "setting"),
    [(2, ""), *nightly((3, ""), (2, "OMP_NUM_THREADS"), (2, "OPENBLAS_NUM_THREADS"), (1, ""))],
)
def test_ranks_share_the_cores(ranks: int, setting: str, tmp_path: Path) -> None:
    """One rank alone keeps all threads, and all keep those that the user has set."""
    cores = len(os.sched_getaffinity(0))
    if setting and cores < 2:
        pytest.skip("needs two cores")
    unset = [word for name in ("OMP", "OPENBLAS", "MKL", "BLIS") for word in ("-u", f"{name}_NUM_THREADS")]
    job = script(tmp_path, ranks, THREADS, before=("env", *unset, *([f"{setting}=2"] if setting else [])))
    succeeded(job)
    before, after = json.loads(job.stdout)
    if not before:
        pytest.skip("threadpoolctl does not know this NumPy's BLAS")
    share = max(before) if setting or ranks == 1 else max(1, cores // ranks)
    assert after == [[min(share, found) for found in before]] * ranks
