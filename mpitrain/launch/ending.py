"""How a job ended, and why, in one line. Pure functions of observations; mpiexec's own messages are among these."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mpitrain.error_file import is_of_neighbour
from mpitrain.launch.memory_kills import KERNEL_KILLED
from mpitrain.watching.census import FirstEnd
from mpitrain.watching.ranges import rank_ranges
from mpitrain.watching.rank_record import CALLED, FAILED, INTERRUPTED, STARTED, RankRecord

_NAME_BYTES = 80  # for `rank 12 on HOST failed at 12:03:04: ` before an error
_LINE_BYTES = 400  # of a cause: the kernel's line about a process that it killed has about 250
# Measured on 4 hosts on two busy cores: after a rank was killed, the ends of MPICH's processes on the other hosts
# were seen 0.2 to 53 ms later. After a daemon of Open MPI was killed, the end of the first rank was seen 0.28 s later.
_UNSURE_SECONDS = 0.1
# A rank that fails ends the job 0.1 s later (mpitrain.job.failure). A process that ends within half of that ended by
# itself.
_ABORT_SECONDS = 0.05
# Signals by which ranks end because of another rank: they abort, or Open MPI ends them.
_REACTIONS = (signal.SIGABRT, signal.SIGTERM)
# The launcher may see the end of mpiexec with this delay.
_NOTICED_SECONDS = 1.0

# MPICH names a process, Intel MPI also its rank. Both also name ranks that mpiexec itself has ended.
_HYDRA = re.compile(r"=   (?:RANK (\d+) )?PID (\d+) RUNNING AT (\S+)\n=   (EXIT CODE|KILLED BY SIGNAL): (\d+)")
# MPICH's exit code may be the number of a signal: the line about it is missing if MPICH's proxies fail too.
_FATAL = ("4", "6", "7", "8", "9", "11", "15")
_OF_HYDRA = re.compile(r"BAD TERMINATION|^\[(proxy|mpiexec)", re.MULTILINE)
_SIGNAL = re.compile(r"EXIT STRING: .*\(signal (\d+)\)")
_KILLED = re.compile(r"was killed by signal (\d+)")  # as we say it
_LEFT = re.compile(r"left with exit code (\d+)")  # as a rank says it that sys.exit has ended
_SILENT = "ended without a message (os._exit, or killed?)"
# Open MPI 4 and 5.
_OPEN_MPI_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited\s+on\s+signal (\d+)")
_OPEN_MPI_DAEMON = re.compile(r"Remote daemon: .* on node (\S+)")
_OPEN_MPI_LEFT = re.compile(r"Process name: \[.*,(\d+)\]\s+Exit code:\s+(\d+)")


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        code: its exit code.
        is_interrupted: a signal to the launcher ended it.
        trouble: why the launcher ended the job, one line per entry.
        lost: the hosts that fell silent.
        failed: the last record of the rank that failed first; its time is by the clock of `first_ends`.
        mpiexec_said: the last output of mpiexec itself.
        names_signals: mpiexec names only ranks that a signal ended. Its "EXIT CODE" is then the number of the signal,
            as in MPICH 5.
        mpiexec_signal: the signal that ended mpiexec itself and did not come from the launcher; 0: none.
        mpiexec_host: where mpiexec ran.
        mpiexec_seconds: when the end of mpiexec was seen, by the clock of `first_ends`.
        missing: the ranks that began and did not finish.
        first_ends: the first end on each host, if known, in order of time.
        records: the last record of each rank.
        left: the step after which all ranks have left for other hosts, and when, by the clock of `first_ends`; None:
            they have not.
        tracebacks: what the error files have of ranks that failed before init(), or never called it.
        left_early: the ranks that never called init(), and have left with code 0.
        ends_others: what ends the other ranks when one has failed.
    """

    code: int
    is_interrupted: bool = False
    trouble: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    failed: RankRecord | None = None
    mpiexec_said: str = ""
    names_signals: bool = False
    mpiexec_signal: int = 0
    mpiexec_host: str = ""
    mpiexec_seconds: float = 0.0
    missing: tuple[int, ...] = ()
    first_ends: tuple[FirstEnd, ...] = ()
    records: Mapping[int, RankRecord] = field(default_factory=dict)
    left: tuple[int, float] | None = None
    tracebacks: Mapping[int, str] = field(default_factory=dict)
    left_early: tuple[int, ...] = ()
    ends_others: str = "mpiexec"

    @property
    def first_end(self) -> FirstEnd | None:
        """The first end on any host."""
        return self.first_ends[0] if self.first_ends else None


