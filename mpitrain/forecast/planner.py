"""Step times of a script for numbers of ranks and exchange configurations, and the report of a plan on them.

The computation was measured, and the sums are simulated.

Costs that the simulation of a training (training.py) lacks are added here:

    vote     a step ends with an agreement of all ranks: ceil(log2 p) messages one after the other
    at once  where sums of all hosts were measured, links carry for each algorithm what they carried then, all at once
    cores    the processor time of messages (where sums were measured), of codecs and of additions is taken from the
             step, as far as no core is free for their thread; and a step takes no less than all its processor time
             on the cores that there are
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy

from mpitrain.allreduce.costs import bucket_bytes
from mpitrain.errors import ConfigError
from mpitrain.forecast.lines_to_add import PlannedTraining, lines_to_add
from mpitrain.forecast.machines import Machines
from mpitrain.forecast.measured_steps import HostTimes, PartTimes, doubts
from mpitrain.forecast.report import IDEAL, Panel, Point, SimulationReport, counted, shown_seconds
from mpitrain.forecast.serving import SimulatedServing, simulate_serving
from mpitrain.forecast.training import SimulatedTraining, simulate_steps
from mpitrain.forecast.ways import ExchangeWay, coded_ways, other_ways, plain_ways, resized_ways
from mpitrain.job.step_times import SUM_BYTES
from mpitrain.noise import SHARE, noise
from mpitrain.profile import DEFAULT
from mpitrain.reducer.bucket import Parameter, plan_buckets, plan_layout
from mpitrain.shown import shown_bytes

_STEPS = 3  # that are simulated; without a spread, equal steps are computed once
_SERVER_ROUNDS = 4
_OF_CODECS = "direct"  # a codec's messages go by it, also inside `hierarchical`
_CLOSE, _ATTEMPTS, _MOST = 0.02, 4, 256.0  # of the rate of links that are fitted to a measured step
_SHOWN = 2  # ways for each number of ranks, besides the plain one
_FASTER = 10  # times the rate of the links, for the question whether another switch would help


@dataclass(frozen=True)
class Forecast:
    """One exchange configuration with a number of ranks.

    Attributes:
        num_ranks, way: which.
        step_seconds: of a step of all ranks.
        samples: of all ranks in a step.
        speedup: samples/s, as many times those of one machine.
        efficiency: speedup / num_ranks.
        wire_bytes: that a node sends in a step; see ExchangeWay.bytes_sent.
        bound: what takes at least half of the time; see SimulatedRun.
    """

    num_ranks: int
    way: ExchangeWay
    step_seconds: float
    samples: float
    speedup: float
    wire_bytes: float
    bound: str

    @property
    def samples_per_second(self) -> float:
        """Of all ranks."""
        return self.samples / self.step_seconds

    @property
    def efficiency(self) -> float:
        """The throughput as a share of that of this many independent machines."""
        return self.speedup / self.num_ranks


class Planner:
    """Forecasts for one script on some machines."""

    def __init__(self, hosts: Sequence[HostTimes], machines: Machines, *, is_profiled: bool) -> None:
        """
        Args:
            hosts: what was measured, by node; of one host only if all machines are taken to be like it.
            machines: their links.
            is_profiled: a job on all machines will have the profile, from which the size of buckets follows.
        """
        self._hosts, self._is_profiled = hosts, is_profiled
        self.machines = machines
        sums = hosts[0].sums if machines.num_nodes > 1 else {}
        self._shares = {name: _at_once(machines, name, seconds) for name, (seconds, _) in sums.items()}
        itemsize = numpy.dtype(numpy.float32).itemsize
        self._layout = plan_layout(
            [
                Parameter(name, (-(-number // itemsize),), numpy.dtype(numpy.float32))
                for name, number in hosts[0].parameters
            ]
        )
        self._count = sum(self._layout.counts.values())
        self._alone = min((host.parts[0] for host in hosts), key=lambda part: part.seconds / part.samples)

    def has_profile(self, num_ranks: int) -> bool:
        """Whether a job of this many ranks has the profile. It is of all machines, so a smaller job would refuse it."""
        return self._is_profiled and num_ranks == self.machines.num_ranks

    def alone(self) -> Forecast:
        """One rank on the fastest host."""
        part = self._alone
        return Forecast(1, ExchangeWay(), part.seconds, part.samples, 1.0, 0.0, "compute")

    def best(self, num_ranks: int, tell: Callable[[str], object] = lambda _: None) -> list[Forecast]:
        """Forecast every configuration that makes sense with this many ranks, the fastest first; [] if a rank had no
        samples."""
        num_nodes = min(-(-num_ranks // self.machines.ranks_per_node), self.machines.num_nodes)
        if any(self._part(node, num_ranks) is None for node in range(num_nodes)):
            return []
        if num_ranks == 1:
            return [self.alone()]
        tell(f"simulating {num_ranks} ranks")
        ppn = self.machines.ranks_per_node
        plain = self.plain(num_ranks)
        codecs = [name for name, _ in self.machines.costs.codecs]
        coded = [self.forecast(num_ranks, way) for way in coded_ways(codecs)] if num_ranks > ppn else []
        whole = [plain, *coded]
        fastest = min(whole, key=lambda row: row.step_seconds)
        resized = self._fastest(num_ranks, resized_ways(fastest.way))
        if resized.step_seconds < fastest.step_seconds * (1 - SHARE):
            whole.append(resized)
        others = [self.forecast(num_ranks, way) for way in other_ways(plain.way, num_ranks, ppn)]
        return sorted([*whole, *others], key=lambda row: -row.samples_per_second)

    def with_links(self, factor: float) -> Planner:
        """The same with links that are this many times as fast, and with no other limit."""
        return Planner(
            [replace(host, sums={}) for host in self._hosts],
            _with_rates(self.machines, factor * max(self._shares.values(), default=1.0)),
            is_profiled=self._is_profiled,
        )

    def as_measured(self, way: ExchangeWay, seconds: float, num_ranks: int) -> Planner:
        """The same with links for which the forecast of this configuration equals the measurement, as far as links can
        explain it."""
        factor, scaled = 1.0, self
        for _ in range(_ATTEMPTS):
            row = scaled.forecast(num_ranks, way)
            gap = seconds - row.step_seconds
            if abs(gap) <= _CLOSE * seconds:
                break
            wire = row.wire_bytes / statistics.median(scaled.machines.link_bytes_per_second)
            factor *= wire / (wire + gap) if wire + gap > wire / 4 else 4.0
            factor = min(max(factor, 1 / _MOST), _MOST)
            scaled = self.with_links(factor)
        return scaled

    def noise(self, row: Forecast) -> float:
        """The seconds of a step by which another configuration must be faster than `row`, from the precision of the
        measured steps."""
        nodes = range(self.machines.nodes_of(row.num_ranks)[-1] + 1)
        parts = [part for node in nodes if (part := self._part(node, row.num_ranks)) is not None]
        return noise(row.step_seconds, max((part.error for part in parts), default=0.0))

    def plain(self, num_ranks: int) -> Forecast:
        """Forecast the fastest configuration that exchanges every step in full."""
        return self._fastest(num_ranks, plain_ways(num_ranks, self.machines.ranks_per_node))

    def forecast(self, num_ranks: int, way: ExchangeWay) -> Forecast:
        """Forecast one configuration. Raises ConfigError if it cannot be simulated."""
        if way.servers:
            return self._served(num_ranks, way)
        part, training = self._training(num_ranks, way)
        machines = self._machines_of(num_ranks, num_ranks, way.algorithm)
        run = simulate_steps(machines, num_ranks, training, _STEPS)
        seconds, bound = run.step_seconds[-1], run.bound
        host = self._hosts[0]
        least = (host.busy_cores * part.seconds + self._work(num_ranks, way)) / host.cores
        if least > seconds:
            seconds, bound = least, "processors"
        return self._row(num_ranks, way, seconds, num_ranks, bound)

    def _row(self, num_ranks: int, way: ExchangeWay, seconds: float, num_parts: int, bound: str) -> Forecast:
        host = self._hosts[0]
        samples = host.whole * num_parts if host.is_fixed else host.whole
        speedup = samples / seconds * self._alone.seconds / self._alone.samples
        sent = way.bytes_sent(host.num_bytes, self.machines.nodes_of(num_ranks)[-1] + 1)
        return Forecast(num_ranks, way, seconds, samples, speedup, sent, bound)

    def _fastest(self, num_ranks: int, ways: Sequence[ExchangeWay]) -> Forecast:
        return min((self.forecast(num_ranks, way) for way in ways), key=lambda row: row.step_seconds)

    def _part(self, node: int, num_ranks: int) -> PartTimes | None:
        return self._hosts[node if len(self._hosts) > 1 else 0].part(num_ranks)

    def _training(self, num_ranks: int, way: ExchangeWay) -> tuple[PartTimes, SimulatedTraining]:
        part = self._part(0, num_ranks)
        assert part is not None
        num_nodes = self.machines.nodes_of(num_ranks)[-1] + 1
        vote = (num_nodes - 1).bit_length() * self.machines.latency_seconds  # ceil(log2)
        compute = part.seconds + vote + self._taken_from_step(num_ranks, way)
        limit = way.bucket_mib * 2**20 if way.bucket_mib else bucket_bytes(
            self.machines.profile(num_nodes) if self.has_profile(num_ranks) else DEFAULT, num_nodes
        )  # fmt: skip
        buckets, end = [], 0
        for bucket in plan_buckets(self._layout, round(limit)):
            end += bucket.end - bucket.begin
            buckets.append((end, min(1.0, max(part.ready[index] for index in bucket.members) / compute)))
        training = SimulatedTraining(
            self._count, compute, max(1, round(part.samples)), way.algorithm, way.codec,
            sync_every=way.sync_every, buckets=tuple(buckets),
        )  # fmt: skip
        return part, training

    def _machines_of(self, num_ranks: int, num_parts: int, algorithm: str) -> Machines:
        """The machines as fast as they were, with so many parts of a batch, and links that carry what they carried."""
        num_nodes = self.machines.nodes_of(num_ranks)[-1] + 1
        seconds = [_seconds(self._part(node, num_parts)) for node in range(num_nodes)]
        known = self.machines.speeds  # of machines that a file describes; measured ones have 1
        speeds = tuple(known[node] * (seconds[0] / one) for node, one in enumerate(seconds)) + known[num_nodes:]
        share = self._shares.get(algorithm, self._shares.get(_OF_CODECS, 1.0))
        return _with_rates(replace(self.machines, speeds=speeds), share)

    def _taken_from_step(self, num_ranks: int, way: ExchangeWay) -> float:
        """Seconds of a step in which the thread of the exchange has the core that computes."""
        if way.sync_every > 1:  # the sum comes after the computation
            return 0.0
        host = self._hosts[0]
        return self._work(num_ranks, way) * min(1.0, max(0.0, 1 - (host.cores - host.busy_cores)))

    def _work(self, num_ranks: int, way: ExchangeWay) -> float:
        """Processor seconds of a rank for the exchange of a step."""
        host, costs, num_bytes = self._hosts[0], self.machines.costs, self._hosts[0].num_bytes
        sent = way.bytes_sent(num_bytes, self.machines.nodes_of(num_ranks)[-1] + 1)
        _, processor = host.sums.get(way.algorithm, host.sums.get(_OF_CODECS, (0.0, 0.0)))
        nodes = self.machines.num_nodes
        work = processor * sent / (2 * (nodes - 1) / nodes * SUM_BYTES) if processor else 0.0
        if way.codec != "none":
            return work + num_bytes / dict(costs.codecs)[way.codec.partition(":")[0]]
        return work or num_bytes / costs.add_bytes_per_second / way.sync_every

    def _served(self, num_ranks: int, way: ExchangeWay) -> Forecast:
        workers = num_ranks - way.servers
        part = self._part(0, workers)
        assert part is not None
        samples = max(1, round(part.samples))
        machines = self._machines_of(num_ranks, workers, _OF_CODECS)  # no vote: a worker makes no agreement with others
        serving = SimulatedServing(self._count, part.seconds, samples, "sync")
        rate, link, share = simulate_serving(machines, way.servers, workers, serving, _SERVER_ROUNDS)
        return self._row(num_ranks, way, samples * workers / rate, workers, link if share >= 0.5 else "compute")


def _seconds(part: PartTimes | None) -> float:
    assert part is not None
    return part.seconds


def _with_rates(machines: Machines, factor: float) -> Machines:
    """The machines with links that are this many times as fast."""
    return replace(
        machines,
        link_bytes_per_second=tuple(rate * factor for rate in machines.link_bytes_per_second),
        pairs=tuple(tuple(rate * factor for rate in row) for row in machines.pairs),
    )


def _at_once(machines: Machines, name: str, seconds: float) -> float:
    """The rate of links if a sum of all ranks takes this long, as a share of the rate of one of them alone; at most
    1."""
    only = SimulatedTraining(SUM_BYTES // 4, 1e-9, 1, name, buckets=((SUM_BYTES // 4, 1.0),))
    return min(1.0, simulate_steps(machines, machines.num_ranks, only, 1).mean_seconds / seconds)


def plan_report(
    planner: Planner,
    hosts: Sequence[HostTimes],
    ranks: Sequence[int],
    command: Callable[[Forecast], str],
    *,
    shows_all: bool,
    tell: Callable[[str], object],
    total_steps: int | None = None,
) -> SimulationReport:
    """Forecast every number of ranks.

    Args:
        ranks: numbers of ranks, each at least 1.
        command: the line that runs a row.
        shows_all: show every configuration, and not only the best few.
        tell: called with what is being simulated.
        total_steps: of the whole training. Default: what the script says; without that, they are not known.

    Raises:
        ConfigError: none of them can be planned.
    """
    rows = {number: planner.best(number, tell) for number in sorted(set(ranks))}
    rows = {number: ways for number, ways in rows.items() if ways}
    left_out = _left_out(ranks, rows, hosts)
    if not rows:
        raise ConfigError(f"{left_out[0]}. Plan fewer ranks with --ranks")
    shown = {number: ways if shows_all else _best_few(ways) for number, ways in rows.items()}
    columns = (
        "ranks", "<way", "step", "samples/s", "times one", "efficiency", "a node sends", "<bound by", "<remark",
    )  # fmt: skip
    cells = [_cells(row) for ways in shown.values() for row in ways]
    every = [row for ways in rows.values() for row in ways]
    summary = sentence(planner, hosts[0], rows)
    return SimulationReport(
        columns,
        cells,
        [_digits(row, command(row)) for row in every],
        [
            *_lines_to_run(planner, rows, command),
            *left_out,
            *doubts(hosts),
            summary,
            *_additions(planner, hosts[0], rows, total_steps or hosts[0].total_steps or None),
        ],
        "ranks",
        [
            Panel("samples/s", {**_lines(rows, lambda row: row.samples_per_second), IDEAL: _ideal(rows)}, log_base=2),
            Panel("efficiency", _lines(rows, lambda row: row.efficiency)),
        ],
        summary,
    )


def _additions(
    planner: Planner, host: HostTimes, rows: Mapping[int, Sequence[Forecast]], total_steps: int | None
) -> list[str]:
    """What to add for the largest number of ranks."""
    number = max(rows)
    if planner.machines.nodes_of(number)[-1] == 0:
        return []
    plain = next(row for row in rows[number] if _is_plain(row) and row.way.bucket_mib is None)
    return lines_to_add(planner, rows[number], plain, PlannedTraining(host.front, total_steps, host.num_bytes))


def _ideal(rows: Mapping[int, Sequence[Forecast]]) -> list[Point]:
    """Return the samples/s of as many times the fastest host alone."""
    speeds = {number: ways[0].samples_per_second / ways[0].efficiency for number, ways in rows.items()}
    return [(number, speed, speed, speed) for number, speed in speeds.items()]


def sentence(planner: Planner, host: HostTimes, rows: Mapping[int, Sequence[Forecast]]) -> str:
    """Summarize in a sentence the speed on the largest number of machines: plain, with bf16, and with faster links."""
    part = host.parts[0]
    rates = planner.machines.link_bytes_per_second
    gbit = statistics.median(rates) * 8 / 1e9
    number = max(rows)
    start = f"With these {host.num_bytes / 4e6:.3g} M parameters, "
    batch = f"{part.samples:g} samples {'a rank' if host.is_fixed else 'a step'}"
    if number == 1:
        return f"{start}{batch} take {shown_seconds(part.seconds)} on one rank"
    plain = next(row for row in rows[number] if _is_plain(row))
    text = (
        f"{start}{gbit:.3g} Gbit/s and {batch}, {counted(number, 'rank')} are {plain.speedup:.1f} times as fast as one"
    )
    coded = next((row for row in rows[number] if row.way.codec != "none" and row.way.is_safe), plain)
    if coded.step_seconds < plain.step_seconds - planner.noise(plain):
        text += f"; {coded.way.codec} makes it {coded.speedup:.1f}"
    faster = planner.with_links(_FASTER).plain(number)
    return f"{text}; links of {gbit * _FASTER:.3g} Gbit/s, {faster.speedup:.1f}"


def _is_plain(row: Forecast) -> bool:
    return row.way.codec == "none" and row.way.is_setting


def _best_few(ways: Sequence[Forecast]) -> list[Forecast]:
    """The fastest ways, the fastest one without other loss, and the plain one."""
    plain = next(row for row in ways if _is_plain(row))
    safe = next(row for row in ways if row.way.is_safe)
    chosen = [*ways[:_SHOWN], safe, plain]
    return [row for row in ways if row in chosen]


def _remark(row: Forecast) -> str:
    return row.way.warning or row.way.advice()


def _cells(row: Forecast) -> list[str]:
    return [
        str(row.num_ranks),
        str(row.way) if row.num_ranks > 1 else "alone",
        shown_seconds(row.step_seconds),
        f"{row.samples_per_second:.4g}",
        f"{row.speedup:.2f}",
        f"{row.efficiency:.0%}",
        shown_bytes(round(row.wire_bytes)) if row.wire_bytes else "",
        row.bound,
        _remark(row),
    ]


def _digits(row: Forecast, command: str) -> dict[str, object]:
    return {
        "num_ranks": row.num_ranks,
        "way": str(row.way),
        "algorithm": row.way.algorithm,
        "codec": row.way.codec,
        "bucket_mib": row.way.bucket_mib,
        "sync_every": row.way.sync_every,
        "servers": row.way.servers,
        "step_seconds": row.step_seconds,
        "samples_per_second": row.samples_per_second,
        "speedup": row.speedup,
        "efficiency": row.efficiency,
        "wire_bytes": row.wire_bytes,
        "bound": row.bound,
        "is_safe": row.way.is_safe,
        "advice": row.way.advice(),
        "command": command,
    }


def _lines_to_run(
    planner: Planner, rows: Mapping[int, Sequence[Forecast]], command: Callable[[Forecast], str]
) -> list[str]:
    """By number of ranks, the line of the fastest way that trains as one rank does; within noise, of a plainer one."""
    lines, remarks = [], []
    for number, ways in rows.items():
        own = [row for row in ways if row.way.is_safe and row.way.is_setting]
        fastest = own[0]
        plainest = sorted(own, key=lambda row: (not _is_plain(row), row.way.bucket_mib is not None))
        best = next(row for row in plainest if row.step_seconds - fastest.step_seconds <= planner.noise(row))
        lines.append(f"{counted(number, 'rank')}: {command(best)}")
        if best.way != fastest.way:
            remarks.append(
                f"{counted(number, 'rank')}: {fastest.way} with {shown_seconds(fastest.step_seconds)} and {best.way} "
                f"with {shown_seconds(best.step_seconds)} a step are equal within the noise of the measured steps "
                f"({planner.noise(best) / best.step_seconds:.0%}), so the line has {best.way}"
            )
    return [*lines, *remarks]


def _left_out(ranks: Sequence[int], rows: Mapping[int, Sequence[Forecast]], hosts: Sequence[HostTimes]) -> list[str]:
    missing = sorted(set(ranks) - set(rows))
    if not missing:
        return []
    host = min(hosts, key=lambda one: one.parts[-1].num_ranks)
    part = host.parts[-1]
    why = (
        f"a step has only {host.parts[0].samples:g} samples"
        if missing[0] > host.parts[0].samples
        else f"the script ended on {host.host} before a part among more than {counted(part.num_ranks, 'rank')} "
        "was measured"
    )
    return [f"not planned: {', '.join(str(number) for number in missing)} ranks, because {why}"]


def _lines(rows: Mapping[int, Sequence[Forecast]], value: Callable[[Forecast], float]) -> dict[str, list[Point]]:
    """Points of the fastest ways with the most ranks, and of the plain way."""
    most = max(rows)
    names = [_name(row) for row in _best_few(rows[most])]
    lines: dict[str, list[Point]] = {}
    for number, ways in rows.items():
        for name in dict.fromkeys(names):
            row = next((row for row in ways if number == 1 or _name(row) == name), None)
            if row is not None:
                y = value(row)
                lines.setdefault(name, []).append((number, y, y, y))
    return lines


def _name(row: Forecast) -> str:
    """The name of a line: the plain way is the fastest algorithm, whatever its name."""
    return "plain" if _is_plain(row) else row.way.codec if row.way.codec != "none" else str(row.way)
