"""Jobs of torch.distributed and of JAX that fail or start in unusual ways. They end soon, and say why."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from faults.failing import HERE, nightly
from faults.outcome import failed, report_of, succeeded
from jobs import REPOSITORY, VENVS, Job, mpiexec, run_command, run_job
from mpitrain.errors import DeviceError

# On a busy machine the import of PyTorch takes seconds.
TIMEOUT = 100.0


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def torch_job(ranks: int | None, source: str, *words: str, **env: str) -> Job:
    need("torch")
    return run_job(ranks, source, *words, timeout=TIMEOUT, env=env)


def jax_job(source: str, *words: str, **env: str) -> Job:
    need("jax")
    return run_job(2, source, *words, timeout=TIMEOUT, env=env)


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


# The calls behind the last comparison, one of which is another on the last rank. A ring of MPI takes it.
LAST_CALLS = """
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])] if size == 4 else [None]
for step in range(160):
    odd = rank == size - 1 and step == 155
    dist.all_reduce(torch.ones(2 if odd else 3), group=pairs[rank // 2] if size == 4 else None)
"""


AGAIN = "dist.destroy_process_group(); dist.init_process_group('mpitrain'); "
CALLS = "for step in range(150): dist.all_reduce(torch.ones(3))\nif rank: dist.reduce(torch.ones(3), dst=0)\n"
SUM_OF_2 = r"ODD on \S+: call (\d+) is all_reduce \(SUM, 2 float32 on cpu\); OTHER on \S+: call \1 is "
SUM_OF_2 += r"all_reduce \(SUM, 3 float32 on cpu\), in process group "
ONE_MORE = r"is reduce with root 0 \(.*\); rank 0 on \S+: no more call, in process group "


@pytest.mark.parametrize(
    ("ranks", "calls", "said"),
    [
        (3, LAST_CALLS, SUM_OF_2.replace("ODD", "rank 2").replace("OTHER", "rank 0")),
        # "one more": rank 1 need not wait for rank 0, which has no call left to compare.
        *nightly(
            (2, CALLS, ONE_MORE),
            (4, LAST_CALLS, SUM_OF_2.replace("ODD", "rank 3").replace("OTHER", "rank 2")),
            # The next group has the same name, and ends well.
            (
                3,
                f"{LAST_CALLS}{AGAIN}dist.all_reduce(torch.ones(3))",
                SUM_OF_2.replace("ODD", "rank 2").replace("OTHER", "rank 0"),
            ),
            (2, CALLS + "dist.destroy_process_group()", ONE_MORE),
        ),
    ],
    ids=["differ", "one more", "differ in a pair", "differ before another group", "one more, destroyed"],
)
def test_the_last_calls_differ(ranks: int, calls: str, said: str) -> None:
    """They are too few to be compared with later ones."""
    assert re.search(said, report_of(torch_job(ranks, START + calls), "MismatchError: ").text)


@pytest.mark.nightly
def test_last_calls_that_are_equal() -> None:
    """A group that is destroyed, one that is not, and one that nothing refers to any more."""
    source = LAST_CALLS.replace("rank == size - 1", "False")
    succeeded(torch_job(3, f"{START}{source}{AGAIN}\n{source}del pairs"))


REDUCES = "dist.all_reduce(torch.ones(1_000_000))"
FAILING = {
    # Killed in an allreduce.
    "dies": (
        2,
        f"for step in range(10**6):\n    {REDUCES}\n    if rank == 1 and step == 5: os.kill(os.getpid(), 9)",
        [],
    ),
    # It has ended, so the others need not wait for their timeout.
    "has ended": (
        2,
        f"{REDUCES}\nif rank: {REDUCES}",
        ["MismatchError: rank ", "rank 0 on ", "all_reduce of 1000000 f"],
    ),
    # In a computation that takes too long.
    "is late": (3, f"if rank == 1: time.sleep(1000)\n{REDUCES}", ["all_reduce of 1000000 float32", " 20 s", "rank 1 "]),
    # PyTorch's own hook for uncaught exceptions does not hide it.
    "raises": (
        3,
        f"if rank == 2: raise KeyError('no such batch')\n{REDUCES}",
        ["rank 2 on ", "KeyError: 'no such batch'"],
    ),
    # DDP on rank 1 sees the difference and raises. Rank 0 continues and waits for rank 1.
    "differs": (2, "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3 + rank, 2))", ["appears not to match"]),
}


@pytest.mark.parametrize("name", ["is late", *nightly("has ended", "dies", "raises", "differs")])
def test_a_rank_of_a_group_that_fails(name: str) -> None:
    ranks, source, said = FAILING[name]
    failed(torch_job(ranks, START + source, GROUP_SECONDS="20" if name == "is late" else "60"), *said)


@pytest.mark.nightly
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
    succeeded(torch_job(3, START + source))


ALONE = """
value = torch.full((3,), 2.0)
dist.all_reduce(value)
assert (rank, size, value.tolist()) == (0, 1, [2.0] * 3)
assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == list("0101")
assert os.environ["MASTER_ADDR"] and os.environ["MASTER_PORT"]
dist.destroy_process_group()
dist.init_process_group("mpitrain")
"""


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


GLOO = (
    START.replace('"mpitrain"', '"gloo"')
    + """
some = dist.new_group([0], backend="mpitrain")  # rank 1 makes no group
if rank == 0:
    dist.all_reduce(torch.ones(1), group=some)
dist.barrier()
"""
)
# Scripts that set torchrun's variables still work, even with an address that does not exist.
TORCHRUN = (
    START
    + """
assert os.environ["MASTER_ADDR"] == "no.such.host.invalid"
value = torch.ones(3)
dist.all_reduce(value)
assert (value == size).all()
dist.new_group(backend="gloo")  # asks the store, which knows better
"""
)
VARIABLES = {"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "0", "WORLD_SIZE": "2"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "source", "env"),
    [
        (None, START + ALONE, {}),
        (2, GLOO, {}),
        (2, TORCHRUN, VARIABLES),
        (2, SAVED, {}),
    ],
    ids=["alone", "beside another backend", "torchrun's variables", "a process that writes a checkpoint"],
)
def test_groups_that_start_in_unusual_ways(tmp_path: Path, ranks: int | None, source: str, env: dict[str, str]) -> None:
    if source == SAVED:  # that process meets those of the other ranks by variables of its own
        pytest.importorskip("torch.distributed.checkpoint._async_process_executor")
    succeeded(torch_job(ranks, source, str(tmp_path), **env))


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


# Two processes, started as torchrun would start them: each is alone in MPI.
STORE = "dist.init_process_group(store=dist.HashStore(), rank=1, world_size=2, backend="


@pytest.mark.parametrize(
    ("ranks", "source", "env", "said"),
    [
        (None, SPAWNS, {}, ["remove mp.spawn (or Process) and start it with `mpitrain run -n N`"]),
        (
            None,
            START.replace("dist.init_process_group(", STORE),
            {},
            ["LaunchError", "rank 1 of 2", "rank 0 of 1", "torchrun"],
        ),
        *nightly(
            (2, SPAWNS, {}, ["remove mp.spawn (or Process) and start it with `mpitrain run -n N`"]),
            # RANK is right for only one rank. The other rank raises, so all ranks raise.
            (
                2,
                START,
                {"RANK": "0"},
                ["LaunchError: rank 1 on ", "says rank 0 of 2, MPI says rank 1 of 2", "torchrun"],
            ),
        ),
    ],
)
def test_groups_that_cannot_start(ranks: int | None, source: str, env: dict[str, str], said: list[str]) -> None:
    failed(torch_job(ranks, source, **env), *said)


STEPS = """
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("deviation", "cause"),
    [
        ("if odd: continue", f"rank 1 on {HERE} has ended after 2 steps of the optimizer, rank 0 on {HERE} after 3"),
        *nightly(
            ("if odd: optimizer.param_groups[0]['lr'] = 0.5", f"rank 1 on {HERE} has made its last step of the op")
        ),
    ],
)
def test_last_steps_that_differ(deviation: str, cause: str) -> None:
    """No exchange follows that could tell: the ranks compare when they have finished."""
    report_of(torch_job(2, STEPS.replace("DEVIATION", deviation)), cause)


# -- JAX -------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_example_on_one_and_two_ranks() -> None:
    """Each step has 127 samples, so the ranks' parts differ."""
    need("jax")
    command = [str(VENVS["mpich"] / "bin/python"), "examples/jax_mlp.py", "--data", "digits", "--steps", "8"]
    jobs = [run_command([*mpiexec(ranks), *command], timeout=100) for ranks in (1, 2)]
    losses = []
    for ranks, job in enumerate(jobs, start=1):
        succeeded(job)
        assert f"{ranks} rank(s): test accuracy " in job.stdout
        losses.append([float(text) for text in re.findall(r"^step \d+: loss ([\d.]+)$", job.stdout, re.M)])
    # The steps have the same samples: losses are equal except for float32's rounding over 8 steps.
    alone, both = losses
    assert len(alone) == 2
    assert both == pytest.approx(alone, rel=2e-5)
    assert 0 < alone[1] < alone[0]


# Only the step is inside jit, so JAX leaves it to a thread of XLA. The rank may use one core alone.
ON_ONE_CORE = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp
import mpitrain as mt, mpitrain.jax
from mpitrain.jax import inside_jit

world = mt.init()
inside_jit._COPY_SECONDS = float(sys.argv[2])

def loss(p, x):
    y = jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.square(y.reshape(len(x), -1) @ p["dense"]).mean()

step = jax.jit(mpitrain.jax.mean(jax.value_and_grad(loss)))
p = {"kernel": jnp.ones((3, 3, 1, 16)) / 100, "dense": jnp.ones((4096, 100)) / 100}
x = jnp.ones((8, 16, 16, 1)) * (1 + world.rank)
for _ in range(int(sys.argv[1])):
    value, gradients = step(p, x)
    p = jax.tree.map(lambda its, gradient: its - 1e-3 * gradient, p, gradients)
world.print("trained")
"""


def test_a_step_inside_jit_where_xla_would_have_one_thread() -> None:
    job = jax_job(ON_ONE_CORE, "100", "600")
    succeeded(job)
    assert job.stdout == "trained\n"


@pytest.mark.nightly
def test_a_step_inside_jit_where_xla_has_one_thread() -> None:
    """With PJRT_NPROC=1 the first steps may succeed."""
    job = jax_job(ON_ONE_CORE, "1000000", "3", PJRT_NPROC="1")
    report_of(job, "ConfigError: rank ", "PJRT_NPROC is 1; XLA needs 2 threads or more: set it to 2")


UNEQUAL = """
import jax, jax.numpy as jnp
import mpitrain as mt, mpitrain.jax

world = mt.init()

@jax.jit
def step(x):
    return mpitrain.jax.sum({"w": x})

step(jnp.ones(3))
step(jnp.ones(2 + world.rank))
"""


def test_an_error_inside_jit_ends_the_job_as_itself() -> None:
    report = report_of(jax_job(UNEQUAL), "step(jnp.ones(2 + world.rank))")
    last = report.text.strip().splitlines()[-1]
    assert re.fullmatch(
        r"mpitrain\.errors\.MismatchError: rank 1 on \S+: \['w'\] float32 \(3,\); rank 0 on \S+: \['w'\] "
        r"float32 \(2,\); they must be equal in: sum",
        last,
    )


OTHER_FACTORS = """
import sys, time
from pathlib import Path
import jax.numpy as jnp
import mpitrain as mt, mpitrain.jax
from mpitrain.errors import MismatchError
from mpitrain.jax import compressed

world = mt.init()
apart = world.replaced(node_ranks=tuple(range(world.size)))  # each rank is as if on a node of its own
compressed.init = lambda: apart
mean = mpitrain.jax.compressed_mean("power_sgd:2")
gradients = {"w": jnp.arange(600, dtype="float32").reshape(20, 30) ** (1 + world.rank)}
first = mean.init(gradients)
_, left = mean.update(gradients, first)
try:
    mean.update(gradients, left._replace(factors=first.factors) if world.rank else left)
except MismatchError:
    Path(sys.argv[1], str(world.rank)).touch()
    while len(list(Path(sys.argv[1]).iterdir())) < world.size:
        time.sleep(0.01)
    raise
"""


@pytest.mark.nightly
def test_factors_of_power_sgd_that_differ_are_an_error_on_every_rank(tmp_path: Path) -> None:
    """Rank 1 continues from the factors of before the first step. The job ends when both ranks have the error."""
    report = report_of(jax_job(OTHER_FACTORS, str(tmp_path)), "mean.update(gradients, left._replace")
    assert "MismatchError: the ranks continue from different factors of PowerSGD" in report.text
    assert len(list(tmp_path.iterdir())) == 2


OWN_COLLECTIVES = """
import os
import mpitrain as mt, mpitrain.jax

world = mt.init()
mpitrain.jax.initialize()

import jax, jax.numpy as jnp, numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(jax.devices(), ("rank",))
mine = numpy.full((1, 3), 10.0**world.rank, numpy.float32)
x = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("rank")), mine)
total = jax.jit(lambda x: x.sum(axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))(x)
try:
    mpitrain.jax.sum(x)