def why(ended: Ended, host_of: Callable[[int], str]) -> tuple[str, int | None]:
    """Say in a line why a job failed, and which rank failed first, if known; `host_of` gives the host of a rank."""
    text, rank = _why(ended, host_of)
    return text[:_LINE_BYTES], rank


def last_words(ended: Ended, host_of: Callable[[int], str], *, has_said: bool = False) -> str:
    """Return the last message of a job that ended by itself; "" if there is nothing to add.

    `has_said`: a rank has said why it ended.
    """
    first = ended.first_end
    is_early = first is not None and first.code not in (None, 0) and _is_early(ended.records, first.rank)
    # A rank that fails before init() says why, and then leaves with a code, or ends itself by SIGTERM.
    if first is not None and (first.code == -signal.SIGTERM or ((first.code or 0) > 0 and has_said)):
        is_early = False
    if ended.is_interrupted or ended.trouble or not (ended.missing or ended.mpiexec_signal or is_early):
        return ""
    if first_failure(ended) is not None:  # the rank itself has reported it
        return ""
    cause, rank = why(ended, host_of)
    if rank is None and cause == _unknown(ended):
        ranks = _ranks(ended.missing)
        others = "" if len(ended.missing) == 1 else f"; when one rank ends so, {ended.ends_others} ends the others"
        return f"{ranks} ended before the end of the program and did not say why (os._exit, or killed?){others}"
    alone = ended.missing if ended.ends_others == "mpiexec" else ended.records.keys()
    others = "" if rank is None or set(alone) <= {rank} else f"; {ended.ends_others} ended the others"
    return cause + others


def _phase(ended: Ended, rank: int | None) -> str:
    record = None if rank is None else ended.records.get(rank)
    return "" if record is None else record.phase


def _is_early(records: Mapping[int, RankRecord], rank: int | None) -> bool:
    record = None if rank is None else records.get(rank)
    return record is not None and record.phase in (STARTED, CALLED)


def first_failure(ended: Ended) -> RankRecord | None:
    """Return the rank whose failure ended the job; None if the ranks failed because something else ended before."""
    failed, first = ended.failed, ended.first_end
    if failed is None:
        return None
    if ended.mpiexec_signal and failed.failed_seconds > ended.mpiexec_seconds - _NOTICED_SECONDS:
        return None
    if first is None or first.seconds > failed.failed_seconds + _ABORT_SECONDS:
        return failed
    return failed if _phase(ended, first.rank) == FAILED else None


def is_consequence(ended: Ended) -> bool:
    """True if the ranks report only failures that follow from the loss of another one."""
    return ended.failed is not None and is_of_neighbour(ended.failed.error)


