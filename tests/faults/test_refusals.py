"""Wrong settings, launchers, data, devices and places: one clear error for any number of ranks, and the job ends."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import numpy
import pytest

from faults.conftest import need
from faults.failing import START, launched, nightly, run
from faults.outcome import failed, report_of, succeeded
from jobs import REPOSITORY, VENVS, Job, mpiexec, run_command, run_job

PYTHON = str(VENVS["mpich"] / "bin/python")
EMULATED = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests/emulated"), str(REPOSITORY)])}


def once(job: Job, *parts: str) -> None:
    """The job failed with a report that has these parts, and prints the first of them once for any number of ranks."""
    report_of(job, *parts)
    assert job.stderr.count(parts[0]) == 1, job.output
    assert "failed too" not in job.stderr, job.output


# -- settings --------------------------------------------------------------------------------------------------------
INIT = "import os\nimport mpitrain as mt\nprint('size', mt.init({}).size)"
ODD = "{} if os.environ['PMI_RANK'] == '1' else {}"
MEANT = "there is no setting MPITRAIN_ALGORITM; did you mean MPITRAIN_ALGORITHM? Known"


@pytest.mark.parametrize(
    ("vendor", "variables", "arguments", "parts"),
    [
        ("mpich", {"MPITRAIN_ALGORITM": "ring"}, "", (MEANT, "ConfigError: rank 0 on ")),
        *nightly(
            ("mpich", {}, "algorithm=" + ODD.format("'ring'", "'native'"), ("algorithm='ring'; rank 0 on ",)),
            ("openmpi", {"MPITRAIN_ALGORITM": "ring"}, "", (MEANT,)),
            ("mpich", {"MPITRAIN_BUCKET_MIB": "big"}, "", ("MPITRAIN_BUCKET_MIB is 'big'; it must be a float",)),
            ("mpich", {"MPITRAIN_COMPRESSION": "int9"}, "", ("there is no compression 'int9'; known: bf16, ",)),
            ("mpich", {}, "compression=" + ODD.format("'bf16'", None), ("compression='bf16'; rank 0 on ",)),
            ("mpich", {}, "bucket_mib=" + ODD.format("'4'", 4), ("bucket_mib is '4'; it must be a float",)),
            ("mpich", {}, "bucket=4", ("there is no setting bucket; did you mean bucket_mib?",)),
        ),
    ],
    indirect=["vendor"],
)
def test_a_wrong_setting(vendor: str, variables: dict[str, str], arguments: str, parts: tuple[str, ...]) -> None:
    """tests/test_config.py has the wrong values; a rank meets them in the same place."""
    once(run(3, INIT.format(arguments), vendor, env=variables), *parts)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MPITRAIN_ALGORITM", "ring", "did you mean MPITRAIN_ALGORITHM?"),
        ("MPITRAIN_ALGORITHM", "rign", "there is no allreduce algorithm 'rign'; known: auto, "),
    ],
)
def test_a_wrong_variable_in_a_world_of_one(variable: str, value: str, said: str) -> None:
    failed(run_job(None, INIT.format(""), env={variable: value}), "ConfigError: rank 0 on ", said)


def test_what_mpitrain_run_prints_of_a_wrong_variable(tmp_path: Path) -> None:
    """`mpitrain run` itself does not read this setting: the ranks refuse it, and the message comes once."""
    job = launched(tmp_path, INIT.format(""), 3, env={"MPITRAIN_BUCKETS": "1"})
    failed(job, "there is no setting MPITRAIN_BUCKETS; did you mean MPITRAIN_BUCKET_MIB?")
    # (The message may come again without a rank, after the output of mpiexec.)
    assert job.stderr.count("] mpitrain.errors.ConfigError") == 1, job.output


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("variable", "parts"),
    [
        ("MPITRAIN_ALGORITM=ring", ("there is no setting MPITRAIN_ALGORITM", "ConfigError: rank 2 on ")),
        ("MPITRAIN_PROFILE=PROFILE", ("profile='", "MismatchError: ")),
    ],
)
def test_a_variable_on_one_rank_alone(tmp_path: Path, variable: str, parts: tuple[str, ...]) -> None:
    name, _, value = variable.partition("=")
    if value == "PROFILE":  # a good one: like every setting, it must be the same on all ranks
        value = str(tmp_path / "cluster.json")
        bench = [PYTHON, "-m", "mpitrain", "bench", "--hosts", "localhost", "-n", "3", "--save-profile", value]
        assert run_command(bench, timeout=300).code == 0
    script = tmp_path / "script.py"
    script.write_text(INIT.format(""))
    one = [PYTHON, str(script)]
    job = run_command([*mpiexec(2), *one, ":", "-n", "1", "-env", name, value, *one])
    if name.endswith("PROFILE"):
        report_of(job, *parts)
    else:
        once(job, *parts)


@pytest.mark.nightly
def test_an_algorithm_that_one_rank_alone_asks_for() -> None:
    source = "from mpitrain.allreduce import make_algorithm\nif rank == 1: make_algorithm(world, 'rign')\n"
    once(run(3, START + source + "world.barrier()"), "ConfigError: there is no allreduce algorithm 'rign'")


# -- a profile that cannot be used -----------------------------------------------------------------------------------
USES = "import mpitrain as mt\nprint(f'continued with {mt.init().profile.origin}')"


def refused(path: Path, message: str, ranks: int = 2) -> str:
    """Every rank ends, and it is said once. Return what is said."""
    job = run_job(ranks, USES, env={"MPITRAIN_PROFILE": str(path)})
    text = report_of(job, f"ConfigError: {message}").text
    assert job.stderr.count(f"the profile {path} ") == 1, job.output
    assert "continued" not in job.stdout, job.output
    assert "failed too" not in job.stderr, job.output
    return text


@pytest.mark.nightly
@pytest.mark.parametrize("first", [b"{", None, b"\xff\xfe\x00"], ids=["torn", "missing", "no text"])
def test_the_remedy_for_a_profile(tmp_path: Path, first: bytes | None, request: pytest.FixtureRequest) -> None:
    """tests/test_profile.py has every other way to be damaged, or of another cluster."""
    path = tmp_path / "cluster.json"
    if first is not None:
        path.write_bytes(first)
    said = {"torn": " is damaged", "missing": "No such file", "no text": "cannot be read: it is not text in UTF-8"}
    text = refused(path, "")
    assert next(words for name, words in said.items() if f"[{name}]" in request.node.name) in text
    assert text.endswith(f". Measure again: mpitrain bench --hosts localhost -n 2 --save-profile {path}\n")
    command = shlex.split(text.partition("Measure again: mpitrain ")[2])
    # The time of a measurement depends on the machine. The variable is still set.
    job = run_command([PYTHON, "-m", "mpitrain", *command], timeout=300, env={"MPITRAIN_PROFILE": str(path)})
    assert job.code == 0, job.output
    job = run_job(2, USES, env={"MPITRAIN_PROFILE": str(path)})
    assert (job.code, job.stdout.count(f"continued with {path}")) == (0, 2), job.output
    content = json.loads(path.read_text())
    refused(path, f"the profile {path} is of another cluster: ranks_per_node [2], here [3]", ranks=3)
    content["fingerprint"]["hosts"] = ["elsewhere"]
    path.write_text(json.dumps(content))
    refused(path, f"the profile {path} is of another cluster: hosts ['elsewhere'], here ")


# -- launchers: what was started as one job, and MPI takes for several -----------------------------------------------
SIZE = "import mpitrain as mt; print('a world of', mt.init().size)"
WRONG_LAUNCHER = (
    "LaunchError: process ",
    "mpiexec of {0} started 3 processes ({1}=3), but mpi4py loads {2}, which sees 1",
    "this would run as 3 jobs of 1. Start the program with the mpiexec of {2}",
    "    mpitrain run -n 3 SCRIPT\n",
)


@pytest.mark.parametrize(
    ("launcher", "python", "names"),
    [
        ("mpich", "openmpi", ("MPICH", "PMI_SIZE", "Open MPI")),
        *nightly(("openmpi", "mpich", ("Open MPI", "OMPI_COMM_WORLD_SIZE", "MPICH"))),
    ],
)
def test_the_mpiexec_of_another_library(launcher: str, python: str, names: tuple[str, ...]) -> None:
    job = run_job(3, SIZE, launcher=need(launcher), python=need(python))
    failed(job, *(part.format(*names) for part in WRONG_LAUNCHER))
    assert "a world of" not in job.stdout


@pytest.mark.nightly
def test_mpi_that_the_script_has_initialised_by_itself() -> None:
    job = run_job(2, "from mpi4py import MPI\n" + SIZE, launcher="mpich", python=need("openmpi"))
    failed(job, "mpiexec of MPICH started 2 processes (PMI_SIZE=2), but mpi4py loads Open MPI, which sees 1")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "expected", "odd", "jobs"),
    [(2, 4, "", ": this would run as 2 jobs of 2"), (2, 3, "", ""), (3, 6, "2", ": this would run as 2 jobs of 3")],
)
def test_fewer_ranks_than_mpitrain_run_announced(ranks: int, expected: int, odd: str, jobs: str) -> None:
    """To all ranks, or to one alone."""
    announces = f"import os\nif os.environ['PMI_RANK'] in '{odd or '012'}': os.environ['_MPITRAIN_EXPECTED_SIZE'] = "
    job = run_job(ranks, f"{announces}'{expected}'\n{SIZE}")
    report_of(
        job,
        f"mpitrain run started {expected} processes (_MPITRAIN_EXPECTED_SIZE={expected}), but mpi4py loads MPICH, "
        f"which sees {ranks}{jobs}",
        "Start the program with the mpiexec of MPICH",
        f"    mpitrain run -n {expected} SCRIPT\n",
    )
    assert job.stderr.count("LaunchError") == 1, job.output
    assert not odd or f"LaunchError: process {odd} on " in job.stderr


@pytest.mark.parametrize(("python", "name"), [("mpich", "MPICH"), *nightly(("openmpi", "Open MPI"))])
def test_a_slurm_step_whose_processes_mpi_does_not_join(python: str, name: str) -> None:
    # Simulates what srun sets for task 1 of 2. No launcher helps the process to find the other task.
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    failed(
        run_job(None, SIZE, env=step, python=need(python)),
        f"srun started 2 processes (SLURM_NTASKS=2), but mpi4py loads {name}, which sees 1",
        f"this would run as 2 jobs of 1. Start the program with the mpiexec of {name}",
        "    mpitrain run -n 2 SCRIPT\n",
    )


def without(folder: Path, *names: str) -> Job:
    """A Python that has only these packages."""
    for name in ("numpy", "numpy.libs", "ml_dtypes", "threadpoolctl.py", *names):
        (folder / name).symlink_to(Path(pytest.__file__).parents[1] / name)
    env = {"PYTHONPATH": f"{REPOSITORY}:{folder}", "LD_LIBRARY_PATH": ""}
    probe = [PYTHON, "-S", "-c", "import ctypes; ctypes.CDLL('libmpi.so.12')"]
    if run_command(probe, env=env).code == 0:
        pytest.skip("this machine has an MPI library of its own")
    return run_command([PYTHON, "-S", "-c", SIZE], env=env)


def test_no_mpi(tmp_path: Path) -> None:
    why = ("LaunchError: on ", "pip install mpi4py mpich", "no MPI library can be loaded (cannot load MPI library")
    (tmp_path / "only").mkdir()
    failed(without(tmp_path, "mpi4py"), *why, "libmpi.so.12: cannot open shared object file")
    failed(without(tmp_path / "only"), *why[:2], "(No module named 'mpi4py')")
    job = run_job(None, SIZE, env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    failed(job, *why, "/nowhere/libmpi.so: cannot open shared object file")


# -- places: containers, communicators -------------------------------------------------------------------------------
# A container as far as processes go. Each has a process 1, and here the files of the containers have equal numbers.
CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc"]
IN_CONTAINER = """
while os.dup(0) < 100:
    pass
