"""The work queue, which hands out samples to workers, and its consistency modes, which decide on updates.

    order of an epoch  |  used  | unit 7: worker b | used | free | unit 9: held |   not cut yet   |
                       0                                                    cursor

A work unit is some samples for one worker. Every sample is in one of three states: free, at a worker, or answered and
not used yet. A checkpoint keeps the cursor, and all unused samples before it.

There is one class for each mode of a ParameterServer. It knows neither sockets nor clocks. It is told when a worker
joins, asks, answers and leaves, in the order in which the server sees it, and owns all units of its queue.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

# Epoch, begin and end (exclusive) in the order of the epoch.
Places: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class WorkUnit:
    """Some samples for one worker to compute a gradient of.

    Attributes:
        number: of this life of the server. No two units have the same, also not two for the same samples.
        epoch, begin, end: the places of the samples in the order of an epoch; `end` is exclusive.
        worker: the worker that has the unit; None: no worker.
        is_answered: the worker has sent the gradient.
    """

    number: int
    epoch: int
    begin: int
    end: int
    worker: Hashable | None = None
    is_answered: bool = False

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.end - self.begin

    @property
    def places(self) -> Places:
        """Epoch, begin and end."""
        return self.epoch, self.begin, self.end


class WorkQueue:
    """Cuts an endless row of epochs into units. Each sample of an epoch is used once, even if workers fail.

    Returned samples are handed out first. The queue knows neither sockets nor clocks, and does not wait.

    Attributes:
        epoch, cursor: where the row is not cut yet.
    """

    def __init__(self, num_samples: int, epoch: int = 0, cursor: int = 0, left: Iterable[Sequence[int]] = ()) -> None:
        """
        Args:
            num_samples: of an epoch; at least 1.
            epoch, cursor: where to begin.
            left: places before that, which are not used; none of them twice.
        """
        self.epoch, self.cursor = epoch, cursor
        self._num_samples = num_samples
        self._free: list[Places] = _merged((epoch, begin, end) for epoch, begin, end in left)
        self._units: dict[int, WorkUnit] = {}
        self._number = 0

    def cut(self, most: int, passed_over: Container[Places] = ()) -> WorkUnit:
        """Return a new unit of at most `most` samples, which no worker has yet. All its samples are of one epoch.

        It has fewer samples at the end of an epoch, and where fewer in a row have come back. Samples that came back as
        a unit of `passed_over` stay.
        """
        index = next((index for index, places in enumerate(self._free) if places not in passed_over), None)
        if index is not None:
            epoch, begin, last = self._free.pop(index)
            end = min(begin + most, last)
            if end < last:
                self._free.insert(index, (epoch, end, last))
        else:
            if self.cursor == self._num_samples:
                self.epoch, self.cursor = self.epoch + 1, 0
            epoch, begin = self.epoch, self.cursor
            end = self.cursor = min(begin + most, self._num_samples)
        return self._add(epoch, begin, end)

    def split(self, number: int, parts: int) -> list[WorkUnit]:
        """Replace a unit by so many units of about equal size, at least one sample each. Return them in order."""
        unit = self._units.pop(number)
        parts = min(parts, unit.samples)
        bounds = [unit.begin + part * unit.samples // parts for part in range(parts + 1)]
        return [self._add(unit.epoch, begin, end) for begin, end in pairwise(bounds)]

    def assign(self, number: int, worker: Hashable) -> WorkUnit:
        """Give a unit to a worker."""
        self._units[number] = unit = replace(self._units[number], worker=worker)
        return unit

    def find(self, number: int, worker: Hashable) -> WorkUnit | None:
        """Return a unit that a worker has not answered. None: it does not have it, or has answered it."""
        unit = self._units.get(number)
        return None if unit is None or unit.worker != worker or unit.is_answered else unit

    def answer(self, number: int, worker: Hashable) -> WorkUnit | None:
        """Note that a worker has sent its gradient. None as for `find`."""
        unit = self.find(number, worker)
        if unit is not None:
            self._units[number] = unit = replace(unit, is_answered=True)
        return unit

    def renew(self, number: int) -> WorkUnit:
        """Take a unit away from its worker. Return one for the same samples, which no worker has."""
        return self._add(*self._units.pop(number).places)

    def give_back(self, number: int) -> None:
        """Make the samples of a unit available again, before others."""
        insort(self._free, self._units.pop(number).places)

    def use(self, number: int) -> None:
        """Note that an update was made from the gradient of a unit."""
        del self._units[number]

    def at(self, worker: Hashable) -> list[WorkUnit]:
        """Return the units that a worker has and has not answered."""
        return [unit for unit in self._units.values() if unit.worker == worker and not unit.is_answered]

    def out(self) -> dict[Hashable, WorkUnit]:
        """Return the units that are not answered, by the workers that have them. A worker has one at most."""
        return {unit.worker: unit for unit in self._units.values() if unit.worker is not None and not unit.is_answered}

    def position(self) -> dict[str, Any]:
        """Return where to continue if all units are lost: epoch, cursor, and `left`, the places before that to be used.

        Where no unit is out of order, the position is that of one process that has used the same samples.
        """
        left = _merged([*self._free, *(unit.places for unit in self._units.values())])
        epoch, cursor = self.epoch, self.cursor
        while left and left[-1][::2] == (epoch, cursor):
            epoch, cursor, _ = left.pop()
            if cursor == 0 and epoch > 0:
                epoch, cursor = epoch - 1, self._num_samples
        return {"epoch": epoch, "cursor": cursor, "left": [list(places) for places in left]}

    def has(self, number: int) -> bool:
        """Whether there is a unit of this number that is not used yet."""
        return number in self._units

    @property
    def live(self) -> tuple[int, list[list[int]]]:
        """The newest number; and the numbers of units that are not used yet, in rows from a first one to a last one."""
        rows: list[list[int]] = []
        for number in sorted(self._units):
            if rows and rows[-1][1] == number - 1:
                rows[-1][1] = number
            else:
                rows.append([number, number])
        return self._number, rows

    def summary(self) -> dict[str, int]:
        """Return numbers of units and samples. `left`: samples of this epoch and earlier that no worker has."""
        units = self._units.values()
        waiting = sum(end - begin for _, begin, end in self._free)
        waiting += sum(unit.samples for unit in units if unit.worker is None)
        return {
            "epoch": self.epoch,
            "samples": self._num_samples,
            "left": self._num_samples - self.cursor + waiting,
            "out": sum(unit.worker is not None and not unit.is_answered for unit in units),
            "answered": sum(unit.is_answered for unit in units),
        }

    def _add(self, epoch: int, begin: int, end: int) -> WorkUnit:
        self._number += 1
        self._units[self._number] = unit = WorkUnit(self._number, epoch, begin, end)
        return unit


def _merged(places: Iterable[Places]) -> list[Places]:
    """Return the places in order, neighbours as one."""
    merged: list[Places] = []
    for epoch, begin, end in sorted(places):
        if merged and merged[-1][0] == epoch and merged[-1][2] == begin:
            merged[-1] = (epoch, merged[-1][1], end)
        else:
            merged.append((epoch, begin, end))
    return merged


class ConsistencyMode:
    """The rule of a mode. Samples that a worker could not compute go to one that has not tried them, if any."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue
        self._workers: set[Hashable] = set()  # those that are here
        self._failed: dict[Places, set[Hashable]] = {}  # who could not compute which samples

    def join(self, worker: Hashable) -> None:
        """Add a worker. It has no unit yet."""
        self._workers.add(worker)

    def leave(self, worker: Hashable) -> None:
        """Take back the units of a worker that is gone, so that others get them. Received answers stay."""
        self._workers.discard(worker)
        for unit in self._queue.at(worker):
            self._release(unit)

    def refuse(self, unit: WorkUnit) -> None:
        """Take back a unit whose answer cannot be used."""
        self._failed.setdefault(unit.places, set()).add(unit.worker)
        self._release(unit)

    def answer(self, unit: WorkUnit) -> Sequence[WorkUnit] | None:
        """Note that a unit of the queue was answered.

        Return the units whose gradients make an update now, in the order in which they are added up. None: there is no
        update yet.
        """
        self._failed.pop(unit.places, None)
        return [unit]

    def next_unit(self, worker: Hashable) -> WorkUnit | None:
        """Return a unit for a worker that has none. None: the worker waits."""
        raise NotImplementedError

    def _release(self, unit: WorkUnit) -> None:
        """Make the samples of a unit available again."""
        self._queue.give_back(unit.number)

    def _not_for(self, worker: Hashable) -> set[Places]:
        """Return the places that this worker must leave to others."""
        return {places for places, failed in self._failed.items() if worker in failed and self._workers - failed}