def words_of_failure(ended: Ended, host_of: Callable[[int], str]) -> list[str]:
    """Return the text on a failure that is known from error files: which rank failed first, when and how.

    The traceback is repeated if ranks failed in several ways: the first one is hard to find then.
    """
    failed = ended.failed
    if failed is None or ended.is_interrupted or failed.error == INTERRUPTED:
        return []
    if ended.ends_others != "mpiexec" and _LEFT.match(failed.error):  # others may have said something since
        return [f"rank {failed.rank} on {host_of(failed.rank)} {failed.error}"]
    if failed.rank not in ended.tracebacks:
        return []
    errors = {rank: ended.records[rank].error for rank in sorted(ended.tracebacks)}
    follows = is_of_neighbour(failed.error)
    alike = [rank for rank, error in errors.items() if error == failed.error or (follows and is_of_neighbour(error))]
    when = time.strftime("%H:%M:%S", time.localtime(time.time() - time.monotonic() + failed.failed_seconds))
    if len(alike) == len(errors):
        hosts = ", ".join(dict.fromkeys(map(host_of, alike)))
        return [f"{_ranks(alike)} on {hosts} failed at {when}: {_error(ended)}"]
    others = _ranks([rank for rank in errors if rank not in alike])
    first = f"rank {failed.rank} on {host_of(failed.rank)} failed first, at {when}, and {others} after it:"
    lines = ended.tracebacks[failed.rank].splitlines() or [failed.error]
    return [first, *(f"    {line}" for line in lines)]


# What to do about failures of scripts that were written for other launchers.
_ADVICE = {
    r"have NCCL built in|no GPUs found|with NCCL[^.]* requires GPU": (
        'NCCL needs a GPU for each rank, and an NVIDIA build of PyTorch. Without GPUs: init_process_group("gloo")'
    ),
    r"EOFError|BdbQuit|Inappropriate ioctl for device": (
        "a rank has no terminal, and its input is empty. Give what it asks for as an argument, or run the script alone"
    ),
}


def _error(ended: Ended) -> str:
    """Return the error of the rank that failed first, with what is known beyond it, for which a long one is cut."""
    error, hint = ended.failed.error if ended.failed is not None else "", _hint(ended)
    return error[: _LINE_BYTES - len(hint) - _NAME_BYTES] + hint if hint else error


def _hint(ended: Ended) -> str:
    """Return what is known beyond the error: what to do, or which ranks had left before if a neighbour is gone."""
    error = ended.failed.error if ended.failed is not None else ""
    if advice := next((words for pattern, words in _ADVICE.items() if re.search(pattern, error)), ""):
        return f"; {advice}"
    if not (ended.left_early and is_consequence(ended)):
        return ""
    return (
        f"; {_ranks(ended.left_early)} had left before, with exit code 0: do all ranks make the same number of steps?"
    )


def exit_code(ended: Ended, returncode: int, host_of: Callable[[int], str], *, told: int, has_left: bool) -> int:
    """Return the exit code for a job: 0 only if it did its work, and 128 + the signal if a signal ended it.

    Args:
        ended: how it ended; its own `code` does not count.
        returncode: of mpiexec.
        host_of: gives the host of a rank.
        told: the signal to the launcher; 0: there was none.
        has_left: processes of the job were left over.
    """
    if told:
        return 128 + told
    if ended.trouble:
        return 1
    if failed := first_failure(ended):  # mpiexec may report another rank, which it ended because of this one
        left = _LEFT.match(failed.error)
        return 128 + signal.SIGINT if failed.error == INTERRUPTED else int(left[1]) if left else 1
    if returncode < 0:
        return 128 - returncode
    if returncode and (number := signal_told(ended, host_of)):
        return 128 + number
    # Older ones of MPICH return the bare number of the signal that ended a rank, and name it only in words.
    if returncode and f"(signal {returncode})" in ended.mpiexec_said:
        return code_told(ended) or 128 + returncode
    return returncode or int(has_left or bool(ended.failed or ended.missing))


def signal_told(ended: Ended, host_of: Callable[[int], str]) -> int:
    """The signal that ended the rank which ended first, as the kernel says or mpiexec's words alone mean; 0: none.

    Over several hosts MPICH's own exit code is 255 then: it hangs up on its proxies once a rank is dead, those of other
    hosts take that for an error, and it fails because of them.
    """
    first = ended.first_end
    if first is not None and (first.rank is None or first.code):
        return max(0, -(first.code or 0))
    told = _told(ended, host_of)
    rank = _first(ended, set(told))
    killed = None if rank is None else _KILLED.fullmatch(told.get(rank, ""))
    return int(killed[1]) if killed else 0


