"""Scripts that were written for torchrun, unedited, under `mpitrain run`: they know nothing of mpitrain."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from jobs import VENVS, Job, run_command

# torch.distributed is torchrun's own way to meet; the last line is what the script sees of its place.
DDP = """
import json, os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(json.dumps([dist.get_rank(), total.item(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()]), flush=True)
dist.destroy_process_group()
"""
PLACE = """
import json, os
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
         "ROLE_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"]
print(json.dumps([os.environ[name] for name in names]), flush=True)
with open(os.environ["OUT"], "a") as file:
    file.write(os.environ["MASTER_PORT"] + " " + os.environ["JAX_COORDINATOR_ADDRESS"] + "\\n")
"""


def run(folder: Path, source: str, *words: str, vendor: str = "mpich", env: dict[str, str] | None = None) -> Job:
    (folder / "train.py").write_text(source)
    command = [str(VENVS[vendor] / "bin/mpitrain"), "run", *words, "train.py"]
    return run_command(command, cwd=folder, env={"OUT": str(folder / "out"), **(env or {})})


def lines_of(job: Job) -> list[list[object]]:
    assert (job.code, job.left) == (0, []), job.output
    return sorted((json.loads(line.partition("] ")[2]) for line in job.stdout.splitlines()), key=str)


def test_a_script_that_meets_by_torch_distributed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = run(tmp_path, DDP, "-n", "3")
    assert lines_of(job) == [[rank, 6.0, rank, 3] for rank in range(3)]
    assert "each rank runs all of it alone" not in job.stderr
    assert "mpitrain: the ranks start without MPI: train.py does not use it (--starter mpiexec: with" in job.stderr


def test_gloo_is_ours_without_an_edit(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    moved_by = "type(dist.group.WORLD._get_backend(torch.device('cpu'))).__module__"
    source = DDP.replace("dist.get_world_size()]", f"dist.get_backend(), {moved_by}]")
    job = run(tmp_path, source, "-n", "2", "--exchange", "mpitrain")
    assert lines_of(job) == [[rank, 3.0, rank, "gloo", "mpitrain.torch.backend"] for rank in range(2)]
    assert "mpitrain: process groups of gloo use mpitrain's exchange in all ranks" in job.stderr


BY_MPIEXEC, BY_AGENT = ("--starter", "mpiexec"), ("--starter", "agent")


@pytest.mark.parametrize(("vendor", "starter"), [("mpich", BY_MPIEXEC), ("openmpi", BY_MPIEXEC), ("mpich", ())])
def test_each_rank_knows_its_place(tmp_path: Path, vendor: str, starter: tuple[str, ...]) -> None:
    """Also where the variables of another launcher are set: all ranks would have one place."""
    job = run(
        tmp_path, PLACE, "-n", "2", *starter, vendor=vendor, env={"RANK": "7", "WORLD_SIZE": "9", "GROUP_RANK": "3"}
    )
    shared = ["2", "2", "0", "1"]
    expected = [[str(rank), str(rank), *shared, str(rank), "2", "127.0.0.1", "0", "3"] for rank in range(2)]
    assert lines_of(job) == expected
    assert "mpitrain: RANK, WORLD_SIZE, GROUP_RANK are set here. Each rank gets its own" in job.stderr
    (ports,) = set((tmp_path / "out").read_text().splitlines())
    port, coordinator = ports.split()
    assert coordinator.startswith("127.0.0.1:")
    assert port != coordinator.rpartition(":")[2]


@pytest.mark.parametrize("starter", [BY_MPIEXEC, BY_AGENT])
def test_tensorflow_is_told_of_the_workers(tmp_path: Path, starter: tuple[str, ...]) -> None:
    """Each port can be taken, and the addresses are the same on all ranks."""
    source = (
        "import json, os, socket\n"
        "told = json.loads(os.environ['TF_CONFIG'])\n"
        "host, _, port = told['cluster']['worker'][told['task']['index']].rpartition(':')\n"
        "socket.create_server((host, int(port))).close()\n"
        "print(json.dumps([told['task'], int(os.environ['RANK']), told['cluster']]))\n"
    )
    job = run(tmp_path, source, "-n", "3", "--tf-config", *starter)
    lines = lines_of(job)
    assert sorted(line[1] for line in lines) == [0, 1, 2]
    assert all(line[0] == {"type": "worker", "index": line[1]} for line in lines)
    (cluster,) = {json.dumps(line[2]) for line in lines}
    workers = json.loads(cluster)["worker"]
    assert len(set(workers)) == 3
    assert all(worker.startswith("127.0.0.1:") for worker in workers)


def test_restarts_are_counted_as_torchrun_does(tmp_path: Path) -> None:
    """The script resumes from checkpoints of its own. So a failure that comes again is none of the launcher's."""
    script = (
        "import os\n"
        "count = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print(count, os.environ['TORCHELASTIC_MAX_RESTARTS'])\n"
        "assert count == 3 or os.environ['RANK'] == '0'\n"
    )
    job = run(tmp_path, script, "-n", "2", "--max-restarts", "3")
    assert (job.code, job.left) == (0, []), job.output
    assert [line for line in job.stdout.splitlines() if line.startswith("[0")][-1].endswith("3 3")
    job = run(tmp_path, script, "-n", "2")  # nobody knows whether it has a checkpoint
    assert job.code == 1, job.output


