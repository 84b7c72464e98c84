"""`mpitrain bench` from outside. What it refuses: tests/forecast/test_bench_values.py."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jobs import REPOSITORY, VENVS, mpiexec, run_command, run_job
from mpitrain.cli import main
from mpitrain.launch.start import Request
from mpitrain.launch.tuning import Conditions, glibc_version, settings

PYTHON = str(VENVS["mpich"] / "bin/python")
BENCH = [PYTHON, "-m", "mpitrain", "bench"]
RANKS = [PYTHON, "-m", "mpitrain.forecast.bench"]
# What `mpitrain bench` sets for the settings' sake.
HERE = Conditions("mpich", 1, False, False, glibc_version(os.confstr("CS_GNU_LIBC_VERSION")))


def said_tuning(folder: Path, tuned: dict[str, str]) -> str:
    """The line that names how MPI is tuned, which must be in the file too."""
    assert json.loads((folder / "r.json").read_text())["tuning"] == tuned
    return f"# tuning: {' '.join(f'{name}={tuned[name]}' for name in sorted(tuned))}"


def test_table_and_files(tmp_path: Path) -> None:
    words = ["-n", "2", "--sizes", "4K,64K", "--rounds", "3", "--operation", "allreduce,point_to_point"]
    if importlib.util.find_spec("matplotlib"):
        words += ["--plot", "r.png"]
    env = {"UCX_RNDV_THRESH": "1k"}
    job = run_command([*BENCH, *words, "--json", "r.json", "--csv", "r.csv"], cwd=tmp_path, env=env)
    assert (job.code, job.left) == (0, []), job.output
    lines = job.stdout.splitlines()
    assert lines[0].startswith("# mpitrain ")
    assert lines[1].startswith("# 2 ranks on ")
    assert lines[3] == said_tuning(tmp_path, env | settings(HERE, {}))
    assert lines[4].split()[:4] == ["#", "size", "count", "type"]
    rows = [line.split() for line in lines[6:10]]
    assert [(row[0], row[4], row[10]) for row in rows] == [
        (size, algorithm, "0") for size in ("4096", "65536") for algorithm in ("mpi", "auto")
    ]
    assert lines[10].startswith("# latency (us)")
    read = json.loads((tmp_path / "r.json").read_text())
    assert [(row["size_bytes"], row["algorithm"]) for row in read["rows"]] == [(int(r[0]), r[4]) for r in rows]
    with (tmp_path / "r.csv").open() as file:
        assert [row["time_us"] for row in csv.DictReader(file)] == [str(row["time_us"]) for row in read["rows"]]
    if "--plot" in words:
        assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_what_every_host_must_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a job on several hosts, each looks for the file that the ranks run."""
    requests: list[Request] = []
    monkeypatch.setattr("mpitrain.launch.start.start", requests.append)
    main(["bench", "--hosts", "node1,node2", "--sizes", "4K"])
    (request,) = requests
    module = importlib.util.find_spec(request.program[2])
    assert module is not None
    assert module.origin == request.script


def test_started_by_mpiexec(tmp_path: Path) -> None:
    words = ["--sizes", "1K", "--rounds", "2", "--json", "r.json"]
    env = {"UCX_RNDV_THRESH": "1k"}
    job = run_command([*mpiexec(3), *RANKS, *words], cwd=tmp_path, env=env)
    assert job.code == 0, job.output
    lines = job.stdout.splitlines()
    assert len(lines) == 8
    assert json.loads((tmp_path / "r.json").read_text())["ranks_per_node"] == [3]
    assert said_tuning(tmp_path, env) in lines


