"""init(): from a launched process to a World, or a clear refusal."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.allreduce import check_name
from mpitrain.allreduce.device import check_transport
from mpitrain.background import Background, Queue
from mpitrain.config import Config, read_config
from mpitrain.control import Control
from mpitrain.cuda.device import choose_early
from mpitrain.early import is_helper
from mpitrain.errors import ConfigError, LaunchError, MpitrainError
from mpitrain.exchange.exchange import check_compression
from mpitrain.exchange.trees import ArrayTrees
from mpitrain.failure import guard
from mpitrain.launch.activity import WAITS, process_numbering, publish
from mpitrain.launch.libraries import launched_by
from mpitrain.launch.roll_call import BEGUN, CALLED, DONE, ROLL_CALL, sign
from mpitrain.launch.verify import check_size, check_vendor
from mpitrain.long_wait import Neighbours, watch_over
from mpitrain.profile import DEFAULT, Profile, fingerprint, from_json, library_name, measure_anew
from mpitrain.trace import Trace
from mpitrain.verify.record import RecordedTrees, Recorder
from mpitrain.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

_world: World | None = None

# Set by the user, each of these already says how many threads a rank may use.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def init(**settings: Any) -> World:
    """The World of this job: all processes that one mpiexec started, or this process alone.

    Every rank calls it once, first; a second call returns the same World. It initialises MPI where the script has
    not, sets the start method of multiprocessing to forkserver (a forked MPI process may crash or hang), shares the
    machine's cores between its ranks where no OMP_NUM_THREADS is set, and from then on an uncaught exception on any
    rank ends the whole job.

    Args:
        settings: fields of mpitrain.config.Config, above the MPITRAIN_* variables.

    Raises:
        LaunchError: no MPI library; or the processes do not form one job (the wrong mpiexec).
        ConfigError: an unknown setting or MPITRAIN_* variable, or a value that is not allowed.
        MismatchError: ranks run different versions of mpitrain or with different settings.
    """
    global _world  # noqa: PLW0603 - MPI itself is one per process
    if _world is not None:
        if settings:
            raise ConfigError("init() has been called before; settings belong to its first call")
        return _world
    stop_waiting = _sign_called()
    _choose_gpu(settings)
    _start_mpi()
    from mpi4py import MPI

    _use_forkserver()
    world = make_world(MPI.COMM_WORLD)
    guard(world)
    world = replace(world, config=_common_config(world, settings))
    if world.size > 1:
        _publish(world)
    stop_waiting()
    world = replace(world, profile=_common_profile(world))
    _share_cores(world)
    if world.config.trace:
        # Called before the farewell, which `guard` has registered: the last one is called first.
        atexit.register(Trace(world, Path(world.config.trace)).finish)
    if world.size > 1 and world.config.roll_call:
        sign(world.config.roll_call, BEGUN, world.rank)
        atexit.register(sign, world.config.roll_call, DONE, world.rank)
    if world.config.verify_record:
        recorder = Recorder(world)
        world = replace(world, observer=recorder, make_arrays=lambda its: RecordedTrees(ArrayTrees(its), recorder))
    _world = world
    return _world


def _common_profile(world: World) -> Profile:
    """What rank 0's file says of this cluster, on all ranks; the default where no file is named. Collective."""
    path = world.config.profile
    if not path:
        return DEFAULT
    from mpi4py import MPI

    profile = DEFAULT
    with world.together(f"read the profile {path}"):
        if world.is_root:
            here = fingerprint(world.hosts, world.node_ranks, library_name(MPI.Get_library_version()))
            try:
                profile = from_json(Path(path).read_text(), path, here)
            except (OSError, UnicodeDecodeError) as error:
                problem = f"{world.name()}: the profile {path} cannot be read: {error}"
                raise ConfigError(f"{problem}. {measure_anew(path, here)}") from None
    common: Profile = world.broadcast(profile)
    return common


def _sign_called() -> Callable[[], None]:
    """Publish that this rank is here: if another one does not come, the wait is in MPI_Init. To be called after it."""
    launched = launched_by(os.environ)
    # A helper signs nothing: its end would be taken for that of its rank.
    if launched is None or launched.rank is None or launched.size == 1 or is_helper():
        return lambda: None
    activity = publish(launched.rank)
    entry = activity.begin(WAITS, "init()", time.monotonic())
    if ROLL_CALL in os.environ:
        about = f"{os.getpid()} {activity.descriptor} {os.getppid()} {process_numbering()}"
        sign(os.environ[ROLL_CALL], CALLED, launched.rank, about)
    return lambda: activity.end(entry)


def _publish(world: World) -> None:
    """What this rank does is published from now on. Where no guard reads it, the ranks of a host read each other's."""
    activity = publish(world.rank)
    activity.set_limits(world.config.stall_seconds, world.config.hang_seconds)
    if not world.config.roll_call:
        everywhere = world.allgather((os.getpid(), activity.descriptor))
        here = {rank: at for rank, at in enumerate(everywhere) if world.node_ranks[rank] == world.node_rank}
        watch_over(Neighbours(here, world.hosts))


