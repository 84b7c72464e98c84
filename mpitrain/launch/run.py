"""Runs the ranks of one attempt from start to end, such that no process is left and the exit code is true."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType

from mpitrain.launch import processes
from mpitrain.launch.dialects import JobSpec, command_for, ends_by_sigterm, names_signals
from mpitrain.launch.ending import (
    Ended,
    exit_code,
    first_failure,
    is_consequence,
    kills_first,
    last_words,
    why,
    without_ends_by_hydra,
    words_of_failure,
)
from mpitrain.launch.job_logs import LOGS
from mpitrain.launch.log import note
from mpitrain.launch.printer import Printer
from mpitrain.launch.started_ranks import RawOutput, ranks_of
from mpitrain.launch.watched import WatchedJob

# After a signal the ranks have this long to end by themselves (for example, to close files) before they are killed.
GRACE_SECONDS = 5.0
# After mpiexec has returned, its daemons and the helpers of ranks (from multiprocessing) may need a moment to end.
LINGER_SECONDS = 2.0
# When all processes of the job have ended, all their output has arrived already.
_DRAIN_SECONDS = 10.0
# The same, after the processes were killed.
_DEAD_SECONDS = 10.0

_MOST_READS = 64
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Run:
    """The ranks of an attempt: `to_end` runs them and prints their output. They can be started before, beside others.

    Where the agents start the ranks, they stand for mpiexec in what is said here (started_ranks.py).
    """

    def __init__(self, job: JobSpec, watched: WatchedJob) -> None:
        """Nothing is started yet.

        Args:
            job: what to start.
            watched: the job as seen by the agents of its hosts.
        """
        command = command_for(job, os.environ)
        self._ranks = ranks_of(job, command, watched.attempt)
        self._has_mpiexec = job.mpiexec is not None
        self._starter = "mpiexec" if self._has_mpiexec else "the ranks"
        self._names_signals = names_signals(job.mpiexec)
        self._ends_by_sigterm = ends_by_sigterm(job.mpiexec)
        self._watched, self._attempt = watched, watched.attempt
        self._job, self._places = job.context.job, job.placement.places
        self._is_here, self._own, self._host_of = job.placement.is_here, job.placement.own, job.placement.host_of
        self._trouble: list[str] = []  # why the launcher ended the job
        self._printer = Printer(
            command.tag,
            job.placement.num_ranks,
            job.shows_ranks,
            shows_bar=job.context.columns > 0,
            recovers=bool(job.context.recover),
        )
        self._signals: list[int] = []  # signals to this process
        self._kill_at = float("inf")
        self._linger_until = float("inf")
        self._mpiexec_ended = 0.0  # when its end was seen; 0: not yet
        self._not_ours: set[int] = set()
        self._is_started = self._has_ended = False
        # The output of a job that was started beside another one waits for the end of that one.
        self._held: list[RawOutput] | None = None

    def start(self) -> None:
        """Start them, and hold back their output. `beside` then continues with it, until `to_end` or `give_up`.

        Raises:
            LaunchError: mpiexec cannot be started.
        """
        self._held = []
        self._start()

    def beside(self) -> bool:
        """Take in what has come so far, without a wait. False: the job has ended, or must be ended; call `to_end`."""
        for _ in range(_MOST_READS):
            if not self._read(0.0):
                break
        return self._goes_on()

    def give_up(self) -> None:
        """End the job that `start` has started. Nothing is printed."""
        processes.kill_all(self._alive)
        self._watched.end(0.0)
        self._close()

    def to_end(self, meanwhile: Callable[[], None] = lambda: None) -> Ended:
        """See to the end of the job, print its output, and say how it ended, with the exit code for this process.

        The code is 0 only if mpiexec returned 0, no rank reported a failure or vanished, and no process was left over.
        It is 128 + the signal if a signal ended the job, here or (if mpiexec reports it) in a rank. SIGINT, SIGTERM and
        SIGHUP to this process end the whole job: it passes them on, and after `GRACE_SECONDS` or at a second signal it
        kills all processes. The ranks read nothing from stdin. Call this in the main thread of a process that does
        little else: the process becomes the parent of every orphan below it.

        Args:
            meanwhile: is called some times a second while the job runs.

        Raises:
            LaunchError: mpiexec cannot be started.
            BrokenPipeError: nobody reads the output; all processes have been killed.
        """
        with _handled(self._on_signal, self._is_here):
            try:
                if not self._is_started:
                    self._start()
                self._watched.lead()
                LOGS.begin(self._job, self._places)
                self._release()
                self._watch(meanwhile)
                left = self._end()
                returncode = self._ranks.wait(_DEAD_SECONDS)
            except BaseException:  # such as BrokenPipeError: nobody reads the output any more (`| head`)
                if self._is_started:
                    processes.kill_all(self._alive)
                    self._watched.end(0.0)
                raise
            finally:
                self._close()
        ended = self._ended(returncode, left)
        if ended.code and not self._is_forced:
            for line in self._watched.recorded():
                self._printer.say(line)
        has_reported = self._printer.first_failure.rank is not None and not ended.missing
        # Ranks that an agent ends may say why they end, which is no reason.
        has_said = self._has_mpiexec and self._printer.has_reason and not is_consequence(ended)
        if not has_reported and (words := last_words(ended, self._host_of, has_said=has_said)):
            self._printer.say(words)
        elif ended.code and not (has_reported or self._is_forced or ended.failed):
            self._printer.print_banner()
        elif first_failure(ended):  # which the rank itself has printed
            note(why(ended, self._host_of)[0])
            for line in words_of_failure(ended, self._host_of):
                self._printer.say(line)
        return ended

    def _start(self) -> None:
        processes.adopt_orphans()
        self._not_ours = processes.children()
        self._ranks.start()
        self._is_started = True
        self._watched.begin()

    def _close(self) -> None:
        self._ranks.close()

    def _watch(self, meanwhile: Callable[[], None]) -> None:
        """Loop until everything has ended, or must be ended."""
        nap_seconds = 0.01  # a restart waits for this; a job whose processes linger is looked at less often
        while time.monotonic() < min(self._kill_at, self._linger_until):
            if self._ranks.is_open:
                self._read(timeout_seconds=0.05 if self._printer.is_waiting else 0.2)
            elif not self._has_ended:  # it is about to end
                with suppress(subprocess.TimeoutExpired):
                    self._ranks.wait(0.2)
            else:
                time.sleep(nap_seconds)
                nap_seconds = min(2 * nap_seconds, 0.05)
            self._pass_signals_on()
            if not self._goes_on():
                return
            meanwhile()

    def _goes_on(self) -> bool:
        """False: everything has ended, or must be ended."""
        if self._trouble:
            return False
        self._has_ended = self._ranks.poll() is not None
        if self._has_ended:
            self._mpiexec_ended = self._mpiexec_ended or time.monotonic()
            self._linger_until = min(self._linger_until, time.monotonic() + LINGER_SECONDS)
            return bool(self._alive())
        if not self._signals:
            for line in self._watched.news():
                self._printer.say(line)
            self._trouble = self._watched.trouble()
            self._say_trouble()
        return not self._trouble

    def _release(self) -> None:
        """Print what has been held back."""
        held, self._held = self._held, None
        for piece in held or ():
            self._take(time.monotonic(), piece)

    def _take(self, now: float, piece: RawOutput) -> None:
        if piece.rank is None:
            self._printer.feed(now, piece.stream, piece.data)
        else:
            self._printer.take(now, piece.stream, piece.rank, piece.data)

    def _read(self, timeout_seconds: float) -> bool:
        """Take in output that comes within that time; False: there was none."""
        pieces = self._ranks.read(timeout_seconds)
        now = time.monotonic()
        for piece in pieces:
            if self._held is not None:
                self._held.append(piece)
            else:
                self._take(now, piece)
        self._printer.print_due(now)
        return bool(pieces)

    def _pass_signals_on(self) -> None:
        if self._signals and self._kill_at == float("inf"):
            name = signal.Signals(self._signals[0]).name
            self._printer.say(f"{name}: ending the job; a second signal kills it at once")
            self._attempt.interrupt()
            self._printer.shorten_interrupts()
            self._ranks.send_signal(self._signals[0])
            self._kill_at = time.monotonic() + GRACE_SECONDS
        elif len(self._signals) > 1:
            self._kill_at = 0.0

    def _end(self) -> list[str]:
        """Kill what is left, and print the rest of the output. Return the killed processes, one line each."""
        alive = sorted(self._alive())
        self._attempt.look_without_agent(alive)
        left = [f"{pid} {processes.command_line(pid)}" for pid in alive]
        immortal = processes.kill_all(self._alive)
        beyond = [f"process {pid} could not be killed: {processes.command_line(pid)}" for pid in sorted(immortal)]
        self._ranks.give_up()
        deadline = time.monotonic() + _DRAIN_SECONDS
        while not immortal and self._ranks.is_open:  # an immortal process holds the pipe open
            self._read(timeout_seconds=0.05)
            if time.monotonic() > deadline:
                beyond.append("another process holds the job's output open; the end of the output may be missing")
                break
        there, beyond_there = self._watched.end(0.0 if self._is_forced else LINGER_SECONDS)
        self._read(0.0)  # agents send the rest at last
        left, beyond = left + there, beyond + beyond_there
        if left and not self._is_forced:
            self._printer.say(f"{self._starter} ended before {len(left)} processes of the job, which were killed:")
            for line in left:
                self._printer.say(f"    {line}")
        for line in beyond:
            self._printer.say(line)
        self._printer.close()
        if self._watched.is_gone:
            self._printer.say(f"cannot check that all ranks finished: {self._watched.path} was removed")
        return left

    def _say_trouble(self) -> None:
        for line in self._trouble:
            self._printer.say(line)

    @property
    def _is_forced(self) -> bool:
        """True if the launcher ended the job, so that leftover processes are no surprise."""
        return bool(self._signals or self._trouble)

    def _ended(self, returncode: int, left: list[str]) -> Ended:
        mpiexec_said = self._printer.mpiexec_said.decode(errors="replace")
        first_ends = self._attempt.first_ends()
        if not self._has_mpiexec:
            first_ends = [end for end in first_ends if end.code != -signal.SIGTERM] or first_ends
        elif self._ends_by_sigterm:
            first_ends = kills_first(first_ends, mpiexec_said)
        else:
            first_ends = without_ends_by_hydra(first_ends, self._attempt.records(), mpiexec_said, returncode)
        ended = Ended(
            returncode,
            is_interrupted=bool(self._signals),
            trouble=tuple(self._trouble),
            lost=tuple(self._watched.lost()),
            failed=self._attempt.failed(),
            mpiexec_said=mpiexec_said,
            names_signals=self._names_signals,
            mpiexec_signal=0 if self._is_forced or not self._has_mpiexec else -min(0, returncode),
            ends_others=self._ranks.ends_others,
            mpiexec_host=self._own,
            mpiexec_seconds=self._mpiexec_ended,
            missing=tuple(self._watched.missing()),
            first_ends=tuple(first_ends),
            records=self._attempt.records(),
            left=self._attempt.left(),
            tracebacks=self._attempt.tracebacks(),
            left_early=tuple(self._attempt.left_early()),
        )
        told = self._signals[0] if self._signals else 0
        return replace(ended, code=exit_code(ended, returncode, self._host_of, told=told, has_left=bool(left)))

    def _alive(self) -> set[int]:
        return processes.alive_below(self._not_ours, self._job)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)  # the loop handles it: a signal handler must not print


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None], is_here: bool) -> Iterator[None]:
    # Signals that the parent ignored stay ignored: `nohup mpitrain run ... &` outlives its terminal.
    numbers = [number for number in _END_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    if not is_here:  # a stopped launcher is silent, and the other hosts would end the job
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, lambda *_: None)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
