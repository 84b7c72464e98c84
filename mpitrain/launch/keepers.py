"""The keepers of all hosts of a job (keeper.py), as the launcher sees them, from the first attempt to the last.

Their agents lead them (agents.py). The attempt that trains says what ranks do (`beat`). Ranks find out by themselves if
a keeper is gone.

Keepers hold the estate too, as JSON: what a launcher leaves to another one that takes over its job.

    request      the fields of start.Request                python       of the launcher and the ranks
    folder       in which the launcher was started          since        when, by time.time()
    environment  of the ranks, without what is of a login   code         hashes of the script and the code beside it
    from_file    the variables that --env-file gave         launcher     as roster.launcher_name names it
    tries        the ids of the job's attempts so far
    places       hosts, each with its number of ranks and its devices, also those that are set aside
    own          the host of the launcher                   is_here      the job runs on that host alone
    ended        why the launcher has ended the job, and left its state to another one; "": it has not
    waits        for which hosts it waits, and until when, in words; "": it does not wait

A secret in the environment is as safe with a keeper as in a rank: only processes of the same user can read it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.errors import LaunchError, MpitrainError
from mpitrain.facts import python_files
from mpitrain.launch.agents import Agents
from mpitrain.launch.kept import DIES, PREPARES, STAYS
from mpitrain.launch.placement import Placement
from mpitrain.launch.processes import launcher_name
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
        "waits": "",
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


# So long a keeper keeps what it holds after it has lost its launcher.
KEEP_SECONDS = 900.0
_ANSWER_SECONDS = 3.0
_READY_SECONDS = 30.0  # a busy host may be about to start its agent
_HEIR_SECONDS = 45.0  # the same, for a keeper that is taken over; hosts may be busy
_LOOK_SECONDS = 0.005


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
    """Use this in `with`, inside that of the agents: at its end, no keeper is left on a host that can be reached.

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

    def __init__(self, agents: Agents, name: str, estate: Mapping[str, Any] | None = None) -> None:
        """No keeper is started yet."""
        self.name = name
        self.estate = dict(estate or {})
        self.is_heir = False
        self.of = ""
        self.wish = STAYS
        self.run = 0
        self.told: dict[int, float] = {}
        self.is_ending = self.refuses = False
        self._agents = agents
        self._launcher = launcher_name(os.getpid())
        self._hosts: set[str] = set()  # those with a keeper
        self._number = 0  # of the last question
        self._opening: dict[str, int] = {}  # by host: the number of the question whether its keeper is ready
        self._answers: dict[tuple[str, int], dict[str, Any]] = {}  # by host and number
        agents.heard["memory"] = self._take
        agents.connected = self._connected

    def __enter__(self) -> Keepers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.is_heir and (kind is None or issubclass(kind, MpitrainError)):
            self._agents.tell(self._hosts, {"memory": {"leave": 1}})
        elif cut_off := self._agents.cut_off - self._hosts:
            with suppress(LaunchError, OSError):
                self._agents.have(cut_off)
                self._wait(cut_off, self._ask(cut_off, {"drop": self.name}), _ANSWER_SECONDS)
        self._agents.hold(())

    def adopt(self, names: Mapping[str, str], heir: str) -> None:
        """Have the keepers of a launcher that has gone obey this one.

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
            self._agents.have(hosts)
            numbers = [self._ask([host], {"name": names[host], "heir": heir, **self._about()}) for host in hosts]
            self._need(dict(zip(hosts, numbers, strict=True)))
        self._hosts = set(names)
        self._agents.hold(self._hosts)
        self.estate["own"] = self._agents.own
        # The estate that they have names the launcher before.
        number = self._ask(names, {"rename": self.name, "launcher": self._launcher, "estate": self.estate})
        self._need(dict.fromkeys(names, number))

    def _need(self, numbers: Mapping[str, int]) -> None:
        self._wait(numbers, numbers, _HEIR_SECONDS)
        late = {"error": f"no answer within {_HEIR_SECONDS:g} s"}
        answers = {host: self._answers.get((host, number), late) for host, number in numbers.items()}
        if problems := [f"{host}: {answer['error']}" for host, answer in answers.items() if "error" in answer]:
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
        if self.estate:
            self.estate["tries"] = [*self.estate["tries"], of]
        before = self._hosts
        self._agents.tell(before.difference(hosts), {"memory": {"drop": self.name}})
        self._hosts = before.intersection(hosts)
        self._agents.have(hosts)
        self._hosts = set(hosts)
        self._agents.hold(hosts)
        for host in hosts:
            self._open(host, is_new=host not in before)

    def widen(self, hosts: Sequence[str]) -> None:
        """Have a keeper on each of these hosts, too. `settle` waits for them."""
        new = [host for host in hosts if host not in self._hosts]
        self._agents.have(new)
        self._hosts.update(new)
        self._agents.hold(self._hosts)
        for host in new:
            self._open(host, is_new=True)

    def _connected(self, host: str) -> None:
        """There is a new agent on a host. If it is in place of one that was killed, it leads the keeper from now on."""
        if host in self._hosts:
            self._open(host, is_new=False)

    def _open(self, host: str, *, is_new: bool) -> None:
        self._opening[host] = self._ask([host], {"name": self.name, "is_new": is_new, **self._about(), **self._now()})
        self._agents.cut_off.discard(host)  # what is held there is dropped, or in use

    def _about(self) -> dict[str, Any]:
        return {"launcher": self._launcher, "keep_seconds": KEEP_SECONDS}

    def _now(self) -> dict[str, Any]:
        return {"wish": self.wish, "of": self.of, **({"estate": self.estate} if self.estate else {})}

    def wait_for(self, hosts: str) -> None:
        """No attempt runs: the job waits for hosts, in words; "": it does not. Others hear so from the keepers."""
        if self.estate:
            self.estate["waits"] = hosts
            self._tell(self._now())

    def take_over(self, hosts: Sequence[str], of: str) -> None:
        """The try `of` has begun to train, on these hosts, beside the one before."""
        self._forget(of)
        if self.estate:
            self.estate["tries"] = [*self.estate["tries"], of]
        before, self._hosts = self._hosts, set(hosts)
        self._agents.tell(before - self._hosts, {"memory": {"drop": self.name}})
        self._tell(self._now())
        self._agents.hold(hosts)

    def rooms(self) -> Mapping[str, Room]:
        """What the ranks of the present try hold on each host with a keeper that answers."""
        hosts = list(self._hosts)
        number = self._ask(hosts, {"room": 1, "of": self.of})
        answers = self._wait(hosts, number, _ANSWER_SECONDS)
        names = Room.__dataclass_fields__
        return {
            host: Room(**{name: answer[name] for name in names})
            for host, answer in answers.items()
            if "error" not in answer
        }

    def _forget(self, of: str) -> None:
        """Of the attempt before, nothing counts any more."""
        self.of, self.wish, self.run, self.told = of, STAYS, 0, {}
        self.is_ending = self.refuses = False

    def stay(self, why: str) -> list[str]:
        """Have the keepers wait for another launcher, because this one ends the job for a reason in words.

        Return the hosts whose keepers hold something. The others end.
        """
        self.estate["ended"] = why
        hosts = sorted(self._hosts)
        answers = self._wait(hosts, self._ask(hosts, {"estate": self.estate, "stay": 1}), _ANSWER_SECONDS)
        return [host for host in hosts if answers.get(host, {}).get("stays")]

    def settle(self) -> None:
        """Wait until the keepers are ready. Report each one that is not: its host then has no in-memory checkpoint."""
        opening, self._opening = self._opening, {}
        answers = self._wait(opening, opening, _READY_SECONDS)
        for host in opening:
            answer = answers.get(host, {"error": f"no answer within {_READY_SECONDS:g} s"})
            if "error" in answer:
                text = f"{host}: no keeper can be started ({answer['error']}), so this host keeps no copy of the state"
                print(f"mpitrain: {text} in memory", file=sys.stderr, flush=True)

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
        self._tell({"wish": DIES if dies else self.wish, "of": self.of, **({"step": step} if step else {})})

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._agents.tell(list(self._hosts), {"memory": message})

    def _ask(self, hosts: Iterable[str], message: Mapping[str, Any]) -> int:
        """Ask, and return the number of the question."""
        self._number += 1
        self._agents.tell(hosts, {"memory": {**message, "number": self._number}})
        return self._number

    def _take(self, host: str, answer: dict[str, Any]) -> None:
        """Take in an answer. The thread of the agents calls."""
        if answer.get("ready") and host == self._agents.own:
            self._agents.leave_out(answer["ready"])  # it outlives the agent, and is then a child of this process
        self._answers[host, answer.get("number", 0)] = answer

    def _wait(
        self, hosts: Iterable[str], numbers: int | Mapping[str, int], seconds: float
    ) -> dict[str, dict[str, Any]]:
        """Wait for the answers of these hosts. Return those that have come in time."""
        keys = {host: (host, numbers if isinstance(numbers, int) else numbers[host]) for host in hosts}
        deadline = time.monotonic() + seconds
        while any(key not in self._answers for key in keys.values()) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return {host: self._answers[key] for host, key in keys.items() if key in self._answers}
