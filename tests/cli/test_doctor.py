"""`mpitrain doctor` on this machine, whole and with real faults."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jobs import REPOSITORY, Job, run_command
from mpitrain.check.run import of_one_machine

DOCTOR = [sys.executable, "-m", "mpitrain", "doctor"]
# A test cannot decide if other people compute here or have left files.
PASSING = {"MPI01", "MPI05", "ENV07", "LIM01", "LIM03", "CON01"}


def doctor(*options: str, before: str = "", **variables: str) -> Job:
    """The command after a line of shell, with variables."""
    line = f"{before}{shlex.join([*DOCTOR, *options])}"
    return run_command(["bash", "-c", line], timeout=120.0, env={"COLUMNS": "200", **variables})


def findings(job: Job) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in json.loads(job.stdout)["findings"]}


def test_this_machine() -> None:
    job = doctor("--json")
    report = json.loads(job.stdout)
    assert (job.code, [one for one in report["findings"] if one["verdict"] in ("fail", "unknown")]) == (0, []), (
        job.output
    )
    verdicts = {one["id"]: one["verdict"] for one in report["results"]}
    assert list(verdicts) == [check.id for check in of_one_machine()]
    assert {verdicts[name] for name in PASSING} == {"pass"}
    facts = report["facts"]
    assert facts["programs"]["mpi"]["library"].startswith("MPICH Version")
    assert [words[1]["size"] for words in facts["two ranks"]["said"].values()] == [2, 2]
    schema = json.loads((REPOSITORY / "docs/check-cluster.schema.json").read_text())
    jsonschema.validate({name: value for name, value in report.items() if name != "facts"}, schema)
    assert job.left == []


def test_what_is_printed() -> None:
    job = doctor()
    assert job.code == 0, job.output
    assert job.stderr == ""
    assert f"{socket.gethostname()}, {len(of_one_machine())} checks: " in job.stdout
    assert "\n2 processes say  I am one of 2, I am one of 2\n" in job.stdout
    assert "ssh " not in job.stdout


def broken(folder: Path, package: str, text: str) -> dict[str, str]:
    """The variables with which Python finds another `package` before the right one."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}


def test_without_mpi4py(tmp_path: Path) -> None:
    job = doctor(**broken(tmp_path, "mpi4py", "raise ImportError('there is no mpi4py here')"))
    assert job.code == 1, job.output
    assert job.stderr == ""
    assert job.stdout.startswith(
        "FAIL    MPI01: mpi4py cannot load an MPI library: ImportError: there is no mpi4py here"
    )
    assert f"        $ {sys.executable} -m pip install mpi4py mpich\n" in job.stdout
    assert "        blocks: MPI06, MPI05, GPU07" in job.stdout


def test_a_numpy_that_is_broken(tmp_path: Path) -> None:
    job = doctor(**broken(tmp_path, "numpy", ""))
    assert job.code == 1, job.output
    assert job.stderr == ""
    assert "FAIL    ENV07: NumPy cannot be used: AttributeError: module 'numpy' has no attribute 'arange'" in job.stdout


def test_few_open_files() -> None:
    found = findings(doctor("--json", before="ulimit -Sn 900; "))["LIM01"]
    assert (found["verdict"], found["found"]) == ("warn", "a process may have 900 files open")
    assert found["remedy"].startswith("ulimit -n ")


def test_another_mpiexec_in_path(tmp_path: Path) -> None:
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text("#!/bin/sh\necho 'mpiexec (Open MPI) 5.0.11'\n")
    mpiexec.chmod(0o755)
    job = doctor("--json", PATH=f"{tmp_path}:{os.environ['PATH']}")
    found = findings(job)["MPI06"]
    assert (job.code, found["verdict"]) == (0, "warn"), job.output
    assert found["found"].startswith(f"mpiexec in PATH is {mpiexec}, of Open MPI 5.0.11; mpi4py loads MPICH")


def test_a_library_that_cannot_begin() -> None:
    """MPICH is told to use a network that it has not: both ranks fail in MPI_Init."""
    job = doctor("--json", FI_PROVIDER="nothing-of-the-kind", UCX_TLS="nothing-of-the-kind")
    found = findings(job)["MPI05"]
    assert (job.code, found["verdict"]) == (1, "fail"), job.output
    assert "do not make one job: mpiexec ended with code" in found["found"]
    assert job.left == []


@pytest.mark.parametrize("module", ["numpy", "mpi4py", "fabric", "paramiko", "yaml", "rich"])
def test_the_standard_library_is_enough(tmp_path: Path, module: str) -> None:
    """The command itself needs no other library; the checks look in children."""
    variables = broken(tmp_path, module, "import sys; sys.exit('imported')")
    code = "import sys, runpy; sys.argv[1:] = ['--help']; from mpitrain.cli import doctor; import argparse"
    code += "; from mpitrain.check import doctor, run, report; print(len(run.of_one_machine()))"
    job = run_command([sys.executable, "-c", code], timeout=60.0, env=variables)
    assert (job.code, job.stdout) == (0, f"{len(of_one_machine())}\n"), job.output


def test_gpus(tmp_path: Path) -> None:
    """Emulated ones; two ranks find the ways between them."""
    paths = os.pathsep.join([str(REPOSITORY / "tests/emulated"), str(REPOSITORY)])
    job = doctor("--json", PYTHONPATH=paths, EMULATED_GPUS="2", XDG_CACHE_HOME=str(tmp_path))
    facts = json.loads(job.stdout)["facts"]
    assert (facts["cupy"]["driver"], facts["cupy"]["runtime"]) == (13000, 13000), job.output
    assert [card["name"] for card in facts["cupy"]["cards"]] == ["Emulated GPU"] * 2
    (answer,) = facts["gpu ways"]["said"]["0"]
    assert answer["error"] == ""
    assert {name: bool(why) for name, why in answer["transports"].items()} == {
        "aware": False,
        "nccl": True,
        "peer": False,
        "staged": False,
    }
    assert "CuPy finds no NCCL" in answer["transports"]["nccl"]
    assert answer["choice"].startswith("below 512 KiB: ")
    assert job.left == []


def test_an_interrupt_is_told() -> None:
    source = """
import sys
from mpitrain.cli import main
from mpitrain.check import run
look = run.check_cluster
run.check_cluster = lambda *arguments: (*look(*arguments)[:2], True)
sys.exit(main(["doctor"]))
"""
    job = run_command([sys.executable, "-c", source], timeout=120.0)
    words = "interrupted: the report above covers only what was seen before\n"
    assert (job.code, job.stderr) == (130, words), job.output
