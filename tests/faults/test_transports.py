"""Jobs with arrays on (emulated) GPUs that fail: they end, and say why."""

from __future__ import annotations

import os

import pytest

from jobs import REPOSITORY, Job, run_job

_START = """
import os, numpy, cupy
import mpitrain as mt
from mpitrain.cuda.transports import make_transport
world = mt.init()
"""
DEADLINE_SECONDS = 60.0


def job(ranks: int, source: str, **env: str) -> Job:
    paths = os.pathsep.join([str(REPOSITORY / "tests/emulated"), str(REPOSITORY)])
    return run_job(ranks, _START + source, timeout=DEADLINE_SECONDS, env={"PYTHONPATH": paths, **env})


@pytest.mark.parametrize("name", ["peer", "staged"])
def test_a_rank_dies_in_flight(name: str) -> None:
    source = f"""
transport = make_transport(world, {name!r})
flat = transport.allocate(3_000_000, numpy.dtype("f4"))
flat.fill(1)
transport.start(flat).wait()
handle = transport.start(flat)
if world.rank == 1:
    os._exit(3)
handle.wait()
print("sum", float(flat.sum()))
"""
    done = job(3, source)
    assert done.code != 0, done.output
    assert "sum" not in done.stdout
    assert done.left == []


def test_a_gpu_that_fails_ends_the_wait_for_it() -> None:
    """CuPy reports for ever that its events have not happened, and nothing else."""
    source = """
transport = make_transport(world, "staged")
flat = transport.allocate(3_000_000, numpy.dtype("f4"))
transport.start(flat).wait()
if world.rank == 1:
    cupy.cuda.runtime.broken = 700
transport.start(flat).wait()
print("sum")
"""
    done = job(3, source)
    assert done.code != 0, done.output
    assert "sum" not in done.stdout
    assert "mpitrain: rank 1 on " in done.stderr, done.output
    assert "DeviceError: the GPU has failed: cudaErrorIllegalAddress" in done.stderr, done.output
    assert done.left == []


def test_a_host_array_on_one_rank() -> None:
    source = """
transport = make_transport(world, "staged")
transport.start(numpy.ones(3) if world.rank == 1 else cupy.ones(3)).wait()
"""
    done = job(2, source)
    assert done.code != 0, done.output
    assert done.stderr.count("ValueError: this sum takes a CuPy array on GPU 0") == 1, done.output
    assert done.left == []


def test_a_forced_transport_that_is_not_possible() -> None:
    done = job(2, "make_transport(world)", MPITRAIN_TRANSPORT="nccl")
    assert done.code != 0, done.output
    text = "DeviceError: the transport nccl is not possible here: rank 0 on "
    assert done.stderr.count(text) == 1, done.output
    assert "CuPy finds no NCCL" in done.stderr


def test_a_transport_that_there_is_not() -> None:
    done = job(2, "", MPITRAIN_TRANSPORT="pear")
    assert done.code != 0, done.output
    assert "there is no transport 'pear'; known: auto, aware, nccl, peer, staged" in done.stderr


def test_the_gpu_is_chosen_before_mpi_starts() -> None:
    """The given devices decide. If MPI takes GPU memory, the local rank decides."""
    source = """
world.print("early", world.rank, seen, all_ranks=True)
"""
    before = """
import mpitrain.job.start
seen = []
start_mpi = mpitrain.job.start._start_mpi
def look():
    import cupy
    seen.append(cupy.cuda.Device().id)
    return start_mpi()
mpitrain.job.start._start_mpi = look
"""
    paths = os.pathsep.join([str(REPOSITORY / "tests/emulated"), str(REPOSITORY)])
    for variables, expected in (
        ({"_MPITRAIN_DEVICES": "cuda:1,cuda:0"}, (1, 0)),
        ({"MPITRAIN_TRANSPORT": "aware"}, (0, 1)),
        ({}, (0, 0)),
    ):
        env = {"PYTHONPATH": paths, "EMULATED_GPUS": "2", **variables}
        done = run_job(2, before + _START + source, timeout=DEADLINE_SECONDS, env=env)
        assert done.code == 0, done.output
        for rank, number in enumerate(expected):
            assert f"early {rank} [{number}]" in done.stdout, done.output
