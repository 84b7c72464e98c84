"""Failures before init(): a rank that fails must not leave the others waiting for ever in MPI_Init, or in init().

`import mpitrain` installs this in processes that an MPI launcher started. In init(), the Job (job/job.py) takes over.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import os
import signal
import site
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fcntl import F_GETFL, F_SETFL, F_SETOWN, F_SETSIG, fcntl
from io import TextIOWrapper
from select import select
from stat import S_ISSOCK
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mpitrain.context import ADDED, JOB, LAUNCHER, OF_MPIEXEC, PREFIX, RANK
from mpitrain.user_code import is_of_user

if TYPE_CHECKING:
    from mpi4py import MPI


# The process that the launcher started. Its helpers inherit the launcher's variables, but are not ranks.
# (config.read_config would refuse a name that begins with MPITRAIN_.)
_RANK_PID = "_MPITRAIN_RANK_PID"
# Prefixes of the variables by which MPI in a process finds its launcher (MPICH and Open MPI).
_OF_CONNECTION = "PMI_FD", "PMI_PORT", "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SERVER_"
# Variables with mpiexec's prefixes that stay: those that a user sets, and those by which an agent finds a job's
# processes.
_KEPT = JOB, LAUNCHER, "OMPI_MCA_", "OMPI_ALLOW_", "HYDRA_", "I_MPI_"
# The time for the launcher to read a rank's output: it drops the rest when the job ends.
_READING_SECONDS = 0.1
_NEIGHBOUR_SECONDS = 1.0
# The process whose start warm_start/sitecustomize.py has watched; 0: the program itself imported mpitrain.
_hooked_pid = 0
_shown: list[BaseException] = []  # the uncaught exception that our hook has shown
# The SystemExit whose code Python has read, because nothing caught it.
_exits: list[SystemExit] = []


def watch() -> None:
    """End the job at an uncaught exception of this process, if it is a rank."""
    if not {"PMI_RANK", "PMIX_RANK", RANK, _RANK_PID} & os.environ.keys():
        return
    os.environ.setdefault(_RANK_PID, str(os.getpid()))
    if is_helper():
        # Processes of multiprocessing stay helpers: init() refuses them, because they may run the script again.
        if any(word.startswith("from multiprocessing.") for word in sys.orig_argv) or any(_connections()):
            helpers_end_with_this()
        else:
            _begin_anew()
    else:
        sys.excepthook = _uncaught
        _write_lines()
        with suppress(OSError):
            _end_input()
        _show_stacks()
        _note_exits()
        before_threads_end(_look_for_uncaught)
        atexit.register(_at_exit)


def leave_hook(folder: str) -> None:
    """Take the folder of warm_start/sitecustomize.py off sys.path and PYTHONPATH: a child process is not a rank.

    A warm interpreter has it twice, because it starts as a rank did. The program may be a mere wrapper that starts the
    actual rank. So no process has taken the rank's place yet (`take_place`).
    """
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    global _hooked_pid  # noqa: PLW0603 - a process is one rank
    if os.environ.get(_RANK_PID) == str(os.getpid()):
        del os.environ[_RANK_PID]
        _hooked_pid = os.getpid()
    left = [entry for entry in os.environ.pop("PYTHONPATH", folder).split(os.pathsep) if entry != folder]
    if left:
        os.environ["PYTHONPATH"] = os.pathsep.join(left)


def take_place() -> None:
    """From now on, a process that this one starts is not a rank: the program has begun to use mpitrain."""
    if _hooked_pid == os.getpid():
        os.environ.setdefault(_RANK_PID, str(_hooked_pid))


def run_own_sitecustomize() -> None:
    """Run the sitecustomize that Python would have found without mpitrain's."""
    hook = sys.modules.pop("sitecustomize")
    site.execsitecustomize()
    sys.modules.setdefault("sitecustomize", hook)  # its import continues when this returns


