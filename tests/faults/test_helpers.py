"""Processes that a rank starts with multiprocessing: what they may do, and how they end."""

from __future__ import annotations

import re

import pytest

from faults import helping
from faults.helping import Script
from faults.outcome import failed, report_of, succeeded
from jobs import run_job

# A fixture: pytest finds it by this name.
script = helping.script


def test_a_forked_process_that_communicates(script: Script, vendor: str) -> None:
    """Every kind of call is refused before it reaches MPI. The job goes on."""
    source = """
import multiprocessing
import numpy
import mpitrain as mt
from mpitrain.errors import MpitrainError

world = mt.init()
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
    succeeded(script(2, source, vendor))


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
        helper = multiprocessing.Process(target=wait, args=(its,))
        helper.start()
        assert ours.recv() == "here"
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()

main()
"""


def test_a_rank_that_is_killed_while_its_process_lives(script: Script, vendor: str) -> None:
    """The process would live for ever, and it keeps the rank's output open. The job ends all the same."""
    job = script(2, KILLED.replace("BEGIN", "pass"), vendor)
    failed(job)
    assert job.left == []


def test_a_rank_that_is_killed_while_its_process_by_forkserver_lives(script: Script, vendor: str) -> None:
    guarded = "if __name__ == '__main__':\n    main()"
    source = KILLED.replace("\nmain()", f"\n{guarded}").replace(
        "BEGIN", 'multiprocessing.set_start_method("forkserver")'
    )
    job = script(2, source, vendor)
    failed(job)
    assert job.left == []


def test_a_rank_that_is_killed_while_its_fork_lives(script: Script) -> None:
    """The program itself has forked. MPICH's mpiexec notices the rank's end, and ends the rest."""
    source = """
import os, signal, time
import mpitrain as mt

world = mt.init()
if world.rank == 1:
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, b"here")
        time.sleep(10**6)
    assert os.read(reading, 4) == b"here"
    os.kill(os.getpid(), signal.SIGKILL)
world.barrier()
"""
    job = script(2, source)
    failed(job)
    assert job.left == []


def test_processes_end_with_a_rank_that_is_alone(script: Script) -> None:
    """Each process ends, although those forked later keep the pipes of the earlier ones open."""
    source = """
import multiprocessing, os, signal, time
import mpitrain as mt

mt.init()
for number in range(4):
    multiprocessing.Process(target=time.sleep, args=(10**6,), daemon=number % 2 == 0).start()
os.kill(os.getpid(), signal.SIGKILL)
"""
    job = run_job(None, source, timeout=100)
    assert (job.code, job.left) == (-9, []), job.output


def test_an_exception_of_a_forked_process_is_its_own(script: Script) -> None:
    source = """
import multiprocessing
import mpitrain as mt

world = mt.init()

def fail():
    raise RuntimeError("in a process")

helper = multiprocessing.Process(target=fail)
helper.start()
helper.join()
assert helper.exitcode == 1
world.barrier()
"""
    job = script(2, source)
    succeeded(job)
    assert job.stderr.count("RuntimeError: in a process\n") == 2
    assert "failed" not in job.stderr


# A training without a guard, whose transform and collate_fn are functions inside a function.
LOADER = """
import os, signal
import torch
import torch.distributed as dist
import mpitrain.torch

class Rows(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 120

    def __getitem__(self, number):
        KILL
        return self.transform(torch.arange(8.0) * number / 100), torch.tensor([number / 100])

def main(num_workers):
    def together(rows):
        assert (torch.utils.data.get_worker_info() is None) == (num_workers == 0)
        return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    data = torch.utils.data.DataLoader(
        Rows(lambda x: x + 1), 12, num_workers=num_workers, collate_fn=together, persistent_workers=num_workers > 0
    )
    PREPARE
    for epoch in range(2):
        for x, y in data:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return [parameter.detach().tolist() for parameter in model.parameters()]
"""
PREPARE = """
    model, optimizer, data = mpitrain.torch.prepare(model, optimizer, data)
"""
DDP = """
    if not dist.is_initialized():
        dist.init_process_group("mpitrain")
    model = torch.nn.parallel.DistributedDataParallel(model)
"""


def test_workers_of_a_loader(script: Script) -> None:
    """The workers live for two epochs, in a loop with prepare and one with DDP. Results equal those without workers."""
    pytest.importorskip("torch")
    prepared, averaged = (LOADER.replace("KILL", "pass").replace("    PREPARE", how) for how in (PREPARE, DDP))
    check = "assert main(2) == main(0)\n"
    job = script(2, prepared + check + averaged + check + "print('equal')")
    succeeded(job)
    assert ("".join(job.stdout.split()), job.stderr) == ("equalequal", "")  # lines of two ranks may be mixed


def test_a_worker_that_is_killed(script: Script) -> None:
    """PyTorch reports the loss on the rank of the worker."""
    pytest.importorskip("torch")
    kill = """
        if number == 63 and os.environ.get("PMI_RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)"""
    source = LOADER.replace("KILL", kill).replace("    PREPARE", DDP)
    job = script(2, source + "\nmain(2)")
    failed(job)
    assert re.search(r"DataLoader worker \(pid.*\d+.*\) (is killed by signal: Killed|exited unexpectedly)", job.stderr)
    assert report_of(job, "DataLoader worker (pid").rank == 1
    assert job.left == []