total = world.sum(numpy.full(100_000, 10.0**rank))
assert (total == 11).all(), total
world.print("summed up on", world.num_nodes, "node")
"""


@pytest.fixture
def _containers() -> None:
    tried = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")


@pytest.mark.usefixtures("_containers")
def test_memory_of_another_container_is_not_taken_for_that_of_a_rank() -> None:
    """With --pid=host it is shared. (Without that option, process_vm_readv fails, which MPICH uses on a node.)"""
    report_of(
        run_command([*mpiexec(2), *CONTAINER, PYTHON, "-c", START + IN_CONTAINER]),
        "LaunchError: rank 0 on ",
        "are in different containers on one machine, but MPI takes them for ranks of one node",
        "--pid=host",
    )
    job = run_command([*mpiexec(2), "unshare", "--mount", "--ipc", PYTHON, "-c", START + IN_CONTAINER])
    succeeded(job)
    assert job.stdout == "summed up on 1 node\n"


@pytest.mark.nightly
@pytest.mark.usefixtures("_containers")
def test_machines_of_different_names_are_nodes() -> None:
    """Host name, boot and numbering of processes identify a node, whatever MPI says. Here MPI says one node."""
    script = 'hostname node$((${PMI_RANK:-0} / 2)); exec "$@"'
    source = START + (
        "assert world.node_ranks == (0, 0, 1), world.node_ranks\n"
        "assert (world.local_rank, world.local_size) == ((0, 2), (1, 2), (0, 1))[world.rank]\n"
        "assert world.sum(10**world.rank) == 111\n"
        "world.print(world.hosts)"
    )
    job = run_command([*mpiexec(3), "unshare", "--uts", "sh", "-c", script, "sh", PYTHON, "-c", source])
    succeeded(job)
    assert job.stdout == "('node0', 'node0', 'node1')\n"


@pytest.mark.parametrize("ranks", [1, *nightly(2)])
def test_reducers_in_a_loop(ranks: int) -> None:
    """MPI has a limited number of communicators. All but 20 are in use before, because 2000 reducers take long."""
    source = """
