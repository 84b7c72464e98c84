"""`mpitrain doctor` on this machine, whole and with real faults. What is said of each: tests/check/test_here.py."""

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
from mpitrain.check.check import Seen
from mpitrain.check.doctor import target_here
from mpitrain.check.run import of_one_machine
from mpitrain.cli import main

DOCTOR = [sys.executable, "-m", "mpitrain", "doctor"]
# A test cannot decide if other people compute here or have left files.
PASSING = {"MPI01", "MPI05", "ENV07", "LIM01", "LIM03", "CON01"}


def doctor(*options: str, before: str = "", **variables: str) -> Job:
    """The command after a line of shell, with variables."""
    line = f"{before}{shlex.join([*DOCTOR, *options])}"
    return run_command(["bash", "-c", line], timeout=120.0, env={"COLUMNS": "200", **variables})


def broken(folder: Path, **packages: str) -> dict[str, str]:
    """The variables with which Python finds other `packages` before the right ones."""
    for package, text in packages.items():
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}


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


def test_packages_that_are_broken(tmp_path: Path) -> None:
    """In the text for people. Nothing in it is for another machine."""
    job = doctor(**broken(tmp_path, mpi4py="raise ImportError('there is no mpi4py here')", numpy=""))
    assert (job.code, job.stderr) == (1, ""), job.output
    said = "FAIL    MPI01: mpi4py cannot load an MPI library: ImportError: there is no mpi4py here"
    assert said in job.stdout
    assert f"        $ {sys.executable} -m pip install mpi4py mpich\n" in job.stdout
    assert "        blocks: MPI06, MPI05, GPU07" in job.stdout
    assert "FAIL    ENV07: NumPy cannot be used: AttributeError: module 'numpy' has no attribute 'arange'" in job.stdout
    assert f"{socket.gethostname()}, {len(of_one_machine())} checks: " in job.stdout
    assert "\nMPI library" in job.stdout and "ssh " not in job.stdout


def test_faults_of_this_machine(tmp_path: Path) -> None:
    """Few open files, another mpiexec in PATH, and an MPICH that is told to use a network that it has not."""
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text("#!/bin/sh\necho 'mpiexec (Open MPI) 5.0.11'\n")
    mpiexec.chmod(0o755)
    no_network = dict.fromkeys(("FI_PROVIDER", "UCX_TLS"), "nothing-of-the-kind")
    path = f"{tmp_path}:{os.environ['PATH']}"
    job = doctor("--json", before="ulimit -Sn 900; ", PATH=path, **no_network)
    found: dict[str, dict[str, Any]] = {one["id"]: one for one in json.loads(job.stdout)["findings"]}
    assert (job.code, job.left) == (1, []), job.output
    assert [found[name]["verdict"] for name in ("LIM01", "MPI06", "MPI05")] == ["warn", "warn", "fail"]
    assert found["LIM01"]["found"] == "a process may have 900 files open"
    assert found["LIM01"]["remedy"].startswith("ulimit -n ")
    said = f"mpiexec in PATH is {mpiexec}, of Open MPI 5.0.11; mpi4py loads MPICH"
    assert found["MPI06"]["found"].startswith(said)
    assert "do not make one job: mpiexec ended with code" in found["MPI05"]["found"]


def test_the_standard_library_is_enough(tmp_path: Path) -> None:
    """The command itself needs no other library; the checks look in children."""
    names = ("numpy", "mpi4py", "fabric", "paramiko", "yaml", "rich")
    variables = broken(tmp_path, **{name: f"import sys; sys.exit('{name} was imported')" for name in names})
    code = "import sys, runpy; sys.argv[1:] = ['--help']; from mpitrain.cli import doctor; import argparse"
    code += "; from mpitrain.check import doctor, run, report; print(len(run.of_one_machine()))"
    job = run_command([sys.executable, "-c", code], env=variables)
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


def test_an_interrupt_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("mpitrain.check.run.check_cluster", lambda *_: ([], Seen(target_here()), True))
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted: the report above covers only what was seen before\n"
