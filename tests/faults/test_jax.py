"""JAX programs as a user runs them: the example, JAX's own collectives, errors that end a job."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from faults.outcome import report_of, succeeded
from jobs import REPOSITORY, VENVS, mpiexec, run_command, run_job

pytest.importorskip("jax", reason="JAX is not installed")

from mpitrain.errors import DeviceError
from mpitrain.jax.distributed import Sight, share_of_gpus


def test_the_example_on_one_and_two_ranks() -> None:
    """Each step has 127 samples, so the ranks' parts differ."""
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
    job = run_job(2, ON_ONE_CORE, "100", "600", timeout=100)
    succeeded(job)
    assert job.stdout == "trained\n"


def test_a_step_inside_jit_where_xla_has_one_thread() -> None:
    """With PJRT_NPROC=1 the first steps may succeed."""
    job = run_job(2, ON_ONE_CORE, "1000000", "3", timeout=100, env={"PJRT_NPROC": "1"})
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
    report = report_of(run_job(2, UNEQUAL), "step(jnp.ones(2 + world.rank))")
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


def test_factors_of_power_sgd_that_differ_are_an_error_on_every_rank(tmp_path: Path) -> None:
    """Rank 1 goes on from the factors of before the first step. The job ends when both ranks have the error."""
    report = report_of(run_job(2, OTHER_FACTORS, str(tmp_path)), "mean.update(gradients, left._replace")
    assert "MismatchError: the ranks go on from different factors of PowerSGD" in report.text
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
    job = run_job(2, OWN_COLLECTIVES, timeout=100, env={"PJRT_NPROC": "1"})
    succeeded(job)
    expected = [((2, rank, [11.0] * 3, True, [2.0, 2.0]), "1") for rank in range(2)]
    assert str(expected) in job.stdout.splitlines()


def test_without_jax() -> None:
    source = "import sys; sys.modules['jax'] = None; import mpitrain.jax"
    job = run_command([sys.executable, "-c", source], cwd=REPOSITORY)
    assert job.code == 1
    assert job.stderr.strip().endswith("install it: pip install 'mpitrain[jax]'")


def sights(*counts: int, visible: tuple[str | None, ...] = (None, None), given: str = "") -> list[Sight]:
    """There are two ranks on each machine. Each machine has so many GPUs."""
    return [Sight(node, its, count, given) for node, count in enumerate(counts) for its in visible]


def test_gpus_are_divided_among_the_ranks_of_a_machine() -> None:
    assert [share_of_gpus(sights(4, 2), rank) for rank in range(4)] == [[0, 1], [2, 3], [0], [1]]
    assert [share_of_gpus(sights(3), rank) for rank in range(2)] == [[0, 1], [2]]
    assert share_of_gpus(sights(0), 1) is None
    assert share_of_gpus(sights(1, visible=("0", "1")), 1) is None  # the launcher has divided them
    assert share_of_gpus(sights(4, given="cuda:3"), 0) == [3]
    assert share_of_gpus([Sight(0, None, 2, ""), Sight(1, None, 2, "")], 1) is None  # alone on its machine
    with pytest.raises(DeviceError, match=r"2 ranks on a machine with 1 GPU\(s\).*start at most 1 rank\(s\) there"):
        share_of_gpus(sights(1), 0)
