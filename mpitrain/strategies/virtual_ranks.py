"""Virtual ranks: the parts of a fixed size into which a global batch is cut, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy

from mpitrain.errors import CheckpointError, ConfigError, everywhere
from mpitrain.exchange.exchange import OTHERS
from mpitrain.shard import part_of
from mpitrain.world import World

# The random numbers of `augment` are drawn from three numbers: see training/data/samples.py.
_NOT_A_SAMPLE = 1
_NOT_A_VIRTUAL_RANK = 2


@dataclass(frozen=True)
class VirtualRanks:
    """How many virtual ranks there are, and the seed of their random numbers."""

    number: int
    seed: int

    def __str__(self) -> str:
        return f"virtual_ranks={self.number} and seed={self.seed}"

    def key(self, step: int, virtual_rank: int) -> tuple[int, int, int, int]:
        """Return what the random numbers of a virtual rank in a step are drawn from, and nothing else."""
        return self.seed, step, virtual_rank, _NOT_A_SAMPLE

    def sample_key(self, epoch: int, batch: int, place: int) -> tuple[int, ...]:
        """The same for reading the sample at this place of a batch, in a loop of one's own."""
        return self.seed, epoch, batch, place, _NOT_A_VIRTUAL_RANK

    def of_rank(self, world: World) -> range:
        """Return the numbers of this rank's virtual ranks."""
        own = part_of(self.number, world.rank, world.size)
        return range(own.start, own.stop)

    def part(self, length: int, of_first: int, virtual_rank: int) -> slice:
        """Return the part of a batch of `length` samples that belongs to a virtual rank.

        `of_first` is the length of the first batch of the epoch. In a smaller batch, the last virtual ranks have fewer
        samples, or none.
        """
        each = -(-max(length, of_first) // self.number)
        return slice(min(virtual_rank * each, length), min((virtual_rank + 1) * each, length))

    def state(self) -> dict[str, int]:
        """Return what a checkpoint must know to go on with the same bits."""
        return asdict(self)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a checkpoint was written with other virtual ranks."""
        for name, own in self.state().items():
            if int(state[name]) != own:
                given = {"number": "virtual_ranks", "seed": "seed"}[name]
                raise CheckpointError(
                    f"the checkpoint was written with {given}={int(state[name])} of mt.Sync, this run has "
                    f"{given}={own}, so it would not have the same bits; take {given}={int(state[name])}, or go on "
                    "without virtual_ranks"
                )


class ComputedPlaces:
    """Where the virtual ranks of a training were computed: processors, libraries and threads, in words."""

    def __init__(self) -> None:
        self._known: list[str] = []

    def state(self) -> list[str]:
        """Return the places so far, for a checkpoint."""
        return list(self._known)

    def restore(self, state: Sequence[str]) -> None:
        """Go on from `state`."""
        self._known = list(state)

    def add(self, world: World, places: Sequence[str]) -> None:
        """Add the places of all ranks of this run. If there are others than before, a line says so."""
        others = [place for place in places if place not in self._known]
        if self._known and others:
            world.print(
                "mpitrain: virtual ranks: this training goes on where kernels may round otherwise, so it may end with "
                f"other bits than without the interruption. It was computed on: {'; '.join(self._known)}. Now it is "
                f"computed on: {'; '.join(others)}. Set OMP_NUM_THREADS as before, and start on hosts of the same kind"
            )
        self._known = sorted({*self._known, *places})


def check_virtual_ranks(
    world: World, virtual: VirtualRanks, *, has_own_exchange: bool = False, call: str = "mt.Sync"
) -> None:
    """Check that these virtual ranks can be computed by the ranks of a World. Collective. `call` is named in errors.

    Raises:
        ConfigError: there are too few of them, or gradients cannot be added up exactly. Raised on every rank.
        MismatchError: the ranks have different ones. Raised on every rank.
    """
    world.agree("make virtual ranks", [f"virtual_ranks={virtual.number!r} seed={virtual.seed!r}"])
    problem = ""
    for name, value, least in (("virtual_ranks", virtual.number, 1), ("seed", virtual.seed, 0)):
        if not isinstance(value, int | numpy.integer) or isinstance(value, bool) or value < least:
            problem = problem or f"{name}={value!r}; it must be an int of at least {least}"
    if not problem and virtual.number < world.size:
        problem = (
            f"virtual_ranks={virtual.number} for {world.size} ranks; each rank computes at least one of them. Start at "
            f"most {virtual.number} ranks, or take more virtual ranks from the beginning of the training"
        )
    elif not problem and world.config.compression not in OTHERS:
        problem = (
            f"virtual_ranks={virtual.number} and compression={world.config.compression}: a codec rounds what each rank "
            "sends, so the sum would depend on the ranks. Leave out one of the two"
        )
    elif not problem and has_own_exchange:
        problem = (
            f"virtual_ranks={virtual.number} and an exchange= of its own; gradients of virtual ranks are added up "
            "exactly. Leave out one of the two"
        )
    if problem:
        raise everywhere(ConfigError(f"{call}: {problem}"))
