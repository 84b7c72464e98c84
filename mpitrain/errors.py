"""Every error that mpitrain raises on purpose.

    MpitrainError
    ├── ConfigError            an option or MPITRAIN_* variable that does not exist or has an invalid value
    │   └── MissingLibraryError    a library of an extra is not installed
    ├── LaunchError            the job did not start as one job: no MPI, the wrong mpiexec, too few ranks
    │   └── LostServerError        a further parameter server is gone
    ├── ClusterError           a machine could not be reached, trusted, set up or taken out of the cluster
    ├── KernelError            CUDA kernels do not compile; the text has the compiler's log
    ├── MismatchError          ranks disagree: operation, tree, shape, dtype, bucket layout, number of calls
    ├── LostRankError          a rank is gone, and the others can continue without it
    ├── RemoteError            a function that mt.run_on ran on another rank has raised an error
    ├── ProcessGroupError      a torch process group cannot continue: a timeout, a rank that has left, use after destroy
    ├── DeviceError            a GPU that cannot be used, lacks memory, or cannot do what was asked for
    ├── TreeError              a tree holds something that is neither an array nor a number
    ├── GradientError          a gradient that cannot be used
    │   ├── MissingGradientError   the backward pass ended without it
    │   └── NonFiniteError         it, or the loss, holds NaN or infinity
    ├── ReplicaError           the ranks' parameters are no longer equal
    ├── DataError              a data file or data set that cannot be used; a rank without samples
    ├── CheckpointError        a checkpoint that cannot be written or read
    ├── NoRoomError            not enough memory for a copy of the state
    ├── WireError              malformed bytes from a worker or server
    └── HorovodInternalError   a call of mpitrain.horovod has failed after it was submitted

A message names rank and host, and says what was found, what is allowed and what to do.

`known_everywhere` is true if every rank raises the same error at the same point. Such an error is printed once, not by
every rank, and does not break a World. Only `everywhere` sets this attribute. `is_repeated` is true if the error came
up on another rank. The traceback of that rank is the one to print.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

__all__ = [
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "DataError",
    "DeviceError",
    "GradientError",
    "HorovodInternalError",
    "KernelError",
    "LaunchError",
    "LostRankError",
    "LostServerError",
    "MismatchError",
    "MissingGradientError",
    "MissingLibraryError",
    "MpitrainError",
    "NoRoomError",
    "NonFiniteError",
    "ProcessGroupError",
    "RemoteError",
    "ReplicaError",
    "TreeError",
    "WireError",
]

AnError = TypeVar("AnError", bound="MpitrainError")

_MOST_TEXT = 16_000  # characters of a message


class MpitrainError(Exception):
    """The base class of all errors of mpitrain. Catch MpitrainError to catch them all."""

    known_everywhere = False
    is_repeated = False

    def __init__(self, *arguments: object) -> None:
        """Leave out the middle of a text that is too long for a terminal: a tree may have 100,000 leaves."""
        super().__init__(*(_bounded(one) if isinstance(one, str) else one for one in arguments))


def _bounded(text: str) -> str:
    left_out = len(text) - _MOST_TEXT
    if left_out <= 0:
        return text
    return f"{text[: _MOST_TEXT * 3 // 4]} ... ({left_out:,} characters) ... {text[-(_MOST_TEXT // 4) :]}"


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, as a traceback shows them. Causes can form a cycle."""
    cause: BaseException | None = error
    seen = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def is_of_another_rank(error: BaseException) -> bool:
    """True if the error was first raised on another rank, even if the program has raised its own error from it."""
    return any(isinstance(one, MpitrainError) and one.is_repeated for one in causes_of(error))


def text_of(error: BaseException) -> str:
    """Return str(error), or what a traceback shows instead if the class's own __str__ fails."""
    try:
        return str(error)
    except BaseException:  # even SystemExit: the report of an error must not fail too
        return "<exception str() failed>"


def everywhere(error: AnError, is_known_everywhere: bool = True) -> AnError:
    """Return `error`, marked as raised by every rank here; or, if not `is_known_everywhere`, as raised by one rank.

    Use it for an error that follows from the same agreement, vote or gathered values on all ranks. An error on one rank
    alone breaks the World, because the others may continue to another call.
    """
    error.known_everywhere = is_known_everywhere
    return error


class ConfigError(MpitrainError, ValueError):
    """An option or MPITRAIN_* variable does not exist or has a value that is not allowed."""


class MissingLibraryError(ConfigError, AttributeError):
    """A library of an extra is not installed. hasattr() and help() treat the name that needs it as missing."""


class LaunchError(MpitrainError, RuntimeError):
    """The processes that were launched do not form one MPI job.

    `hosts` are the hosts that cannot take part, if the other hosts might continue without them. `different` are the
    hosts that answer but differ from the launcher's own, each with the difference.
    """

    hosts: tuple[str, ...] = ()
    different: Mapping[str, str] = MappingProxyType({})


class LostServerError(LaunchError):
    """A further parameter server is gone, and its part of the parameters with it."""


class ClusterError(MpitrainError, RuntimeError):
    """A machine could not be reached, trusted, set up or taken out of the cluster."""


class KernelError(MpitrainError, RuntimeError):
    """CUDA kernels do not compile on this machine; the text has the compiler's log."""


class MismatchError(MpitrainError, ValueError):
    """Ranks disagree about what they do next; the text names the first difference."""


class LostRankError(MpitrainError, RuntimeError):
    """A rank of the World is gone. With `mpitrain run --recover` the others can continue in a new World."""


class RemoteError(MpitrainError, RuntimeError):
    """A function of `mt.run_on` has raised an error on its rank; the text has the traceback there.

    `kind` is the name of the class of that error, such as "ValueError".
    """

    kind = ""


class ProcessGroupError(MpitrainError, RuntimeError):
    """A process group of torch.distributed cannot make a call, or one of its calls did not end in time."""


class DeviceError(MpitrainError, RuntimeError):
    """A GPU cannot be used, lacks memory, or cannot do what was asked for."""


class TreeError(MpitrainError, TypeError):
    """A tree of arrays holds a leaf that cannot be exchanged."""


class GradientError(MpitrainError, ValueError):
    """A gradient cannot be used."""


class MissingGradientError(GradientError):
    """A rank ended its backward pass without producing every gradient."""


class NonFiniteError(GradientError):
    """A rank had a gradient or a loss with NaN or infinity.

    `gradient_of` holds the names of the rank and of the parameter whose gradient it is; None: it is another value.
    """

    gradient_of: tuple[str, str] | None = None


class ReplicaError(MpitrainError, RuntimeError):
    """The parameters of the ranks are no longer bitwise identical. The text names ranks, parameters and values."""


class DataError(MpitrainError, ValueError):
    """A data file or data set cannot be used."""


class CheckpointError(MpitrainError, OSError):
    """A checkpoint could not be written or read."""


class NoRoomError(MpitrainError):
    """There is not enough memory for a copy."""


class WireError(MpitrainError, ValueError):
    """The received bytes are malformed, or the message is larger than allowed."""


class HorovodInternalError(MpitrainError, RuntimeError):
    """A call failed after it was submitted: the ranks differ, or a rank is gone. The cause is mpitrain's own error."""


def error_of_kind(kind: str, where: str, text: str) -> MpitrainError:
    """Return an error of mpitrain's class of that name; for any other name, a MpitrainError with the name in its
    text."""
    error_class = globals().get(kind)
    if isinstance(error_class, type) and issubclass(error_class, MpitrainError):
        return error_class(f"{where}: {text}")
    return MpitrainError(f"{where}: {kind}: {text}")
