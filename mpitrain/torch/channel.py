"""The channel of one process group: its world, the calls in flight, and how they end."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy

from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.algorithm import Progress
from mpitrain.errors import ConfigError, MismatchError, MpitrainError, ProcessGroupError, everywhere
from mpitrain.torch.last_small_calls import LastSmallCalls
from mpitrain.torch.peers import Peers
from mpitrain.torch.waited_calls import WaitedCalls
from mpitrain.torch.work import Call
from mpitrain.waiting.agreement import Agreement
from mpitrain.waiting.background import Begun
from mpitrain.waiting.control import until

if TYPE_CHECKING:
    from mpitrain.torch.engine import Engine
    from mpitrain.world.world import World

# In each group, the first calls, this many, begin with a comparison of what the ranks are about to do.
COMPARED_CALLS = 100
# Later calls are compared in batches of this many. A call that waits for long is compared by itself.
COMPARED_AT_ONCE = 50
_MOST_TEXT = 300
_FEW_NUMBERS = 64  # as many as a metric has; a call with more may exchange gradients or parameters
WORD_TAG = -1  # the tag of the messages of monitored barriers; send and recv use tags of 0 and above
# For how long get_future drives a call. With 0.02, four ranks on two cores took a fifth longer.
_HERE_SECONDS = 0.3


class Channel:
    """The channel of one group. Collective calls run one after the other, in the order begun; sends and receives run
    beside them.

    Attributes:
        num_large_calls: how many calls with more than a few numbers this rank has begun, in all groups.
    """

    num_large_calls: ClassVar[int] = 0

    def __init__(self, engine: Engine, world: World, name: str, timeout_seconds: float) -> None:
        """`world` is the group's own. Collective over its ranks.

        Raises:
            ConfigError: the reduction of the World is exact. Raised on every rank.
        """
        if world.config.reduction == "exact":
            raise everywhere(
                ConfigError(
                    "reduction=exact: the calls of torch.distributed add up as the algorithm does; use "
                    "reduction=plain, or train with mpitrain.torch.prepare or mt.Trainer, whose means are "
                    "exact"
                )
            )
        self.engine = engine
        self.world = world
        self.name = name
        self.timeout_seconds = timeout_seconds
        self.sums = ALGORITHMS[world.config.algorithm].make(world)
        self.calls: dict[Call, None] = {}  # in flight, in the order begun
        self.num_calls = 0  # calls of all ranks that were begun
        self.num_monitored = 0  # monitored barriers so far; each sends a message to every other rank
        self.words_read: Counter[int] = Counter()  # how many of these messages were received, by rank
        self._last_small = LastSmallCalls()
        self._peers = Peers(world)
        self._queue = world.background
        self._process = os.getpid()
        self._left_to_compare = COMPARED_CALLS
        self._waited = WaitedCalls(world, str(self))
        self._has_refused = False  # refused a call since then: it may be the one that the others are making now
        self._compares_all = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
        self._is_closed = False

    def __str__(self) -> str:
        return f"process group {self.name}"

    def check(self, call: str) -> None:
        """Raise ProcessGroupError if no call can be made."""
        if os.getpid() != self._process:
            raise ProcessGroupError(
                f"{self.world.name()}: {call} in process {os.getpid()}, which was forked from the rank's own "
                f"({self._process}); MPI works only in the process that called init_process_group: pass the data to "
                "that process, and make the call there"
            )
        if self._is_closed:
            raise ProcessGroupError(
                f"{self.world.name()}: {call} in {self}, which has been destroyed; call it before "
                "destroy_process_group, or make a new group"
            )
        if self.world.control.is_broken:
            self.world.control.check()

    def begin(
        self,
        call: Call,
        work: Callable[[], Progress],
        lines: Callable[[], list[str]] | None,
        *,
        is_awaited: bool,
        root: int | None = None,
    ) -> Call:
        """Begin a call of all ranks, or of this rank alone, after all earlier calls.

        Args:
            call: the call.
            work: makes the steps of the call.
            lines: describes what must be equal on all ranks; None: a call of this rank alone.
            is_awaited: the caller will wait for the call at once.
        """
        name = call.name if root is None else f"{call.name} with root {root}"
        agreement = None if lines is None else self._agreement(name, lines)
        self.num_calls += lines is not None
        self._enqueue(call, agreement, work, is_for_all=lines is not None)
        if not is_awaited:
            self._last_small.keep(call)
            self.engine.wake()
        return call

    def refuse(self, call: str, error: Exception) -> None:
        """Refuse a call that this rank cannot make: tell the other ranks, and raise `error`."""
        # Without this rank's name: if all ranks refuse a call, it is the same call.
        reason = str(error).removeprefix(f"{self.world.name()}: {call}: ")
        agreement = self._agreement(call, lambda: [f"refused: {reason}"])
        if agreement is None and self.world.size > 1:
            self.world.control.count_call()  # the others make it
            self._waited.tell(self.world.control.calls)
            self._has_refused = True
        elif agreement is not None:
            told = Call(self, call, (), self.timeout_seconds)
            self._enqueue(told, None, lambda: _tell(agreement))
            self.engine.wake()
        raise error

    def send(self, call: Call, data: numpy.ndarray, to: int, tag: int) -> Call:
        """Begin to send to one rank."""
        self._add(call)
        self._peers.send(call, data, to, tag)
        return self._begun(call)

    def receive(self, call: Call, data: numpy.ndarray, source: int | None, tag: int) -> Call:
        """Begin to receive from one rank, or from any."""
        self._add(call)
        self._peers.receive(call, data, source, tag)
        return self._begun(call)

    def _begun(self, call: Call) -> Call:
        self.look()  # a short message is complete at once
        if not call.is_done:
            self.engine.wake()
        return call

    @property
    def largest_tag(self) -> int:
        """The largest tag of sends and receives."""
        return self._peers.largest_tag

    @property
    def compares(self) -> bool:
        """True if the next call begins with a comparison."""
        is_due = self._left_to_compare > 0 or self._compares_all or self._waited.num_uncompared == COMPARED_AT_ONCE - 1
        return self.world.size > 1 and (is_due or self._has_refused)

    def look(self) -> float | None:
        """Make progress without waiting. Return the seconds that the caller may sleep before the next call."""
        if not self._prepare():
            return None
        nap = self._queue.look()
        if self._peers.is_busy:
            try:
                ended = self._peers.look()
            except Exception as error:
                self.break_off("a send or receive", error)
                return nap
            for call, problem in ended:
                self._end(call, problem)
        return nap

    def judge(self, now: float) -> None:
        """End calls that have timed out, and all calls if a member has left. Called now and then."""
        for call in tuple(self.calls):
            if call.deadline > now or call.is_done:
                continue
            error = ProcessGroupError(
                f"{self.world.name()}: {call} has not ended after {call.seconds:g} s (timeout); do all its ranks make "
                f"this call? {self.engine.who_waits()}. For a longer time, set timeout= of init_process_group or "
                "new_group"
            )
            if self._peers.give_up(call):
                self._end(call, error)
            else:
                self.break_off(str(call), error)
                return
        first = next((call for call in self.calls if self.is_for_all(call) and not call.is_done), None)
        try:
            self._waited.look(self.engine.heard(self.world.control.number), first, now)
        except MpitrainError as error:
            self.break_off(str(first or self), error)
            return
        for call in tuple(self.calls):
            try:
                self.world.control.judge(call, self.others(call), call.number)
            except MpitrainError as error:
                self.break_off(str(call), error)
                return

    def others(self, call: Call) -> Collection[int] | None:
        """Return the peers of a send or receive, as ranks of the group; None for a call of all ranks."""
        return self._peers.others(call)

    def break_off(self, doing: str, error: BaseException) -> None:
        """Give the group up, with messages half transferred. All calls in flight end with `error`.

        The queue stays as it is, because MPI may still write into its memory.
        """
        self.engine.wrecks.add(self)
        self._waited.close(is_broken=True)
        control = self.world.control
        if not control.is_broken:
            try:
                with control.unbroken(doing):
                    raise error
            except type(error):
                pass
        for call in tuple(self.calls):
            self._end(call, error)

    def drive_here(self, call: Call) -> None:
        """Drive the call from this thread for a while, if ranks share the cores on which they compute.

        The caller that gets the future (DistributedDataParallel, in the backward pass) waits for it without driving.
        The engine's thread, which alternates between work and naps, would take more time from the computation
        (measured).
        """
        if self.world.num_nodes == 1 and self.is_for_all(call) and not call.is_done:
            with suppress(MpitrainError):  # the call ends with this error
                self.engine.wait(call, _HERE_SECONDS)

    def is_for_all(self, call: Call) -> bool:
        """True for a call of all ranks, which ends as soon as all have made it. A receive may wait for a later call."""
        return self.others(call) is None

    def abort(self) -> None:
        """End all calls in flight with an error."""
        text = f"{self.world.name()}: {self} was aborted"
        self.break_off("a call", ProcessGroupError(text))
        self._is_closed = True

    def finish(self) -> None:
        """Wait until all calls in flight have ended. Give up receives for which no message has come.

        Raises:
            MpitrainError: a call has failed.
        """
        for call in tuple(self.calls):
            if self._peers.give_up(call):
                text = f"{self.world.name()}: {call} was given up, because the process group has ended"
                self._end(call, ProcessGroupError(text))
            elif not self.world.control.is_broken:
                self.engine.wait(call)
                if call.error is not None:  # and no caller has got it
                    raise call.error

    def close(self) -> None:
        """End as `finish` does, and free the communicators once all ranks of the group have called this."""
        if self._is_closed or os.getpid() != self._process:
            return
        try:
            self.finish()
        finally:
            self._is_closed = True
            self._waited.close(is_broken=self.world.control.is_broken)
        del self.sums  # this also frees the memory that it shares with other ranks
        if not self.world.control.is_broken:  # MPI may still use the communicators of a broken World
            # Keep no reference to this channel, which need not exist until all ranks have closed the group.
            read_words = partial(_read_words, self._peers, self.words_read, self.world.rank)
            self.engine.free(self.world, self.num_monitored, read_words)

    def _agreement(self, call: str, lines: Callable[[], list[str]]) -> Agreement | None:
        if self.world.size == 1:
            return None
        # A barrier costs a round trip anyway, and often stands at the end of an epoch.
        is_due, described = self.compares or call == "barrier", lines()
        if self._left_to_compare > 0 or self._compares_all:
            self._left_to_compare = max(0, self._left_to_compare - 1)
            return self.world.begin_agreement(f"{call} in {self}", described)
        text = f"{call} ({', '.join(described)})"
        if len(text) > _MOST_TEXT:
            text = f"{text[:_MOST_TEXT]}..., checksum {zlib.crc32(text.encode()):08x})"
        self._waited.begun(self.world.control.calls + 1 + is_due, text)
        if not is_due:
            return None
        calls, self._has_refused = self._waited.take(), False
        return self.world.begin_agreement(f"the last {len(calls)} calls in {self}", calls)

    def _prepare(self) -> bool:
        """Put the calls that can run now into the queue, in a subclass. False if the group was given up."""
        return True

    def _enqueue(
        self, call: Call, agreement: Agreement | None, work: Callable[[], Progress], *, is_for_all: bool = True
    ) -> None:
        self._add(call, is_for_all=is_for_all)
        is_ready = None if agreement is None else agreement.test
        Begun(self._queue, self._run(call, [call], is_ready, work), call)

    def _add(self, call: Call, *, is_for_all: bool = False) -> None:
        """Note a call that begins. Calls of all ranks are counted."""
        if is_for_all:
            self.world.control.count_call()
        call.number = self.world.control.calls
        self.calls[call] = None
        Channel.num_large_calls += sum(tensor.numel() for tensor in call.results) > _FEW_NUMBERS
        self.engine.add(self)

    def _run(
        self, doing: object, calls: Sequence[Call], is_ready: Callable[[], bool] | None, work: Callable[[], Progress]
    ) -> Generator[float | None]:
        """Run the work of calls of this rank that end together, once `is_ready()`."""
        try:
            if is_ready is not None and not _have_ended(calls):
                yield from until(is_ready)
            if not _have_ended(calls):  # the failure of another call may have ended these
                yield from work()
        except MpitrainError as error:
            if not error.known_everywhere:
                self.break_off(str(doing), error)
            for call in calls:
                self._end(call, error)
        except Exception as error:
            for call in calls:
                yield from self._waited.ask(call, error)
            if not _have_ended(calls):
                self.break_off(str(doing), error)
        else:
            for call in calls:
                self._end(call, None)

    def _end(self, call: Call, error: BaseException | None) -> None:
        if self.calls.pop(call, call) is call:  # the call has ended already
            return
        if error is None:
            try:
                call.buffers.finish()
            except Exception as problem:  # such as a GPU's
                error = problem
        future = call.end(error)
        if future is not None:
            self.engine.ended.append(future)
            self.engine.wake()


def _have_ended(calls: Sequence[Call]) -> bool:
    return any(call.is_done for call in calls)


def _tell(agreement: Agreement) -> Generator[float | None]:
    """Show the others that this rank has refused a call. A mismatch is not an error here: the caller gets the
    reason."""
    with suppress(MismatchError):
        yield from until(agreement.test)


def _read_words(peers: Peers, words_read: Counter[int], own_rank: int, sent: Sequence[int]) -> None:
    """Receive the messages of monitored barriers that this rank has missed. Rank r has sent it `sent[r]` messages."""
    for rank, count in enumerate(sent):
        if rank != own_rank:
            peers.take_in(rank, WORD_TAG, count - words_read[rank])
