"""Hosts join a loop of PyTorch over the nodes of a cluster, with `prepare` and with DistributedDataParallel."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import PYTHONS, SHARE, Ended, Job, as_user, write
from test_joining import COPIES, change, steps_of

from faults.test_recovery_of_programs import OF_TORCH
from testbed import Bed

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.timeout(2400), pytest.mark.usefixtures("healed"), pytest.mark.nightly]

PACKAGES = f"{SHARE}/packages"

# Samples are whole numbers, and each rank has 8 or 4 of a batch. So the mean gradient is not rounded, and every number
# of ranks gives the same bits. Once the file `enough` exists, the training makes 20 more steps.
SCRIPT = """
import pathlib, sys, time
import torch
import mpitrain as mt
import mpitrain.torch

torch.set_num_threads(1)
torch.manual_seed(0)
IN_DDP = sys.argv[2] == "ddp"
if IN_DDP:
    torch.distributed.init_process_group("mpitrain")
world = mt.init()
x = torch.randint(-9, 9, (64, 5), dtype=torch.float64)
samples = torch.utils.data.TensorDataset(x, torch.arange(64))
loader = torch.utils.data.DataLoader(samples, batch_size=16, shuffle=True)
model = torch.nn.Linear(5, 1, bias=False, dtype=torch.float64)
if IN_DDP:
    model, data = torch.nn.parallel.DistributedDataParallel(model), mpitrain.torch.shard(loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if not IN_DDP:
    model, optimizer, data = mpitrain.torch.prepare(model, optimizer, loader)

kept = mpitrain.torch.keep(model, optimizer, data, last=int(sys.argv[1]), step=0)
for epoch in range(data.epoch, 10**6):
    for inputs, numbers in data:
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()
        time.sleep(0.05 if sys.argv[1] == "4000" else 0.0)
        step, last = kept["step"] + 1, kept["last"]
        bits = next(model.parameters()).detach().numpy().tobytes().hex()
        world.print("step", step, world.size, sum(world.allgather(numbers.tolist()), []), bits)
        if step == 20:
            world.print("has begun")
        if world.broadcast_object(last == 4000 and pathlib.Path("enough").exists()):
            last = step + 20
        kept.update(last=last, step=step)
        if step == last:
            break
    if kept["step"] == kept["last"]:
        break
if IN_DDP:
    torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module", autouse=True)
def packages(bed: Bed) -> Iterator[None]:
    """PyTorch and what it imports, of this environment, on the shared folder."""
    if as_user(bed, "node1", f"test -e {PACKAGES}/torch").returncode == 0:  # of a developer's own bed
        yield
        return
    there = as_user(bed, "node1", "python3 --version").stdout.split()[1]
    here = Path(torch.__file__).parents[1]
    if f"python{there.rpartition('.')[0]}" not in str(here):
        pytest.skip("the nodes have another version of Python")
    unpack = f"sudo -u cluster mkdir {PACKAGES} && sudo -u cluster tar -C {PACKAGES} -x"
    left_out = "--exclude torch/include --exclude torch/test"
    line = f"tar -C {here} {left_out} -c {' '.join(OF_TORCH)} | ssh node1 {shlex.quote(unpack)}"
    copied = bed.run(["bash", "-o", "pipefail", "-c", line], timeout_seconds=900)
    assert copied.returncode == 0, copied.stderr
    yield
    as_user(bed, "node1", f"rm -r {PACKAGES}")


def train(bed: Bed, hosts: str, last: int, kind: str) -> Job:
    options = f"--hosts {hosts} --ppn 1 --max-restarts 1 moves.py {last} {kind}"
    return Job(bed, options, python=PYTHONS["mpich"], setting=f"{COPIES} PYTHONPATH={PACKAGES}")


@pytest.mark.parametrize("kind", ["prepare", "ddp"])
def test_two_hosts_join(bed: Bed, kind: str) -> None:
    write(bed, "node1", f"{SHARE}/moves.py", SCRIPT)
    as_user(bed, "node1", "rm -f enough")
    job = train(bed, "node1,node2", 4000, kind)
    job.wait_for("has begun")
    change(bed, PYTHONS["mpich"], "+node3,node4")
    job.wait_for("continuing on node1, node2, node3, node4 with 4 ranks\n")
    job.wait_for("resumed from memory at step ")
    write(bed, "node1", f"{SHARE}/enough", "")
    steps = steps_of(ended(job).output)
    assert {size for size, _, _ in steps.values()} == {2, 4}
    for first in range(1, len(steps) - 3, 4):  # an epoch
        read = [number for step in range(first, first + 4) for number in steps[step][1]]
        assert sorted(read) == list(range(64)), first
    # An undisturbed run, always with 2 ranks.
    whole = steps_of(ended(train(bed, "node1,node2", len(steps), kind)).output)
    assert [(sorted(read), bits) for _, read, bits in steps.values()] == [
        (sorted(read), bits) for _, read, bits in whole.values()
    ]


def ended(job: Job) -> Ended:
    end = job.end()
    assert end.code == 0, end.output
    return end
