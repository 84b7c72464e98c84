"""The exact command lines for every known mpiexec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mpitrain.context import JobContext
from mpitrain.errors import LaunchError
from mpitrain.launch.dialects import (
    JobSpec,
    can_recover,
    command_for,
    ends_by_sigterm,
    names_signals,
    ssh_agent,
)
from mpitrain.launch.libraries import Mpiexec
from mpitrain.launch.placement import Place, Placement

MPICH = Mpiexec(Path("/v/bin/mpiexec"), "mpich", "5.0.2")
INTEL = Mpiexec(Path("/v/bin/mpiexec"), "impi", "2021.18.1")
OPEN_MPI_5 = Mpiexec(Path("/v/bin/mpiexec"), "openmpi", "5.0.11")
OPEN_MPI_4 = Mpiexec(Path("/usr/bin/mpiexec"), "openmpi", "4.1.4")
HERE = JobSpec(
    mpiexec=MPICH,
    program=["/v/bin/python", "train.py", "--name", "a b"],
    placement=Placement((Place("a", 0, 4),)),
    num_cores=8,
    as_root=False,
)

COMMON = "OMP_NUM_THREADS=2 _MPITRAIN_EXPECTED_SIZE=4 PYTHONUNBUFFERED=1"
WITHOUT_OFI = "OMPI_MCA_btl='^ofi'"
OVER_TCP = f"OMPI_MCA_btl_tcp_flags=send {WITHOUT_OFI} OMPI_MCA_mpi_yield_when_idle=1"
PROGRAM = "/v/bin/python train.py --name 'a b'"


def shown(mpiexec: Mpiexec, *, num_cores: int = 8, as_root: bool = False, environ: dict[str, str] | None = None) -> str:
    job = replace(HERE, mpiexec=mpiexec, num_cores=num_cores, as_root=as_root)
    return str(command_for(job, environ or {}))


def test_mpich() -> None:
    line = f"{COMMON} /v/bin/mpiexec -n 4 -prepend-pattern '<mpitrain-rank-%r>' {PROGRAM}"
    assert shown(MPICH) == line
    assert shown(MPICH, as_root=True) == line


def test_intel() -> None:
    line = f"{COMMON} /v/bin/mpiexec -n 4 -prepend-pattern '<mpitrain-rank-%r>' {PROGRAM}"
    assert shown(INTEL) == f"I_MPI_PIN=off {line}"
    assert shown(INTEL, environ={"I_MPI_PIN": "on"}) == line


def test_open_mpi_5() -> None:
    flags = "--map-by :OVERSUBSCRIBE --output tag --bind-to none --stdin none"
    line = f"{COMMON} /v/bin/mpiexec -n 4 {flags} {PROGRAM}"
    assert shown(OPEN_MPI_5) == f"{WITHOUT_OFI} {line}"
    root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    assert shown(OPEN_MPI_5, as_root=True) == f"{root} {WITHOUT_OFI} {line}"


@pytest.mark.parametrize("mark", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"])
def test_no_mpiexec_takes_its_hosts_from_a_batch_system(mark: str) -> None:
    """A job on this machine alone: Hydra would start its ranks on all nodes of the batch job."""
    assert f"-prepend-pattern '<mpitrain-rank-%r>' -launcher fork {PROGRAM}" in shown(MPICH, environ={mark: "7"})
    assert f"-prepend-pattern '<mpitrain-rank-%r>' -launcher fork {PROGRAM}" in shown(INTEL, environ={mark: "7"})
    new, old = shown(OPEN_MPI_5, environ={mark: "7"}), shown(OPEN_MPI_4, environ={mark: "7"})
    assert "PRTE_MCA_ras='^slurm,pbs,lsf,gridengine' PRTE_MCA_plm=ssh " in new
    assert "OMPI_MCA_ras='^slurm,tm,lsf,gridengine' OMPI_MCA_plm=rsh " in old


def test_open_mpi_5_goes_on_without_a_lost_rank() -> None:
    """ULFM is on. Its detector of failures is off, because the detector takes a rank that computes for dead."""
    job = replace(HERE, mpiexec=OPEN_MPI_5, context=JobContext(recover=1))
    line = str(command_for(job, {}))
    assert "_MPITRAIN_RECOVER=1" in line
    assert "--with-ft ulfm" in line
    assert "--mca mpi_ft_detector false" in line
    assert [can_recover(one) for one in (OPEN_MPI_5, OPEN_MPI_4, MPICH, INTEL)] == [True, False, False, False]


def test_open_mpi_4() -> None:
    flags = "--oversubscribe --tag-output --bind-to none --stdin none"
    assert shown(OPEN_MPI_4) == f"{WITHOUT_OFI} {COMMON} /usr/bin/mpiexec -n 4 {flags} {PROGRAM}"


def test_open_mpi_yields_when_ranks_share_cores() -> None:
    settings = f"{WITHOUT_OFI} OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1 "
    assert shown(OPEN_MPI_5, num_cores=2).startswith(settings)


def test_the_ssh_that_the_user_has_chosen() -> None:
    assert ssh_agent(MPICH, {}) == ("HYDRA_LAUNCHER_EXEC", ["ssh"])
    assert ssh_agent(INTEL, {"I_MPI_HYDRA_BOOTSTRAP_EXEC": "/my ssh"})[1] == ["/my ssh"]
    variable, words = ssh_agent(OPEN_MPI_5, {"PRTE_MCA_plm_ssh_agent": "ssh -q : rsh"})
    assert (variable, words) == ("PRTE_MCA_plm_ssh_agent", ["ssh", "-q"])
    assert ssh_agent(OPEN_MPI_4, {"OMPI_MCA_plm_rsh_agent": ""}) == ("OMPI_MCA_plm_rsh_agent", ["ssh"])


PLACES = (Place("a", 0, 2), Place("b", 2, 1))
OVER_HOSTS = replace(HERE, placement=Placement(PLACES, {"a": "10.0.0.1", "b": "10.0.0.2"}, "a"))
SSH = "'-o BatchMode=yes -o ConnectTimeout=10 -o ControlMaster=no'"
COMMON_OVER_HOSTS = "OMP_NUM_THREADS=4 _MPITRAIN_EXPECTED_SIZE=3 PYTHONUNBUFFERED=1"


def test_mpich_over_hosts() -> None:
    line = f"/v/bin/mpiexec -n 3 -prepend-pattern '<mpitrain-rank-%r>' -launcher ssh -hosts a:2,b:1 {PROGRAM}"
    shown_line = str(command_for(OVER_HOSTS, {}))
    assert shown_line == f"HYDRA_LAUNCHER_EXTRA_ARGS={SSH} UCX_RNDV_THRESH=inf {COMMON_OVER_HOSTS} {line}"
    assert "UCX" not in str(command_for(replace(OVER_HOSTS, has_rdma=True), {}))


def test_intel_over_hosts() -> None:
    parts = f"-n 2 -host a {PROGRAM} : -n 1 -host b {PROGRAM}"
    line = f"/v/bin/mpiexec -prepend-pattern '<mpitrain-rank-%r>' -launcher ssh {parts}"
    shown_line = str(command_for(replace(OVER_HOSTS, mpiexec=INTEL), {}))
    assert shown_line == f"I_MPI_PIN=off I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS={SSH} {COMMON_OVER_HOSTS} {line}"


def test_open_mpi_over_hosts() -> None:
    # Variables about the user and the session belong to this machine. A shell carries only names that are identifiers.
    environ = {"PATH": "/bin", "LR": "0.5", "HOME": "/home/ada", "SSH_TTY": "/dev/pts/0", "BASH_FUNC_x%%": "() {"}
    carried = "-x LR -x OMP_NUM_THREADS -x PATH -x PYTHONUNBUFFERED -x _MPITRAIN_EXPECTED_SIZE"
    job = replace(OVER_HOSTS, mpiexec=OPEN_MPI_5)
    flags = f"--map-by :OVERSUBSCRIBE --output tag --bind-to none --stdin none --host a:2,b:1 {carried}"
    line = f"{COMMON_OVER_HOSTS} /v/bin/mpiexec -n 3 {flags} {PROGRAM}"
    assert str(command_for(job, environ)) == f"PRTE_MCA_plm_ssh_args={SSH} {OVER_TCP} {line}"
    job = replace(OVER_HOSTS, mpiexec=OPEN_MPI_4)
    flags = f"--oversubscribe --tag-output --bind-to none --stdin none --host a:2,b:1 {carried}"
    line = f"{COMMON_OVER_HOSTS} /usr/bin/mpiexec -n 3 {flags} {PROGRAM}"
    assert str(command_for(job, environ)) == f"OMPI_MCA_plm_rsh_args={SSH} {OVER_TCP} {line}"


def test_malloc_is_told_to_keep_its_memory() -> None:
    line = str(command_for(replace(HERE, glibc=(2, 36)), {}))
    assert line.startswith("MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592 OMP_NUM_THREADS=2 ")


def test_only_the_ranks_of_one_host_share_its_cores() -> None:
    job = replace(OVER_HOSTS, mpiexec=OPEN_MPI_5, has_rdma=True)  # over TCP, all yield
    assert "yield_when_idle" not in str(command_for(replace(job, num_cores=2), {}))
    assert "yield_when_idle" in str(command_for(replace(job, num_cores=1), {}))


def test_devices_are_told_to_all_ranks() -> None:
    assert "_MPITRAIN_DEVICES=cuda:0,cpu " in str(
        command_for(replace(HERE, placement=Placement((Place("a", 0, 2, ("cuda:0", "cpu")),))), {})
    )


def test_the_users_threads_stay_and_the_expected_size_does_not() -> None:
    line = shown(MPICH, environ={"OMP_NUM_THREADS": "7", "_MPITRAIN_EXPECTED_SIZE": "9"})
    assert line.startswith("_MPITRAIN_EXPECTED_SIZE=4 PYTHONUNBUFFERED=1 /v/bin/mpiexec ")


def test_an_unknown_mpiexec_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"allowed are MPICH, Intel MPI, Open MPI.*train\.py --name 'a b'"):
        shown(Mpiexec(Path("/opt/mpiexec"), "other", ""))


@pytest.mark.parametrize(
    ("mpiexec", "written", "rank", "text"),
    [
        (MPICH, b"<mpitrain-rank-12>loss", b"12", b"loss"),
        (INTEL, b"<mpitrain-rank-0>loss", b"0", b"loss"),
        (OPEN_MPI_5, b"[1,3]<stderr>: loss", b"3", b"loss"),
        (OPEN_MPI_4, b"[1,3]<stdout>: loss", b"3", b" loss"),
    ],
)
def test_tags_as_each_prints_them(mpiexec: Mpiexec, written: bytes, rank: bytes, text: bytes) -> None:
    found = command_for(replace(HERE, mpiexec=mpiexec), {}).tag.whole.match(written)
    assert found is not None
    assert (found[1], written[found.end() :]) == (rank, text)


def test_whose_numbers_are_signals() -> None:
    older = Mpiexec(Path("/usr/bin/mpiexec"), "mpich", "4.0.2")
    assert [names_signals(one) for one in (MPICH, older, INTEL, OPEN_MPI_5)] == [True, False, False, False]
    assert [ends_by_sigterm(one) for one in (MPICH, INTEL, OPEN_MPI_4, OPEN_MPI_5)] == [False, False, True, True]
