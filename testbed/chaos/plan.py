"""The faults of a job and their times: a function of the seed alone. Each victim is chosen when its fault is due."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mpitrain.errors import ConfigError

Choice = TypeVar("Choice")

KINDS = ("rank", "freeze", "link", "host", "disk")


@dataclass(frozen=True)
class Fault:
    """A planned fault.

    Attributes:
        number: 1 for the first one.
        seconds: when, after the start.
        kind: one of KINDS.
        pick: a number from 0 to below 1, which chooses the victim from those that can be hit.
        is_of_host: of a freeze: it stops all processes of the job on a host, not one rank.
    """

    number: int
    seconds: float
    kind: str
    pick: float
    is_of_host: bool

    def victim(self, ranks: Mapping[int, str], apart: str, folders: Sequence[str]) -> tuple[int | None, str]:
        """Return the rank (None: not one rank alone) and the host that the fault hits.

        Args:
            ranks: the host of each rank that can be hit now.
            apart: the host of the launcher, which keeps its cable and its power.
            folders: the hosts whose disk can be filled.

        Raises:
            LookupError: nothing can be hit; the text says why.
        """
        if not ranks:
            raise LookupError("no rank is between its start and its end")
        if self.kind == "rank" or (self.kind == "freeze" and not self.is_of_host):
            rank = self._of(sorted(ranks))
            return rank, ranks[rank]
        hosts = sorted(set(ranks.values()))
        if self.kind == "disk":
            hosts = sorted(folders)
        elif self.kind != "freeze":
            hosts = [host for host in hosts if host != apart]
        if not hosts:
            raise LookupError(f"all ranks are on {apart}, where the launcher is")
        return None, self._of(hosts)

    def _of(self, choices: Sequence[Choice]) -> Choice:
        return choices[int(self.pick * len(choices))]


def plan(kinds: Sequence[str], every_seconds: float, seed: int) -> Iterator[Fault]:
    """Yield faults for ever: in each round every kind once, in an order of its own, each at a random moment.

    Two faults are at least half of `every_seconds` apart. A fault that is due before the job has gone on waits.
    """
    chance = random.Random(seed)
    number = 0
    while True:
        for kind in chance.sample(list(kinds), len(kinds)):
            number += 1
            seconds = every_seconds * (number + chance.uniform(-0.25, 0.25))
            yield Fault(number, seconds, kind, chance.random(), chance.random() < 0.5)


def parse_kinds(text: str) -> tuple[str, ...]:
    """Return the kinds of faults in a text such as "rank,freeze".

    Raises:
        ConfigError: a kind is unknown, or appears twice.
    """
    kinds = tuple(text.split(","))
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"--faults {text}: there is no fault {kind!r}; known: {', '.join(KINDS)}")
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"--faults {text}: name each kind once")
    return kinds
