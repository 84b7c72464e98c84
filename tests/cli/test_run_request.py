"""What `mpitrain run` makes of its words: scripts, modules, `python` before them, options; and what it refuses."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import run_command
from mpitrain.cli import main
from mpitrain.cli.run import _starter, aware_of, remarks
from mpitrain.launch.start import Request

SAYS = "import sys; print(__name__, __package__ or '-', sys.argv[1:])"
BIN = Path(sys.executable).parent
RUN = [sys.executable, "-m", "mpitrain", "run", "-n", "2"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("pack/inner", "spaces/inner"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("train.py", "pack/__init__.py", "pack/inner/__init__.py"):
        (tmp_path / name).touch()
    for name in ("train.py", "pack/inner/fit.py", "pack/__main__.py", "spaces/inner/fit.py", "spaces/__main__.py"):
        (tmp_path / name).write_text(SAYS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    return tmp_path


def refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is wrong use, and the text says of what."""
    try:
        code: object = main(["run", *words])
    except SystemExit as end:
        code = end.code
    assert (code, said in (err := capsys.readouterr().err)) == (2, True), err


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["-m", "pack.inner.fit"], ["-m", "pack.inner.fit"]),
        (["-m", "pack"], ["-m", "pack"]),
        (["-m", "train"], ["-m", "train"]),
        (["python", "train.py"], ["train.py"]),
        (["python3", "-m", "pack"], ["-m", "pack"]),
        ([sys.executable, "train.py"], ["train.py"]),
        (["-m", "spaces.inner.fit"], ["-m", "spaces.inner.fit"]),  # folders without __init__.py
        (["-m", "spaces"], ["-m", "spaces"]),
    ],
)
def test_what_is_run(project: Path, words: list[str], program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2", "--dry-run", *words, "--epochs", "5", "-n", "3"]) == 0
    line = shlex.split(capsys.readouterr().out)
    assert line[line.index(sys.executable) + 1 :] == [*program, "--epochs", "5", "-n", "3"]


@pytest.mark.parametrize("options", [["--ppn", "2", "--hosts", "localhost"], ["--hosts", "localhost/cpux2"]])
def test_an_n_behind_the_script_is_the_scripts(
    project: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the number of ranks is given in another way."""
    assert main(["run", *options, "--dry-run", "train.py", "-n", "3"]) == 0
    assert capsys.readouterr().out.endswith("train.py -n 3\n")


def test_a_module_runs_with_what_is_behind_two_dashes(project: Path) -> None:
    env = {"PATH": f"{BIN}:{os.environ['PATH']}"}
    job = run_command([*RUN, "python3", "-m", "pack.inner.fit", "a", "--", "--show", "b"], cwd=project, env=env)
    assert job.code == 0, job.output
    said = {line.partition("] ")[2] for line in job.stdout.splitlines()}
    assert said == {"__main__ pack.inner ['a', '--', '--show', 'b']"}, job.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "pack.missing"], "there is no module 'pack.missing' to run, neither in "),
        (["-m", "pack.inner"], "there is no module 'pack.inner' to run, neither in "),
        (["-m", "nothing.at.all"], "there is no module 'nothing.at.all' to run, neither in "),
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        (["--ppn", "0", "train.py"], "'0' is not a whole number above 0"),
        (
            ["--start-timeout", "soon", "train.py"],
            "'soon' is not a number with a unit, as in 60s; units: us, ms, s, min, h, d",
        ),
        (["--hosts", "a/gpu", "train.py"], "'a/gpu' in --hosts a/gpu is not a known form"),
        (["--hosts", "localhost/cpux3", "train.py"], "-n is 2, but the devices in --hosts are for 3 ranks"),
        (["-i", "nowhere", "train.py"], "nowhere: there is no such file"),
        (["--dry-rnu", "train.py"], "unknown argument --dry-rnu; did you mean --dry-run?"),
        (["--env-file", "none", "train.py"], "none cannot be read: No such file"),
    ],
)
def test_wrong_use(project: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["-n", "2", *words], said, capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "0", "train.py"], "'0' is not a whole number above 0"),
        (["-n", "two", "train.py"], "'two' is not a whole number above 0"),
        (["train.py"], "how many ranks? Say -n N for the whole job, --ppn N for each host, or name devices"),
        (["train.py", "-n", "2"], "-n comes after train.py and belongs to the script; options of mpitrain come bef"),
        (["-m", "json.tool", "--ppn=2"], "--ppn comes after json.tool and belongs to the script"),
    ],
)
def test_no_number_of_ranks(project: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(words, said, capsys)


def test_a_file_of_variables_that_does_not_fit(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file may be that of the variable."""
    (project / "mpi.env").write_text("FI_TCP_IFACE=eth77\n")
    job = run_command([*RUN, "--env-file", "mpi.env", "train.py"], cwd=project)
    assert job.code == 1 and job.stdout == "", job.output
    assert "FI_TCP_IFACE names eth77, which does not exist here" in job.stderr
    monkeypatch.setenv("MPITRAIN_ENV_FILE", "missing.env")
    refused(["-n", "2", "--dry-run", "train.py"], "missing.env cannot be read", capsys)


def test_another_python_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks would run another Python than the user has named."""
    (project / "bin").mkdir()
    (project / "bin/python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{project / 'bin'}:{os.environ['PATH']}")
    said = f"the ranks run {sys.executable}, but 'python' is {project / 'bin/python'}; leave out"
    refused(["-n", "2", "python", "train.py"], said, capsys)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1"], "-n 2 train.py --lr 1"),
        (["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=8", "train.py"], "-n 8 train.py"),
        (["accelerate", "launch", "--num_processes", "2", "train.py"], "-n 2 train.py"),
        (["horovodrun", "-np", "3", "python", "train.py"], "-n 3 train.py"),
        (["torchrun", "--nproc-per-node", "gpu", "train.py"], "-n 4 train.py"),
        (["/usr/bin/mpirun"], "-n 4 train.py"),
    ],
)
def test_another_launcher_in_place_of_the_script(
    project: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["-n", "2", *words], f"starts ranks itself, and mpitrain takes its place: mpitrain run {line}\n", capsys)


@pytest.mark.parametrize(
    ("script", "beside", "kind"),
    [
        ("import torch\ntorch.save({}, 'best.pt')", "", ""),
        ("import json, own", "import numpy", ""),
        ("import mpitrain as mt", "", "mpi"),
        ("from mpi4py import MPI", "", "mpi"),
        ("import own", "import mpitrain.torch", "mpi"),
        ("from own import fit", "def fit():\n    from mpitrain import init", "mpi"),
        ("import net", "", "mpi"),  # packages
        ("import plain", "", ""),
        ("import os\nrank = os.environ['PMI_RANK']", "", "mpi"),
        ("import torch.distributed as dist", "", "torchrun"),
        ("import own", "from accelerate import Accelerator", "torchrun"),
        ("import ignite.distributed as idist", "", "torchrun"),
        ("import horovod.torch as hvd", "", "either"),
        ("import own, torch.distributed as dist", "dist.init_process_group('mpi')", "either"),
        ("import own, torch.distributed", "import mpitrain", "mpi"),
        ("import large, torch.distributed", "", "torchrun"),  # in a checkout of its library
        ("import large", "", "mpi"),  # nobody knows
        ("this is not Python(", "", "mpi"),
    ],
)
def test_scripts_that_do_not_know_of_other_ranks(tmp_path: Path, script: str, beside: str, kind: str) -> None:
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "own.py").write_text(beside)
    for package, text in (("net", "import mpitrain"), ("plain", "import json")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "fit.py").write_text(text)
    (tmp_path / "large").mkdir()
    for number in range(301):
        (tmp_path / "large" / f"part{number}.py").touch()
    assert aware_of(tmp_path / "train.py") == kind


@pytest.mark.parametrize(
    ("source", "num_ranks", "said"),
    [
        ("torch.multiprocessing.spawn(main, nprocs=2)", 4, ["starts ranks itself"]),
        ("mp.spawn(main, nprocs=2)", 1, []),  # as it must be
        ('parser.add_argument("--local-rank", type=int)', 2, ["takes its local rank from the option --local-rank"]),
        ('add_argument("--local_rank", default=os.environ.get("LOCAL_RANK", 0))', 2, []),
        ("torch.distributed.init_process_group()", 2, []),
    ],
)
def test_scripts_for_torchrun_that_will_not_do_what_is_meant(
    tmp_path: Path, source: str, num_ranks: int, said: list[str]
) -> None:
    (tmp_path / "train.py").write_text(source)
    lines = remarks(tmp_path / "train.py", num_ranks)
    assert len(lines) == len(said)
    assert all(words in line for words, line in zip(said, lines, strict=True))


@pytest.mark.parametrize(
    ("kind", "asked", "options", "starter"),
    [
        ("torchrun", None, {}, "agent"),
        ("torchrun", "mpiexec", {}, "mpiexec"),
        ("torchrun", None, {"exchange": "mpitrain"}, "mpiexec"),
        ("torchrun", None, {"mpiexec": Path("/usr/bin/mpiexec")}, "mpiexec"),
        ("either", None, {}, "mpiexec"),
        ("mpi", None, {}, "mpiexec"),
        ("mpi", "agent", {}, "agent"),
        ("", None, {}, "mpiexec"),
    ],
)
def test_what_starts_the_ranks(
    kind: str, asked: str | None, options: dict[str, Any], starter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    request = Request(program=["train.py"], script="train.py", typed=["run", "train.py"], **options)
    assert _starter(argparse.Namespace(starter=asked), request, kind) == starter
    said = "mpitrain: the ranks start without MPI: train.py does not use it (--starter mpiexec: with MPI)\n"
    assert capsys.readouterr().err == (said if starter == "agent" and asked is None else "")
