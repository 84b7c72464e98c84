"""The path of a job from the user's request to its exit code.

Request ─> environment ─> Placement ─> mpiexec ─> JobSpec ─> Supervisor.to_end ─> Attempts.run ─> exit code
                                                      ^                                     │
                                                      └── with fewer hosts after a failure ─┘
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mpitrain.config import ENV_FILE
from mpitrain.context import PREFIX, JobContext, PlanTask, VerifyTask
from mpitrain.errors import ConfigError
from mpitrain.launch import job_here, over_hosts, torchrun
from mpitrain.launch.agents import Agents
from mpitrain.launch.attempts import Attempts
from mpitrain.launch.batch import MARKS
from mpitrain.launch.chosen_mpiexec import chosen_mpiexec
from mpitrain.launch.control import socket_of
from mpitrain.launch.dialects import JobSpec
from mpitrain.launch.ending import Ended
from mpitrain.launch.events import Limits, Pause
from mpitrain.launch.holders import Holders
from mpitrain.launch.hosts import Listed, listed_hosts, place_ranks, widened
from mpitrain.launch.job_logs import LOGS
from mpitrain.launch.keepers import Keepers, new_estate
from mpitrain.launch.kept import KEEPER_PREFIX
from mpitrain.launch.live import Live
from mpitrain.launch.log import say
from mpitrain.launch.notify import Notifier
from mpitrain.launch.orders import Orders
from mpitrain.launch.placement import Placement, refuse_crowds
from mpitrain.launch.policy import begin
from mpitrain.launch.processes import launcher_name
from mpitrain.launch.roster import own_program
from mpitrain.launch.served import show_sizes
from mpitrain.launch.successor import Successor
from mpitrain.launch.supervisor import Supervisor, telling
from mpitrain.launch.time_limit import TimeUp
from mpitrain.launch.tuning import glibc_version
from mpitrain.launch.variables import is_of_login, read_env_file


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
        limits: how often the job may be started again after a failure, and on how few and how many hosts.
        verify: what `mpitrain verify` wants of the ranks.
        plan: what `mpitrain plan` wants of them.
        recover: continue without a rank that is lost, in place of ending the job; see mpitrain.job.recovery.
        exchange: as in JobContext.
        starter: what starts the ranks: "mpiexec", or "agent": the agents of the hosts, without MPI.
        tf_config: each rank gets TensorFlow's TF_CONFIG.
        servers: so many ranks, the first ones of each host, are servers, the others workers; 0: all ranks are equal.
        notify: the command or the URL that is told how the job goes (launch/notify.py); "": there is none.
        keeps_logs: write the output of the job into files (launch/job_logs.py).
        log_dir: where; None: in the folder of this user's state.
        detaches: the job continues without the terminal (launch/detach.py).
        show: print the command that starts the ranks, do not run it; with `servers` of 2 or more, also run the script
            up to its Trainer.
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
    verify: VerifyTask = field(default_factory=VerifyTask)
    plan: PlanTask = field(default_factory=PlanTask)
    recover: bool = False
    exchange: str = ""
    starter: Literal["mpiexec", "agent"] = "mpiexec"
    tf_config: bool = False
    servers: int = 0
    notify: str = ""
    keeps_logs: bool = False
    log_dir: Path | None = None
    detaches: bool = False
    show: bool = False
    shows_ranks: bool = True


@dataclass(frozen=True)
class Heritage:
    """What a launcher that has gone has left of its job; resume.py finds it.

    Attributes:
        estate: as keepers.py says.
        keepers: the names of the sockets of the keepers, by host.
        placement: where the job ran.
        away: the hosts of it that do not answer.
        pause: what ended the last attempt.
    """

    estate: Mapping[str, Any]
    keepers: Mapping[str, str]
    placement: Placement
    away: tuple[str, ...]
    pause: Pause


def start(
    request: Request, heritage: Heritage | None = None, when_started: Callable[[str], None] = lambda job: None
) -> int:
    """Start a job, see to its end, and return its exit code. Call this in the main thread of a process of its own.

    Args:
        request: what to start.
        heritage: of the launcher that has started it before; its environment is taken in place of this process's.
        when_started: is called once with the id of the job, when the processes of all ranks are there.

    Raises:
        ConfigError: the request contradicts itself, or names something that does not exist.
        LaunchError: the ranks cannot be started.
    """
    with _environment(request, heritage) as from_file:
        if heritage is not None:
            placement = heritage.placement
        else:
            placement = place_ranks(request.hosts, request.inventory, request.num_ranks, request.ranks_per_host)
        request = _with_limits(request, placement, is_resumed=heritage is not None)
        _check_servers(request, placement.num_ranks)
        num_cores = len(os.sched_getaffinity(0))
        if placement.is_here:  # otherwise each host reports its cores
            refuse_crowds(placement.places, {placement.own: num_cores})
        if request.limits.min_nodes > len(placement.places):
            num_hosts = len(placement.places)
            raise ConfigError(f"{request.limits.words}, but the job runs on {num_hosts} host{'s' * (num_hosts > 1)}")
        listed = _listed_hosts(request) if request.limits.max_nodes and request.limits.most_restarts else None
        mpiexec = None
        if request.starter == "mpiexec":
            mpiexec = chosen_mpiexec(request.mpiexec, placement.num_ranks, request.typed, recovers=request.recover)
        if foreign := torchrun.foreign(os.environ):
            names = ", ".join(foreign)
            print(f"mpitrain: {names} are set here. Each rank gets its own", file=sys.stderr)
        if placement.note:
            print(f"mpitrain: {placement.note}", file=sys.stderr)
        job = JobSpec(
            mpiexec=mpiexec,
            program=[sys.executable, *request.program],
            placement=placement,
            num_cores=num_cores,
            as_root=os.geteuid() == 0,
            shows_ranks=request.shows_ranks,
            context=JobContext(
                columns=0 if request.detaches else _columns(),
                verify=request.verify,
                plan=request.plan,
                recover=int(request.recover),
                exchange=request.exchange,
                tf_config=int(request.tf_config),
                must_copy=int(bool(request.limits.restarts)),
                servers=request.servers,
            ),
            glibc=glibc_version(
                os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
            ),
        )

        try:
            if not request.show:
                return _supervise(job, request, from_file, listed, heritage, when_started)
            job = replace(job, placement=placement.first(request.limits.max_nodes))
            if placement.is_here:
                job_here.show_here(job, from_file)
            else:
                over_hosts.show(job, request.script, from_file)
            sys.stdout.flush()
            show_sizes(request.program, [f"server {number}" for number in range(request.servers)])
            return 0
        except KeyboardInterrupt:  # between jobs, or while hosts are asked; a running job handles it itself
            print("mpitrain: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT


def _supervise(
    job: JobSpec,
    request: Request,
    from_file: Mapping[str, str],
    listed: Listed | None,
    heritage: Heritage | None,
    when_started: Callable[[str], None],
) -> int:
    """Run the job, and again after failures: then there are keepers, and each attempt is told how the last one ended.

    `listed` returns the hosts that an elastic job may take in; None: the job is not elastic.
    """
    is_started = not request.detaches

    def look() -> None:
        nonlocal is_started
        if not is_started and (job_id := live.job_with_ranks()):
            is_started = True
            when_started(job_id)
        supervisor.look()

    first_host = job.placement.first(request.limits.max_nodes).hosts[0]

    def attempt(where: Placement, context: JobContext) -> JobSpec:
        """Return the job of the next attempt. A script for torchrun is told how many there were before."""
        if torchrun.MASTER_ADDR in os.environ and where.hosts[0] != first_host:
            del os.environ[torchrun.MASTER_ADDR]
            say(f"rank 0 is on {where.hosts[0]} now: the MASTER_ADDR that was set here is left out")
        number = len(keepers.estate.get("tries", ())) if keepers is not None else 0
        counts = {torchrun.RESTART_COUNT: str(number), torchrun.MAX_RESTARTS: str(request.limits.most_restarts)}
        return replace(job, placement=where, context=context, variables=counts)

    def run(where: Placement, pause: Pause | None) -> Ended:
        context = replace(job.context, keeper=keepers.name if keepers else "", orders=orders.replay())
        if pause is not None:
            at = time.time() - (time.monotonic() - pause.since)
            step = pause.step or 0
            context = replace(
                context, failed_ms=int(1000 * at), failed_step=step, failure=pause.cause, saves=int(pause.only_saves)
            )
        ended = tries.run(attempt(where, context), look)
        if keepers is not None:
            keepers.is_heir = False
        return ended

    def make_over_hosts(stack: ExitStack, this_try: JobSpec) -> over_hosts.JobOverHosts:
        script, seconds = request.script, request.start_seconds
        return over_hosts.JobOverHosts(stack, agents, this_try, script, seconds, from_file, holders, orders)

    def make_here(stack: ExitStack, this_try: JobSpec) -> job_here.JobHere:
        return job_here.JobHere(stack, agents, this_try, from_file, holders, orders)

    def prepare(where: Placement, cause: str) -> Successor | None:
        assert keepers is not None
        if where.is_here:
            return None
        replayed = orders.replay()  # some may be for a later step, if the present try has begun at an earlier one
        context = replace(job.context, keeper=keepers.name, follows=keepers.of, failure=cause, orders=replayed)
        this_try = attempt(where, context)
        return Successor(partial(make_over_hosts, this_try=this_try), keepers, holders, tries.after)

    def widen(placement: Placement, hosts: str) -> Placement:
        return widened(placement, hosts, request.inventory)

    def check(placement: Placement) -> None:
        over_hosts.check(placement, request.script, from_file)

    since = time.time() if heritage is None else float(heritage.estate["since"])
    orders = Orders("it has servers and workers, which have no steps in common" if request.servers else "")
    with ExitStack() as stack:
        keepers = holders = None
        if request.keeps_logs:
            script = [request.script, *_arguments(request)]
            before = () if heritage is None else heritage.estate["tries"]
            LOGS.open(request.log_dir, script, launcher_name(os.getpid()), say, before)
        launcher = launcher_name(os.getpid())
        is_kept = bool(request.limits.most_restarts)
        agents = stack.enter_context(Agents(job.placement.own, str(socket_of(launcher)), says=is_kept))
        live = stack.enter_context(Live(request.script, _arguments(request), since))
        stack.enter_context(Notifier(request.notify, live))
        if is_kept:
            stack.enter_context(_signals_end_in_order())
            holders = Holders(agents, job.program) if job.mpiexec is not None else None
            if heritage is None:
                estate = new_estate(asdict(request), request.script, from_file)
            else:
                estate = {**heritage.estate, "launcher": launcher, "ended": "", "waits": ""}
            name = f"{KEEPER_PREFIX}{secrets.token_hex(8)}"
            keepers = stack.enter_context(Keepers(agents, name, estate))
            if heritage is not None:
                heir = f"another `mpitrain resume` on {job.placement.own} (process {os.getpid()})"
                keepers.adopt(heritage.keepers, heir)
        pause, away = (heritage.pause, heritage.away) if heritage else (None, ())
        time_up = TimeUp(orders)
        state = begin(request.limits, job.placement, pause)
        supervisor = stack.enter_context(
            Supervisor(state, run, keepers, widen=widen, check=check, prepare=prepare, listed=listed, code=time_up.code)
        )
        time_up.stop_wait = supervisor.stop_wait
        live.waits_for = lambda: supervisor.waits_for
        stack.enter_context(time_up)
        stack.enter_context(telling(live, orders, supervisor if keepers is not None else None))
        tries = stack.enter_context(Attempts(make_here, make_over_hosts, keepers, holders, live))
        return live.end(supervisor.to_end(away))


def _arguments(request: Request) -> Sequence[str]:
    """Return the arguments of the script."""
    program = own_program(request.program)
    return program[2:] if program[:1] == ["-m"] else program[1:]


@contextmanager
def _signals_end_in_order() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP between two attempts end this process in order: else keepers wait for an heir."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _with_limits(request: Request, placement: Placement, *, is_resumed: bool) -> Request:
    """Return the request with the limits that follow from its hosts.

    If as many hosts are named as the job shall have, there are no others to choose from. Where the user has not said
    how often the job may restart, it does not in three cases: one rank has no other that would have to be started
    again; a batch system starts its jobs again itself; and servers and workers cannot. A job that is resumed has what
    its keepers have kept.
    """
    limits = request.limits
    if limits.min_nodes == limits.max_nodes == len(placement.places):
        limits = replace(limits, max_nodes=None)
    stays_down = placement.num_ranks == 1 or request.servers or any(mark in os.environ for mark in MARKS)
    if limits.restarts is None and limits.max_nodes is None and stays_down and not is_resumed:
        limits = replace(limits, restarts=0)
    return replace(request, limits=limits)


def _listed_hosts(request: Request) -> Listed:
    """Return what reads the inventory of an elastic job; ConfigError: the job cannot be elastic."""
    if request.num_ranks is not None:
        raise ConfigError(
            f"-n {request.num_ranks} sets the ranks of the whole job, whose hosts --nnodes chooses; set the ranks of "
            "each host: --ppn N, or devices in --hosts"
        )
    return listed_hosts(request.hosts, request.inventory)


def _check_servers(request: Request, num_ranks: int) -> None:
    if not request.servers:
        return
    if num_ranks <= request.servers:
        raise ConfigError(
            f"{num_ranks} ranks, {request.servers} of them servers, leave none for workers; start at least "
            f"{request.servers + 1}"
        )
    if request.recover or request.limits.most_restarts:
        raise ConfigError(
            "--servers goes without --max-restarts, --nnodes and --recover: here all ranks have one fate. Where "
            "workers may come and go, start the server with `mpitrain serve` and each worker with `mpitrain work`"
        )


def _columns() -> int:
    """Return the width of the terminal at stdout; 0 if stdout is no terminal, or the terminal cannot redraw a line."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return 0
    return shutil.get_terminal_size().columns


@contextmanager
def _environment(request: Request, heritage: Heritage | None) -> Iterator[dict[str, str]]:
    """Set the job's variables in this process, from which mpiexec, ssh and the search for MPI inherit them.

    With a heritage, they are those of the launcher before, but what is of a login is of this one.

    Yield the variables of the file that the user has not set. If a rank started this launcher, remove what that rank
    was told: those variables are not for the ranks of this job.
    """
    before = dict(os.environ)
    if heritage is not None:
        from_file = dict(heritage.estate["from_file"])
        login = {name: value for name, value in before.items() if is_of_login(name)}
        after = {**login, **heritage.estate["environment"]}
    else:
        path = before.get(ENV_FILE, "") if request.env_file is None else request.env_file
        read = read_env_file(Path(path)) if path else {}
        from_file = {name: value for name, value in read.items() if name not in before}
        own = {name: value for name, value in before.items() if not name.startswith(PREFIX)}
        after = {**own, **from_file, **request.variables}
    try:
        _set(after)
        yield from_file
    finally:
        _set(before)


def _set(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
