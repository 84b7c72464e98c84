"""The spares of a job on a host: processes that run the job's script up to init(), and wait there to become ranks.

    mpiexec ── stub ──environment, output, PMI_FD──> holder ──the same──> spare: now the rank
                 ^──────exit code or signal──────── holder <──────end──── spare

A restart is quick with spares, because a rank spends most of its start on imports. mpiexec starts a stub (stub.py) in
place of each rank. The stub lends its place to a spare, or becomes the program itself if no spare is ready. In the
first attempt there are no spares yet: the holder then keeps the environment of the last stub, and starts spares in it.

The holder runs as long as the launcher, over all attempts of the job. Sent to its host as text, like the guard
(agent.py). So it imports only the modules that come with it, and must run with old Pythons. One JSON object a line:

    launcher: {"start": {"program": [word...],     holder: {"said": text for the user}
               "count": so many are to wait}}      holder: {"ready": how many wait now}
    launcher: {"beat": 1}, every second

All spares end with the holder, which ends when its connection closes, and when the launcher has been silent for
`silence_seconds` (0: never). A spare that has become a rank ends with it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mpitrain.context import (
    JOB,
    LAUNCHER,
    OF_MPIEXEC,
    SPARE,
    SPARE_FOLDER,
    SPARE_LINE,
    SPARE_OUTPUT,
    SPARE_ROOM,
)
from mpitrain.launch.hearing import Hearing, send
from mpitrain.launch.processes import Marked, read
from mpitrain.reading import MessageLines
from mpitrain.watching.sockets import accepted, listen, of_this_user, peer, receive_bytes
from mpitrain.watching.sockets import send as send_to

# STARTING: it has not come to init() yet. READY: it waits there. ASKED: it has been given the place of a rank. RANK: it
# has taken that place. REFUSED: it cannot become a rank.
STARTING, READY, ASKED, RANK, REFUSED = range(5)

_ROOM_BYTES = 512
_TAIL_BYTES = 4096
_PR_SET_PDEATHSIG = 1


class Spare:
    """A spare.

    Attributes:
        process: its process.
        line: a socket: it sends "ready", "taken", or why it cannot become a rank.
        state: see above.
        stub: the line to the stub whose place it has; None: it has none.
        asked_at: when it was asked, by time.monotonic().
        is_late: it did not answer in time.
    """

    def __init__(self, program: Sequence[str], place: Sequence[bytes], token: str) -> None:
        """Start it.

        Args:
            program: the command of a rank.
            place: folder, cores and variables of a rank.
            token: marks the spares of this holder.

        Raises:
            OSError, subprocess.SubprocessError: it cannot be started.
        """
        folder, _, *variables = place
        environment = dict(variable.split(b"=", 1) for variable in variables)
        # It must not take itself for a rank before it is one.
        told = tuple(prefix.encode() for prefix in (*OF_MPIEXEC, JOB, LAUNCHER))
        environment = {name: value for name, value in environment.items() if not name.startswith(told)}
        self.line, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.setblocking(False)
        own = {
            SPARE: token,
            SPARE_FOLDER: os.fsdecode(folder),
            SPARE_LINE: f"{far_end.fileno()} {os.getpid()}",
            SPARE_ROOM: "." * _ROOM_BYTES,
            "MPI4PY_RC_INITIALIZE": "0",  # a script's own `from mpi4py import MPI` must not start MPI in a spare
        }
        environment.update((name.encode(), os.fsencode(value)) for name, value in own.items())
        output, self._errors = os.memfd_create(SPARE_OUTPUT), os.memfd_create(SPARE_OUTPUT)
        self.state = STARTING
        self.stub: socket.socket | None = None
        self.asked_at = 0.0
        self.is_late = False
        try:
            self.process = subprocess.Popen(
                program,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=self._errors,
                pass_fds=[far_end.fileno()],
                preexec_fn=_as_spare(),  # noqa: PLW1509 (there are no threads)
            )
        except BaseException:
            self.close()
            raise
        finally:
            far_end.close()
            os.close(output)

    def last_words(self) -> str:
        """Return the last line that it has written to stderr."""
        size = os.fstat(self._errors).st_size
        text = os.pread(self._errors, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")
        return "".join(text.strip().splitlines()[-1:])

    def close(self) -> None:
        """Close all that belongs to it."""
        self.line.close()
        os.close(self._errors)
        if self.stub is not None:
            self.stub.close()


def _as_spare() -> Callable[[], None]:
    """Return what a spare runs before its program: it ends with the holder, and has a session of its own."""
    holder = os.getpid()
    prctl = ctypes.CDLL(None).prctl

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != holder:
            os._exit(1)
        os.setsid()

    return in_child


_ANSWER_SECONDS = 5.0
_END_SECONDS = 5.0
_MOST_BYTES = 1024


class Spares:
    """The spares of this host. Call `look` when `fileno` is readable, and twice a second."""

    def __init__(self, name: str, token: str, tell: Callable[[dict[str, Any]], None]) -> None:
        """Listen for stubs at the abstract socket `name`. `token` marks the spares; `tell` tells the launcher.

        Raises:
            OSError: the name stays taken.
        """
        self._token, self._tell = token, tell
        self._listener = listen(name)
        self._spares: list[Spare] = []
        self._heard: dict[int, Callable[[], None]] = {}  # by descriptor: what to do when it is readable
        self._events = select.epoll()
        self._ended, wake = os.pipe()
        for end in (self._ended, wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._hear(self._listener.fileno(), self._accept)
        self._hear(self._ended, self._wake)
        self._program: list[str] = []
        self._count = 0
        self._place: list[bytes] = []  # folder, cores and variables of the last rank that was started
        self._was_complete = self._has_given_up = False

    def fileno(self) -> int:
        """A descriptor for select: readable when there are events."""
        return self._events.fileno()

    def start(self, program: list[str], count: int) -> None:
        """Have `count` spares of `program` wait from now on."""
        self._program, self._count, self._was_complete = program, count, False

    def look(self) -> None:
        """Take in the events so far, and start a spare if one is missing."""
        for descriptor, _ in self._events.poll(0):
            if descriptor in self._heard:  # an earlier event may have closed it
                self._heard[descriptor]()
        for spare in list(self._spares):
            code = spare.process.poll()
            if code is not None:
                self._end(spare, code)
            elif spare.state == ASKED and time.monotonic() - spare.asked_at > _ANSWER_SECONDS:
                spare.is_late = True
                spare.process.kill()
        self._start_next()

    def close(self) -> None:
        """Kill all spares, with all that they have started."""
        self._listener.close()
        for spare in self._spares:
            spare.process.kill()
        deadline = time.monotonic() + _END_SECONDS
        for spare in self._spares:
            with contextlib.suppress(subprocess.TimeoutExpired):
                spare.process.wait(max(0.0, deadline - time.monotonic()))
        Marked(self._token, SPARE).end(0.0)

    def _hear(self, descriptor: int, act: Callable[[], None]) -> None:
        self._heard[descriptor] = act
        self._events.register(descriptor, select.EPOLLIN)

    def _ignore(self, descriptor: int) -> None:
        if self._heard.pop(descriptor, None) is not None:
            self._events.unregister(descriptor)

    def _start_next(self) -> None:
        """Start spares one after the other, so that they hold up the ranks as little as possible.

        Not with a low priority: MPI waits with all the time of a core, and leaves nothing for them.
        """
        waiting = [spare for spare in self._spares if spare.state in (READY, ASKED)]
        is_starting = any(spare.state == STARTING for spare in self._spares)
        if len(waiting) >= self._count and self._count and not self._was_complete:
            self._was_complete = True
            self._tell({"ready": len(waiting)})
        if len(waiting) >= self._count or is_starting or self._has_given_up or not self._place:
            return
        try:
            spare = Spare(self._program, self._place, self._token)
        except (OSError, subprocess.SubprocessError) as error:
            self._give_up(f"no spare can be started: {error}")
            return
        self._spares.append(spare)
        self._hear(spare.line.fileno(), partial(self._listen_to, spare))

    def _wake(self) -> None:
        os.read(self._ended, _MOST_BYTES)

    def _accept(self) -> None:
        for stub in of_this_user(accepted(self._listener)):
            self._hear(stub.fileno(), partial(self._lend, stub))

    def _lend(self, stub: socket.socket) -> None:
        """Give a spare the place of this stub, or let the stub become the program."""
        self._ignore(stub.fileno())
        self._count = 0  # an attempt starts, which needs the cores; the launcher says when it has
        given: list[int] = []
        with contextlib.suppress(OSError):
            _, given = receive_bytes(stub)
        try:
            if not given:
                stub.close()
                return
            self._place = Path(f"/proc/self/fd/{given[0]}").read_bytes().split(b"\0")
            pid, _, _ = peer(stub)
            state = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
            starter = int(state[1]) if state else 0
            for spare in self._spares:
                if spare.state != READY:
                    continue
                with contextlib.suppress(OSError):  # it has just ended
                    send_to(spare.line, {"stub": pid, "starter": starter}, given)
                    spare.state, spare.stub, spare.asked_at = ASKED, stub, time.monotonic()
                    self._hear(stub.fileno(), partial(self._obey, spare, stub))
                    return
            self._answer(stub, b"program")
            stub.close()
        finally:
            for number in given:
                os.close(number)

    def _listen_to(self, spare: Spare) -> None:
        """Receive what a spare sends: "ready", "taken", or why it cannot become a rank."""
        try:
            said = spare.line.recv(_MOST_BYTES)
        except OSError:
            said = b""
        if said == b"ready" and spare.state == STARTING:
            spare.state = READY
        elif said == b"taken" and spare.state == ASKED:
            spare.state = RANK
            self._answer(spare.stub, b"taken")
        elif said:
            why = f"a spare cannot become a rank: {said.decode(errors='replace')}"
            if spare.state == STARTING:
                self._give_up(why)
            else:
                self._say(why)
            spare.state = REFUSED
            self._answer(spare.stub, b"program")
            spare.process.kill()
        else:  # it has closed the line; its end comes as a signal
            self._ignore(spare.line.fileno())

    def _obey(self, spare: Spare, stub: socket.socket) -> None:
        """Pass on the signal that a stub names. If the stub has gone, the rank must end."""
        try:
            said = stub.recv(_MOST_BYTES)
        except OSError:
            said = b""
        if not said:
            self._ignore(stub.fileno())
            spare.process.kill()
        elif spare.state == RANK and spare.process.poll() is None:
            spare.process.send_signal(int(said))

    def _end(self, spare: Spare, code: int) -> None:
        """A spare has ended."""
        self._spares.remove(spare)
        self._ignore(spare.line.fileno())
        if spare.stub is not None:
            self._ignore(spare.stub.fileno())
        if spare.state == RANK:
            self._answer(spare.stub, b"%d" % code)
        elif spare.state != REFUSED and (spare.stub is None or self._answer(spare.stub, b"program")):
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            where = "before it came to init()" if spare.state == STARTING else "while it waited in init()"
            if spare.is_late:
                how, where = f"did not answer within {_ANSWER_SECONDS:g} s", "and was killed"
            words = spare.last_words()
            self._give_up(f"a spare {how} {where}{': ' * bool(words)}{words}")
        spare.close()

    def _answer(self, stub: socket.socket | None, answer: bytes) -> bool:
        """Answer a stub; False: it has gone."""
        try:
            return stub is not None and stub.send(answer) > 0
        except OSError:
            return False

    def _give_up(self, why: str) -> None:
        """Start no more spares: what happened would happen again."""
        if not self._has_given_up:
            self._has_given_up = True
            self._say(f"{why}. No more spares are started there")

    def _say(self, text: str) -> None:
        self._tell({"said": f"{socket.gethostname()}: {text}"})


def main(wish: dict[str, Any], _probe: str) -> None:
    """Keep the spares until the connection closes, or the launcher is silent for `wish["silence_seconds"]`."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.set_blocking(1, True)
    spares = Spares(wish["socket"], wish["token"], send)
    send({"ready": 0})
    received = MessageLines()
    hearing = Hearing(wish["silence_seconds"])
    try:
        while True:
            ready, _, _ = select.select([0, spares.fileno()], [], [], 0.5)
            spares.look()
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    break
                for message in received.take(data):
                    if "start" in message:
                        spares.start(**message["start"])
            if hearing.is_lost(has_come=0 in ready):
                break
    finally:
        spares.close()
