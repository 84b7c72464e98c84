"""init(): from a launched process to a World, or a clear refusal. elastic(): a loop that survives a lost rank."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mpitrain.allreduce import check_name
from mpitrain.allreduce.exact import check_reduction
from mpitrain.collectives.trees import ArrayTrees
from mpitrain.compression import check_compression
from mpitrain.config import Config, read_config
from mpitrain.context import JobContext
from mpitrain.cuda.device import choose_early
from mpitrain.cuda.transports import check_transport
from mpitrain.early import is_cut_off, is_helper, keep_place
from mpitrain.errors import ConfigError, LaunchError, MpitrainError, everywhere
from mpitrain.job.failure import say_interrupts_in_a_line
from mpitrain.job.helpers import prepare_for_helpers, unsafe_because
from mpitrain.job.job import Job, heed
from mpitrain.job.recovery import Recovery
from mpitrain.job.segments import own_folder
from mpitrain.job.step_times import StepTimes
from mpitrain.job.trace import Trace
from mpitrain.job.warm import TakenPlace, place, publish_imports
from mpitrain.job.without_mpi import why_no_mpi
from mpitrain.job.worlds import check_containers, make_world
from mpitrain.launch.launched import check_size, check_vendor, launched_by
from mpitrain.launch.shared_files import remove_mine
from mpitrain.profile import DEFAULT, Profile, fingerprint, from_json, library_name, measure_anew, read_profile
from mpitrain.reducer.exchange import OTHERS
from mpitrain.role import role_of
from mpitrain.verify.run_record import RecordedTrees, Recorder
from mpitrain.waiting.long_wait import Neighbours, watch_over
from mpitrain.watching.activity import publish
from mpitrain.watching.rank_record import BEGUN, CALLED, DONE, WAITS
from mpitrain.world.world import World

_job: Job | None = None

NO_RANK = "a process that multiprocessing started, which is not a rank"
ONE_START = (
    "If the script starts its ranks itself, remove mp.spawn (or Process) and start it with `mpitrain run -n N`. "
    "Otherwise let the function return its data to the rank, and communicate there"
)

# A cold start takes long: init() may take this long on a rank, whatever hang_seconds is.
START_SECONDS = 60.0

# If the user sets one of these, it already limits a rank's threads.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def init(**settings: Any) -> World:
    """Return the current World of this job: all processes that one mpiexec started, or this process alone.

    In a job with servers, each process has its own World with one rank.

    Call init() once on every rank, before any other call. A second call returns the job's current World. The first
    call does this:

    - It initialises MPI, unless the script has done so.
    - It makes multiprocessing start processes by forkserver if a fork is unsafe, unless the program has chosen a start
      method (mpitrain/job/helpers.py).
    - It divides the machine's cores between its ranks, unless OMP_NUM_THREADS is set.
    - It makes an uncaught exception on any rank end the whole job.

    Args:
        settings: fields of mpitrain.config.Config. They take precedence over the MPITRAIN_* variables.

    Raises:
        LaunchError: there is no MPI library, or the processes do not form one job (the wrong mpiexec, or none).
        ConfigError: a setting or MPITRAIN_* variable is unknown, or its value is not allowed.
        MismatchError: the ranks run different versions of mpitrain, or have different settings.
    """
    if _job is None:
        return _begin(settings).world
    if settings:
        raise ConfigError("init() has been called before; pass settings to the first call")
    return _job.world


def has_begun() -> bool:
    """Whether init() has been called in this process."""
    return _job is not None


def the_job() -> Job:
    """Return the Job of this process. If there is none yet, call init() first."""
    return _begin({}) if _job is None else _job


def _begin(settings: dict[str, Any]) -> Job:
    global _job  # noqa: PLW0603 - MPI itself is one per process
    if why := why_no_mpi(os.environ):
        raise LaunchError(why)
    stop_waiting = _appear(place(), settings)
    _choose_gpu(settings)
    recovers = bool(JobContext.read(os.environ).recover)
    remove_segments = _start_mpi()
    from mpi4py import MPI

    world = make_world(MPI.COMM_WORLD)  # has heard from all ranks, so they have left MPI_Init
    remove_segments()
    job = Job(world)
    job.world = world = world.replaced(config=_common_config(world, settings))
    check_containers(world)
    stop_waiting()  # before the user's limits apply: MPI_Init may have taken longer
    if world.size > 1:
        _publish(world)
    if world.context.keeper and world.context.roll_call:
        heed(publish(world.rank), world.context)
        publish(world.rank).after_first_step(publish_imports)
    job.world = world = world.replaced(profile=_common_profile(world))
    # Every rank makes this call, whatever its environment.
    facts = world.allgather((world.node_rank, os.sched_getaffinity(0), unsafe_because()))
    _share_cores(world, [(node_rank, cores) for node_rank, cores, _ in facts])
    # If rank 0 already has a reason not to fork, its line is enough. Otherwise each rank with a reason prints a line.
    prepare_for_helpers(world.name() if world.is_root or not facts[0][2] else "")
    keep_place()
    if world.config.trace:
        # Runs before the job's farewell: functions registered last are called first.
        atexit.register(Trace(job, Path(world.config.trace)).finish)
    if world.size > 1:
        activity = publish(world.rank)
        activity.enter(BEGUN)
        atexit.register(activity.enter, DONE)
    if world.context.verify.record:
        recorder = Recorder(world)
        job.world = world.replaced(
            observer=recorder, make_arrays=lambda tree: RecordedTrees(ArrayTrees(tree), recorder)
        )
    if world.context.plan.record:
        job.everyone = job.world
        times = StepTimes(job.world)
        atexit.register(times.write)  # of a script that ends early; the farewell comes later
        job.world = make_world(MPI.COMM_SELF, world.config, parent=job.world).replaced(watch=times)
    if recovers:
        job.recovery = Recovery(job.world, MPI.COMM_WORLD)
        job.world = job.recovery.world
        if world.size == 1:  # a single rank has no farewell
            atexit.register(job.recovery.finish)
    job.role = role_of(world.context, world.rank, world.node_ranks)
    if world.context.serve.kind:
        say_interrupts_in_a_line()
        # No launcher cleans up after a process that may be killed at any time. The memory itself stays usable.
        remove_mine()
        if world.context.serve.kind == "server" and world.context.job:
            publish(world.rank).enter(BEGUN)
    elif world.context.servers:
        job.everyone = job.world
        alone = make_world(MPI.COMM_SELF, world.config, parent=job.everyone)
        job.world = alone.replaced(profile=world.profile)
    _job = job
    return job


def _common_profile(world: World) -> Profile:
    """Return, on all ranks, the profile in rank 0's file; the default if no file is named. Collective."""
    path = world.config.profile
    if not path:
        return DEFAULT
    from mpi4py import MPI

    profile = DEFAULT
    with world.together(f"read the profile {path}"):
        if world.is_root:
            here = fingerprint(world.hosts, world.node_ranks, library_name(MPI.Get_library_version()))
            profile = from_json(read_profile(Path(path), measure_anew(path, here), f"{world.name()}: "), path, here)
    common: Profile = world.broadcast_object(profile)
    return common


