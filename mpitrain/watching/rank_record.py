"""What a rank publishes about itself: one record, which its own process writes and others read.

The record is a page of memory whose only name is below its process: /proc/PID/fd/N. The page is memory, not a file on
disk: a write costs no system call, and neither a full nor a failed disk can block a rank. The page vanishes with the
last process that has it open. The host's agent gets the page's descriptor from the rank (roll_call.py). So the agent
can read a rank's last record after the rank was killed, and the record of a rank in a container, which has its own
/proc. Under a bare mpiexec the ranks of a host read each other's pages by name.

An agent also writes into the page: the newest command to the training (launch/orders.py). Without commands, a rank only
reads one number in each step.

A metric has a name that a script chooses, and training reports it. A fact has a name that mpitrain defines: a line of
rank_facts.py.

No other module knows the layout of the page. This module is sent to other hosts as text. So it imports only modules
that are sent before it, and must run with old Pythons.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.reading import message_of, whole
from mpitrain.watching.proc import opened
from mpitrain.watching.rank_facts import FACTS

# How far a rank has come. STARTED: its process runs. CALLED: it is in init(). BEGUN: init() has returned.
# DONE: its program has finished, and it waits until all others have. PARTED: all have. FAILED: an error ends the rank,
# and the job with it.
STARTED, CALLED, BEGUN, DONE, PARTED, FAILED = PHASES = ("started", "called", "begun", "done", "parted", "failed")

# What a rank does. BUSY: the others wait for it by design. ENDED: its program has finished.
WORKS, WAITS, BUSY, ENDED = range(4)

# A rank writes its stacks at this signal, which nothing else uses: UCX has SIGHUP and SIGALRM, batch systems SIGUSR1
# and SIGUSR2, glibc the first two real-time signals.
STACK_SIGNAL = signal.SIGRTMIN + 11

NAME = "mpitrain-rank-"

INTERRUPTED = "interrupted"  # the error of a rank that Ctrl-C has ended

_BYTES = 65536
# Words of 8 bytes: each is written in one piece, and separately.
_EDITION, _CALLS, _MOVED, _FIRST_STEP, _LEFT_STEP, _LEFT_SECONDS, _RUN, _TOLD, _READY, _ORDER, _CHECKPOINT = range(11)
_METRICS, _MOST_METRICS = 11, 32
_FACTS_AT = _METRICS + _MOST_METRICS  # in the order of the table
_EDITION_AGAIN = _BYTES // 8 - 1
# since, stall_seconds, hang_seconds, failed_seconds, pid, stacks, phase, status, lengths of the five texts
_TEXTS = struct.Struct("<ddddiiBBHHHHH400s400s800s400s400s")
_TEXTS_AT = 512
assert 8 * (_FACTS_AT + len(FACTS)) <= _TEXTS_AT, "rank_facts.FACTS has more lines than a rank's record has room for"
_MOST_TEXT, _MOST_NAMES = 400, 800
# Texts of any length up to these, each behind its length: the newest command, which the agent writes, and the commands
# that the training accepts, which the rank writes.
_LENGTH = struct.Struct("<I")
_ORDER_AT, MOST_ORDER_BYTES = 4096, 4000
_STEERING_AT, MOST_STEERING_BYTES = 8192, 57000


@dataclass(frozen=True)
class RankRecord:
    """What a rank publishes about itself.

    Attributes:
        rank: number of the rank.
        phase: one of PHASES.
        pid: the process that mpiexec has started as this rank, as seen where it runs.
        first_step: the first step that the rank began; 1, unless it resumed from a checkpoint. 0: it began none.
        facts: its published facts of rank_facts.FACTS, by name, without those that are 0.
        metrics: the last value of each metric, by name; includes "loss" and "samples/s" of the last step.
        calls: number of calls begun, counting calls that all ranks make.
        moved: how often data has arrived or left.
        status: WORKS, WAITS, BUSY or ENDED.
        words: what the rank waits in, or is busy with.
        since: when that began, by time.monotonic() of its host.
        stall_seconds, hang_seconds: see mpitrain.config.Config.
        stacks: its process's descriptor of what it writes at STACK_SIGNAL; -1: it does not.
        failed_seconds: when it failed, by time.monotonic() of its host.
        error: that it failed with, in a line.
        lost: the ranks without which it continues.
        left_step: the step after which it has ended, for another attempt to continue from there on other hosts; 0: it
            has not.
        left_seconds: when that was, by time.monotonic() of its host.
        run: the number of the run, of a Trainer or a loop with mt.keep, that copies its state to memory; 0: none does.
        told_to_end: whether SIGTERM has told it to end, and it waits for what the launcher says.
        is_ready: it has made everything that it needs, and waits for the earlier ranks to leave.
        record_folder: where it writes the record of the run, as an absolute path; "": it writes none.
        steering: the commands that its training accepts, and the outcomes of the newest ones, as JSON
            (training/steering.py); "": it trains without a Trainer.
        has_checkpoint: it has taken a checkpoint, in memory or on disk, or resumed from one.
    """

    rank: int
    phase: str = STARTED
    pid: int = 0
    first_step: int = 0
    facts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    calls: int = 0
    moved: int = 0
    status: int = WORKS
    words: str = ""
    since: float = 0.0
    stall_seconds: float = 30.0  # until init() sets it: a cold start takes long
    hang_seconds: float = 0.0
    stacks: int = -1
    failed_seconds: float = 0.0
    error: str = ""
    lost: Sequence[int] = ()
    left_step: int = 0
    left_seconds: float = 0.0
    run: int = 0
    told_to_end: bool = False
    is_ready: bool = False
    record_folder: str = ""
    steering: str = ""
    has_checkpoint: bool = False

    @property
    def step(self) -> int:
        """The last step that the rank began; 0: it began none."""
        return int(self.facts.get("step", 0))

    @property
    def paused(self) -> str:
        """Who paused its training, when, and after which step; "": it is not paused."""
        return str(read_steering(self.steering).get("paused", ""))


def read_steering(text: str) -> dict[str, Any]:
    """Parse the text that a rank has published; {} if it is incomplete."""
    try:
        return message_of(text)
    except ValueError:
        return {}


class Page:
    """The page of this process. Writing a number costs 0.1 us, `write` about 7 us.

    Attributes:
        descriptor: for readers of the page.
    """

    def __init__(self, rank: int) -> None:
        self.descriptor = os.memfd_create(f"{NAME}{rank}")
        os.ftruncate(self.descriptor, _BYTES)
        self._memory = mmap.mmap(self.descriptor, _BYTES)
        self._numbers = memoryview(self._memory).cast("Q")
        self._reals = memoryview(self._memory).cast("d")
        self._places: dict[str, int] = {}  # the place of each metric
        self._facts: dict[str, tuple[memoryview[Any], int]] = {
            fact.name: (self._numbers if fact.kind is int else self._reals, place)
            for place, fact in enumerate(FACTS, _FACTS_AT)
        }

    def write(self, record: RankRecord, status: int, words: str, since: float) -> None:
        """Write everything except the numbers that have their own methods; the last three arguments replace the
        record's fields."""
        doing, error = words.encode(errors="replace")[:_MOST_TEXT], record.error.encode(errors="replace")[:_MOST_TEXT]
        names = "\n".join(self._places).encode(errors="replace")
        edition = self._numbers[_EDITION] + 1
        self._numbers[_EDITION] = edition
        times = since, record.stall_seconds, record.hang_seconds, record.failed_seconds
        numbers = record.pid, record.stacks, PHASES.index(record.phase), status
        lost = "".join(f"{rank}," for rank in record.lost).encode()[:_MOST_TEXT].rpartition(b",")[0]
        folder = record.record_folder.encode(errors="surrogateescape")
        folder = folder if len(folder) <= _MOST_TEXT else b""  # a part of a path would be another path
        texts = doing, error, names, lost, folder
        _TEXTS.pack_into(self._memory, _TEXTS_AT, *times, *numbers, *map(len, texts), *texts)
        self._numbers[_EDITION_AGAIN] = edition

    def publish(self, name: str, value: float) -> None:
        """Set a fact of rank_facts.FACTS. Raises ValueError for an unknown name, or a value that is not allowed."""
        try:
            words, place = self._facts[name]
            words[place] = value
        except (KeyError, TypeError, ValueError):
            raise ValueError(_why_not(name, value)) from None

    def set_calls(self, calls: int) -> None:
        """Set how many calls have begun that all ranks make."""
        self._numbers[_CALLS] = calls

    def set_moved(self, moved: int) -> None:
        """Set how often data has arrived or left."""
        self._numbers[_MOVED] = moved

    def set_first_step(self, step: int) -> None:
        """Set the first step that the rank begins."""
        self._numbers[_FIRST_STEP] = step

    def set_left(self, step: int, seconds: float) -> None:
        """Note that the rank ends after this step, for another attempt to continue from there."""
        self._reals[_LEFT_SECONDS] = seconds
        self._numbers[_LEFT_STEP] = step

    def set_run(self, run: int) -> None:
        """Set the number of the run that takes in-memory checkpoints."""
        self._numbers[_RUN] = run

    def set_told(self) -> None:
        """Note that SIGTERM has told the rank to end."""
        self._numbers[_TOLD] = 1

    def set_ready(self) -> None:
        """Note that the rank waits for the ranks before it to leave."""
        self._numbers[_READY] = 1

    def set_checkpoint(self) -> None:
        """Note that there is a checkpoint from which another attempt can continue."""
        self._numbers[_CHECKPOINT] = 1

    @property
    def order_number(self) -> int:
        """The number of the newest command that the agent has written; 0: there is none."""
        return self._numbers[_ORDER]

    def order(self) -> dict[str, Any]:
        """The newest command. It stays until the agent knows its outcome. Raises ValueError if it is damaged."""
        return message_of(_text_at(self._memory, _ORDER_AT, MOST_ORDER_BYTES))

    def set_steering(self, text: str) -> None:
        """Set the commands that the training accepts; see RankRecord. Raises ValueError if the text does not fit."""
        data = _framed(text, MOST_STEERING_BYTES)
        edition = self._numbers[_EDITION] + 1
        self._numbers[_EDITION] = edition
        self._memory[_STEERING_AT : _STEERING_AT + len(data)] = data
        self._numbers[_EDITION_AGAIN] = edition

    def set_metrics(self, metrics: Mapping[str, float]) -> bool:
        """Set these metrics. Return whether a name is new, so that `write` must follow. Metrics that do not fit are
        dropped."""
        is_new = False
        for name, value in metrics.items():
            place = self._places.get(name)
            if place is None:
                room = _MOST_NAMES - sum(len(known.encode(errors="replace")) + 1 for known in self._places)
                if len(self._places) == _MOST_METRICS or len(name.encode(errors="replace")) > room or "\n" in name:
                    continue
                place = self._places[name] = len(self._places)
                is_new = True
            self._reals[_METRICS + place] = value
        return is_new


