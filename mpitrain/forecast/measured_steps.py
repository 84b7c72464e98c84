"""The steps of a script as they were measured on each host alone (job/step_times.py): medians, and what is wrong."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.context import LEAST_PLAN_STEPS
from mpitrain.errors import DataError
from mpitrain.forecast.report import shown_seconds
from mpitrain.noise import error_of_median
from mpitrain.reading import parsed
from mpitrain.shown import shown_bytes
from mpitrain.world.shard import largest_part


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

    @property
    def error(self) -> float:
        """The standard error of `seconds`."""
        return error_of_median(self.first_quarter, self.third_quarter, self.num_steps)


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
        front: what trains; see StepWatch.trains and lines_to_add.py. "": a GradientReducer.
        total_steps: of the whole training, if the script limits them; 0: not known.
    """

    host: str
    parameters: tuple[tuple[str, int], ...]
    parts: tuple[PartTimes, ...]
    is_fixed: bool
    memory_bytes: int
    cores: float
    busy_cores: float
    sums: dict[str, tuple[float, float]]
    front: str = ""
    total_steps: int = 0

    @property
    def whole(self) -> float:
        """Samples of a step of one rank."""
        return self.parts[0].samples

    @property
    def num_bytes(self) -> int:
        """Of all gradients."""
        return sum(number for _, number in self.parameters)

    def part(self, num_ranks: int) -> PartTimes | None:
        """The part among this many ranks: as measured, or interpolated between two measured ones. None: there is
        none."""
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


# If the third quartile of the steps' times is this many times the first, they have no typical time.
_WILD = 2.0
_FEW_STEPS = 8  # of fewer, the message has the number


def read_times(path: Path, script: str) -> list[HostTimes]:
    """Read what the ranks have written, by rank.

    Raises:
        DataError: the script has made no steps that can be measured, too few of them, or steps whose times vary widely;
            or it trains differently on another host.
    """
    try:
        text = path.read_text()
    except OSError:
        text = ""
    if not text:
        raise DataError(
            f"{script} never called mpitrain: mpitrain plan measures the steps of Trainer, of mpitrain.torch.prepare "
            "and of GradientReducer, and the script has made none of them"
        )
    hosts = []
    for entry in parsed(lambda: json.loads(text), DataError, f"what {script} has measured", "is damaged"):
        if not entry["parts"] or len(entry["parts"][0]["steps"]) < LEAST_PLAN_STEPS:
            made = entry["num_steps"]
            why = "made no step" if not made else f"ended after {made} step{'s' * (made > 1)}, too few to measure"
            raise DataError(
                f"{script} {why} on {entry['host']}. mpitrain plan measures the steps of Trainer, of "
                "mpitrain.torch.prepare and of GradientReducer, from the fourth one on, and at least "
                f"{LEAST_PLAN_STEPS} of them. Give the script more steps, or use one of these"
            )
        hosts.append(_host(entry))
    for host in hosts:
        if _trained(host) != _trained(hosts[0]):
            raise DataError(
                f"{script} does not train alike on all hosts: {_trained(host)} on {host.host}, and "
                f"{_trained(hosts[0])} on {hosts[0].host}. Plan a script that makes the same steps on each of them"
            )
        if _is_wild(host.parts[0]):
            raise DataError(
                f"the steps of {script} differ too much on {host.host} to plan with them: {_spread(host.parts[0])}. "
                "Plan when the machine does nothing else; if the script itself is so, measure more steps with --steps"
            )
    return hosts


def doubts(hosts: Sequence[HostTimes]) -> list[str]:
    """Lines about parts of batches whose step times vary widely."""
    return [
        f"doubtful from {part.num_ranks} ranks on: on {host.host}, {_spread(part)}"
        for host in hosts
        for part in host.parts
        if _is_wild(part)
    ]


def described(hosts: Sequence[HostTimes]) -> str:
    """One line on what was measured."""
    one = hosts[0]
    part = one.parts[0]
    speeds = ""
    if len(hosts) > 1:
        times = ", ".join(f"{host.host} {shown_seconds(host.parts[0].seconds)}" for host in hosts)
        speeds = f" ({times})"
    steps = "the steps" if part.num_steps >= _FEW_STEPS else f"only {part.num_steps} steps"
    spread = (part.third_quarter - part.first_quarter) / part.seconds
    return (
        f"measured on {one.host}: a step of {part.samples:g} samples takes {shown_seconds(part.seconds)}{speeds}, half "
        f"of {steps} within {spread:.0%}; {one.num_bytes / 4e6:.3g} M parameters, "
        f"{one.busy_cores:.1f} of {one.cores:g} cores busy, {shown_bytes(one.memory_bytes)} of memory"
    )


def _trained(host: HostTimes) -> str:
    batch = "a rank, however many ranks there are" if host.is_fixed else "a step"
    names = [name for name, _ in host.parameters]
    shown = f"{names[0]} to {names[-1]}"
    return f"{len(names)} gradients ({shown}) of {host.num_bytes} bytes, {host.whole:g} samples {batch}"


def _is_wild(part: PartTimes) -> bool:
    return part.third_quarter > _WILD * part.first_quarter


def _spread(part: PartTimes) -> str:
    return (
        f"of {part.num_steps} steps with {part.samples:g} samples, a quarter took less than "
        f"{shown_seconds(part.first_quarter)}, and a quarter more than {shown_seconds(part.third_quarter)}"
    )


def _host(entry: dict[str, Any]) -> HostTimes:
    return HostTimes(
        entry["host"],
        tuple((name, number) for name, number in entry["parameters"]),
        tuple(_part(part) for part in entry["parts"] if len(part["steps"]) >= LEAST_PLAN_STEPS),
        entry["is_fixed"],
        entry["memory_bytes"],
        entry["cores"],
        entry["busy_cores"],
        {name: (seconds, processor) for name, (seconds, processor) in entry["sums"].items()},
        entry["front"],
        entry["total_steps"],
    )


def _part(part: dict[str, Any]) -> PartTimes:
    seconds = [step["seconds"] for step in part["steps"]]
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    ready = zip(*(step["ready"] for step in part["steps"]), strict=True)
    return PartTimes(
        part["ranks"],
        part["samples"],
        statistics.median(seconds),
        tuple(statistics.median(times) for times in ready),
        first,
        third,
        len(seconds),
    )
