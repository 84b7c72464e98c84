"""The engine that drives the calls in flight of all process groups of this process: one thread, or a waiting caller.

A waiting caller drives everything itself, which is fastest. If no caller waits, as in a backward pass, the thread
drives, with naps in between. Without naps it would take a core from the computation.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING

import numpy
import torch

from mpitrain.errors import MpitrainError
from mpitrain.job.start import the_job
from mpitrain.waiting.long_wait import PUBLISH_SECONDS, LongWait, Neighbours
from mpitrain.watching.activity import own_activity

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.torch.channel import Channel
    from mpitrain.torch.waited_calls import Word
    from mpitrain.torch.work import Call, CallFuture
    from mpitrain.world.world import World

    # Receives the messages that are still in flight; its argument is the number that each rank has sent.
    ReadWords = Callable[[Sequence[int]], None]

_NAP_SECONDS = 50e-6  # Linux adds as much again
_SECONDS_BETWEEN_JUDGEMENTS = 0.01


class Engine:
    """The calls in flight in this process.

    Attributes:
        world: the World of the whole job.
        ended: futures of calls that have ended. Complete them when no lock is held.
        wrecks: groups that were given up. MPI may still write into the memory of their calls, so they are kept, even if
            the program does not refer to them any more.
    """

    def __init__(self, world: World) -> None:
        """Collective: every rank makes one."""
        self.world = world
        self.ended: deque[CallFuture] = deque()
        self.wrecks: set[Channel] = set()
        self._busy: dict[Channel, None] = {}  # those with calls in flight
        self._heard: dict[int, list[Word]] = {}
        self._closed: list[tuple[MPI.Request, World, numpy.ndarray, numpy.ndarray, ReadWords]] = []  # see free
        self._wake = threading.Condition()
        self._driving = threading.Lock()  # held by the thread that drives
        self._waiters = 0
        self._judged = 0.0
        self._waited: Call | None = None
        self._since = 0.0
        self._long_wait: LongWait | None = None
        self._is_ending = False
        self._neighbours = _neighbours(world)
        self._process = os.getpid()
        atexit.register(self._finish)  # runs before the rank reports that it has finished: last in, first out
        self._thread = threading.Thread(target=self._run, name="mpitrain torch", daemon=True)
        self._thread.start()

    def heard(self, number: int) -> list[Word]:
        """Return, and forget, what ranks have reported about their calls in the group with this number."""
        return self._heard.pop(number, [])

    def add(self, channel: Channel) -> None:
        """Note that the channel has a call in flight."""
        with self._wake:
            self._busy[channel] = None

    def wake(self) -> None:
        """Wake the thread, because no caller waits for the call."""
        with self._wake:
            self._wake.notify()

    def wait(self, call: Call, seconds: float | None = None) -> None:
        """Drive until the call has ended, or until the seconds are over. torch.profiler sees this wait."""
        is_profiled = torch._C._autograd._profiler_enabled()
        span = torch.profiler.record_function(f"mpitrain:{call.name}") if is_profiled else nullcontext()
        with self._wake:
            self._waiters += 1
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            with span:
                while not (call.is_done or (deadline is not None and time.monotonic() > deadline)):
                    try:
                        call.channel.world.control.wait(
                            self._until(call, deadline), call, call.channel.others(call), call=call.number
                        )
                    except MpitrainError as error:
                        # An error that all ranks know belongs to another call, which raises it. This call continues.
                        if not error.known_everywhere:
                            raise
        except BaseException as error:
            call.channel.break_off(str(call), error)
            raise
        finally:
            with self._wake:
                self._waiters -= 1
                if self._busy and not self._waiters:
                    self._wake.notify()

    def look(self) -> float:
        """Make progress without waiting, unless another thread does. Return the seconds that the caller may sleep."""
        nap = 0.0
        if self._driving.acquire(blocking=False):
            try:
                nap = self._drive()
            finally:
                self._driving.release()
        self._complete()
        return nap

    def free(self, world: World, num_sent: int, read_words: ReadWords) -> None:
        """Free a group's communicators once all its ranks have closed it. Do not wait for this.

        A later communicator that reuses the number in MPI would receive messages that are still in flight. So the ranks
        exchange how many messages they have sent, and receive the rest. A rank that gave the group up never calls this.
        """
        sent, of_all = numpy.array([num_sent]), numpy.empty(world.size, numpy.int64)
        self._closed.append((world.comm.Iallgather(sent, of_all), world, sent, of_all, read_words))
        self.free_closed()

    def free_closed(self) -> None:
        """Free the communicators of the groups that all their ranks have closed by now."""
        for closed in tuple(self._closed):
            everyone, world, _, sent, read_words = closed
            if everyone.Test():
                self._closed.remove(closed)
                read_words(sent.tolist())
                world.free()

    def who_waits(self) -> str:
        """Describe what the ranks of this host are doing."""
        return "; ".join(line.strip() for line in self._neighbours.look()[1] if line[:1] != " ")

    def _until(self, call: Call, deadline: float | None) -> Iterator[float | None]:
        while not call.is_done:
            nap = 0.0
            # Another thread may still drive, or wait for the same.
            if self._driving.acquire(timeout=1e-3):
                try:
                    nap = self._drive()
                finally:
                    self._driving.release()
            if self.ended:
                self._complete()
            if call.is_done or (deadline is not None and time.monotonic() > deadline):
                return
            yield nap

    def _drive(self) -> float:
        nap = 0.0
        for channel in tuple(self._busy):
            nap = max(nap, channel.look() or 0.0)
            if not channel.calls:
                with self._wake:
                    if not channel.calls:
                        self._busy.pop(channel, None)
        now = time.monotonic()
        if now - self._judged > _SECONDS_BETWEEN_JUDGEMENTS:
            self._judged = now
            try:
                self.world.control.notes.look()
                for rank, (number, *word) in self.world.control.notes.heard():
                    self._heard.setdefault(number, []).append((rank, *word))
            except Exception as error:  # MPI's own: a rank is lost, and this World ends with it
                for channel in tuple(self._busy):
                    channel.break_off("a call", error)
                return nap
            for channel in tuple(self._busy):
                channel.judge(now)
        return nap

    def _complete(self) -> None:
        while self.ended:
            try:
                future = self.ended.popleft()
            except IndexError:  # another thread was first
                return
            future.complete()

    def _run(self) -> None:
        while not self._is_ending:
            with self._wake:
                while not (self._is_ending or self.ended or (self._busy and not self._waiters)):
                    self._publish(None)
                    self._wake.wait()
            nap = self.look()
            self._publish(next((call for channel in tuple(self._busy) for call in tuple(channel.calls)), None))
            time.sleep(max(nap, _NAP_SECONDS))

    def _publish(self, call: Call | None) -> None:
        """Publish a long wait of the thread as a wait of this rank, for the reports of other ranks."""
        if self._long_wait is not None and (call is None or call is not self._waited):
            self._long_wait.end()
            self._long_wait = None
        if call is None or not call.channel.is_for_all(call):
            self._waited = None
            return
        now = time.monotonic()
        if call is not self._waited:
            self._waited, self._since = call, now
        elif self._long_wait is not None:
            try:
                self._long_wait.look(now)
            except MpitrainError as error:
                call.channel.break_off(str(call), error)
        elif now - self._since > PUBLISH_SECONDS and (activity := own_activity()):
            self._long_wait = LongWait(activity, self.world.rank, call, self._since)

    def _finish(self) -> None:
        """Before the program ends, wait for the calls that it has begun. Give up receives without a message."""
        from mpi4py import MPI

        if os.getpid() != self._process or MPI.Is_finalized():
            return
        try:
            for channel in tuple(self._busy):
                channel.finish()
        except (KeyboardInterrupt, Exception) as error:
            the_job().end(error)
        self._is_ending = True
        self.wake()
        self._thread.join()


@cache
def engine_of(world: World) -> Engine:
    """Return the engine of this process for a World. Its first call is collective."""
    return Engine(world)


def _neighbours(world: World) -> Neighbours:
    activity = own_activity()
    everywhere: Sequence[tuple[int, int]] = world.allgather((os.getpid(), activity.descriptor if activity else -1))
    here = {rank: at for rank, at in enumerate(everywhere) if world.node_ranks[rank] == world.node_rank and at[1] >= 0}
    return Neighbours(here, world.hosts)
