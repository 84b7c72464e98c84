"""The GPU of each rank, the errors of a rank without one, and memory that is missing."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from mpitrain import World
from mpitrain.cuda import aware_probe, device
from mpitrain.cuda.aware_probe import fingerprint
from mpitrain.cuda.device import array_module, bind, choose_early, local_rank_of, open_gpu
from mpitrain.cuda.memory import open_block
from mpitrain.cuda.streams import make_stream, working_on
from mpitrain.cuda.transports import TRANSPORTS, make_transport
from mpitrain.errors import ConfigError, DeviceError, MismatchError
from tests.ranks.common import error_on_all, skip_alone

from .transports import emulated

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The state before the first `bind`. The emulation's variables make up the facts of the GPU."""
    monkeypatch.setattr(device, "_bound", None)
    return monkeypatch


def given(world: World, devices: str) -> World:
    return world.replaced(context=replace(world.context, devices=tuple(devices.split(","))))


def test_by_the_local_rank(world: World, unbound: pytest.MonkeyPatch) -> None:
    count = cupy.cuda.runtime.getDeviceCount()
    gpu = bind(world)
    assert gpu.number == world.local_rank % count
    assert gpu.ranks == tuple(rank for rank in range(world.size) if rank % count == world.rank % count)
    assert cupy.cuda.Device().id == gpu.number
    assert bind(world) == gpu


def test_the_one_that_was_given(world: World, unbound: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """That ranks share it is said once."""
    last = cupy.cuda.runtime.getDeviceCount() - 1
    for _ in range(2):
        assert bind(given(world, ",".join([f"cuda:{last}"] * world.size))).number == last
    names = ", ".join(str(rank) for rank in range(world.size))
    expected = f"mpitrain: ranks {names} share one GPU on {world.host}: they take turns"
    assert capfd.readouterr().err.count(expected) == int(world.is_root and world.size > 1)
    device._bound = None


@emulated
@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("EMULATED_DRIVER", "0", "there is no NVIDIA driver on this machine"),
        ("EMULATED_DRIVER", "12040", "the NVIDIA driver is for CUDA 12.4, CuPy for CUDA 13.0"),
        ("EMULATED_GPUS", "0", "CUDA sees no GPU"),
        ("EMULATED_BYTES_OF_OTHERS", "all but 1000", "has 1,000 of 2,147,483,648 bytes free"),
    ],
)
def test_a_rank_without(world: World, unbound: pytest.MonkeyPatch, variable: str, value: str, text: str) -> None:
    gc.collect()
    if value == "all but 1000":
        value = str(2**31 - 1000 - cupy.cuda._used.get(world.local_rank % cupy.cuda.runtime.getDeviceCount(), 0))
    if world.rank == world.size - 1:
        unbound.setenv(variable, value)
    said = error_on_all(world, DeviceError, lambda: bind(world))
    assert said.startswith(f"{world.name(world.size - 1)}: ")
    assert text in said
    assert array_module(world, "auto") is numpy  # on all ranks, as nobody asked for a GPU
    error_on_all(world, DeviceError, lambda: array_module(world, "cuda"))
    unbound.undo()
    assert bind(world)


def test_without_cupy(world: World, unbound: pytest.MonkeyPatch) -> None:
    if world.is_root:
        unbound.setitem(sys.modules, "cupy", None)
    said = error_on_all(world, DeviceError, lambda: bind(world))
    assert said.startswith(f"{world.name(0)}: CuPy cannot be imported")
    assert "pip install cupy-cuda13x" in said
    for name in TRANSPORTS:
        said = error_on_all(world, DeviceError, lambda name=name: make_transport(world, name))
        assert "CuPy cannot be imported" in said


def test_more_gpus_are_given_than_there_are(world: World, unbound: pytest.MonkeyPatch) -> None:
    count = cupy.cuda.runtime.getDeviceCount()
    devices = ["cuda:0"] * world.size
    devices[-1] = f"cuda:{count}"
    said = error_on_all(world, DeviceError, lambda: bind(given(world, ",".join(devices))))
    assert f"{world.name(world.size - 1)}: this rank was given cuda:{count}, but CUDA sees {count} GPU(s) here" in said


