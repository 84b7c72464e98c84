"""The keepers of all hosts of a job (keeper.py), as the launcher sees them, from the first try to the end of the last.

No thread belongs to them: the guards of the try that trains send their beats, from their thread. Ranks find out by
themselves if a keeper is gone.
"""

from __future__ import annotations

import selectors
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpitrain.launch.connections import Connection, connect
from mpitrain.launch.kept import DIES, PREPARES, STAYS
from mpitrain.watching.rank_record import RankRecord

# The modules of the keeper, each after those that it imports.
KEEPER = ("launch.hearing", "launch.kept", "launch.keeper")

# Longer than that of a guard: between two tries, nobody sends beats.
KEEPER_SILENCE_SECONDS = 60.0
# A keeper that does not answer within this time is replaced by a new one, which holds nothing.
_PONG_SECONDS = 3.0
_READY_SECONDS = 10.0
_CLOSE_SECONDS = 3.0


@dataclass(frozen=True)
class Room:
    """What the ranks of a try hold on a host, and what is free there.

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

    Attributes:
        name: of the socket of each keeper, for the ranks.
        of: the id of the job of the try that trains.
        wish: what the ranks of this try are to do (kept.py).
        run: the number of the run of a Trainer whose state all ranks of this try copy; 0: there is none now.
        told: the ranks of this try that SIGTERM has told to end, and when that was heard, by time.monotonic().
        refuses: the ranks that were told to end cannot leave, and so end at once.
        is_ending: this try fails, or a signal to the launcher ends it.
    """

    def __init__(self, own: str, name: str) -> None:
        """`own` is the name of this machine among the hosts. No keeper is started yet."""
        self.name = name
        self.of = ""
        self.wish = STAYS
        self.run = 0
        self.told: dict[int, float] = {}
        self.is_ending = self.refuses = False
        self._own = own
        self._connections: dict[str, Connection] = {}
        self._said: dict[str, list[dict[str, object]]] = {}
        self._sending = threading.Lock()

    def __enter__(self) -> Keepers:
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go(list(self._connections), _CLOSE_SECONDS)

    def begin(self, hosts: Sequence[str], of: str) -> None:
        """Before the try `of`: have a keeper on each of these hosts, and on no others. `settle` waits for them.

        A host that does not take part in a try loses its keeper: what it holds would be older than what the others do.
        """
        self._forget(of)
        self._send({"ping": 1, "wish": STAYS, "of": of})
        self._hear("pong", [host for host in self._connections if host in hosts], _PONG_SECONDS)
        silent = [host for host in self._connections if not any("pong" in one for one in self._said[host])]
        self._let_go([host for host in self._connections if host not in hosts or host in silent], 0.0)
        self.widen(hosts)

    def widen(self, hosts: Sequence[str]) -> None:
        """Have a keeper on each of these hosts, too. `settle` waits for them."""
        for host in hosts:
            if host not in self._connections:
                silence = 0 if host == self._own else KEEPER_SILENCE_SECONDS
                wish = {"keeper": self.name, "silence_seconds": silence}
                connection = connect(host, host == self._own, wish, time.monotonic(), KEEPER)
                with self._sending:
                    self._connections[host] = connection
                self._said[host] = []

    def take_over(self, hosts: Sequence[str], of: str) -> None:
        """The try `of` has begun to train, on these hosts, beside the one before."""
        self._forget(of)
        self._send({"beat": 1, "wish": STAYS, "of": of})
        self._let_go([host for host in self._connections if host not in hosts], 0.0)

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
        """Of the try before, nothing counts any more."""
        self.of, self.wish, self.run, self.told = of, STAYS, 0, {}
        self.is_ending = self.refuses = False

    def settle(self) -> None:
        """Wait until the keepers are ready. Report each one that is not: its host then has no copy in memory."""
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
        """Call this every second, with the newest records of the ranks of this try.

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
        self._send({"beat": 1, "wish": DIES if dies else self.wish, "of": self.of})

    def processes(self) -> set[int]:
        """Return the ids of the processes here that connect to the keepers."""
        return {connection.process.pid for connection in self._connections.values()}

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

    def _let_go(self, hosts: Sequence[str], patience_seconds: float) -> None:
        with self._sending:
            gone = [self._connections.pop(host) for host in hosts]
            for connection in gone:
                connection.hang_up()
        for host in hosts:
            del self._said[host]
        deadline = time.monotonic() + patience_seconds
        for connection in gone:
            connection.close(max(0.0, deadline - time.monotonic()))