def _why_not(name: str, value: object) -> str:
    kinds = {fact.name: fact.kind for fact in FACTS}
    if name not in kinds:
        return f"a rank has no fact {name!r}; allowed are {', '.join(kinds)}; a new one goes into FACTS (rank_facts.py)"
    allowed = "a whole number from 0 to 2^64 - 1" if kinds[name] is int else "a number"
    return f"the fact {name!r} of a rank is {value!r:.80}; allowed is {allowed}"


def write_order(page: int, order: Mapping[str, Any]) -> None:
    """Write a command into the page with this descriptor: {"number": from 1, and more}. An agent calls this.

    The previous command must have been answered. The number is written last, so a rank never reads half a command.
    Raises ValueError if it does not fit.
    """
    os.pwrite(page, _framed(json.dumps(order), MOST_ORDER_BYTES), _ORDER_AT)
    os.pwrite(page, struct.pack("=Q", order["number"]), 8 * _ORDER)


def _framed(text: str, most: int) -> bytes:
    """A text behind its length, as `_text_at` reads it."""
    data = text.encode()
    if len(data) > most:
        raise ValueError(f"a text of {len(data)} bytes for the record of a rank; at most {most} fit")
    return _LENGTH.pack(len(data)) + data


def _text_at(data: Any, place: int, most: int) -> str:
    (length,) = _LENGTH.unpack_from(data, place)
    begin = place + _LENGTH.size
    return bytes(data[begin : begin + min(length, most)]).decode(errors="replace")


