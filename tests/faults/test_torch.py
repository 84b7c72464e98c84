"""Jobs of torch.distributed over MPI that fail or start in unusual ways. They end soon, and say why."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

from faults.outcome import failed, report_of, succeeded
from jobs import run_job

pytest.importorskip("torch", reason="PyTorch is not installed")

# On a busy machine the import of PyTorch takes seconds.
TIMEOUT = 100.0

START = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import mpitrain.torch

assert "mpi4py.MPI" not in sys.modules  # a process that loads data may import it too
dist.init_process_group("mpitrain", timeout=timedelta(seconds=SECONDS))
rank, size = dist.get_rank(), dist.get_world_size()
""".replace("SECONDS", "int(os.environ.get('GROUP_SECONDS', 60))")


def test_a_rank_that_dies_in_an_allreduce() -> None:
    source = """
value = torch.ones(1_000_000)
for step in range(10**6):
    dist.all_reduce(value)
    value.fill_(1)
    if rank == 1 and step == 5:
        os.kill(os.getpid(), 9)
"""
    failed(run_job(2, START + source, timeout=TIMEOUT))


# The calls behind the last comparison, one of which is another on the last rank. A ring of MPI takes it.
LAST_CALLS = """
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])] if size == 4 else [None]
for step in range(160):
    odd = rank == size - 1 and step == 155
    dist.all_reduce(torch.ones(2 if odd else 3), group=pairs[rank // 2] if size == 4 else None)
"""


@pytest.mark.parametrize(
    ("ranks", "end", "odd", "other"),
    [
        (3, "", "rank 2", "rank 0"),
        (4, "", "rank 3", "rank 2"),
        # The next group has the same name, and ends well.
        (
            3,
            "dist.destroy_process_group(); dist.init_process_group('mpitrain'); dist.all_reduce(torch.ones(3))",
            "rank 2",
            "rank 0",
        ),
    ],
)
def test_the_last_calls_differ(ranks: int, end: str, odd: str, other: str) -> None:
    """They are too few to be compared with later ones."""
    report = report_of(run_job(ranks, START + LAST_CALLS + end, timeout=TIMEOUT), "MismatchError: ").text
    assert re.search(
        rf"{odd} on \S+: call (\d+) is all_reduce \(SUM, 2 float32 on cpu\); {other} on \S+: call \1 is ", report
    )
    assert "all_reduce (SUM, 3 float32 on cpu), in process group " in report


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"])
def test_one_call_more_behind_the_last_comparison(end: str) -> None:
    """Rank 1 need not wait for rank 0, which has no call left to compare."""
    calls = "for step in range(150): dist.all_reduce(torch.ones(3))\nif rank: dist.reduce(torch.ones(3), dst=0)\n"
    report = report_of(run_job(2, START + calls + end, timeout=TIMEOUT), "MismatchError: ").text
    assert re.search(r"is reduce with root 0 \(.*\); rank 0 on \S+: no more call, in process group ", report)


def test_last_calls_that_are_equal() -> None:
    """A group that is destroyed, one that is not, and one that nothing refers to any more."""
    source = LAST_CALLS.replace("rank == size - 1", "False")
    again = "dist.destroy_process_group(); dist.init_process_group('mpitrain')\n"
    succeeded(run_job(3, START + source + again + source + "del pairs", timeout=TIMEOUT))


@pytest.mark.nightly
def test_a_rank_that_fails() -> None:
    """The report of the rank that failed comes once. PyTorch's own hook for uncaught exceptions does not hide it."""
    source = """
for step in range(10):
    if rank == 2 and step == 3:
        raise KeyError("no such batch")
    dist.all_reduce(torch.ones(1000))
"""
    job = run_job(3, START + source, timeout=TIMEOUT)
    assert report_of(job, "KeyError: 'no such batch'").rank == 2


@pytest.mark.nightly
def test_models_that_differ() -> None:
    """DDP on rank 1 sees the difference and raises. Rank 0 goes on and waits for rank 1."""
    source = """
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3 + rank, 2))
"""
    job = run_job(2, START + source, timeout=TIMEOUT)
    assert report_of(job, "appears not to match").rank == 1


def test_a_rank_that_makes_no_further_call() -> None:
    """The rank has ended, so the others need not wait for their timeout."""
    source = """
dist.all_reduce(torch.ones(3))
if rank:
    dist.all_reduce(torch.ones(3))
"""
    job = run_job(2, START + source, timeout=TIMEOUT)
    failed(job, "MismatchError: rank ", "rank 0 on ", "all_reduce of 3 float32")


def test_a_rank_that_leaves_after_its_part() -> None:
    """Rank 2 has sent and ended long before rank 1 comes. By then calls are no longer compared."""
    source = """
for _ in range(110):
    dist.barrier()
if rank < 2:  # no call of all ranks
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
        dist.isend(torch.ones(2), 1) if rank == 0 else dist.irecv(torch.ones(2), 0)
if rank == 1:
    time.sleep(2.5)
parts = [torch.empty(3) for _ in range(size)] if rank == 0 else None
dist.gather(torch.full((3,), float(rank)), parts, 0)
assert rank or [part[0].item() for part in parts] == [0.0, 1.0, 2.0]
"""
    succeeded(run_job(3, START + source, timeout=TIMEOUT))