class Synchronous(ConsistencyMode):
    """sync: the gradients of one step, all computed with the same parameters, make one update.

    The samples of a step are those of the step that one process would make. They are cut into as many units as there
    are workers when the step begins, or into units of `unit_samples`. Gradients are added up in the order of the
    samples, so the result does not depend on the order in which they arrive. A worker that joins takes part from the
    next step on, or takes a free unit of this one.

    With `backup` = b and n + b workers, n + b units of `batch` / n samples go out, the first n answers make the update,
    and the samples of the others go out again. Where n does not divide the batch, `batch` mod n of the units have one
    sample more, so that no n answers have more samples than the batch. A worker that has answered gets another unit of
    the step only if fewer than n units are at workers or answered. Source: Chen et al., Revisiting Distributed
    Synchronous SGD, arXiv 1604.00981 (2016).
    """

    def __init__(self, queue: WorkQueue, batch: int, unit_samples: int | None, backup: int) -> None:
        super().__init__(queue)
        self._batch, self._unit_samples, self._backup = batch, unit_samples, backup
        self._step: list[WorkUnit] = []  # in the order of the samples; assigned units as they were assigned
        self._needed = 0

    def next_unit(self, worker: Hashable) -> WorkUnit | None:
        """See ConsistencyMode."""
        if not self._step:
            self._begin()
        taken = sum(unit.worker is not None for unit in self._step)
        if taken >= self._needed and any(unit.worker == worker for unit in self._step):
            return None  # it would still be computing an unneeded unit when the next step begins
        not_for = self._not_for(worker)
        for index, unit in enumerate(self._step):
            if unit.worker is None and unit.places not in not_for:
                self._step[index] = self._queue.assign(unit.number, worker)
                return self._step[index]
        return None

    def answer(self, unit: WorkUnit) -> Sequence[WorkUnit] | None:
        """See ConsistencyMode."""
        super().answer(unit)
        self._step[self._place(unit)] = unit
        answered = [unit for unit in self._step if unit.is_answered]
        if len(answered) < self._needed:
            return None
        for unit in self._step:
            if not unit.is_answered:
                self._queue.give_back(unit.number)
        self._step = []
        return answered

    def _begin(self) -> None:
        num_workers = max(1, len(self._workers))
        if self._backup:
            self._needed = min(max(1, num_workers - self._backup), self._batch)
            samples, larger = divmod(self._batch, self._needed)
            for _ in range(min(num_workers, self._needed + self._backup)):
                # The larger units are cut first: a larger one that comes back must not leave a unit of one sample.
                self._step.append(self._queue.cut(samples + (larger > 0)))
                larger -= self._step[-1].samples > samples
            self._step.sort(key=lambda unit: unit.places)
            return
        whole = self._queue.cut(self._batch)
        parts = num_workers if self._unit_samples is None else -(-whole.samples // self._unit_samples)
        self._step = self._queue.split(whole.number, parts)
        self._needed = len(self._step)

    def _release(self, unit: WorkUnit) -> None:
        """See ConsistencyMode. Other workers of the step get it."""
        self._step[self._place(unit)] = self._queue.renew(unit.number)

    def _place(self, unit: WorkUnit) -> int:
        return next(index for index, one in enumerate(self._step) if one.number == unit.number)


class Asynchronous(ConsistencyMode):
    """async: every answer makes an update at once, however old its parameters are."""

    def __init__(self, queue: WorkQueue, unit_samples: int) -> None:
        super().__init__(queue)
        self._unit_samples = unit_samples

    def next_unit(self, worker: Hashable) -> WorkUnit | None:
        """See ConsistencyMode. There is always one."""
        unit = self._queue.cut(self._unit_samples, self._not_for(worker))
        return self._queue.assign(unit.number, worker)


class BoundedStaleness(Asynchronous):
    """bounded: as async, but a worker that is more than `staleness` units ahead of the slowest one waits.

    A worker's clock is the number of its units that have made updates. One that joins begins at the clock of the
    slowest worker, and one that is gone does not delay others. Source: Ho et al., More Effective Distributed ML via a
    Stale Synchronous Parallel Parameter Server, NIPS 2013 (SSP).
    """

    def __init__(self, queue: WorkQueue, unit_samples: int, staleness: int) -> None:
        super().__init__(queue, unit_samples)
        self._staleness = staleness
        self._clocks: dict[Hashable, int] = {}

    def join(self, worker: Hashable) -> None:
        """See ConsistencyMode."""
        super().join(worker)
        self._clocks[worker] = min(self._clocks.values(), default=0)

    def leave(self, worker: Hashable) -> None:
        """See ConsistencyMode."""
        super().leave(worker)
        self._clocks.pop(worker, None)

    def next_unit(self, worker: Hashable) -> WorkUnit | None:
        """See ConsistencyMode."""
        if self._clocks[worker] - min(self._clocks.values()) > self._staleness:
            return None
        return super().next_unit(worker)

    def answer(self, unit: WorkUnit) -> Sequence[WorkUnit] | None:
        """See ConsistencyMode."""
        if unit.worker in self._clocks:
            self._clocks[unit.worker] += 1
        return super().answer(unit)