def _appear(place: TakenPlace, settings: dict[str, Any]) -> Callable[[], None]:
    """Publish that this rank has started, because MPI_Init may wait for other ranks. Call the result after MPI_Init."""
    launched = launched_by(os.environ)
    # A helper is not a rank: its end would be mistaken for the end of its rank.
    if launched is None or launched.rank is None or is_helper():
        return lambda: None
    is_alone = launched.size == 1
    context = JobContext.read(os.environ)
    # If a script of the job calls another mpiexec, its ranks have other numbers, and check_size refuses them.
    roll_call = context.roll_call if context.expected_size == launched.size else ""
    if is_alone and not roll_call:
        return lambda: None
    activity = publish(launched.rank, place.stub)
    entry = None
    if not is_alone:  # a single rank waits for no other, and its exit code tells how it ended
        with contextlib.suppress(MpitrainError):  # all ranks report wrong settings later
            hang_seconds = read_config(os.environ, settings).hang_seconds
            activity.set_limits(activity.stall_seconds, max(hang_seconds, START_SECONDS) if hang_seconds else 0.0)
        activity.enter(CALLED)
        entry = activity.begin(WAITS, "init()", time.monotonic())
    if roll_call:
        try:
            activity.appear(roll_call, place.starter)
        except OSError as error:
            raise LaunchError(str(error)) from None
    return lambda: None if entry is None else activity.end(entry)


def _publish(world: World) -> None:
    """From now on, publish what this rank does. If no agent reads it, the ranks of a host read each other's records."""
    activity = publish(world.rank)
    activity.set_limits(world.config.stall_seconds, world.config.hang_seconds)
    if not world.context.roll_call:
        everywhere = world.allgather((os.getpid(), activity.descriptor))
        here = {rank: at for rank, at in enumerate(everywhere) if world.node_ranks[rank] == world.node_rank}
        watch_over(Neighbours(here, world.hosts))


def _choose_gpu(settings: dict[str, Any]) -> None:
    """If the settings name GPUs, choose this rank's before MPI starts. All ranks report wrong settings later."""
    with contextlib.suppress(MpitrainError):
        launched = launched_by(os.environ)
        rank = launched.rank if launched is not None else 0
        given = JobContext.read(os.environ).device(rank) if rank is not None else ""
        choose_early(given, read_config(os.environ, settings).transport, os.environ)