from mpi4py import MPI
taken = []
try:
    while True:
        taken.append(world.comm.Dup())
except MPI.Exception:
    for comm in taken[:20]:
        comm.Free()
parameters = [mt.Parameter("a", (3,), numpy.dtype(numpy.float32))]
kept = [mt.GradientReducer(world, parameters, threaded=False) for _ in range(5000)]
"""
    failed(run(ranks, START + source), "MPI has no further communicator", "close those that are no longer used")


@pytest.mark.nightly
def test_communicators_that_are_given_back_can_be_had_again() -> None:
    """The test makes and frees more than MPI has. (test_worlds.py counts those of whole worlds.)"""
    succeeded(run(2, START + "for _ in range(2500):\n    world.apart().free()"))


def test_ranks_that_run_different_tests() -> None:
    """tests/ranks/conftest.py notices it. Neither test makes a collective call itself."""
    one, two = ([PYTHON, "-m", "tests.ranks", "-k", name] for name in ("test_wrong_options", "test_the_first_place"))
    job = run_command([*mpiexec(1), *one, ":", "-n", "1", *two])
    failed(job)
    assert "the ranks do not come to the end of the same test: " in job.stdout, job.output


# -- arrays on (emulated) GPUs ---------------------------------------------------------------------------------------
ON_GPU = "import cupy\nfrom mpitrain.cuda.transports import make_transport\n"
IN_FLIGHT = """
transport = make_transport(world, NAME)
flat = transport.allocate(3_000_000, numpy.dtype("f4"))
flat.fill(1)
transport.start(flat).wait()
HOW
print("sum", float(flat.sum()))
"""
DIES = "handle = transport.start(flat)\nif rank == 1: os._exit(3)\nhandle.wait()"
# CuPy reports for ever that its events have not happened, and nothing else.
BREAKS = "if rank == 1: cupy.cuda.runtime.broken = 700\ntransport.start(flat).wait()"
ELSEWHERE = 'with cupy.cuda.Device(1):\n    world.sum({"a": cupy.ones(3)})'


@pytest.mark.parametrize(
    ("source", "variables", "said"),
    [
        (
            IN_FLIGHT.replace("NAME", "'staged'").replace("HOW", BREAKS),
            {},
            "DeviceError: the GPU has failed: cudaErrorIllegalAddress",
        ),
        *nightly(
            (IN_FLIGHT.replace("NAME", "'staged'").replace("HOW", DIES), {}, ""),
            (IN_FLIGHT.replace("NAME", "'peer'").replace("HOW", DIES), {}, ""),
            (
                "make_transport(world)",
                {"MPITRAIN_TRANSPORT": "nccl"},
                "DeviceError: the transport nccl is not possible here: rank 0 on ",
            ),
            ("", {"MPITRAIN_TRANSPORT": "pear"}, "no transport 'pear'; known: auto, aware, nccl, peer, staged"),
            # On all ranks alike. (tests/device_ranks has the case of one rank.)
            (
                ELSEWHERE,
                {"EMULATED_GPUS": "2", "_MPITRAIN_DEVICES": "cuda:0,cuda:0,cuda:0"},
                "['a'] float64 (3,) on GPU 1, and this rank has GPU 0; move the array to this rank's GPU, or to the ho",
            ),
        ),
    ],
    ids=["breaks", "dies", "dies, peer", "nccl", "pear", "elsewhere"],
)
def test_a_gpu_that_cannot_be_used(source: str, variables: dict[str, str], said: str) -> None:
    job = run(3, START + ON_GPU + source, env=EMULATED | variables)
    failed(job, *([said, "mpitrain: rank "] if said else []))
    assert "sum" not in job.stdout
    assert not said or job.stderr.count(said) == 1, job.output


LOOKS = """
import mpitrain.job.start
seen = []
start_mpi = mpitrain.job.start._start_mpi
def look():
    import cupy
    seen.append(cupy.cuda.Device().id)
    return start_mpi()