def test_a_timeout_names_who_is_missing() -> None:
    source = """
if rank == 1:
    time.sleep(1000)  # in a computation that takes too long
dist.all_reduce(torch.ones(3))
"""
    job = run_job(3, START + source, timeout=TIMEOUT, env={"GROUP_SECONDS": "20"})
    failed(job, "all_reduce of 3 float32", " 20 s", "rank 1 ")


ALONE = """
value = torch.full((3,), 2.0)
dist.all_reduce(value)
assert (rank, size, value.tolist()) == (0, 1, [2.0] * 3)
assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == list("0101")
assert os.environ["MASTER_ADDR"] and os.environ["MASTER_PORT"]
dist.destroy_process_group()
dist.init_process_group("mpitrain")
"""


def test_alone_without_mpiexec() -> None:
    succeeded(run_job(None, START + ALONE, timeout=TIMEOUT))


@pytest.mark.nightly
def test_variables_of_a_launcher_are_accepted() -> None:
    """Scripts that set torchrun's variables still work, even with an address that does not exist."""
    source = """
assert os.environ["MASTER_ADDR"] == "no.such.host.invalid"
value = torch.ones(3)
dist.all_reduce(value)
assert (value == size).all()
dist.new_group(backend="gloo")  # asks the store, which knows better
"""
    variables = {"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "0", "WORLD_SIZE": "2"}
    succeeded(run_job(2, START + source, timeout=TIMEOUT, env=variables))


def test_a_first_group_of_some_ranks() -> None:
    """The group exists beside another backend's. Rank 1 makes no group."""
    source = """
some = dist.new_group([0], backend="mpitrain")
if rank == 0:
    dist.all_reduce(torch.ones(1), group=some)
dist.barrier()
"""
    succeeded(run_job(2, START.replace('"mpitrain"', '"gloo"') + source, timeout=TIMEOUT))


def test_variables_that_contradict_mpi() -> None:
    """RANK is right for only one rank. The other rank raises, so all ranks raise."""
    job = run_job(2, START, timeout=TIMEOUT, env={"RANK": "0"})
    report_of(job, "LaunchError: rank 1 on ", "the environment says rank 0 of 2, MPI says rank 1 of 2", "torchrun")


def test_processes_that_mpi_has_not_started() -> None:
    """Two processes, started as torchrun would start them: each is alone in MPI."""
    ranks = "store=dist.HashStore(), rank=1, world_size=2, backend="
    source = START.replace("dist.init_process_group(", f"dist.init_process_group({ranks}")
    job = run_job(None, source, timeout=TIMEOUT)
    failed(job, "LaunchError", "rank 1 of 2", "rank 0 of 1", "torchrun")


SAVED = """
import sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import mpitrain.torch
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

if __name__ == "__main__":
    dist.init_process_group("mpitrain")
    process = AsyncCheckpointerType.PROCESS
    dcp.async_save({"w": torch.arange(4.0)}, checkpoint_id=sys.argv[1], async_checkpointer_type=process).result()
    dist.barrier()
    loaded = {"w": torch.zeros(4)}
    dcp.load(loaded, checkpoint_id=sys.argv[1])
    assert loaded["w"].tolist() == [0, 1, 2, 3]
"""


def test_a_checkpoint_that_a_process_writes(tmp_path: Path) -> None:
    """That process meets those of the other ranks by variables of its own."""
    pytest.importorskip("torch.distributed.checkpoint._async_process_executor")
    succeeded(run_job(2, SAVED, str(tmp_path), timeout=TIMEOUT))


SPAWNS = """
import os
import torch.distributed as dist, torch.multiprocessing as mp
import mpitrain.torch

def work(rank, size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29500"
    dist.init_process_group("mpitrain", rank=rank, world_size=size)

if __name__ == "__main__":
    mp.spawn(work, args=(1,), nprocs=1)
"""


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_script_that_starts_its_ranks_itself(ranks: int | None) -> None:
    failed(
        run_job(ranks, SPAWNS, timeout=TIMEOUT), "remove mp.spawn (or Process) and start it with `mpitrain run -n N`"
    )


@pytest.mark.parametrize(
    ("deviation", "cause"),
    [
        ("if odd: continue", "rank 1 on HOST has ended after 2 steps of the optimizer, rank 0 on HOST after 3"),
        ("if odd: optimizer.param_groups[0]['lr'] = 0.5", "rank 1 on HOST has made its last step of the optimizer"),
    ],
)
def test_last_steps_that_differ(deviation: str, cause: str) -> None:
    """No exchange follows that could tell: the ranks compare when they have finished."""
    source = """
import torch
import mpitrain as mt
import mpitrain.torch

def main():
    world = mt.init()
    model = torch.nn.Linear(2, 1)
    x = torch.arange(24.0).reshape(12, 2) / 24
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = mpitrain.torch.prepare(model, optimizer, [x[:4], x[4:8], x[8:]])
    for number, batch in zip((1, 2, 3), data):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        odd = number == 3 and world.rank == 1
        DEVIATION
        optimizer.step()

main()
"""
    job = run_job(2, source.replace("DEVIATION", deviation), timeout=TIMEOUT)
    report_of(job, cause.replace("HOST", platform.node()))
