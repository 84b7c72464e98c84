"""The exact command lines for every known mpiexec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mpitrain.context import JobContext
from mpitrain.errors import LaunchError
from mpitrain.launch.dialects import JobSpec, can_recover, command_for, ends_by_sigterm, names_signals, ssh_agent
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
PLACES = (Place("a", 0, 2), Place("b", 2, 1))
OVER_HOSTS = replace(HERE, placement=Placement(PLACES, {"a": "10.0.0.1", "b": "10.0.0.2"}, "a"))

PROGRAM = "/v/bin/python train.py --name 'a b'"
TAG = "-prepend-pattern '<mpitrain-rank-%r>'"
COMMON = "OMP_NUM_THREADS=2 _MPITRAIN_EXPECTED_SIZE=4 PYTHONUNBUFFERED=1"
COMMON_OVER_HOSTS = "OMP_NUM_THREADS=4 _MPITRAIN_EXPECTED_SIZE=3 PYTHONUNBUFFERED=1"
SSH = "'-o BatchMode=yes -o ConnectTimeout=10 -o ControlMaster=no'"
WITHOUT_OFI = "OMPI_MCA_btl='^ofi'"
OVER_TCP = f"OMPI_MCA_btl_tcp_flags=send {WITHOUT_OFI} OMPI_MCA_mpi_yield_when_idle=1"
FLAGS_5 = "--map-by :OVERSUBSCRIBE --output tag --bind-to none --stdin none"
FLAGS_4 = "--oversubscribe --tag-output --bind-to none --stdin none"


def shown(mpiexec: Mpiexec, job: JobSpec = HERE, environ: dict[str, str] | None = None, **changes: object) -> str:
    return str(command_for(replace(job, mpiexec=mpiexec, **changes), environ or {}))  # type: ignore[arg-type]


def test_on_one_host() -> None:
    line = f"{COMMON} /v/bin/mpiexec -n 4 {TAG} {PROGRAM}"
    assert shown(MPICH) == shown(MPICH, as_root=True) == line
    assert shown(INTEL) == f"I_MPI_PIN=off {line}"
    assert shown(INTEL, environ={"I_MPI_PIN": "on"}) == line
    line = f"{COMMON} /v/bin/mpiexec -n 4 {FLAGS_5} {PROGRAM}"
    assert shown(OPEN_MPI_5) == f"{WITHOUT_OFI} {line}"
    root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    assert shown(OPEN_MPI_5, as_root=True) == f"{root} {WITHOUT_OFI} {line}"
    assert shown(OPEN_MPI_4) == f"{WITHOUT_OFI} {COMMON} /usr/bin/mpiexec -n 4 {FLAGS_4} {PROGRAM}"


def test_over_hosts() -> None:
    line = f"/v/bin/mpiexec -n 3 {TAG} -launcher ssh -hosts a:2,b:1 {PROGRAM}"
    mpich = f"HYDRA_LAUNCHER_EXTRA_ARGS={SSH} UCX_RNDV_THRESH=inf {COMMON_OVER_HOSTS} {line}"
    assert shown(MPICH, OVER_HOSTS) == mpich
    assert "UCX" not in shown(MPICH, OVER_HOSTS, has_rdma=True)
    line = f"/v/bin/mpiexec {TAG} -launcher ssh -n 2 -host a {PROGRAM} : -n 1 -host b {PROGRAM}"
    intel = f"I_MPI_PIN=off I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS={SSH} {COMMON_OVER_HOSTS} {line}"
    assert shown(INTEL, OVER_HOSTS) == intel
    # Variables about the user and the session belong to this machine. A shell carries only names that are identifiers.
    environ = {"PATH": "/bin", "LR": "0.5", "HOME": "/home/ada", "SSH_TTY": "/dev/pts/0", "BASH_FUNC_x%%": "() {"}
    hosts = "--host a:2,b:1 -x LR -x OMP_NUM_THREADS -x PATH -x PYTHONUNBUFFERED -x _MPITRAIN_EXPECTED_SIZE"
    for mpiexec, name, flags in ((OPEN_MPI_5, "PRTE_MCA_plm_ssh", FLAGS_5), (OPEN_MPI_4, "OMPI_MCA_plm_rsh", FLAGS_4)):
        line = f"{COMMON_OVER_HOSTS} {mpiexec.path} -n 3 {flags} {hosts} {PROGRAM}"
        assert shown(mpiexec, OVER_HOSTS, environ) == f"{name}_args={SSH} {OVER_TCP} {line}"


@pytest.mark.parametrize("mark", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"])
def test_no_mpiexec_takes_its_hosts_from_a_batch_system(mark: str) -> None:
    """A job on this machine alone: Hydra would start its ranks on all nodes of the batch job."""
    for hydra in (MPICH, INTEL):
        assert f"{TAG} -launcher fork {PROGRAM}" in shown(hydra, environ={mark: "7"})
    assert "PRTE_MCA_ras='^slurm,pbs,lsf,gridengine' PRTE_MCA_plm=ssh " in shown(OPEN_MPI_5, environ={mark: "7"})
    assert "OMPI_MCA_ras='^slurm,tm,lsf,gridengine' OMPI_MCA_plm=rsh " in shown(OPEN_MPI_4, environ={mark: "7"})


def test_open_mpi_5_goes_on_without_a_lost_rank() -> None:
    """ULFM is on. Its detector of failures is off, because the detector takes a rank that computes for dead."""
    line = shown(OPEN_MPI_5, context=JobContext(recover=1))
    for words in ("_MPITRAIN_RECOVER=1", "--with-ft ulfm", "--mca mpi_ft_detector false"):
        assert words in line


def test_open_mpi_yields_when_the_ranks_of_a_host_share_cores() -> None:
    settings = f"{WITHOUT_OFI} OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1 "
    assert shown(OPEN_MPI_5, num_cores=2).startswith(settings)
    over_rdma = replace(OVER_HOSTS, has_rdma=True)  # over TCP, all yield
    assert "yield_when_idle" not in shown(OPEN_MPI_5, over_rdma, num_cores=2)
    assert "yield_when_idle" in shown(OPEN_MPI_5, over_rdma, num_cores=1)


def test_the_ssh_that_the_user_has_chosen() -> None:
    assert ssh_agent(MPICH, {}) == ("HYDRA_LAUNCHER_EXEC", ["ssh"])
    assert ssh_agent(INTEL, {"I_MPI_HYDRA_BOOTSTRAP_EXEC": "/my ssh"})[1] == ["/my ssh"]
    chosen = ssh_agent(OPEN_MPI_5, {"PRTE_MCA_plm_ssh_agent": "ssh -q : rsh"})
    assert chosen == ("PRTE_MCA_plm_ssh_agent", ["ssh", "-q"])
    assert ssh_agent(OPEN_MPI_4, {"OMPI_MCA_plm_rsh_agent": ""}) == ("OMPI_MCA_plm_rsh_agent", ["ssh"])


def test_variables_of_every_rank() -> None:
    line = shown(MPICH, glibc=(2, 36))  # malloc is told to keep its memory
    assert line.startswith("MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592 OMP_NUM_THREADS=2 ")
    devices = Placement((Place("a", 0, 2, ("cuda:0", "cpu")),))
    assert "_MPITRAIN_DEVICES=cuda:0,cpu " in shown(MPICH, placement=devices)
    # The user's threads stay, and the expected size does not.
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
    assert (found[1], written[found.end() :]) == (rank, text)


def test_what_each_mpiexec_can() -> None:
    older = Mpiexec(Path("/usr/bin/mpiexec"), "mpich", "4.0.2")
    of_each = [
        (one, names_signals(one), ends_by_sigterm(one), can_recover(one))
        for one in (MPICH, older, INTEL, OPEN_MPI_4, OPEN_MPI_5)
    ]
    assert of_each == [
        (MPICH, True, False, False),
        (older, False, False, False),
        (INTEL, False, False, False),
        (OPEN_MPI_4, False, True, False),
        (OPEN_MPI_5, False, True, True),
    ]