def _write_lines() -> None:
    """Write each line of output at once, so that lines of different ranks do not mix.

    With PYTHONUNBUFFERED, which the launcher sets, and many container images too, each word of a print is a write.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)


def keep_place() -> None:
    """From now on, no process that this rank starts takes the rank's place: it would use the same connection."""
    take_place()
    for name in tuple(_connections()):
        del os.environ[name]


def _connections() -> Iterator[str]:
    """The variables by which MPI in a process finds its launcher."""
    return (name for name in os.environ if name.startswith(_OF_CONNECTION))


def _begin_anew() -> None:
    """Make this process, which a rank has started, a program of its own: for MPI and PyTorch it is alone."""
    told = [name for name in os.environ if name.startswith((PREFIX, *OF_MPIEXEC))]
    added = os.environ.get(ADDED, "").split(",")
    for name in [*added, *(name for name in told if not name.startswith(_KEPT))]:
        os.environ.pop(name, None)


def _end_input() -> None:
    """Give this process an input that has ended, if its own would never end.

    MPICH's mpiexec passes its input to rank 0. It keeps the pipes of the others open, and writes nothing into them.
    """
    if os.environ.get("PMI_RANK", "0") == "0":
        return
    pipe, pid = os.readlink("/proc/self/fd/0"), os.getppid()  # noqa: PTH115 (pathlib costs the import some ms)
    while pid > 1:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            name, _, rest = file.read().partition(b"(")[2].rpartition(b")")
        if name.startswith(b"hydra"):
            # Intel's can pass its input to others too (-s all). Then there is something to read, or the end.
            if pipe in _open_files(pid) and not select([0], [], [], 0.0)[0]:
                nothing = os.open(os.devnull, os.O_RDONLY)
                os.dup2(nothing, 0)
                os.close(nothing)
            return
        pid = int(rest.split()[1])


def _open_files(pid: int) -> Iterator[str]:
    for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        with suppress(OSError):  # closed meanwhile
            yield os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115


def _show_stacks() -> None:
    """From now on, let the host's agent see where this process is: its imports may take long. (view.py reads it.)"""
    number = signal.SIGRTMIN + 11  # watching.rank_record.STACK_SIGNAL
    if signal.getsignal(number) is signal.SIG_DFL:
        faulthandler.register(number, file=os.memfd_create("mpitrain-stacks"), all_threads=True)


def before_threads_end(call: Callable[[], object]) -> None:
    """Call `call` once the program has ended, before Python waits for its threads, some of which may never end."""
    threading._register_atexit(call)  # type: ignore[attr-defined]  # concurrent.futures uses it too


def uncaught() -> BaseException | None:
    """Return the exception that has ended the program, also if another library's sys.excepthook has hidden it.

    Other programs, such as pytest, set sys.last_value too. The traceback of an uncaught exception begins in a frame
    without a caller.
    """
    error, trace = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
    return error if trace is not None and trace.tb_frame.f_back is None else None


def last_exit() -> SystemExit | None:
    """Return the SystemExit with which the program ended, if its code is not 0; otherwise None."""
    return _exits[-1] if _exits and exit_code_of(_exits[-1]) else None


def exit_code_of(error: SystemExit) -> int:
    """Return the exit code that Python gives a process for this SystemExit."""
    code = error.code
    return (code & 0xFF) if isinstance(code, int) else int(code is not None)


def words_of_exit(error: SystemExit) -> str:
    """Describe a SystemExit in one line, as in `left with exit code 1: there is no data.csv (train.py:9)`."""
    place = getattr(error, "place", None)
    text = "" if error.code in (None, "") or isinstance(error.code, int) else f": {error.code!s:.300}"
    where = f" ({os.path.basename(place[0])}:{place[1]})" if place else ""  # noqa: PTH119
    return f"left with exit code {exit_code_of(error)}{text}{where}"


