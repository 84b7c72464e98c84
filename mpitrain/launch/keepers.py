"""The keepers of all hosts of a job (keeper.py), as the launcher sees them, from the first attempt to the last.

No thread belongs to them: the agents of the attempt that trains send their beats, from their thread. Ranks find out by
themselves if a keeper is gone.

Keepers hold the estate too, as JSON: what a launcher leaves to another one that takes over its job.

    request      the fields of start.Request                python       of the launcher and the ranks
    folder       in which the launcher was started          since        when, by time.time()
    environment  of the ranks, without what is of a login   code         hashes of the script and the code beside it
    from_file    the variables that --env-file gave         launcher     as roster.launcher_name names it
    tries        the ids of the job's attempts so far
    places       hosts, each with its number of ranks and its devices, also those that are set aside
    own          the host of the launcher                   is_here      the job runs on that host alone
    ended        why the launcher has ended the job, and left its state to another one; "": it has not

A secret in the environment is as safe with a keeper as in a rank: only processes of the same user can read it.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.errors import LaunchError, MpitrainError
from mpitrain.facts import python_files
from mpitrain.launch.connections import Connection, connect
from mpitrain.launch.kept import DIES, PREPARES, STAYS
from mpitrain.launch.placement import Placement
from mpitrain.launch.processes import left_out
from mpitrain.launch.roster import launcher_name
from mpitrain.launch.variables import is_of_login
from mpitrain.watching.rank_record import RankRecord


def new_estate(request: Mapping[str, Any], script: str, from_file: Mapping[str, str]) -> dict[str, Any]:
    """Return the estate of a job that begins, without its hosts, from the environment of its ranks."""
    fields = {name: str(value) if isinstance(value, Path) else value for name, value in request.items()}
    return {
        "request": fields,
        "folder": str(Path.cwd()),
        "python": sys.executable,
        "since": time.time(),
        "environment": {name: value for name, value in os.environ.items() if not is_of_login(name)},
        "from_file": dict(from_file),
        "code": code_of(script),
        "launcher": launcher_name(os.getpid()),
        "tries": [],
        "ended": "",
    }


def hosts_of(placement: Placement) -> dict[str, Any]:
    """Return the part of an estate that says where a job runs."""
    places = [[place.host, place.num_ranks, list(place.devices)] for place in placement.places]
    return {"places": places, "own": placement.own, "is_here": placement.is_here}


def code_of(script: str) -> dict[str, str]:
    """Return a hash of the script, and of each file of Python beside and below it, by name."""
    path = Path(script).absolute()
    files = python_files(path.parent)
    files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return {name: digest[:16] for name, digest in files.items()}


# The modules of the keeper, each after those that it imports.
KEEPER = ("reading", "watching.sockets", "launch.hearing", "launch.kept", "launch.keeper")

# Longer than that of a guard: between two attempts, nobody sends beats.
KEEPER_SILENCE_SECONDS = 60.0
# So long a keeper keeps what it holds after it has lost its launcher.
KEEP_SECONDS = 900.0
# A keeper that does not answer within this time is replaced by a new one, which holds nothing.
_PONG_SECONDS = 3.0
_READY_SECONDS = 10.0
_HEIR_SECONDS = 45.0  # the same, for a keeper that takes over from another one; hosts may be busy
_CLOSE_SECONDS = 3.0


@dataclass(frozen=True)
class Room:
    """What the ranks of an attempt hold on a host, and what is free there.

    Attributes:
        num_ranks: the ranks that copy their state there.
        held_bytes: their own memory.
        free_bytes: the memory that new processes can get.
        has_gpu: one of them has opened a GPU.
    """

    num_ranks: int
    held_bytes: int
    free_bytes: int
    has_gpu: bool


class Keepers:
    """Use this in `with`: at its end, no keeper is left on a host that can be reached.

    Except for an heir (`adopt`) that has refused to start an attempt: then the keepers wait for the next one.

    Attributes:
        name: of the socket of each keeper, for the ranks.
        estate: what another launcher needs to continue with the job (keepers.py); empty: there can be no other one.
        is_heir: what the keepers hold is of another launcher, and no attempt of this one has run.
        of: the id of the job of the try that trains.
        wish: what the ranks of this attempt are to do (kept.py).
        run: the number of the run, of a Trainer or a loop with mt.keep, whose state all ranks of this attempt copy; 0:
            none now.
        told: the ranks of this attempt that SIGTERM has told to end, and when that was heard, by time.monotonic().
        refuses: the ranks that were told to end cannot leave, and so end at once.
        is_ending: this attempt fails, or a signal to the launcher ends it.
    """

    def __init__(self, own: str, name: str, estate: Mapping[str, Any] | None = None) -> None:
        """`own` is the name of this machine among the hosts. No keeper is started yet."""
        self.name = name
        self.estate = dict(estate or {})
        self.is_heir = False
        self.of = ""
        self.wish = STAYS
        self.run = 0
        self.told: dict[int, float] = {}
        self.is_ending = self.refuses = False
        self._own = own
        self._connections: dict[str, Connection] = {}
        self._parting: list[Connection] = []  # they have been told to end
        self._cut_off: set[str] = set()  # the hosts that have perhaps not heard it
        self._said: dict[str, list[dict[str, object]]] = {}
        self._sending = threading.Lock()
        self._none_of_job = ExitStack()

    def __enter__(self) -> Keepers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        stays = self.is_heir and (kind is None or issubclass(kind, MpitrainError))
        if cut_off := [] if stays else [host for host in self._cut_off if host not in self._connections]:
            self.widen(cut_off)  # a new keeper ends the one that has not heard the goodbye
            self._hear("ready", cut_off, _CLOSE_SECONDS)
        self._let_go(list(self._connections), says_goodbye=not stays)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for connection in self._parting:
            if stays:
                connection.leave()
            else:
                connection.close(max(0.0, deadline - time.monotonic()))
        self._none_of_job.close()

    def adopt(self, names: Mapping[str, str], heir: str) -> None:
        """Start keepers that take over what those of a launcher hold that has gone.

        Args:
            names: of the sockets of those keepers, by host. Who gets the first host gets all.
            heir: names this launcher to another one that wants the same.

        Raises:
            LaunchError: somebody else continues with the job, or a host does not answer. What is held stays where it
                is.
        """
        self.is_heir = True
        first, *others = names
        for hosts in ([first], others):
            for host in hosts:
                self._open(host, {"inherits": names[host], "heir": heir})
            self._need("ready", hosts)
            self._send({"beat": 1})  # the next answers may take almost as long as a keeper bears silence
        self._send({"inherit": 1})
        self._need("inherited", list(names))
        self.estate["own"] = self._own
        self._send({"estate": self.estate})  # the one that they have inherited names the launcher before
        for said in self._said.values():
            said[:] = [{"ready": 1}]

    def _need(self, word: str, hosts: Sequence[str]) -> None:
        self._hear(word, hosts, _HEIR_SECONDS)
        problems = []
        for host in hosts:
            if not any(word in one for one in self._said[host]):
                errors = [str(one["error"]) for one in self._said[host] if "error" in one]
                why = errors[0] if errors else f"no answer within {_HEIR_SECONDS:g} s"
                problems.append(f"{host}: {why}")
        if problems:
            raise LaunchError(
                f"the state of the job cannot be taken over: {'; '.join(problems)}. `mpitrain ps` shows whether it is "
                "still kept; if so, give the command again"
            )

    def note(self, hosts: Placement) -> None:
        """From the next attempt on, these are the hosts of the job, also those that are set aside."""
        if self.estate:
            self.estate.update(hosts_of(hosts))

    def begin(self, hosts: Sequence[str], of: str) -> None:
        """Before the try `of`: have a keeper on each of these hosts, and on no others. `settle` waits for them.

        A host that does not take part in an attempt loses its keeper: what it holds would be older than what the others
        do.
        """
        self._forget(of)
        for said in self._said.values():  # an attempt that was refused has left the answers to its own question
            said[:] = [one for one in said if "pong" not in one]
        self._send({"ping": 1, "wish": STAYS, "of": of, **self._estate_with(of)})
        self._hear("pong", [host for host in self._connections if host in hosts], _PONG_SECONDS)
        silent = [host for host in self._connections if not any("pong" in one for one in self._said[host])]
        self._cut_off |= set(silent) - set(hosts)
        self._let_go([host for host in self._connections if host not in hosts or host in silent])
        self.widen(hosts)

    def widen(self, hosts: Sequence[str]) -> None:
        """Have a keeper on each of these hosts, too. `settle` waits for them."""
        for host in hosts:
            if host not in self._connections:
                self._open(host, {})
                if self.estate:
                    with self._sending:
                        self._connections[host].send({"estate": self.estate})

    def _open(self, host: str, added: Mapping[str, Any]) -> None:
        is_own = host == self._own
        silence = 0 if is_own else KEEPER_SILENCE_SECONDS
        wish = {"keeper": self.name, "silence_seconds": silence, "keep_seconds": KEEP_SECONDS, **added}
        said_to = []
        with suppress(OSError):  # there may be no stderr
            said_to = [os.dup(2)] if is_own else []
        try:
            if said_to:
                wish["stderr"] = said_to[0]
            connection = connect(host, is_own, wish, time.monotonic(), KEEPER, descriptors=said_to)
        finally:
            for descriptor in said_to:
                os.close(descriptor)
        self._none_of_job.enter_context(left_out({connection.process.pid}))  # also if an attempt is running
        with self._sending:
            self._connections[host] = connection
        self._cut_off.discard(host)  # the new keeper ends the one before
        self._said[host] = []

    def _estate_with(self, of: str) -> dict[str, Any]:
        """The estate as it is from the try `of` on, for a message."""
        if not self.estate:
            return {}
        self.estate["tries"] = [*self.estate["tries"], of]
        return {"estate": self.estate}

    def take_over(self, hosts: Sequence[str], of: str) -> None:
        """The try `of` has begun to train, on these hosts, beside the one before."""
        self._forget(of)
        self._send({"beat": 1, "wish": STAYS, "of": of, **self._estate_with(of)})
        self._let_go([host for host in self._connections if host not in hosts])

    def rooms(self) -> Mapping[str, Room]:
        """What the ranks of the present try hold on each host with a keeper that answers."""
        self._send({"room": 1, "of": self.of})
        self._hear("room", list(self._connections), _PONG_SECONDS)
        names = Room.__dataclass_fields__
        rooms = {}
        for host, said in self._said.items():
            for one in (one for one in said if "room" in one):
                rooms[host] = Room(**{name: one[name] for name in names})  # type: ignore[arg-type]
            said[:] = [one for one in said if "room" not in one]
        return rooms

    def _forget(self, of: str) -> None:
        """Of the attempt before, nothing counts any more."""
        self.of, self.wish, self.run, self.told = of, STAYS, 0, {}
        self.is_ending = self.refuses = False

    def stay(self, why: str) -> list[str]:
        """Have the keepers wait for another launcher, because this one ends the job for a reason in words.

        Return the hosts whose keepers hold something. The others end.
        """
        self.estate["ended"] = why
        self._send({"estate": self.estate, "stay": 1})
        self._hear("stays", list(self._connections), _CLOSE_SECONDS)
        held = [host for host, said in self._said.items() if any(one.get("stays") for one in said)]
        with self._sending:
            for host in held:
                connection = self._connections.pop(host)
                connection.hang_up()
                connection.leave()
                del self._said[host]
        return held

    def settle(self) -> None:
        """Wait until the keepers are ready. Report each one that is not: its host then has no in-memory checkpoint."""
        new = [host for host, said in self._said.items() if not said]
        self._hear("ready", new, _READY_SECONDS)
        for host in new:
            if not any("ready" in one for one in self._said[host]):
                errors = [str(one["error"]) for one in self._said[host] if "error" in one]
                why = errors[0] if errors else f"no answer within {_READY_SECONDS:g} s"
                text = f"{host}: no keeper can be started ({why}), so this host keeps no copy of the state in memory"
                print(f"mpitrain: {text}", file=sys.stderr, flush=True)
        for said in self._said.values():
            said[:] = [{"ready": 1}]

    def beat(self, records: Iterable[RankRecord], *, is_ending: bool, has_failed: bool = False) -> None:
        """Call this every second, with the newest records of the ranks of this attempt.

        Args:
            records: the records.
            is_ending: the try is ending, perhaps because its ranks leave.
            has_failed: a rank has failed, or a signal to the launcher ends the job.
        """
        records, now = list(records), time.monotonic()
        runs = {record.run for record in records}
        self.run = runs.pop() if len(runs) == 1 else 0
        self.told = {record.rank: self.told.get(record.rank, now) for record in records if record.told_to_end}
        self.is_ending = is_ending or has_failed
        dies = has_failed or (self.wish in (STAYS, PREPARES) and (is_ending or self.refuses))
        step = max((record.step for record in records), default=0)
        self._send({"beat": 1, "wish": DIES if dies else self.wish, "of": self.of, **({"step": step} if step else {})})

    def _send(self, message: Mapping[str, object]) -> None:
        with self._sending:
            for connection in self._connections.values():
                connection.send(message)

    def _hear(self, word: str, hosts: Sequence[str], seconds: float) -> None:
        """Receive until each of these hosts has sent `word` or an error or has gone, or the time is over."""
        deadline = time.monotonic() + seconds

        def missing() -> list[str]:
            return [
                host
                for host in hosts
                if not self._connections[host].is_closed
                and not any(word in one or "error" in one for one in self._said[host])
            ]

        with selectors.DefaultSelector() as ways:
            for host in hosts:
                output = self._connections[host].process.stdout
                assert output is not None
                ways.register(output, selectors.EVENT_READ, host)
            while missing() and (left := deadline - time.monotonic()) > 0:
                with self._sending:
                    for connection in self._connections.values():
                        connection.flush()
                for key, _ in ways.select(min(left, 0.25)):
                    connection = self._connections[key.data]
                    self._said[key.data] += connection.receive(time.monotonic())
                    if connection.is_closed:
                        ways.unregister(key.fileobj)

    def _let_go(self, hosts: Sequence[str], *, says_goodbye: bool = True) -> None:
        """Have these keepers end. Nobody waits for them before the end of the job."""
        with self._sending:
            gone = [self._connections.pop(host) for host in hosts]
            for connection in gone:
                if says_goodbye:
                    connection.send({"bye": 1})
                connection.hang_up()
        over = [connection for connection in self._parting if connection.process.poll() is not None]
        for connection in over:
            connection.close(0.0)
        self._parting = [connection for connection in self._parting if connection not in over] + gone
        for host in hosts:
            del self._said[host]