mpitrain.job.start._start_mpi = look
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"_MPITRAIN_DEVICES": "cuda:1,cuda:0"}, (1, 0)),
        ({"MPITRAIN_TRANSPORT": "aware"}, (0, 1)),
        ({}, (0, 0)),
    ],
)
def test_the_gpu_is_chosen_before_mpi_starts(variables: dict[str, str], expected: tuple[int, int]) -> None:
    """The given devices decide. If MPI takes GPU memory, the local rank decides."""
    source = LOOKS + START + 'world.print("early", rank, seen, all_ranks=True)'
    job = run(2, source, env=EMULATED | {"EMULATED_GPUS": "2"} | variables)
    succeeded(job)
    for rank, number in enumerate(expected):
        assert f"early {rank} [{number}]" in job.stdout, job.output


# -- data and options of a program -----------------------------------------------------------------------------------
# A data set with one file per sample, which a thread reads ahead.
TRAIN = """
import pathlib, sys, threading, time
import numpy
import mpitrain as mt

class Files:
    files = sorted(pathlib.Path(sys.argv[1]).glob("*.npy"))
    def __len__(self):
        return len(self.files)
    def __getitem__(self, number):
        time.sleep(float(sys.argv[2]))
        return numpy.load(self.files[number])

def loss_and_gradients(parameters, batch, on_gradient):
    on_gradient("w", batch.sum(axis=0))
    return 0.0

def build(world):
    data = mt.data.MapData(world, Files(), global_batch=6, shuffle=False)
    adapter = mt.ArrayFunction(loss_and_gradients, {"w": numpy.zeros(3)}, mt.optim.SGD(0.01))
    return mt.Parts(adapter, mt.Sync(), mt.data.Prefetch(data, batches=2))

trainer = mt.Trainer(build, [mt.StopAtStep(4)])
trainer.run()
trainer.world.print("trained", trainer.step_number, "steps,", [thread.name for thread in threading.enumerate()][1:])
"""