def _note_exits() -> None:
    """From now on, note the SystemExit that ends the program: Python calls no hook for it.

    Python reads the `code` of an uncaught SystemExit from outside any frame. Python 3.11 does not even read it if
    sys.exit raised the exception, unless it was caught on its way. An atexit function is too late: Python has freed the
    exception by then. Where `code` cannot be watched, only an exit by sys.exit is noticed, because the exception is
    freed outside any frame.
    """
    code: Any = SystemExit.__dict__["code"]

    def read(error: SystemExit) -> object:
        if sys._getframe().f_back is None:
            _exits.append(error)
            # Python 3.11 has no traceback here; the place where sys.exit raised the error is known.
            trace = None if hasattr(error, "place") else error.__traceback__
            lines = []
            while trace is not None:
                lines.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
                trace = trace.tb_next
            _set_place(error, lines[::-1])
        return code.__get__(error)

    class Leaving(SystemExit):
        def __del__(self) -> None:
            if sys._getframe().f_back is None:
                _exits.append(self)

    def leave(status: object = None, /) -> NoReturn:
        error = SystemExit(status) if is_watched else Leaving(status)
        caller, lines = sys._getframe().f_back, []
        while caller is not None:
            lines.append((caller.f_code.co_filename, caller.f_lineno))
            caller = caller.f_back
        _set_place(error, lines)
        raise error

    is_watched = False
    with suppress(Exception):  # a Python whose types have another layout
        (own,) = gc.get_referents(SystemExit.__dict__)
        own["code"] = property(read, code.__set__, code.__delete__)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
        replaced: Any = SystemExit.code
        is_watched = replaced.fget is read
    if sys.version_info < (3, 12) or not is_watched:
        sys.exit = leave


def _set_place(error: SystemExit, lines: Sequence[tuple[str, int]]) -> None:
    """Note where the program exited: the innermost of these lines (innermost first) that is the user's own.

    A library such as argparse may call sys.exit for the program.
    """
    if lines:
        error.place = next((line for line in lines if is_of_user(line[0])), lines[0])  # type: ignore[attr-defined]


def helpers_end_with_this() -> None:
    """Let every process that multiprocessing starts from this process end when this process ends, for any reason.

    Otherwise the helper of a killed rank lives on and keeps the rank's output open. Open MPI's mpiexec considers a rank
    alive as long as any process can write to its output.
    """
    from multiprocessing import util

    util.register_after_fork(_end_with_parent, _end_with_parent)


