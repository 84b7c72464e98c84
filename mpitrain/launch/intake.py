"""An elastic job takes in by itself the hosts that answer again, and lets go those that the inventory has lost.

    host is back, or new ─> is it due? ─> does it let us in? ─> Changes.accept ─┬─> it joins, as by `mpitrain scale`
         ^                                                                      └─> it differs: say so once, wait long
         └──────── a longer time, if it does not answer ────────────────────────────────┘

A host that was found bad is first set aside for the time that a restart would wait for it (policy.py). A host that was
found bad too often is not asked again. A thread asks, one round after the other, and only while a change can be made.
A host that has left by a wish is no longer one of the job, so it is not asked.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack

from mpitrain.errors import ConfigError, LaunchError, NotNowError
from mpitrain.launch.changes import Changes
from mpitrain.launch.connections import command_on
from mpitrain.launch.log import say
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.policy import MOST_TIMES_BAD, FailedTry, Limits, aside_until, times_bad
from mpitrain.launch.processes import STARTING, end_with_parent, left_out

# ssh gives up by itself after 10 s without an answer. A frozen host accepts the connection and says no more.
_LOGIN_SECONDS = 20.0
_LOGIN_LOOK_SECONDS = 0.2


def that_let_in(hosts: Iterable[str], stop: threading.Event) -> set[str]:
    """Return those of the hosts on which `true` runs by ssh. Nothing is printed, and `stop` ends the wait.

    Raises:
        OSError: ssh cannot be started here.
    """
    deadline = time.monotonic() + _LOGIN_SECONDS
    asked: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        for host in hosts:
            with STARTING:
                asked[host] = subprocess.Popen(
                    command_on(host, "true"),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
                    # The kernel watches over the thread that forks: this one, which lives as long as the launcher.
                    preexec_fn=end_with_parent(),  # noqa: PLW1509 (no thread holds a lock that it takes)
                )
                stack.enter_context(left_out({asked[host].pid}))
            stack.callback(_end, asked[host])
        while any(process.poll() is None for process in asked.values()) and time.monotonic() < deadline:
            if stop.wait(_LOGIN_LOOK_SECONDS):
                break
        return {host for host, process in asked.items() if process.poll() == 0}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


_LOOK_SECONDS = 1.0
# A host that does not answer is asked again after this time, which doubles each time.
FIRST_SECONDS, MOST_SECONDS = 10.0, 300.0
# A host that answers and differs.
DIFFERENT_SECONDS = 600.0


class Intake:
    """Use this in `with`: inside, hosts are asked.

    Attributes:
        dropped: the hosts that the inventory has lost since the start.
    """

    def __init__(self, changes: Changes, limits: Limits, listed: Callable[[], Sequence[str] | None]) -> None:
        """No host is asked yet.

        Args:
            changes: makes the changes, and knows the hosts that could not take part.
            limits: the most hosts.
            listed: returns the hosts that the inventory of the job has now; None: the job has no inventory. Raises
                ConfigError.
        """
        assert limits.max_nodes is not None
        self.dropped: set[str] = set()
        self._changes, self._listed, self._most = changes, listed, limits.max_nodes
        self._known: set[str] | None = None  # the hosts that the inventory had when it was read last; None: never
        self._new: dict[str, None] = {}  # hosts that the inventory has got since, in order
        self._hosts: Placement | None = None
        self._now_on: Placement | None = None
        self._failures: Sequence[FailedTry] = ()
        self._wait: dict[str, float] = {}  # since the last question without an answer, in seconds
        self._due: dict[str, float] = {}  # when to ask
        self._said: dict[str, str] = {}  # the last difference of each host
        self._given_up: set[str] = set()
        self._fault = ""  # of the inventory
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)

    def __enter__(self) -> Intake:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(2 * _LOOK_SECONDS)  # it may be asking a host, which takes longer

    def begin(self, hosts: Placement, now_on: Placement, failures: Sequence[FailedTry]) -> None:
        """An attempt is about to begin on `now_on`. See Changes.begin; `failures` are those so far."""
        with self._lock:
            if self._hosts is None:
                self._read_inventory()
            else:
                for host in set(self._hosts.hosts) - set(hosts.hosts):  # it has left
                    self._new.pop(host, None)
            for host in now_on.hosts:  # it has been taken in; what it did before does not count
                for kept in (self._wait, self._due, self._said):
                    kept.pop(host, None)
            self._hosts, self._now_on, self._failures = hosts, now_on, tuple(failures)

    def note(self, different: Mapping[str, str], now: float) -> list[str]:
        """Take note that these hosts differ, each with the difference. Return those of which that is news."""
        news = [host for host, difference in different.items() if self._said.get(host) != difference]
        self._said.update(different)
        self._due.update(dict.fromkeys(different, now + DIFFERENT_SECONDS))
        return news

    def look(self, now: float) -> None:
        """Ask the hosts that are due `now`, by time.monotonic(), and let those that answer join. Takes seconds."""
        with self._lock:
            hosts, now_on = self._hosts, self._now_on
        if hosts is None or now_on is None or not self._changes.is_open:
            return
        try:
            self._read_inventory()
            if leave := [host for host in now_on.hosts if host in self.dropped]:
                self._changes.let_go(leave, "not in the inventory any more")
                return
            if len(now_on.hosts) < self._most:
                self._ask(hosts, now_on, now)
        except NotNowError:  # it can in a moment, or the job ends
            return

    def _read_inventory(self) -> None:
        try:
            listed = self._listed()
        except ConfigError as error:
            if self._fault != str(error):
                self._fault = str(error)
                say(f"the hosts of the job stay as they are, because the inventory cannot be read: {error}")
            return
        if listed is None:
            return
        self._fault = ""
        if self._known is None:  # hosts have perhaps left or joined by a wish, to a launcher before; that is no news
            self._known = set(listed)
        self.dropped |= self._known - set(listed)
        self.dropped -= set(listed)
        for host in listed:
            if host not in self._known:
                self._new[host] = None
                self._due.pop(host, None)
        for host in self.dropped:
            self._new.pop(host, None)
        self._known = set(listed)

    def _ask(self, hosts: Placement, now_on: Placement, now: float) -> None:
        """Ask the hosts that are due. Those that answer join, as many as there is room for.

        Raises:
            NotNowError: the hosts of the job cannot change now.
        """
        places = {place.host: place for place in hosts.places}
        names = dict.fromkeys([*places, *self._new])
        out = [host for host in names if host not in now_on.hosts and host not in self.dropped]
        due = self._due_of(out, now)
        if not due:
            return
        inside = that_let_in(due, self._stop)
        self._put_off((host for host in due if host not in inside), now)
        joining = [host for host in due if host in inside][: self._most - len(now_on.hosts)]
        if not joining or self._stop.is_set():
            return
        try:
            change = self._changes.accept({"join": ",".join(_as_text(host, places.get(host)) for host in joining)})
        except NotNowError:
            raise
        except LaunchError as error:
            away = [
                host for host in joining if host in error.hosts
            ]  # one without the shared folder too: it is being set up
            self._put_off(away, now)
            different = {host: text for host, text in error.different.items() if host in joining and host not in away}
            self._refuse(different if different or away else dict.fromkeys(joining, str(error)), now)
        except ConfigError as error:
            self._refuse(dict.fromkeys(joining, str(error)), now)
        else:
            self._put_off(joining, now)  # if the next attempt fails, perhaps because of another host
            answer = f"{', '.join(joining)} answer{'s' * (len(joining) == 1)}"
            say(f"{answer}; {change.text} after the next copy of the state, and then it continues on {change.where}")

    def _refuse(self, different: Mapping[str, str], now: float) -> None:
        for host in self.note(different, now):
            say(f"{host} cannot take part: {different[host]}. It is asked again in {DIFFERENT_SECONDS / 60:g} minutes")

    def _due_of(self, out: Iterable[str], now: float) -> list[str]:
        """Return those of the hosts that are to be asked now. Say once which ones are not asked any more."""
        due = []
        for host in out:
            times = times_bad(host, self._failures, self._changes.bad)
            if len(times) >= MOST_TIMES_BAD:
                if host not in self._given_up:
                    self._given_up.add(host)
                    why = f"was found bad {len(times)} times"
                    say(f"{host} {why}, and is not taken in again by itself; `mpitrain scale JOB +HOST` lets it in")
            elif now >= max(self._due.get(host, 0.0), aside_until(times) if times else 0.0):
                due.append(host)
        return due

    def _put_off(self, hosts: Iterable[str], now: float) -> None:
        """These hosts do not answer: ask them later, each time after a longer time."""
        for host in hosts:
            self._wait[host] = min(2 * self._wait.get(host, FIRST_SECONDS / 2), MOST_SECONDS)
            self._due[host] = now + self._wait[host]

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            try:
                self.look(time.monotonic())
            except Exception as error:  # nobody looks at a thread's error, and the job can train without it
                say(f"no host is taken in by itself any more: {error!r}")
                return


def _as_text(host: str, place: Place | None) -> str:
    """Write a host as in --hosts."""
    return ",".join(f"{host}/{device}" for device in place.devices) if place and place.devices else host
