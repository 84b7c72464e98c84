"""Checks that the replicas are still equal. Without it, a flipped bit or a rank-dependent step goes unnoticed."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from mpitrain.arrays import Array, is_device_array
from mpitrain.errors import ConfigError, ReplicaError, everywhere
from mpitrain.strategies.strategy import refuse_stages
from mpitrain.training.hooks.hook import Hook

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer
    from mpitrain.world.world import World

_REPAIRS = ("majority", "root")


class CompareReplicas(Hook):
    """Compare a hash of all parameters over the ranks, every `steps` steps and after the last step (monitor.md).

    The comparison takes one pass over the parameters and one agreement of 48 bytes a rank. Parameters on a GPU are
    copied to the CPU first. Every flipped bit is found; with ShardedSync, only one that flips after the step
    (docs/how-to/large-models.md). The optimizer's state is not compared: an error in it becomes an error in the
    parameters with the next step, which ShardedSync spreads to all ranks. The parameters of all ranks must be bitwise
    identical, as with the strategy Sync. With local updates, such as LocalSGD, a comparison that is due comes at the
    end of the round.
    """

    def __init__(self, steps: int = 100, *, repair: str | None = None) -> None:
        """
        Args:
            steps: the number of steps between two comparisons.
            repair: None: a difference is an error. "majority": the ranks that differ get the parameters and the
                optimizer state that most ranks have, or the root's if two kinds are equally frequent. "root": they get
                the root's. Give the same value on all ranks.

        Raises:
            ConfigError: `steps` is below 1, or `repair` has another value.
        """
        if steps < 1:
            raise ConfigError(f"CompareReplicas every {steps} steps: the number must be at least 1")
        if repair is not None and repair not in _REPAIRS:
            raise ConfigError(f"CompareReplicas: repair={repair!r}; allowed: None, {', '.join(map(repr, _REPAIRS))}")
        self._steps = steps
        self._repair = repair
        self._is_due = False

    def before_run(self, trainer: Trainer) -> None:
        """See Hook.

        Raises:
            ConfigError: the ranks have different layers. Raised on every rank.
        """
        refuse_stages(
            trainer.strategy,
            "CompareReplicas compares the parameters of all ranks, but with Pipeline the ranks have different "
            "layers. Leave the hook out, or use one stage",
        )

    def reads_model(self, trainer: Trainer, step: int) -> bool:
        """See Hook."""
        return step % self._steps == 0 or step == trainer.last_step

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook.

        Raises:
            ReplicaError: parameters differ, and `repair` is None. Raised on every rank. The error names the ranks that
                differ, and for each of them the first parameter that differs, with its values.
        """
        self._is_due |= step.number % self._steps == 0 or step.number == trainer.last_step
        self._compare(trainer)

    def after_run(self, trainer: Trainer) -> None:
        """See Hook. Raises as after_step does."""
        self._compare(trainer)

    def state(self) -> dict[str, Any]:
        """See Hook. The state is empty, unless a comparison waits for the end of a round."""
        return {"is_due": True} if self._is_due else {}

    def restore(self, state: dict[str, Any]) -> None:
        """See Hook."""
        self._is_due = bool(state.get("is_due"))

    def _compare(self, trainer: Trainer) -> None:
        if not self._is_due or not trainer.strategy.replicas_are_equal:
            return
        self._is_due, number = False, trainer.step_number
        world, parameters = trainer.world, trainer.adapter.parameters()
        checksums = [checksum(value) for value in parameters.values()]
        options = [f"every {self._steps} steps, repair {self._repair}"]
        records = world.agree("compare the replicas", options, detail=_joined(checksums))
        hashes = records["detail"].tolist()
        if len(set(hashes)) == 1:
            return
        right = right_rank(hashes, by_majority=self._repair != "root")
        differences = _describe(world, parameters, checksums, right)
        same = [rank for rank in range(world.size) if hashes[rank] == hashes[right]]
        reference = f"rank{'s' * (len(same) > 1)} {', '.join(map(str, same))}"
        if self._repair is None:
            raise everywhere(
                ReplicaError(
                    f"after step {number} the parameters are not those of {reference} on: {differences}. Memory "
                    "or a GPU may be faulty there, or the training depends on the rank. Resume from an "
                    "earlier checkpoint, or repair while training: CompareReplicas(repair='majority')"
                )
            )
        trainer.strategy.own_state()  # if the ranks have divided the optimizer, this gathers its state
        trainer.adapter.restore(world.broadcast(trainer.adapter.state(), root=right))
        world.print(
            f"mpitrain: after step {number} the parameters were not those of {reference} on: {differences}. "
            f"Repaired: all ranks have parameters and optimizer state of {world.name(right)}"
        )


def checksum(value: Array) -> int:
    """Return a 32-bit checksum of the bytes of an array on the CPU or a GPU. Any single flipped bit changes it."""
    host = numpy.ascontiguousarray(value.get() if is_device_array(value) else value)
    return zlib.crc32(host.reshape(-1).view(numpy.uint8).data)


def right_rank(hashes: Sequence[int], *, by_majority: bool) -> int:
    """Return the rank whose replica counts as correct: the lowest with the most frequent hash; in a tie, the root."""
    if not by_majority:
        return 0
    (most, count), *others = Counter(hashes).most_common()
    if others and others[0][1] == count:
        return 0
    return hashes.index(most)


def _joined(checksums: Sequence[int]) -> int:
    """Return one signed number of 8 bytes, the form that an agreement carries."""
    content = numpy.array(checksums, "<u4").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def _describe(world: World, parameters: Mapping[str, Array], checksums: Sequence[int], right: int) -> str:
    """Describe each rank that differs: the first parameter that differs, and its values there. Collective."""
    of_all = world.allgather(list(checksums))
    first = [_first_difference(checksums_of_rank, of_all[right]) for checksums_of_rank in of_all]
    names = list(parameters)
    texts: list[str] = []
    for index in sorted({index for index in first if index is not None}):
        value = parameters[names[index]]
        expected = world.broadcast({names[index]: value}, root=right)[names[index]]
        difference = _difference(value, expected) if first[world.rank] == index else ""
        difference_of_rank = world.allgather(difference)
        texts += [
            f"{world.name(rank)}: {names[index]} {difference_of_rank[rank]}"
            for rank in range(world.size)
            if difference_of_rank[rank]
        ]
    return "; ".join(texts)


def _first_difference(checksums: Sequence[int], expected: Sequence[int]) -> int | None:
    return next((index for index, pair in enumerate(zip(checksums, expected, strict=True)) if pair[0] != pair[1]), None)


def _difference(value: Array, expected: Array) -> str:
    """Describe how many elements differ in bits, and the place and values of the first."""
    own, other = (array.get() if is_device_array(array) else array for array in (value, expected))
    unequal = [numpy.ascontiguousarray(array).reshape(-1).view(f"V{array.itemsize}") for array in (own, other)]
    places = numpy.flatnonzero(unequal[0] != unequal[1])
    place = [int(number) for number in numpy.unravel_index(int(places[0]), own.shape)]
    return f"in {len(places)} of {own.size} elements, {place} is {own[*place]} instead of {other[*place]}"