def test_a_rank_that_was_given_none(world: World, unbound: pytest.MonkeyPatch) -> None:
    skip_alone(world)
    mixed = given(world, ",".join(["cuda:0", *["cpu"] * (world.size - 1)]))
    for call in (lambda: bind(mixed), lambda: array_module(mixed, "auto"), lambda: make_transport(mixed, "staged")):
        said = error_on_all(world, DeviceError, call)
        assert f"{world.name(1)}: --hosts gave this rank no GPU (cpu)" in said
    assert array_module(given(world, ",".join(["cpu"] * world.size)), "auto") is numpy


def test_array_module(world: World) -> None:
    assert array_module(world, "host") is numpy
    assert array_module(world, "auto") is cupy
    with pytest.raises(ConfigError, match="device='gpu'; allowed are auto, host and cuda"):
        array_module(world, "gpu")
    if world.size > 1:
        said = error_on_all(world, MismatchError, lambda: array_module(world, "host" if world.rank else "cuda"))
        assert f"{world.name(1)}: host; {world.name(0)}: cuda" in said


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2", "SLURM_LOCALID": "0"}, 2),
        ({"MPI_LOCALRANKID": "1"}, 1),
        ({"SLURM_LOCALID": "3"}, 3),
        ({"SLURM_LOCALID": "x"}, None),
    ],
)
def test_local_rank_before_mpi_starts(environ: dict[str, str], expected: int | None) -> None:
    assert local_rank_of(environ) == expected


def test_before_there_are_ranks(world: World) -> None:
    last = cupy.cuda.runtime.getDeviceCount() - 1
    before = cupy.cuda.Device().id
    for given_device, number in (("cpu", before), ("", before), (f"cuda:{last}", last)):
        choose_early(given_device, world.config.transport, {})
        assert cupy.cuda.Device().id == number
    choose_early("cuda:999", world.config.transport, {})  # said by bind, on all ranks
    cupy.cuda.Device(before).use()
    with pytest.raises(DeviceError, match="this rank was given cuda:99"):
        open_gpu("cuda:99", 0)


def test_handle_of_a_dead_process(world: World) -> None:
    source = """
import cupy
memory = cupy.cuda.Memory(1 << 20)
print(cupy.cuda.runtime.ipcGetMemHandle(memory.ptr).hex())
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=300)
    with pytest.raises(DeviceError, match=r"cannot open another rank's GPU memory: .*\. Has its process ended"):
        open_block(bind(world), bytes.fromhex(done.stdout))


def test_current_ones_are_restored(world: World) -> None:
    """The current stream is restored too, also one that use() has chosen."""
    gpu = bind(world)
    own, other = make_stream(gpu), make_stream(gpu)
    own.use()
    try:
        with working_on(gpu, other):
            assert cupy.cuda.get_current_stream() == other
        assert cupy.cuda.get_current_stream() == own
    finally:
        cupy.cuda.Stream.null.use()


def test_what_is_known_of_a_library_depends_on_its_settings() -> None:
    """The answer depends on the library's settings, not on what the launcher left."""
    plain = fingerprint({})
    assert plain == fingerprint({"PMI_RANK": "1", "HOME": "/x"})
    assert plain != fingerprint({"I_MPI_OFFLOAD": "1"})
    assert plain != fingerprint({"LD_LIBRARY_PATH": "/opt/ucx"})


@emulated
def test_an_mpi_that_is_not_cuda_aware(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process dies of it, and no rank; what came out is asked for once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("EMULATED_AWARE", "0")
    for _ in range(2):
        said = error_on_all(world, DeviceError, lambda: make_transport(world, "aware"))
        assert said.startswith(f"the transport aware is not possible here: {world.name(0)}: the MPI library is not")
        assert "CUDA-aware: a process that sent GPU memory with it ended with " in said
        monkeypatch.setattr(aware_probe, "_ask", lambda number: ("asked again", True))
    if world.local_rank == 0:
        assert len(json.loads((tmp_path / "mpitrain/cuda_aware.json").read_text())) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "no json"])
def test_a_cache_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cuda_aware.json"
    path.write_text(content)
    assert aware_probe._read(path) == {}
    aware_probe._write(path, {"key": "why"})
    assert aware_probe._read(path) == {"key": "why"}