@pytest.mark.parametrize(
    ("bad", "seconds", "error"),
    [
        ("cut short", "0", "ValueError"),
        # A thread that is still reading does not delay the end.
        *nightly(("", "0.1", ""), ("", "0", ""), ("gone", "0", "FileNotFoundError")),
    ],
)
def test_files_that_are_read_ahead(tmp_path: Path, bad: str, seconds: str, error: str) -> None:
    """Rank 1 has samples 20 and 21 in the fourth step: it is named, with the sample."""
    for number in range(60):
        numpy.save(tmp_path / f"{number:02d}.npy", numpy.full(3, float(number)))
    path = tmp_path / "21.npy"
    if bad == "cut short":
        path.write_bytes(path.read_bytes()[:-5])
    elif bad:
        path.unlink()
        path.symlink_to(tmp_path / "not there")  # still in the list
    job = run_job(3, TRAIN, str(tmp_path), seconds, timeout=30)
    if bad:
        assert report_of(job, "in sample 21", error).rank == 1
    else:
        succeeded(job)
        assert (job.stdout, job.stderr) == ("trained 4 steps, ['mpitrain prefetch']\n", "")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "options", "parts"),
    [
        (3, ["--data-directory", "FOLDER"], ("train-images-idx3-ubyte.gz cannot be read (No such file or directory)",)),
        (1, ["--lerning-rate", "1"], ()),
        (3, ["--lerning-rate", "1"], ()),
    ],
)
def test_an_example(ranks: int, options: list[str], parts: tuple[str, ...], tmp_path: Path) -> None:
    """It must find no data except those in a folder."""
    words = [word.replace("FOLDER", str(tmp_path)) for word in options]
    command = [*mpiexec(ranks), PYTHON, "examples/train.py", "--device", "host", *words]
    job = run_command(command, env={"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)})
    if parts:
        once(job, *parts, "DataError: ", f"get it with: scripts/get-data fashion {tmp_path}", "--data digits")
    else:
        failed(job, "error: unrecognized arguments: --lerning-rate 1\n")
        assert job.code == 2, job.output
        assert "left with exit code 2 (train.py:" in job.stderr, job.output  # and not argparse's own line


# Each line is a wrong option. One process tests all of them, because most of its time goes into imports.
WRONG_OPTIONS = """
import runpy, sys
script, *lines = sys.argv[1:]
sys.path.insert(0, script.rpartition("/")[0])
for line in lines:
    sys.argv = [script, *line.split()]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(end.code)
"""


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ("train.py", ("--steps 0", "--epochs 0", "--global-batch -5", "--global-batch many")),
        *nightly(("train_gpt.py", ("--steps 0", "--evaluate-steps 0", "--context 0", "--global-batch 0"))),
    ],
)
def test_numbers_of_the_examples_that_must_be_positive(script: str, lines: tuple[str, ...]) -> None:
    job = run_command([PYTHON, "-c", WRONG_OPTIONS, f"examples/{script}", *lines])
    assert job.stdout.split() == ["2"] * len(lines), job.output
    for option, value in (line.split() for line in lines):
        assert f"error: argument {option}: '{value}' is not a whole number above 0\n" in job.stderr, job.output