def _end_with_parent(_: object) -> None:
    """Let the kernel kill this process when the other end of a pipe is closed.

    Its parent has the end open, and so have later children of the parent, which end with it too.
    """
    from multiprocessing import parent_process

    parent = parent_process()
    assert parent is not None
    pipe = parent.sentinel
    fcntl(pipe, F_SETOWN, os.getpid())
    fcntl(pipe, F_SETSIG, signal.SIGKILL)
    fcntl(pipe, F_SETFL, fcntl(pipe, F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():  # it ended before the pipe was watched
        os.kill(os.getpid(), signal.SIGKILL)


def is_helper() -> bool:
    """True if a rank has started or forked this process."""
    return os.environ.get(_RANK_PID, str(_hooked_pid or os.getpid())) != str(os.getpid())


def abort(comm: MPI.Comm, code: int) -> None:
    """End all processes of the job. Suppress MPICH's own messages, so that the report of the failure stays last."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    comm.Abort(code)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if is_helper():  # forked, with the rank's connection to the launcher: its failure is not the rank's
        sys.__excepthook__(kind, error, trace)
        return
    _shown.append(error)
    _note_error(error)
    if issubclass(kind, KeyboardInterrupt):
        os.write(2, b"KeyboardInterrupt\n")
    else:
        # torch.distributed's own hook calls this one, and prints its output only after it returns.
        if sys.__stderr__ is not None:
            sys.stderr = sys.__stderr__
        sys.__excepthook__(kind, error, trace)
        if isinstance(error, ImportError) and (path := os.environ.get("PYTHONPATH")):
            _say(f"looked in PYTHONPATH ({path}) before {sys.prefix}; do the other ranks have the same there?")
    _end(130 if issubclass(kind, KeyboardInterrupt) else 1)


def _look_for_uncaught() -> None:
    if (
        (error := uncaught()) is not None and error not in _shown and not is_helper()
    ):  # another hook has shown it, in its own way
        _note_error(error)
        _say(f"failed before it called init(): {type(error).__name__}")
        _end(1)


def _note_error(error: BaseException) -> None:
    """Write the error into the error file of this rank, if it has one. If the error follows from the loss of another
    rank, wait for a moment: the rank to blame may be about to write its reason, and the first rank that ends, ends
    all."""
    import traceback

    from mpitrain.error_file import is_of_neighbour, note_error

    is_interrupt = isinstance(error, KeyboardInterrupt)
    # watching.rank_record.INTERRUPTED
    line = "interrupted" if is_interrupt else f"{type(error).__name__}: {error}"
    if note_error(line, "".join(traceback.format_exception(error))) and is_of_neighbour(line):
        time.sleep(_NEIGHBOUR_SECONDS)


def _at_exit() -> None:
    error, mpi = last_exit(), sys.modules.get("mpi4py.MPI")
    if error is None or is_helper() or (mpi is not None and mpi.Is_initialized()):
        return
    if RANK in os.environ:  # those that need this one fail before the agent sees its end
        from mpitrain.error_file import note_error

        note_error(words_of_exit(error), "")
    if not str(error.code).startswith("mpitrain: "):  # our own words, which Python has printed
        _say(words_of_exit(error))
    _end(exit_code_of(error))


def _say(text: str) -> None:
    rank = next((os.environ[name] for name in ("PMI_RANK", "PMIX_RANK", RANK) if name in os.environ), "?")
    os.write(2, f"mpitrain: rank {rank} on {os.uname().nodename} {text}\n".encode(errors="backslashreplace"))


def _end(code: int) -> None:
    """End the job with this exit code. If the launcher cannot be told the code, end the job by a signal."""
    time.sleep(_READING_SECONDS)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        if not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
            sys.stdout.flush()
            abort(mpi.COMM_WORLD, code)
    elif os.environ.get("PMI_SIZE", "1") != "1":
        sys.stdout.flush()
        with suppress(OSError, ValueError):
            _tell_hydra(code)
            os._exit(code)  # at once: otherwise Hydra kills this process, and its failure would not be visible
        # Other launchers, such as srun, leave the ranks waiting in MPI_Init for one that exits with a code; a signal
        # may end them.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _tell_hydra(code: int) -> None:
    """Make Hydra (MPICH, Intel MPI) end all ranks with this exit code: send it what MPI_Abort sends.

    Before MPI_Init, Hydra ignores the exit code of a rank and leaves the others waiting there. It obeys this PMI-1
    message from the start of a rank, and prints nothing (tested with MPICH 5.0.2 and Intel MPI 2021.18). Raises OSError
    or ValueError if this process has no connection to Hydra.
    """
    # srun has PMI_FD too, and speaks PMI-2.
    connection = int(os.environ.get("PMI_FD", "") if "MPI_LOCALNRANKS" in os.environ else "")
    if _is_closed(connection):
        raise OSError("not the connection to Hydra")
    os.write(connection, f"cmd=abort exitcode={code}\n".encode())


def is_cut_off() -> bool:
    """Whether Hydra started a parent of this process, and the subprocess module closed the connection to Hydra here."""
    connection = os.environ.get("PMI_FD", "") if "MPI_LOCALNRANKS" in os.environ else ""
    return connection.isdigit() and _is_closed(int(connection))


def _is_closed(connection: int) -> bool:
    """Whether the descriptor is closed, or is another file by now."""
    try:
        return not S_ISSOCK(os.fstat(connection).st_mode)
    except OSError:
        return True
