"""`mpitrain bench` from outside."""

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

from jobs import REPOSITORY, VENVS, Job, mpiexec, run_command, run_job
from mpitrain.cli import main
from mpitrain.launch.start import Request
from mpitrain.launch.tuning import Conditions, glibc_version, settings

DEADLINE_SECONDS = 60.0
PYTHON = str(VENVS["mpich"] / "bin/python")

# What `mpitrain bench` sets for the settings' sake.
HERE = Conditions("mpich", 1, False, False, glibc_version(os.confstr("CS_GNU_LIBC_VERSION")))


def bench(*words: str, cwd: Path) -> Job:
    return run_command([PYTHON, "-m", "mpitrain", "bench", *words], timeout=DEADLINE_SECONDS, cwd=cwd)


def test_table_and_files(tmp_path: Path) -> None:
    words = ["-n", "2", "--sizes", "4K,64K", "--rounds", "3", "--operation", "allreduce,point_to_point"]
    if importlib.util.find_spec("matplotlib"):
        words += ["--plot", "r.png"]
    job = bench(*words, "--json", "r.json", "--csv", "r.csv", cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.left == []
    lines = job.stdout.splitlines()
    assert lines[0].startswith("# mpitrain ")
    assert lines[1].startswith("# 2 ranks on ")
    assert lines[3].startswith("# tuning: ")
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
    command = [
        *mpiexec(3),
        PYTHON,
        "-m",
        "mpitrain.forecast.bench",
        "--sizes",
        "1K",
        "--rounds",
        "2",
        "--json",
        "r.json",
    ]
    job = run_command(command, timeout=DEADLINE_SECONDS, cwd=tmp_path)
    assert job.code == 0, job.output
    assert len(job.stdout.splitlines()) == 8
    assert json.loads((tmp_path / "r.json").read_text())["ranks_per_node"] == [3]


def test_how_mpi_is_tuned_is_recorded(tmp_path: Path) -> None:
    words = ["--sizes", "1K", "--rounds", "1", "--json", "r.json"]
    for start, tuned in (
        ([PYTHON, "-m", "mpitrain", "bench", "-n", "2"], {"UCX_RNDV_THRESH": "1k"} | settings(HERE, {})),
        ([*mpiexec(2), PYTHON, "-m", "mpitrain.forecast.bench"], {"UCX_RNDV_THRESH": "1k"}),
    ):
        job = run_command([*start, *words], timeout=DEADLINE_SECONDS, cwd=tmp_path, env={"UCX_RNDV_THRESH": "1k"})
        assert job.code == 0, job.output
        assert json.loads((tmp_path / "r.json").read_text())["tuning"] == tuned
        assert f"# tuning: {' '.join(f'{name}={tuned[name]}' for name in sorted(tuned))}" in job.stdout.splitlines()


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile that was measured on two ranks."""
    folder = tmp_path_factory.mktemp("profile")
    job = bench("-n", "2", "--save-profile", "cluster.json", cwd=folder)
    assert job.code == 0, job.output
    return folder / "cluster.json"


def test_a_profile(profile: Path) -> None:
    read = json.loads(profile.read_text())
    assert read["fingerprint"]["ranks_per_node"] == [2]
    assert read["measured"]["native_below_bytes"] >= 0


def test_what_is_chosen_without_a_profile(tmp_path: Path) -> None:
    job = bench("-n", "2", "--show", cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.stdout.splitlines() == [
        "profile: default: Gigabit Ethernet; 50 us, 117 MB/s",
        "below 16 KiB: native",
        "from 16 KiB: shared_memory",
        "buckets: 4 MiB",
    ]


def test_what_settings_force_is_shown(tmp_path: Path) -> None:
    command = [PYTHON, "-m", "mpitrain", "bench", "-n", "2", "--show"]
    env = {"MPITRAIN_ALGORITHM": "ring", "MPITRAIN_COMPRESSION": "auto"}
    job = run_command(command, timeout=DEADLINE_SECONDS, cwd=tmp_path, env=env)
    assert job.code == 0, job.output
    assert job.stdout.splitlines()[1:] == [
        "all sizes: ring, set by MPITRAIN_ALGORITHM",
        "compression auto: none, as all ranks are on one node",
        "buckets: 4 MiB",
    ]


def test_what_is_chosen_by_a_profile(profile: Path) -> None:
    env = {"MPITRAIN_PROFILE": "cluster.json", "MPITRAIN_BUCKET_MIB": "0.5"}
    command = [PYTHON, "-m", "mpitrain", "bench", "-n", "2", "--show"]
    job = run_command(command, timeout=DEADLINE_SECONDS, cwd=profile.parent, env=env)
    assert job.code == 0, job.output
    lines = job.stdout.splitlines()
    assert lines[0].startswith("profile: cluster.json; ")
    assert lines[-1] == "buckets: 0.5 MiB"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-n", "2", "--algorithms", "rign"], "there is no algorithm 'rign'; known: auto"),
        (["-n", "2", "--sizes", "big"], "'big' is not a size"),
        (["--sizes", "4K"], "how many ranks?"),
        (["-n", "2", "-m", "pack"], "bench runs no module; to run one: mpitrain run -n N -m pack"),
        (["-n", "2", "--operation", "point_to_point", "--plot", "r.png"], "has no rows; leave out --plot"),
        (["-n", "2", "--show", "--json", "r.json"], "measures and writes nothing; leave out --json"),
        (["-n", "2", "--device", "gpu"], "--device is 'gpu'; allowed are host and cuda"),
        (["-n", "2", "--device", "cuda", "--algorithms", "ring"], "there is no transport 'ring'; known: auto, aware,"),
        (["-n", "2", "--device", "cuda", "--codecs", "int8"], "--device cuda measures --operation allreduce"),
    ],
)
def test_refused_before_any_rank_starts(tmp_path: Path, words: list[str], text: str) -> None:
    job = bench(*words, cwd=tmp_path)
    assert job.code == 2
    assert job.stdout == ""
    (line,) = job.stderr.splitlines()
    assert line.startswith("mpitrain bench: ")
    assert text in line


def test_refused_by_ranks_is_said_once(tmp_path: Path) -> None:
    for words, text in ((["--sizes", "big"], "mpitrain bench: "), (["--rubbish"], "usage: ")):
        command = [*mpiexec(3), PYTHON, "-m", "mpitrain.forecast.bench", *words]
        job = run_command(command, timeout=DEADLINE_SECONDS, cwd=tmp_path)
        assert job.code == 2, job.output
        assert job.stderr.count(text) == 1, job.output


def test_without_a_gpu(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(REPOSITORY / "tests/emulated"), str(REPOSITORY)])
    env = {"PYTHONPATH": paths, "EMULATED_GPUS": "0"}
    command = [*mpiexec(2), PYTHON, "-m", "mpitrain.forecast.bench", "--device", "cuda"]
    job = run_command(command, timeout=DEADLINE_SECONDS, cwd=tmp_path, env=env)
    assert job.code == 2, job.output
    assert job.stderr.count("CUDA sees no GPU") == 1, job.output
    assert "Traceback" not in job.output


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
    words = ["--algorithms", "forgets", "--sizes", "4K", "--rounds", "1"]
    job = run_job(2, source, *words, timeout=DEADLINE_SECONDS)
    assert job.code == 1, job.output
    assert "elements are wrong: see #wrong" in job.stdout
    assert "Traceback" not in job.output


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    def during(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("#      size") or "all ranks are on one node" in line:
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)

    words = ["-n", "3", "--sizes", "16M", "--seconds", "50", "--json", "r.json"]
    job = run_command(
        [PYTHON, "-m", "mpitrain", "bench", *words], timeout=DEADLINE_SECONDS, cwd=tmp_path, during=during
    )
    assert job.code == 128 + signal.SIGINT, job.output
    assert job.left == []
    assert list(tmp_path.iterdir()) == []
