"""The launcher's socket for those who watch its job: a look at all ranks, once or as often as they ask.

agents ─> reports ─> one answer for all whose look is due ─> watchers, each as fast as it reads

Who tells the job something (control.py) comes to this socket too. A thread answers each, because an answer may take a
minute.

A thread serves the socket. It never waits for a watcher, and sleeps while there is none. It asks the agents to look
more often, again every second; agents that are not asked any more go back to one look a second.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from mpitrain.errors import LaunchError
from mpitrain.launch.control import VERSION, socket_of
from mpitrain.launch.job_logs import LOGS
from mpitrain.launch.live_jobs import live_folder
from mpitrain.launch.live_picture import is_over
from mpitrain.launch.live_watcher import LiveWatcher
from mpitrain.launch.log import KEPT, Wanted, noted, say
from mpitrain.launch.processes import launcher_name
from mpitrain.launch.record_end import note_failure
from mpitrain.launch.time_limit import EXIT_CODE
from mpitrain.watching.sockets import user_of

_MOST_WATCHERS = 256
_RENEW_SECONDS = 1.0
# The first look of a watcher waits so long for agents that have looked less often.
_FRESH_SECONDS = 0.7
# At the end, watchers have so long to take the last look.
_LAST_SECONDS = 0.3
_PAUSE_SECONDS = 0.2
_END_SECONDS = 5.0
_TRIES = 10
# Of those who tell the job something: how many at once, how long each may take to read its answer, and how long they
# have at the end of the job to hear of it.
_MOST_TELLERS, _TELLER_SECONDS, _LAST_TELLER_SECONDS = 32, 5.0, 1.5


class Watchable(Protocol):
    """An attempt of a job whose ranks can be looked at. Any thread may call."""

    def watch(self, seconds: float) -> None:
        """Look at the ranks every `seconds` from now on, for some seconds."""

    def looked(self) -> float:
        """Return when the last of all hosts that are not silent has said what its ranks do, by time.monotonic()."""

    def picture(self) -> dict[str, Any]:
        """Return the fields of an answer that this attempt has."""


class Live:
    """Use this in `with`: inside, the job of this process can be watched.

    Attributes:
        why: how the job has ended, and of a failure why; "": it has not ended.
        waits_for: returns for which hosts the job waits without an attempt, in words; "": it does not wait.
    """

    def __init__(self, script: str, arguments: Sequence[str], since: float) -> None:
        """Nothing is open yet.

        Args:
            script: the script, as the user named it.
            arguments: of the script.
            since: when the job began, in seconds since the epoch.
        """
        self._about = {"script": script, "arguments": list(arguments), "since": since}
        self._ids: list[str] = []
        self._try: Watchable | None = None
        self._last: dict[str, Any] = {}
        self._record: str | None = None  # the folder of the record of the newest try that has one
        self._ended: dict[str, Any] | None = None
        self.why = ""
        self.waits_for: Callable[[], str] = lambda: ""
        self._watchers: set[LiveWatcher] = set()
        self._tell: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
        self._tellers: list[threading.Thread] = []
        self._asked_at = 0.0  # when the agents were asked to look more often
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._fault = ""
        self._listener: socket.socket | None = None
        self._path = socket_of(launcher_name(os.getpid()))

    def __enter__(self) -> Live:
        """Open the socket. If that fails, print a warning to stderr: the job does not need it."""
        KEPT.clear()
        self._wake, self._woken = socket.socketpair()
        try:
            self._listener = _listen(self._path)
        except (LaunchError, OSError) as error:
            say(f"this job cannot be watched (mpitrain top): {error}")
            say(f"nobody can tell this job anything (mpitrain tell, scale): {error}")
        else:
            self._thread = threading.Thread(target=self._run, name="live", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self.end_by(error)
        self._stop.set()
        self._wake.send(b".")
        try:
            if self._thread is not None:
                self._thread.join(_END_SECONDS)
        finally:  # also after another Ctrl-C
            if self._listener is not None:
                self._path.unlink(missing_ok=True)  # first: the agent here removes one at which nobody listens
        if self._listener is not None:
            self._listener.close()
            with suppress(OSError):  # others are in use
                self._path.parent.rmdir()
        self._wake.close()
        self._woken.close()
        LOGS.close(self._ended or {})

    @contextmanager
    def telling(
        self, tell: Callable[[Mapping[str, Any]], Mapping[str, Any]], close: Callable[[], None]
    ) -> Iterator[None]:
        """Inside, `tell` answers what the job is told, each in a thread. `close` has those that wait answer now."""
        self._tell = tell
        try:
            yield
        finally:
            self._tell = None
            close()
            deadline = time.monotonic() + _LAST_TELLER_SECONDS
            for one in list(self._tellers):
                one.join(max(0.0, deadline - time.monotonic()))

    @contextmanager
    def showing(self, token: str, new: Watchable) -> Iterator[None]:
        """Inside, this attempt of the job is what is to be seen. Its id is `token`."""
        self.begin(token, new)
        try:
            yield
        finally:
            self.end_try()

    def begin(self, token: str, new: Watchable) -> None:
        """An attempt of the job has begun, with this id."""
        self._ids.append(token)
        self._try = new

    def end_try(self) -> None:
        """The try has ended; its agents are about to go."""
        if self._try is not None:
            self._last, self._try = self._try.picture(), None
            self._record = self._last.get("record") or self._record

    def job_with_ranks(self) -> str:
        """Return the id of the attempt that runs; "": the process of a rank is not seen yet."""
        present = self._try
        ranks = present.picture()["ranks"] if present is not None else ()
        return self._ids[-1] if ranks and all(entry["pid"] for entry in ranks) else ""

    def end(self, code: int) -> int:
        """The job has ended with this exit code. Returns the code."""
        how = f"the job has ended with exit code {code}" if code else "the job has ended, and has done its work"
        is_saved = code == EXIT_CODE
        if is_saved:
            how += ": it is saved, and the same command continues from there"
        said = noted()
        self._ended = {"code": code, "text": how}
        self.why = str(said[-1]["text"]) if code and said and not is_saved else how
        if code and not is_saved:
            note_failure(self._record, self._ids, self.why)
        return code

    def end_by(self, error: BaseException | None) -> None:
        """The job has ended by this error, if nothing else has been said of its end."""
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            self.end(error.code)
        elif self._ended is None:
            self.why = f"the job has ended: {str(error) or repr(error)}"
            self._ended = {"code": None, "text": self.why}

    def _run(self) -> None:
        assert self._listener is not None
        with selectors.DefaultSelector() as ways:
            ways.register(self._listener, selectors.EVENT_READ)
            ways.register(self._woken, selectors.EVENT_READ)
            while not self._stop.is_set():
                try:
                    self._serve(ways)
                except Exception as error:  # the job continues whatever a watcher does
                    self._say_once(f"those who watch this job may miss something: {error!r}")
                    self._stop.wait(_PAUSE_SECONDS)
            self._say_end()
            for watcher in self._watchers:
                watcher.close()

    def _serve(self, ways: selectors.BaseSelector) -> None:
        """Do what is due, and wait for what comes next."""
        now = time.monotonic()
        wait_seconds = self._look(now)
        for watcher in self._watchers:
            watcher.judge(now)
            _attend(ways, watcher)
        for watcher in [one for one in self._watchers if one.is_closed]:
            self._watchers.remove(watcher)
            watcher.close()
        for key, events in ways.select(wait_seconds):
            if key.fileobj is self._listener:
                self._accept(ways)
            elif isinstance(key.fileobj, LiveWatcher):
                if events & selectors.EVENT_WRITE:
                    key.fileobj.flush()
                if events & selectors.EVENT_READ:
                    key.fileobj.receive(time.monotonic())
                if key.fileobj.wish is not None:
                    self._hand_over(ways, key.fileobj)

    def _accept(self, ways: selectors.BaseSelector) -> None:
        assert self._listener is not None
        try:
            line, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # such as too many open files: the request stays in the queue
            self._say_once(f"nobody can begin to watch this job now: {error}")
            self._stop.wait(_PAUSE_SECONDS)
            return
        if user_of(line) != os.geteuid():
            line.close()
            return
        now = time.monotonic()
        watcher = LiveWatcher(line, now)
        self._watchers.add(watcher)
        ways.register(watcher, selectors.EVENT_READ)
        if len(self._watchers) > _MOST_WATCHERS:
            watcher.refuse(f"{_MOST_WATCHERS} others watch this job, which is the limit", now)

    def _hand_over(self, ways: selectors.BaseSelector, teller: LiveWatcher) -> None:
        """Have a thread answer; if there are too many, or the job is over, hang up."""
        ways.unregister(teller)
        self._watchers.remove(teller)
        self._tellers = [one for one in self._tellers if one.is_alive()]
        if self._tell is None or len(self._tellers) >= _MOST_TELLERS:
            teller.close()
            return
        thread = threading.Thread(target=_answer, args=(teller, self._tell), name="teller", daemon=True)
        thread.start()
        self._tellers.append(thread)

    def _look(self, now: float) -> float | None:
        """Send the looks that are due. Return for how long nothing is to be done; None: until somebody comes."""
        if not self._watchers:
            return None
        dues = [watcher.due for watcher in self._watchers if watcher.due is not None]
        if not dues:
            return _RENEW_SECONDS
        self._renew(now)
        present = self._try  # the main thread may end it meanwhile
        looked = present.looked() if present is not None else now
        line = b""
        for watcher in self._watchers:
            if watcher.due is None or watcher.due > now:
                continue
            if watcher.output is not None:
                watcher.look(self._output(watcher.output), now)
                continue
            if watcher.asked is not None and looked < watcher.asked and now - watcher.asked < _FRESH_SECONDS:
                continue
            line = line or self._line()
            watcher.look(line, now)
        dues = [watcher.due for watcher in self._watchers if watcher.due is not None]
        next_due = min(dues, default=now + _RENEW_SECONDS)
        return min(_RENEW_SECONDS, next_due - now if next_due > now else 0.02)

    def _renew(self, now: float) -> None:
        """Ask the agents to look as often as the watchers want."""
        is_new = any(watcher.asked is not None and watcher.asked > self._asked_at for watcher in self._watchers)
        present = self._try
        if present is not None and (is_new or now - self._asked_at >= _RENEW_SECONDS):
            self._asked_at = now
            present.watch(min((one.seconds for one in self._watchers if one.seconds), default=_RENEW_SECONDS))

    def _line(self) -> bytes:
        return json.dumps(self.answer(), allow_nan=False).encode() + b"\n"

    def _output(self, wanted: Wanted) -> bytes:
        answer = {"version": VERSION, "at": time.time(), "output": KEPT.find(wanted)}
        return json.dumps(answer).encode() + b"\n"

    def answer(self) -> dict[str, Any]:
        """Return what a look says now, as docs/reference/formats-and-protocols.md describes it."""
        present = self._try
        picture = self._last = present.picture() if present is not None else self._last
        answer = {
            "version": VERSION,
            "at": time.time(),
            "job": self._ids[-1] if self._ids else "",
            "ids": list(self._ids),
            **self._about,
            "state": self._state(picture, is_there=present is not None),
            "tries": len(self._ids),
            "hosts": {},
            "ranks": [],
            "metrics": {},
            "record": None,
            "stall": None,
            "paused": "",
            "printed": False,
            "events": noted(),
            "served": None,
            **picture,
        }
        return answer if self._ended is None else {**answer, "ended": self._ended}

    def _state(self, picture: Mapping[str, Any], *, is_there: bool) -> str:
        ranks = picture.get("ranks", ())
        if self._ended is None and self.waits_for():
            return "waits"
        if self._ended is not None or is_over(ranks):
            return "ends"
        if is_there and any(entry["step"] for entry in ranks):
            return "trains"
        return "restarts" if len(self._ids) > 1 or (self._ids and not is_there) else "starts"

    def _say_end(self) -> None:
        """Send the last look to those who have asked for several. Nobody is waited for long."""
        now = time.monotonic()
        line = self._line()
        for watcher in self._watchers:
            if watcher.seconds is not None and not watcher.is_closed:
                watcher.send(line, now)
        deadline = now + _LAST_SECONDS
        while any(one.has_unsent for one in self._watchers) and time.monotonic() < deadline:
            time.sleep(0.01)
            for watcher in self._watchers:
                watcher.flush()

    def _say_once(self, fault: str) -> None:
        if fault != self._fault:
            self._fault = fault
            say(fault)


def _answer(teller: LiveWatcher, tell: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    with teller.line as line:
        try:
            line.settimeout(_TELLER_SECONDS)
            line.sendall(json.dumps({"version": VERSION, "answer": tell(teller.wish or {})}).encode() + b"\n")
        except Exception as error:  # nobody looks at a thread's error, and the next request may be answered
            say(f"a request of `mpitrain tell` or `scale` could not be answered: {error!r}")


def _attend(ways: selectors.BaseSelector, watcher: LiveWatcher) -> None:
    """Wait for what a watcher can still say, and until it takes more."""
    events = 0
    if not watcher.is_closed:
        events = watcher.hears * selectors.EVENT_READ | watcher.has_unsent * selectors.EVENT_WRITE
    known = ways.get_map().get(watcher)
    if known is not None and known.events != events:
        ways.unregister(watcher)
    if events and (known is None or known.events != events):
        ways.register(watcher, events)


def _listen(path: Path) -> socket.socket:
    """Make the socket; nobody else can come into its folder.

    Raises:
        LaunchError: see live_folder.
        OSError: it cannot be made.
    """
    for tries_left in range(_TRIES, -1, -1):
        live_folder(make=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_MOST_WATCHERS)
            listener.setblocking(False)
            return listener
        except OSError as error:
            listener.close()
            if not (isinstance(error, FileNotFoundError) and tries_left):  # the last job before has removed the folder
                raise
    raise AssertionError("the last attempt returns or raises")