except mt.errors.MpitrainError as error:
    refused = "spread over the devices of several processes" in str(error)
ours = mpitrain.jax.sum(jnp.ones(2))
found = jax.process_count(), jax.process_index(), numpy.asarray(total).tolist(), refused, ours.tolist()
world.print(world.allgather((found, os.environ["PJRT_NPROC"])))
"""


def test_jax_gets_the_ranks_as_its_processes() -> None:
    job = jax_job(OWN_COLLECTIVES, PJRT_NPROC="1")
    succeeded(job)
    expected = [((2, rank, [11.0] * 3, True, [2.0, 2.0]), "1") for rank in range(2)]
    assert str(expected) in job.stdout.splitlines()


def test_without_jax() -> None:
    source = "import sys; sys.modules['jax'] = None; import mpitrain.jax"
    job = run_command([sys.executable, "-c", source], cwd=REPOSITORY)
    assert job.code == 1
    assert job.stderr.strip().endswith("install it: pip install 'mpitrain[jax]'")


def sights(*counts: int, visible: tuple[str | None, ...] = (None, None), given: str = "") -> list[Any]:
    """There are two ranks on each machine. Each machine has so many GPUs."""
    from mpitrain.jax.distributed import Sight

    return [Sight(node, its, count, given) for node, count in enumerate(counts) for its in visible]


def test_gpus_are_divided_among_the_ranks_of_a_machine() -> None:
    need("jax")
    from mpitrain.jax.distributed import Sight, share_of_gpus

    assert [share_of_gpus(sights(4, 2), rank) for rank in range(4)] == [[0, 1], [2, 3], [0], [1]]
    assert [share_of_gpus(sights(3), rank) for rank in range(2)] == [[0, 1], [2]]
    assert share_of_gpus(sights(0), 1) is None
    assert share_of_gpus(sights(1, visible=("0", "1")), 1) is None  # the launcher has divided them
    assert share_of_gpus(sights(4, given="cuda:3"), 0) == [3]
    assert share_of_gpus([Sight(0, None, 2, ""), Sight(1, None, 2, "")], 1) is None  # alone on its machine
    with pytest.raises(DeviceError, match=r"2 ranks on a machine with 1 GPU\(s\).*start at most 1 rank\(s\) there"):
        share_of_gpus(sights(1), 0)
