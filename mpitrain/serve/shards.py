"""The further servers of a job, as the first one directs them.

    first server:       pieces, settle ─> update, update, forget, update ... fetch ─>     ... over
    shard:       shard ─>              have (a part of an answer) ...          ─> pieces, state ─> bye

All shards get the same messages in the same order, so they have the same versions. Each has the whole model, and
updates its part. Where hooks read the model, the first server fetches the parts; what hooks change goes back.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy

from mpitrain.adapters.adapter import Adapter, divided_of
from mpitrain.exchange.division import line_of, sizes_of
from mpitrain.serve.attendance import ServerRules
from mpitrain.serve.ledger import ServerTally
from mpitrain.serve.link import Event, ServerLink
from mpitrain.serve.passes import make_secret, pass_of
from mpitrain.serve.pieces import difference_of, pieces_of
from mpitrain.serve.pushes import plain_told
from mpitrain.serve.shard_peers import ShardPeers
from mpitrain.serve.store import divisions_of
from mpitrain.serve.update import ServedUpdate

# What is new, by server: values by name, and names that are gone.
Changes: TypeAlias = Mapping[int, tuple[Mapping[str, Any], Sequence[str]]]

# In one message, whose header has at most wire.MOST_HEADER_BYTES. An answer takes less than 100 of them.
_MOST_ANSWERS = 10_000


class Shards(ShardPeers):
    """Directs the further servers; there may be none."""

    def __init__(
        self,
        link: ServerLink,
        events: deque[Event],
        adapter: Adapter,
        rules: ServerRules,
        tallies: list[ServerTally],
        host: str,
    ) -> None:
        """
        Args:
            events: what comes from others in a wait for shards is added here.
            tallies: of all servers; those of the shards are kept up to date here.
            host: of the first server, with its rank if it has one.
        """
        super().__init__(link, events, rules, tallies, host)
        self._gradients, self._parameters = divisions_of(adapter, len(tallies))
        self._sizes = sizes_of(self._parameters)
        self._secret = make_secret()
        self._adapter = adapter
        self._version = -1  # that was told last
        self._is_fetched = False
        self._fetched: dict[int, dict[str, Any]] = {}  # as they came, to see what is changed here
        if self.num:
            divided_of(adapter).update_only(0, len(tallies), self._norm_of_all)

    def begin(self, version: int, carried: Mapping[numpy.dtype, numpy.ndarray]) -> None:
        """Give all servers the parameters, the optimizer's state, and what is carried. `gather` comes before."""
        if not self.num:
            return
        self._rules.say(line_of(self._parameters, self._all_names()))
        for peer, number in self._peers.items():
            parts = [flat[self._gradients.parts[number][dtype]] for dtype, flat in carried.items()]
            self._link.send(peer, "carry", {"secret": self._secret}, parts)
        self.settle(version, {number: (self._part(number), []) for number in self._peers.values()})

    def parts(self) -> list[dict[str, Any]]:
        """Return what each server has, and what has gone in and out there; [] if there is one."""
        if not self.num:
            return []
        rows = zip(self._all_names(), self._sizes, self._tallies, strict=True)
        return [{"name": name, **asdict(size), **asdict(tally)} for name, size, tally in rows]

    def update(self, known: Mapping[str, Any], update: ServedUpdate, numbers: tuple[int, Sequence[int]]) -> None:
        """Tell all servers of an update.

        Args:
            known: its version, its plan, and its staleness.
            numbers: as for `forget`.
        """
        if not self.num:
            return
        told = [plain_told(answer.push.told) for answer in update.answers if answer.push]
        texts = [json.dumps(one) for one in told]
        # Each of its own, so that the notes of any number of workers are never too long for a message.
        distinct = dict(zip(texts, told, strict=True))
        for one in distinct.values():
            self._tell("told", {"told": one})
        places = {text: place for place, text in enumerate(distinct)}
        used = [
            [answer.ticket, job.number, places[text], share]
            for job, answer, text, share in zip(update.jobs, update.answers, texts, update.shares, strict=True)
        ]
        for begin in range(0, len(used), _MOST_ANSWERS):
            self._tell("answers", {"answers": used[begin : begin + _MOST_ANSWERS]})
        self._tell("update", {**known, **_numbers(*numbers)})
        self._version, self._is_fetched = known["version"], False

    def forget(self, newest: int, live: Sequence[int]) -> None:
        """Let all servers drop the answers to jobs with a number up to `newest`, but for those that are `live`."""
        self._tell("forget", _numbers(newest, live))

    def pass_for(self, ticket: str, number: int) -> dict[str, str]:
        """Return what shows these servers that a worker has a job: its field "pass"."""
        return {"pass": pass_of(self._secret, ticket, number)} if self.num else {}

    def fetch(self) -> None:
        """Bring the parameters and the optimizer's state of all servers into the model of this one.

        Raises:
            LaunchError: a server is gone, or does not answer, or `is_apart`.
        """
        if not self.num or self._version < 0 or self._is_fetched:
            return
        with self.together():
            self._pieces = {number: {} for number in self._peers.values()}
            self._tell("fetch", {})
            self._wait("state", self._peers.values(), "for its part of the model")
            for number, state in self._pieces.items():
                gone = [name for name in self._part(number) if name not in state]
                divided_of(self._adapter).take_part_state(number, state, gone)
            self._fetched, self._is_fetched = self._pieces, True

    def changes(self) -> Changes:
        """Return what has been changed here since `fetch`."""
        differences = {number: difference_of(state, self._part(number)) for number, state in self._fetched.items()}
        self._fetched, self._is_fetched = {}, False
        return {number: (changed, gone) for number, (changed, gone) in differences.items() if changed or gone}

    def settle(self, version: int, changes: Changes) -> None:
        """Give the servers what has been changed here, and tell them the version, unless they know it."""
        if not changes and version == self._version:
            return
        with self.together():
            for peer, number in self._peers.items():
                changed, gone = changes.get(number, ({}, []))
                for fields, arrays in pieces_of(changed):
                    self._link.send(peer, "piece", fields, arrays)
                self._link.send(peer, "settle", {"version": version, "life": self._rules.life, "gone": gone})
            self._version = version

    def end(self, problem: str, seconds: float) -> None:
        """Send the servers home, when no worker needs them any more. The run has ended, so it does not fail here.

        Args:
            problem: for an error of each of them; "": they end with exit code 0.
            seconds: they are waited for so long; 0: without end.
        """
        self._tell("over", {"problem": problem})
        self._try_to_wait("bye", self._peers.values(), "to end", seconds)

    def _norm_of_all(self, norm: float) -> float:
        norms = self._wait("norm", self._peers.values(), "for the norm of its gradients")
        whole = math.hypot(norm, *(float(message.fields["norm"]) for message in norms.values()))
        self._tell("norm", {"norm": whole})
        return whole

    def _all_names(self) -> list[str]:
        return [f"server 0 on {self._host}", *(self._listed([number]) for number in range(1, self.num + 1))]

    def _part(self, number: int) -> dict[str, Any]:
        return divided_of(self._adapter).part_state(number)


def _numbers(newest: int, live: Sequence[int]) -> dict[str, Any]:
    """Return these as fields. The live numbers are in rows, from the first one to the last one."""
    rows: list[list[int]] = []
    for number in sorted(live):
        if rows and rows[-1][1] == number - 1:
            rows[-1][1] = number
        else:
            rows.append([number, number])
    return {"newest": newest, "live": rows}