def read_record(path: str, rank: int) -> RankRecord | None:
    """Read the record of `rank` at `path`, /proc/PID/fd/N.

    None if there is none, if it belongs to another user, or if the rank was killed in the middle of a write.
    """
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME}{rank} "):  # noqa: PTH115 (Path.readlink is of Python 3.9)
            return None  # another process has the process id now
        with Path(path).open("rb", buffering=0) as page:
            for _ in range(5):
                # The writer sets the first edition, then the text, then the last one; so this reads them in the reverse
                # order. If both are the same, no write was in progress.
                last = os.pread(page.fileno(), 8, 8 * _EDITION_AGAIN)
                data = os.pread(page.fileno(), _BYTES, 0)
                if os.pread(page.fileno(), 8, 8 * _EDITION) == last:
                    break
            else:
                return None
        fields = _TEXTS.unpack_from(data, _TEXTS_AT)
    except (OSError, struct.error, TypeError, IndexError):
        return None
    with suppress(IndexError, TypeError):  # it is not a record of mpitrain
        return _record(rank, data, fields)
    return None


def records_of(pids: Iterable[int]) -> list[RankRecord]:
    """Return the record of each rank among these processes of this host, also of one that they have inherited."""
    found: dict[int, RankRecord] = {}
    for pid in pids:
        for path, what in opened(pid):
            name = what.partition(" ")[0]
            rank = name[len(f"/memfd:{NAME}") :]
            if name.startswith(f"/memfd:{NAME}") and rank.isdigit():
                record = read_record(path, int(rank))
                if record is not None:
                    found[int(rank)] = record
    return [found[rank] for rank in sorted(found)]