def _start_mpi() -> Callable[[], None]:
    """Load and initialise MPI, and refuse processes that do not form one job. Call the result when all ranks have got
    this far."""
    # While such a process is still reading the script, only multiprocessing's own mark identifies it.
    starting = getattr(multiprocessing.current_process(), "_inheriting", False)
    if (starting or multiprocessing.parent_process() is not None) and launched_by(os.environ) is not None:
        # It would wait in MPI_Init for ever: the launcher has started no such rank.
        raise LaunchError(
            f"on {socket.gethostname()}: init() was called in {NO_RANK}. "
            + (
                "Such a process runs the script again: put the code of the ranks under if __name__ == '__main__':"
                if starting
                else ONE_START
            )
        )
    try:
        _load_mpi()
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"on {socket.gethostname()}: no MPI library can be loaded ({error}); "
            "install one into this environment: pip install mpi4py mpich"
        ) from error
    version = MPI.Get_library_version()
    check_vendor(version, os.environ)
    if MPI.Is_initialized():
        return lambda: None
    if is_cut_off():  # MPI would end this process with a message about PMI
        rank = os.environ.get("PMI_RANK", "?")
        raise LaunchError(
            f"on {socket.gethostname()}: init() was called in a program that rank {rank} has started before its own "
            "init(), and the program has no connection to mpiexec. If it is to be alone, call init() in the rank "
            "before it starts. If it is to be the rank, start it by os.execv"
        )
    with own_folder(version, JobContext.read(os.environ).job) as remove:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return remove


def _load_mpi() -> None:
    """Load the library without MPI_Init: under a foreign mpiexec, MPI_Init fails obscurely."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = not JobContext.read(os.environ).recover  # else Recovery.finish does it
    from mpi4py import MPI as MPI


def _common_config(world: World, settings: dict[str, Any]) -> Config:
    """Read the settings. All ranks must have the same settings and the same version of mpitrain. Collective."""
    from mpi4py import MPI

    from mpitrain import __version__

    config, problem = Config(), None
    try:
        check_size(MPI.Get_library_version(), os.environ, world.size)
        config = read_config(os.environ, settings)
        check_name(config.algorithm)
        check_compression(config.compression, OTHERS)
        check_reduction(config.reduction)
        check_transport(config.transport)
    except MpitrainError as error:
        problem = error
    for rank, rank_problem in enumerate(world.allgather(problem)):
        if rank_problem is not None:
            # Raise the lowest rank's error, on every rank. A launch error names the process itself.
            common = (
                rank_problem
                if isinstance(rank_problem, LaunchError)
                else type(rank_problem)(f"{world.name(rank)}: {rank_problem}")
            )
            raise everywhere(common)
    lines = [f"mpitrain {__version__}"]
    lines += [f"{name}={value!r}" for name, value in {**vars(config), **vars(world.context)}.items()]
    world.agree("init", lines)
    return config


def _share_cores(world: World, of_all: Sequence[tuple[int, set[int]]]) -> None:
    """Give each rank its share of the machine's cores: by default, NumPy's BLAS would use all of them in every rank."""
    # A launcher may have bound each rank to its own cores: count the cores of all ranks of the machine.
    cores: set[int] = set().union(*(rank_cores for node_rank, rank_cores in of_all if node_rank == world.node_rank))
    share = max(1, len(cores) // world.local_size)
    if world.local_size > 1 or share == 1:
        # For JAX: XLA reads only this variable, at its first array. While one of its threads is in an exchange inside
        # jit, another one is needed to copy the arrays (mpitrain/jax/inside_jit.py).
        os.environ.setdefault("PJRT_NPROC", str(max(2, share)))
    if world.local_size == 1 or any(variable in os.environ for variable in _THREAD_VARIABLES):
        return
    from threadpoolctl import threadpool_limits

    threadpool_limits(share)


Result = TypeVar("Result")


def elastic(train: Callable[[World], Result]) -> Result:
    """Call `train(world)`, and again in a new World after each loss of a rank. Return what the last call returns.

    A rank can be lost only with `mpitrain run --recover`. Without it, `elastic` is a single call. A Trainer recovers by
    itself: do not make one in `train`.

    Collective. `train` keeps its state outside of itself, and calls `world.commit()` in every step, after the step's
    exchanges and before the step changes that state. So when `train` is called again, all remaining ranks have made the
    same steps.

    Args:
        train: makes everything that needs a World, such as a GradientReducer, for the World that it is given.

    Raises:
        ConfigError: `train` makes a Trainer.
        Exception: what `train` raises, unless a lost rank is the cause.
    """
    job = the_job()
    job.is_elastic = True
    try:
        while True:
            try:
                result = train(job.world)
                job.world.commit()  # no rank may leave while others have to repeat the last step
            except Exception as error:
                if job.recovery is None or not job.recovery.is_loss(error):
                    raise
                job.recovery.abandon()
                job.recover(lambda world: world.barrier(), error)
            else:
                return result
    finally:
        job.is_elastic = False
