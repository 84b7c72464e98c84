"""The steps of a rank of each host, as a forecast needs them."""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.shard import largest_part


@dataclass(frozen=True)
class PartTimes:
    """The steps of one rank with the part of a batch that it has among some ranks.

    Attributes:
        num_ranks: among how many.
        samples: of the part.
        seconds: of a step, from the end of the one before; the median.
        ready: seconds after the end of the step before at which each gradient is in its bucket, by index; medians.
        first_quarter, third_quarter: of the seconds of steps.
        num_steps: how many were measured.
    """

    num_ranks: int
    samples: float
    seconds: float
    ready: tuple[float, ...]
    first_quarter: float
    third_quarter: float
    num_steps: int


@dataclass(frozen=True)
class HostTimes:
    """The steps of one rank of a host.

    Attributes:
        host: its name.
        parameters: name and bytes of each gradient, by index.
        parts: by number of ranks, from 1 on.
        is_fixed: each rank takes as many samples, however many there are: the script does not divide its batch.
        memory_bytes: the most that the process had.
        cores: of the machine, for each of its ranks.
        busy_cores: that the steps kept busy, on average.
        sums: seconds of a sum of step_times.SUM_BYTES over all hosts, and processor seconds of a rank in it, by
            algorithm; {}: not measured.
    """

    host: str
    parameters: tuple[tuple[str, int], ...]
    parts: tuple[PartTimes, ...]
    is_fixed: bool
    memory_bytes: int
    cores: float
    busy_cores: float
    sums: dict[str, tuple[float, float]]

    @property
    def whole(self) -> float:
        """Samples of a step of one rank."""
        return self.parts[0].samples

    @property
    def num_bytes(self) -> int:
        """Of all gradients."""
        return sum(number for _, number in self.parameters)

    def part(self, num_ranks: int) -> PartTimes | None:
        """The part among so many ranks: as measured, or between two that were. None: there is none."""
        if self.is_fixed:
            return self.parts[0]
        below = [part for part in self.parts if part.num_ranks <= num_ranks]
        above = [part for part in self.parts if part.num_ranks >= num_ranks]
        if not below or not above:
            return None
        few, many = below[-1], above[0]
        samples = largest_part(self.whole, num_ranks)
        if few.samples == many.samples:
            return few
        share = (samples - few.samples) / (many.samples - few.samples)

        def between(one: float, other: float) -> float:
            return one + share * (other - one)

        return PartTimes(
            num_ranks,
            samples,
            between(few.seconds, many.seconds),
            tuple(between(*times) for times in zip(few.ready, many.ready, strict=True)),
            between(few.first_quarter, many.first_quarter),
            between(few.third_quarter, many.third_quarter),
            min(few.num_steps, many.num_steps),
        )