@pytest.mark.nightly
def test_a_profile_and_what_is_chosen_by_it(tmp_path: Path) -> None:
    """`--dry-run` says what settings force, and with which profile. What it chooses without one: below."""
    job = run_command([*BENCH, "-n", "2", "--save-profile", "cluster.json"], cwd=tmp_path)
    assert job.code == 0, job.output
    read = json.loads((tmp_path / "cluster.json").read_text())
    assert read["fingerprint"]["ranks_per_node"] == [2]
    assert read["measured"]["native_below_bytes"] >= 0
    env = {"MPITRAIN_PROFILE": "cluster.json", "MPITRAIN_BUCKET_MIB": "0.5", "MPITRAIN_ALGORITHM": "ring"}
    job = run_command([*BENCH, "-n", "2", "--dry-run"], cwd=tmp_path, env={**env, "MPITRAIN_COMPRESSION": "auto"})
    assert job.code == 0, job.output
    profile, *lines = job.stdout.splitlines()
    assert profile.startswith("profile: cluster.json; ")
    assert lines == [
        "all sizes: ring, set by MPITRAIN_ALGORITHM",
        "compression auto: none, as all ranks are on one node",
        "buckets: 0.5 MiB",
    ]


def test_what_is_chosen_without_a_profile(tmp_path: Path) -> None:
    job = run_command([*BENCH, "-n", "2", "--dry-run"], cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.stdout.splitlines() == [
        "profile: default: Gigabit Ethernet; 50 us, 117 MB/s",
        "below 16 KiB: native",
        "from 16 KiB: shared_memory",
        "buckets: 4 MiB",
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-n", "2", "--algorithms", "rign"], "there is no algorithm 'rign'; known: auto"),
        (["--sizes", "4K"], "how many ranks?"),
        (["-n", "2", "-m", "pack"], "bench runs no module; to run one: mpitrain run -n N -m pack"),
        (["-n", "2", "--device", "gpu"], "--device is 'gpu'; allowed are host and cuda"),
        (["-n", "2", "--device", "cuda", "--algorithms", "ring"], "there is no transport 'ring'; known: auto, aware,"),
        (["-n", "2", "--device", "cuda", "--codecs", "int8"], "--device cuda measures --operation allreduce"),
    ],
)
def test_refused_before_any_rank_starts(
    words: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    assert main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("mpitrain bench: ") and text in line and out == ""


def test_refused_by_ranks_is_said_once(tmp_path: Path) -> None:
    """By the options themselves, and where CUDA sees no GPU."""
    paths = os.pathsep.join([str(REPOSITORY / "tests/emulated"), str(REPOSITORY)])
    emulated = {"PYTHONPATH": paths, "EMULATED_GPUS": "0"}
    for words, text, env in (
        (["--rubbish"], "usage: ", {}),
        (["--device", "cuda"], "CUDA sees no GPU", emulated),
    ):
        job = run_command([*mpiexec(2), *RANKS, *words], cwd=tmp_path, env=env)
        assert job.code == 2, job.output
        assert job.stderr.count(text) == 1 and "Traceback" not in job.output, job.output


def test_a_wrong_element_is_an_exit_code() -> None:
    source = """
import sys
from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.registry import Entry
from mpitrain.allreduce.algorithm import Sequential
from mpitrain.forecast.bench import main

def forgets(world):
    def steps(flat, *_):
        return
        yield
    return Sequential(world, "forgets", steps)

ALGORITHMS["forgets"] = Entry(forgets)
sys.exit(main())
"""
    job = run_job(2, source, "--algorithms", "forgets", "--sizes", "4K", "--rounds", "1")
    assert job.code == 1, job.output
    assert "elements are wrong: see #wrong" in job.stdout
    assert "Traceback" not in job.output


@pytest.mark.nightly
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    def during(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("#      size") or "all ranks are on one node" in line:
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)

    words = ["-n", "3", "--sizes", "16M", "--time", "50s", "--json", "r.json"]
    job = run_command([*BENCH, *words], cwd=tmp_path, during=during)
    assert job.code == 128 + signal.SIGINT, job.output
    assert job.left == []
    assert list(tmp_path.iterdir()) == []
