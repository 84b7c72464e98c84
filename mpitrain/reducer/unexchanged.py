"""The check, at the end, for optimizers that each rank steps with its own gradients, because they are not exchanged.

A forgotten DistributedDataParallel raises no error: each rank trains its own model, and the script saves that of rank
0. So when all have finished, the ranks compare what their optimizers have used, in the notes that they send anyway. A
warning names them. It is not an error, because a script may train separate models on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import NamedTuple

from mpitrain.world.world import World

# The entry of Notes.final that has these numbers. Models have numbers from 1.
NUMBER_IN_FINAL = 0
# The entry of the buffers of prepared models.
BUFFERS_IN_FINAL = 1 << 40
# What is known about an optimizer.
ALL_KNOWN, UNKNOWN, EXCHANGED = range(3)
# Ranks with different processors may clip equal gradients by norms that differ in the last bit of bfloat16.
_NEAR = 2**-8


class UnexchangedSteps(NamedTuple):
    """The steps of one optimizer on one rank.

    Attributes:
        known: EXCHANGED: its parameters were changed between steps, or the program has exchanged arrays about as often.
        kind: a checksum of the shapes of its parameters and of its settings.
        trained: how many numbers it trains.
        steps: their number.
        begin, end: checksums of a sample of its parameters before the first step and at the end of the program.
        used: norm and sum of a sample of the gradients in the steps 1, 2, 4, 8 and so on.
    """

    known: int
    kind: int
    trained: int
    steps: int
    begin: int
    end: int
    used: tuple[tuple[float, float], ...]

    def numbers(self) -> tuple[float, ...]:
        """Return the fields as numbers for a note; see `steps_in`."""
        return *map(float, self[:-1]), float(len(self.used)), *(number for pair in self.used for number in pair)


def steps_in(numbers: Sequence[float]) -> list[UnexchangedSteps]:
    """Read the numbers of a note, by optimizer, in the order of their first steps."""
    optimizers, at = [], 0
    while at < len(numbers):
        known, kind, trained, steps, begin, end, length = (int(number) for number in numbers[at : at + 7])
        at += 7
        used = tuple(zip(numbers[at : at + 2 * length : 2], numbers[at + 1 : at + 2 * length : 2], strict=True))
        at += 2 * length
        optimizers.append(UnexchangedSteps(known, kind, trained, steps, begin, end, used))
    return optimizers


def tell_of_unexchanged(world: World, final: Mapping[int, Mapping[int, tuple[float, ...]]]) -> None:
    """Print a line if ranks began with equal parameters, and stepped with their own gradients until the end.

    Args:
        final: the ranks' notes, by their numbers in the job; see Notes.final. Every rank gives the same.
    """
    members = world.control.members
    of_ranks = {rank: steps_in(final[rank].get(NUMBER_IN_FINAL, ())) for rank in final if rank in members}
    if any(one.known == EXCHANGED for of_rank in of_ranks.values() for one in of_rank):
        return
    for place in range(max(map(len, of_ranks.values()), default=0)):
        same = {rank: of_rank[place] for rank, of_rank in of_ranks.items() if place < len(of_rank)}
        if len(same) > 1 and _are_apart([*same.values()]):
            rank, first = next(iter(same.items()))
            text = (
                f"mpitrain: {len(same)} ranks have each trained a separate model: from equal parameters, an "
                f"optimizer of {first.trained:,} numbers has made {first.steps:,} steps on "
                f"{world.name(members.index(rank))} with gradients that were not averaged. To train one model on all "
                "ranks, wrap it in DistributedDataParallel, or use mpitrain.torch.prepare(); auto_model of "
                "pytorch-ignite wraps it for gloo, nccl and mpi alone. If each rank is to have its own model, "
                "let it begin with different values: torch.manual_seed(rank)"
            )
            _print(world, text)
            return


def say_buffers_at_end(world: World, of_model: Callable[[], Callable[[], tuple[float, float]] | None]) -> None:
    """Make the ranks compare the buffers of a model when all have finished. Every rank calls this for the same models.

    `of_model` returns, while the model exists, a function that tells whether forward passes have changed buffers since
    the last exchange, and a checksum of those that may have changed.
    """
    said = world.control.notes.final.setdefault(BUFFERS_IN_FINAL, _Buffers())
    assert isinstance(said, _Buffers)
    said.append(of_model)


class _Buffers(list[Callable[[], Callable[[], tuple[float, float]] | None]]):
    """The models of this rank, in the order of their prepare()."""

    def __call__(self) -> tuple[float, ...]:
        now = (of_model() for of_model in self)
        return tuple(number for one in now for number in (one() if one is not None else (0.0, 0.0)))


def tell_of_buffers(world: World, final: Mapping[int, Mapping[int, tuple[float, ...]]]) -> None:
    """Print a line if ranks end with buffers of a prepared model that each of them has changed separately. See
    above."""
    members = world.control.members
    of_ranks = [final[rank].get(BUFFERS_IN_FINAL, ()) for rank in final if rank in members]
    for place in range(0, max(map(len, of_ranks), default=0), 2):
        changed = {numbers[place + 1] for numbers in of_ranks if len(numbers) > place and numbers[place]}
        if len(changed) > 1:
            _print(
                world,
                "mpitrain: the buffers of a model that prepare() was given, such as running means, differ between "
                "ranks at the end. Forward passes in training mode came after the last backward pass, outside of a "
                "loop over all prepared data. Call model.eval() before such passes, and go through the data to its end",
            )
            return


def _print(world: World, text: str) -> None:
    with suppress(OSError, ValueError):  # the program has closed its output, or its reader is gone
        world.print(text)


def _are_apart(same: Sequence[UnexchangedSteps]) -> bool:
    first = same[0]
    if any(
        one.known != ALL_KNOWN or one.steps < 2 or (one.kind, one.begin) != (first.kind, first.begin) for one in same
    ):
        return False
    return all(
        one.end != other.end and not any(map(_are_near, one.used, other.used)) for one, other in combinations(same, 2)
    )


def _are_near(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether gradients are equal up to rounding. Non-finite values are not compared."""
    if not all(map(math.isfinite, (*one, *other))):
        return True
    size = max(one[0], other[0])
    return all(
        math.isclose(here, there, rel_tol=_NEAR, abs_tol=_NEAR * size) for here, there in zip(one, other, strict=True)
    )