def test_the_port_of_the_user(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        taken = str(server.getsockname()[1])
        job = run(tmp_path, PLACE, "-n", "2", env={"MASTER_PORT": taken})
        assert (job.code, job.stdout, job.left) == (1, "", []), job.output
        assert f"the port {taken} (MASTER_PORT) is taken. Choose another one, or leave MASTER_PORT out" in job.stderr
    job = run(tmp_path, PLACE, "-n", "1", env={"MASTER_PORT": "80000"})
    assert (job.code, job.stdout) == (1, "")
    assert "MASTER_PORT is '80000'; it must be a port, from 1 to 65535, or unset" in job.stderr
    lines_of(run(tmp_path, PLACE, "-n", "2", env={"MASTER_PORT": taken, "MASTER_ADDR": "localhost"}))
    assert (tmp_path / "out").read_text().split()[0] == taken


def test_a_program_that_a_rank_starts_has_no_place(tmp_path: Path) -> None:
    """It would wait for the ranks, or take the place of one: an evaluation that a training starts, say."""
    source = (
        "import mpitrain as mt, os, subprocess, sys\n"
        "world = mt.init()\n"
        "names = 'RANK', 'LOCAL_RANK', 'MASTER_PORT'\n"
        "seen = 'import mpitrain, os; print([os.environ.get(name) for name in (%r, %r, %r)])' % names\n"
        "said = subprocess.run([sys.executable, '-c', seen], capture_output=True, text=True, check=True).stdout\n"
        "print('\"' + said.strip() + '\"')\n"
    )
    job = run(tmp_path, source, "-n", "1")
    assert (job.code, job.left) == (0, []), job.output
    assert "[None, None, None]" in job.stdout


# The rank that fails closes its connections before it ends, so the others fail at about the same time, or before it.
FAILS = """
import os, sys, time, torch, torch.distributed as dist
def main():
    dist.init_process_group("gloo")
    try:
        for step in range(10):
            dist.all_reduce(torch.ones(4))
            if dist.get_rank() == 1 and step == 3:
                %s
    finally:
        dist.destroy_process_group()
        time.sleep(0.3)
main()
"""
RECORD = "from torch.distributed.elastic.multiprocessing.errors import record\n"


@pytest.mark.parametrize(
    "source",
    [
        FAILS % "1 / 0",
        pytest.param(RECORD + (FAILS % "1 / 0").replace("def main", "@record\ndef main"), marks=pytest.mark.nightly),
    ],
)
def test_the_rank_that_failed_first(tmp_path: Path, source: str) -> None:
    pytest.importorskip("torch")
    job = run(tmp_path, source, "-n", "3")
    assert (job.code, job.left) == (1, []), job.output
    words = job.stderr[job.stderr.rindex("mpitrain: rank 1 on ") :]
    assert re.match(r"mpitrain: rank 1 on \S+ failed (first, )?at \d\d:\d\d:\d\d", words), job.output
    assert "ZeroDivisionError: division by zero" in words


def test_a_rank_that_leaves_while_others_need_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = run(tmp_path, FAILS % "os._exit(0)", "-n", "2")
    assert (job.code, job.left) == (1, []), job.output
    last = job.stderr.splitlines()[-1]
    assert re.match(r"mpitrain: rank 0 on \S+ failed at \S+: RuntimeError: .*onnection", last), job.output
    assert "rank 1 had left before, with exit code 0: do all ranks make the same number of steps?" in last


HANGS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(4):
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1 and step == 2:
        begin = time.monotonic()
        while time.monotonic() < begin + 8: pass
        if step == 2: print("sleeps", flush=True); time.sleep(1000)
"""


def test_a_rank_that_hangs(tmp_path: Path) -> None:
    """Rank 0 waits while rank 1 computes: that is no hang."""
    pytest.importorskip("torch")
    limits = {"MPITRAIN_STALL_SECONDS": "4", "MPITRAIN_HANG_SECONDS": "6"}
    job = run(tmp_path, HANGS, "-n", "2", env=limits)
    assert (job.code, job.left) == (1, []), job.output
    assert "sleeps" in job.stdout
    reports = [line for line in job.stderr.splitlines() if "rank 0 on" in line and "waits in" in line]
    assert len(reports) == 2, job.output
    for said, line in zip(["no progress for", "nothing has moved for 6 s"], reports, strict=True):
        who = r"rank 0 on \S+ waits in all_reduce at train.py:5 \(<module>\); rank 1 on \S+ sleeps in train.py:9"
        assert re.match(rf"mpitrain: {said}.*: {who}", line), line


def test_a_script_that_only_starts_the_rank_proper(tmp_path: Path) -> None:
    """Under Open MPI, a program that a rank starts can take its place."""
    (tmp_path / "proper.py").write_text("import mpitrain as mt\nworld = mt.init()\nprint([world.rank, world.size])\n")
    source = "import subprocess, sys\nsys.exit(subprocess.run([sys.executable, 'proper.py']).returncode)\n"
    job = run(tmp_path, source, "-n", "2", vendor="openmpi")
    assert lines_of(job) == [[0, 2], [1, 2]]