def _record(rank: int, data: bytes, fields: Sequence[Any]) -> RankRecord:
    numbers = memoryview(data).cast("Q")
    since, stall_seconds, hang_seconds, failed_seconds, pid, stacks, phase, status, *lengths = fields[:13]
    texts = zip(fields[13:], lengths)  # noqa: B905 (strict is of Python 3.10)
    words, error, names, lost, folder = (text[:length].decode(errors="replace") for text, length in texts)
    reals = memoryview(data).cast("d")
    return RankRecord(
        rank=rank,
        phase=PHASES[phase],
        pid=pid,
        first_step=numbers[_FIRST_STEP],
        facts={
            fact.name: value
            for place, fact in enumerate(FACTS, _FACTS_AT)
            if (value := numbers[place] if fact.kind is int else reals[place])
        },
        metrics={name: reals[_METRICS + place] for place, name in enumerate(names.split("\n") if names else ())},
        calls=numbers[_CALLS],
        moved=numbers[_MOVED],
        status=range(ENDED + 1)[status],
        words=words,
        since=since,
        stall_seconds=stall_seconds,
        hang_seconds=hang_seconds,
        stacks=stacks,
        failed_seconds=failed_seconds,
        error=error,
        lost=tuple(rank for rank in (whole(number, 0, 1 << 31) for number in lost.split(",")) if rank is not None),
        left_step=numbers[_LEFT_STEP],
        left_seconds=reals[_LEFT_SECONDS],
        run=numbers[_RUN],
        told_to_end=bool(numbers[_TOLD]),
        is_ready=bool(numbers[_READY]),
        record_folder=folder,
        steering=_text_at(data, _STEERING_AT, MOST_STEERING_BYTES),
        has_checkpoint=bool(numbers[_CHECKPOINT]),
    )