def _choose_gpu(settings: dict[str, Any]) -> None:
    """Where the settings name GPUs, take this rank's before MPI starts. Wrong settings are told later, by all ranks."""
    with contextlib.suppress(MpitrainError):
        launched = launched_by(os.environ)
        rank = launched.rank if launched is not None else 0
        choose_early(read_config(os.environ, settings), rank, os.environ)


def make_world(
    parent: MPI.Comm, config: Config | None = None, generation: int = 0, numbers: Sequence[int] | None = None
) -> World:
    """A World over the ranks of `parent`, which stays the caller's own. Collective over `parent`.

    `numbers`: what its ranks are called in messages; see Control.
    """
    from mpi4py import MPI

    config = config or Config()
    node = parent.Split_type(MPI.COMM_TYPE_SHARED, key=parent.rank)
    leaders = parent.Split(0 if node.rank == 0 else MPI.UNDEFINED, parent.rank)
    # A node's number is its leader's place among the leaders, who stand in rank order.
    node_rank = node.bcast(leaders.rank if node.rank == 0 else None)
    comm = parent.Dup()
    everyone = comm.allgather((socket.gethostname(), node_rank))
    hosts = tuple(host for host, _ in everyone)
    control = Control(parent.Dup(), parent.Dup(), hosts, numbers)
    return World(
        comm=comm,
        objects=parent.Dup(),
        queue=Queue(control),
        background=Background(parent.Dup(), control),
        node=node,
        leaders=leaders if node.rank == 0 else None,
        hosts=hosts,
        node_ranks=tuple(number for _, number in everyone),
        generation=generation,
        config=config,
        control=control,
        make_arrays=ArrayTrees,
    )


def _start_mpi() -> None:
    """Load and initialise MPI, and refuse a job that is not one."""
    # While such a process still reads the script, only multiprocessing's own mark tells what it is.
    starting = getattr(multiprocessing.current_process(), "_inheriting", False)
    if (starting or multiprocessing.parent_process() is not None) and launched_by(os.environ) is not None:
        # It would wait in MPI_Init for ever: the launcher has started no such rank.
        raise LaunchError(
            f"on {socket.gethostname()}: init() was called in a process that multiprocessing started, which is no "
            "rank. Such a process runs the script again: put what the ranks do under if __name__ == '__main__':"
        )
    try:
        import mpi4py

        # Whose library it is must be known before MPI_Init, which fails obscurely under a foreign mpiexec.
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"on {socket.gethostname()}: no MPI library can be loaded ({error}); "
            "install one into this environment: pip install mpi4py mpich"
        ) from error
    version = MPI.Get_library_version()
    check_vendor(version, os.environ)
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)


def _common_config(world: World, settings: dict[str, Any]) -> Config:
    """The settings, which all ranks must share, as they must the version of mpitrain. Collective."""
    from mpi4py import MPI

    from mpitrain import __version__

    config, problem = Config(), None
    try:
        check_size(MPI.Get_library_version(), os.environ, world.size)
        config = read_config(os.environ, settings)
        check_name(config.algorithm)
        check_compression(config.compression)
        check_transport(config.transport)
    except MpitrainError as error:
        problem = error
    for rank, found in enumerate(world.allgather(problem)):
        if found is not None:
            # The lowest rank's, on every rank; a launch error names the process by itself.
            common = found if isinstance(found, LaunchError) else type(found)(f"{world.name(rank)}: {found}")
            common.known_everywhere = True
            raise common
    lines = [f"mpitrain {__version__}"]
    lines += [f"{name}={value!r}" for name, value in vars(config).items()]
    world.agree("init", lines)
    return config


def _use_forkserver() -> None:
    if multiprocessing.get_start_method(allow_none=True) is None:
        multiprocessing.set_start_method("forkserver")


def _share_cores(world: World) -> None:
    """Give each rank its share of the machine's cores: NumPy's BLAS would take all of them in every rank."""
    # Every rank makes this call, whatever its environment. A launcher may have bound each rank to cores of its own:
    # count those of all ranks of the machine.
    of_all = world.allgather((world.node_rank, os.sched_getaffinity(0)))
    cores: set[int] = set().union(*(its for node_rank, its in of_all if node_rank == world.node_rank))
    if world.local_size == 1:
        return
    share = max(1, len(cores) // world.local_size)
    os.environ.setdefault("PJRT_NPROC", str(share))  # XLA's, of JAX, which looks here alone, at its first array
    if any(variable in os.environ for variable in _THREAD_VARIABLES):
        return
    from threadpoolctl import threadpool_limits

    threadpool_limits(share)