def code_told(ended: Ended) -> int | None:
    """The exit code with which the rank that ended first left before its end; None: a signal ended it, or not known.

    Of ranks that ended together MPICH may name any: one that it has itself killed because of this one.
    """
    first = ended.first_end
    if first is None or first.rank not in ended.missing or first.code is None or first.code < 0:
        return None
    return first.code or 1


def _why(ended: Ended, host_of: Callable[[int], str]) -> tuple[str, int | None]:
    if ended.lost:
        return f"{' and '.join(ended.lost)} fell silent", None
    if ended.trouble:
        return ended.trouble[0], None
    failed, first = first_failure(ended), ended.first_end
    if failed is not None:
        how = failed.error if _LEFT.match(failed.error) else f"failed: {_error(ended)}"
        return f"rank {failed.rank} on {host_of(failed.rank)} {how}", failed.rank
    if ended.mpiexec_signal:
        return f"mpiexec itself was killed on {ended.mpiexec_host}, by signal {ended.mpiexec_signal}", None
    if daemon := _OPEN_MPI_DAEMON.search(ended.mpiexec_said):
        return f"the process of mpiexec on {daemon[1]} was killed, or has crashed, or cannot be reached", None
    kernel = first.kernel if first is not None else ""
    if first is not None and first.rank is None:
        host = host_of(first.parent_of[0])
        started = f"that started {_ranks(first.parent_of)}"
        why_so = f": {kernel}" if kernel else ""
        return f"the process of mpiexec on {host} {started} was killed, or has crashed{why_so}", None
    told = _told(ended, host_of)
    rank = _first(ended, set(told))
    if rank is None and len(told) == 1:
        (named,) = told
        return f"rank {named} on {host_of(named)} or another one {told[named]}", None
    if rank is None:
        return _unknown(ended), None
    how = told.get(rank, "")
    if first is not None and first.rank == rank:
        how = words_of_end(first, how)
    how = how or _SILENT
    return f"rank {rank} on {host_of(rank)} {how}", rank


def words_of_end(end: FirstEnd, told: str = "") -> str:
    """Say how a rank ended, as in `was killed by signal 9`; `told` is what mpiexec says, less than the kernel knows."""
    how = told or _SILENT
    if end.code:  # a rank that is alone, such as an exception ends, leaves with a code
        how = f"was killed by signal {-end.code}" if end.code < 0 else f"left with exit code {end.code}"
    if end.kernel.startswith(KERNEL_KILLED) and "killed" in how:
        return f"was killed by signal 9: {end.kernel}"
    return (
        f"{how}: {end.kernel}"
        if end.kernel and (how == _SILENT or "by signal 9" in how or end.code == -signal.SIGBUS)
        else how
    )


def _unknown(ended: Ended) -> str:
    number = ended.code - 128
    by_signal = f", as by signal {number}" if number in set(signal.Signals) else ""
    return f"the job ended with exit code {ended.code}{by_signal}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)}"


def _first(ended: Ended, told: set[int]) -> int | None:
    """Return the rank that failed first, if known; `told` are the ranks that mpiexec mentions."""
    dead = [end.rank for end in ended.first_ends if end.rank is not None]
    if dead:
        return dead[0]
    if len(told) == 1 and (len(ended.records) == 1 or not _HYDRA.search(ended.mpiexec_said)):
        return next(iter(told))
    return ended.missing[0] if len(ended.missing) == 1 else None


def _told(ended: Ended, host_of: Callable[[int], str]) -> dict[int, str]:
    """Return what mpiexec says of ranks. Ranks that mpiexec itself ended because of another one may be among them."""
    said = ended.mpiexec_said
    told = {int(rank): f"was killed by signal {number}" for rank, number in _OPEN_MPI_KILLED.findall(said)}
    told |= {int(rank): f"left with exit code {code}" for rank, code in _OPEN_MPI_LEFT.findall(said)}
    for named, pid, host, kind, number in _HYDRA.findall(said):
        # The same process id may exist on several hosts.
        ranks = [rank for rank, record in ended.records.items() if record.pid == int(pid)]
        ranks = [int(named)] if named else [rank for rank in ranks if len(ranks) == 1 or host_of(rank) == host]
        words = _SIGNAL.search(said)
        if kind == "KILLED BY SIGNAL" or words or ended.names_signals:
            how = f"was killed by signal {words[1] if words else number}"
        elif number in _FATAL:
            how = f"was killed by signal {number}, or left with exit code {number}"
        else:
            how = f"left with exit code {number}"
        told |= dict.fromkeys(ranks, how)
    return told


def in_order(ends: Iterable[FirstEnd]) -> list[FirstEnd]:
    """Sort the first ends of all hosts by time; the times are by one clock.

    A host sees its own ends in their order, but the delay depends on how busy the host is. So the times of two hosts
    may be the wrong way round. If two ends are close together, that of a rank comes before that of a process that had
    started ranks. When a rank ends, MPICH's mpiexec lets its processes on the other hosts end before their ranks do.
    When one of these processes is killed, no rank ends before it.
    """
    ends = sorted(ends, key=lambda end: end.seconds)
    close = [end for end in ends if end.seconds - ends[0].seconds < _UNSURE_SECONDS]
    return sorted(close, key=lambda end: end.rank is None) + ends[len(close) :]


def without_ends_by_hydra(
    ends: Sequence[FirstEnd], records: Mapping[int, RankRecord], mpiexec_said: str, returncode: int
) -> list[FirstEnd]:
    """Leave out ranks that Hydra killed because another one had told it a code before init() (mpitrain/early.py).

    Such a rank may seem to end later than those. Hydra names a rank that another signal has ended;
    of one that has told it a code, it prints nothing.
    """
    if returncode <= 0 or returncode in (signal.SIGKILL, 128 + signal.SIGKILL) or _OF_HYDRA.search(mpiexec_said):
        return list(ends)
    return [end for end in ends if end.code != -signal.SIGKILL or not _is_early(records, end.rank)]


def kills_first(ends: Sequence[FirstEnd], mpiexec_said: str) -> list[FirstEnd]:
    """Put ranks that were killed before ranks that left at about the same time; for Open MPI alone.

    With Open MPI, ranks of other hosts leave by themselves because a rank was killed, at times within a millisecond,
    and the kernel's times are less precise. Such a rank leaves with an exit code, or aborts. Open MPI ends ranks by
    SIGTERM, and by SIGKILL only after a second. It names the first rank of whose end it hears, before it ends any.
    """
    told = {int(rank) for rank, number in _OPEN_MPI_KILLED.findall(mpiexec_said) if int(number) not in _REACTIONS}
    killed = [
        end
        for end in ends
        if end.seconds - ends[0].seconds < _UNSURE_SECONDS
        and (end.rank in told or (end.code is not None and end.code < 0 and -end.code not in _REACTIONS))
    ]
    return [*killed, *(end for end in ends if end not in killed)]


def last_step(records: Mapping[int, RankRecord], rank: int | None = None) -> int | None:
    """Return the step in which the job was, or `rank` if the failed rank is known. None: no rank has begun a step.

    Ranks that wait for each other are in one step, but the others may be about to begin the next one.
    """
    if rank is not None and rank in records:
        return records[rank].step or None
    return max((record.step for record in records.values()), default=0) or None


def is_kill(cause: str) -> bool:
    """True if the failure may come from the kernel, which kills processes when memory runs out."""
    return "was killed by signal 9" in cause or "ended without a message" in cause
