"""The tables of a described training: steps for numbers of ranks; samples/s for numbers of servers and workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpitrain.forecast.machines import Machines
from mpitrain.forecast.report import IDEAL, Panel, Point, SimulationReport, counted, report_of, shown_seconds
from mpitrain.forecast.serving import SimulatedServing, check_serving, simulate_serving
from mpitrain.forecast.sums import check_sum
from mpitrain.forecast.training import SimulatedTraining, is_plain_ring, least_messages, simulate_steps
from mpitrain.noise import error_of_mean, noise
from mpitrain.shown import shown_bytes

_GOOD = 0.8  # an efficiency that is worth the machines
_ENOUGH = 0.9  # of what the largest number of servers reaches
# Measured with a ring of 1,024 ranks: see benchmarks/log/. Without events, the messages of at most two lengths of
# buckets
# are recorded first.
_MESSAGE_SECONDS, _MESSAGE_BYTES = 20e-6, 900
_RECORD_SECONDS, _REPLAY_SECONDS, _REPLAY_BYTES = 4e-6, 1e-8, 50
_LONG_SECONDS = 20.0  # of processor time; a longer simulation is announced


@dataclass(frozen=True)
class ScalingRow:
    """Some ranks with one algorithm.

    Attributes:
        num_ranks, algorithm: which.
        step_seconds: mean over steps and seeds.
        lowest_seconds, highest_seconds: means of the fastest and of the slowest seed.
        error_seconds: the standard error of step_seconds over seeds.
        samples_per_second: of all ranks.
        efficiency: samples/s as a share of that of independent ranks.
        bound: see SimulatedRun.
    """

    num_ranks: int
    algorithm: str
    step_seconds: float
    lowest_seconds: float
    highest_seconds: float
    error_seconds: float
    samples_per_second: float
    efficiency: float
    bound: str


def scaling_report(
    machines: Machines,
    trainings: Mapping[str, SimulatedTraining],
    ranks: Sequence[int],
    *,
    num_steps: int,
    num_seeds: int,
    tell: Callable[[str], object] = lambda _: None,
) -> SimulationReport:
    """Simulate every number of ranks with every training.

    Args:
        trainings: by their names in the table.
        ranks: numbers of ranks; each at least 1.
        num_steps: steps, or rounds.
        num_seeds: without a spread, one is enough.
        tell: called with a sentence before a simulation that takes long.

    Raises:
        ConfigError: there is no room for so many ranks, or something cannot be simulated. Nothing was simulated.
    """
    for num_ranks in ranks:
        num_nodes = machines.nodes_of(num_ranks)[-1] + 1
        for training in trainings.values():
            check_sum(training.algorithm, training.codec, num_nodes, machines.costs)
    warning = _warning(machines, trainings, ranks, num_steps * num_seeds)
    if warning:
        tell(warning)
    rows = [
        _row(machines, name, training, num_ranks, num_steps, num_seeds)
        for num_ranks in sorted(set(ranks))
        for name, training in trainings.items()
    ]
    columns: dict[str, Callable[[ScalingRow], str]] = {
        "ranks": lambda row: str(row.num_ranks),
        "<algorithm": lambda row: row.algorithm,
        "step": lambda row: shown_seconds(row.step_seconds),
        "fastest and slowest seed": lambda row: (
            f"{shown_seconds(row.lowest_seconds)} - {shown_seconds(row.highest_seconds)}" if num_seeds > 1 else ""
        ),
        "samples/s": lambda row: f"{row.samples_per_second:.4g}",
        "efficiency": lambda row: f"{row.efficiency:.1%}",
        "<bound by": lambda row: row.bound,
    }
    points = []
    for row in rows:
        most = row.samples_per_second * row.step_seconds  # of a step that takes a second
        rates = most / row.highest_seconds, row.samples_per_second, most / row.lowest_seconds
        points.append((row.algorithm, row.num_ranks, row.efficiency, *rates))
    return report_of(rows, columns, _answers(rows), "ranks", _panels(points))


def _warning(
    machines: Machines, trainings: Mapping[str, SimulatedTraining], ranks: Sequence[int], num_steps: int
) -> str:
    """The warning before a simulation that takes long; "" if it does not."""
    total, seconds, most, largest = 0, 0.0, 0, ""
    for num_ranks in set(ranks):
        for name, training in trainings.items():
            messages, of_bucket = least_messages(machines, num_ranks, training)
            times = num_steps if training.spread else 1  # without a spread, steps repeat
            total += messages * times
            if is_plain_ring(training) and machines.ranks_per_node == 1:
                seconds += 2 * of_bucket * _RECORD_SECONDS + messages * times * _REPLAY_SECONDS
                num_bytes = of_bucket * _REPLAY_BYTES
            else:
                seconds += messages * times * _MESSAGE_SECONDS
                num_bytes = of_bucket * _MESSAGE_BYTES
            if num_bytes > most:
                most, largest = num_bytes, f"{name} with {num_ranks} ranks"
    if seconds < _LONG_SECONDS:
        return ""
    return (
        f"this simulates at least {total:,} messages, which take about {shown_seconds(seconds)} of processor time or "
        f"more; {largest} needs about {shown_bytes(most)} of memory or more. Fewer ranks or "
        "parameters, larger buckets, and with --spread fewer --steps and --seeds take less"
    )


def _row(
    machines: Machines, name: str, training: SimulatedTraining, num_ranks: int, num_steps: int, num_seeds: int
) -> ScalingRow:
    runs = [simulate_steps(machines, num_ranks, training, num_steps, seed) for seed in range(num_seeds)]
    seconds = sum(run.mean_seconds for run in runs) / num_seeds
    speeds = [machines.speeds[node] for node in machines.nodes_of(num_ranks)]
    speeds[-1] /= training.straggler
    alone = sum(speeds) / training.compute_seconds
    return ScalingRow(
        num_ranks,
        name,
        seconds,
        min(run.mean_seconds for run in runs),
        max(run.mean_seconds for run in runs),
        error_of_mean([run.mean_seconds for run in runs]),
        num_ranks * training.num_samples / seconds,
        num_ranks / seconds / alone,
        runs[0].bound,
    )


def _answers(rows: Sequence[ScalingRow]) -> list[str]:
    answers = []
    ranks = list(dict.fromkeys(row.num_ranks for row in rows))
    names = list(dict.fromkeys(row.algorithm for row in rows))
    for name in names:
        good = [row.num_ranks for row in rows if row.algorithm == name and row.efficiency >= _GOOD]
        how_far = f"up to {counted(max(good), 'rank')}" if good else "for none of these numbers of ranks"
        answers.append(f"{name}: an efficiency of {_GOOD:.0%} {how_far}")
    if len(names) > 1:
        changes, last = [], ""
        others: dict[str, list[str]] = {}
        for number in [number for number in ranks if number > 1]:
            own = [row for row in rows if row.num_ranks == number]
            best = min(own, key=lambda row: row.step_seconds)
            as_fast = [row.algorithm for row in own if row.step_seconds - best.step_seconds <= _noise(row, best)]
            if last not in as_fast:
                last = as_fast[0]  # the first one that was asked for is the plain one
                changes.append(f"{last} from {number} ranks")
            for name in as_fast:
                if name != last:
                    others.setdefault(name, []).append(str(number))
        answers.append(f"fastest: {', '.join(changes)}")
        if others:
            shown = [f"{name} with {', '.join(numbers)} ranks" for name, numbers in others.items()]
            answers.append(f"as fast within noise: {'; '.join(shown)}")
    return answers


def _noise(row: ScalingRow, other: ScalingRow) -> float:
    return noise(row.step_seconds, row.error_seconds, other.error_seconds)


def _panels(rows: Sequence[tuple[str, int, float, float, float, float]]) -> list[Panel]:
    """Samples/s and efficiency of rows: name, number of ranks, efficiency; lowest, mean and highest samples/s."""
    per_second: dict[str, list[Point]] = {}
    efficiencies: dict[str, list[Point]] = {}
    for name, number, efficiency, low, mean, high in rows:
        per_second.setdefault(name, []).append((number, low, mean, high))
        efficiencies.setdefault(name, []).append(
            (number, low / mean * efficiency, efficiency, high / mean * efficiency)
        )
        if name == rows[0][0]:
            ideal = mean / efficiency
            per_second.setdefault(IDEAL, []).append((number, ideal, ideal, ideal))
    return [Panel("samples/s", per_second, log_base=2), Panel("efficiency", efficiencies)]


@dataclass(frozen=True)
class ServersRow:
    """Some servers and workers.

    Attributes:
        num_servers, num_workers: how many.
        samples_per_second: of all workers, the mean of the seeds.
        lowest, highest: of the seeds.
        efficiency: samples/s as a share of what the workers would make if a work unit took its computation only.
        link: the busiest link, with the first seed.
        link_share: of the time, it was busy.
    """

    num_servers: int
    num_workers: int
    samples_per_second: float
    lowest: float
    highest: float
    efficiency: float
    link: str
    link_share: float


def servers_report(
    machines: Machines,
    serving: SimulatedServing,
    servers: Sequence[int],
    workers: Sequence[int],
    *,
    num_rounds: int,
    num_seeds: int,
) -> SimulationReport:
    """Simulate every number of servers with every number of workers.

    Args:
        servers, workers: numbers of each, at least 1.
        num_rounds: work units of each worker that are counted, on average.
        num_seeds: without a spread, one is enough.

    Raises:
        ConfigError: there is no room for this many, or no such mode. Nothing was simulated.
    """
    servers, workers = sorted(set(servers)), sorted(set(workers))
    for num_servers in servers:
        for num_workers in workers:
            check_serving(machines, num_servers, num_workers, serving.mode)
    rows = [
        _servers_row(machines, serving, num_servers, num_workers, num_rounds, num_seeds)
        for num_workers in workers
        for num_servers in servers
    ]
    columns: dict[str, Callable[[ServersRow], str]] = {
        "workers": lambda row: str(row.num_workers),
        "servers": lambda row: str(row.num_servers),
        "samples/s": lambda row: f"{row.samples_per_second:.4g}",
        "slowest and fastest seed": lambda row: f"{row.lowest:.4g} - {row.highest:.4g}" if num_seeds > 1 else "",
        "efficiency": lambda row: f"{row.efficiency:.1%}",
        "<busiest link": lambda row: row.link,
        "busy": lambda row: f"{row.link_share:.0%}",
    }
    panels = _panels(
        [
            (counted(row.num_servers, "server"), row.num_workers, row.efficiency, row.lowest, row.samples_per_second,
             row.highest)
            for row in rows
        ]
    )  # fmt: skip
    return report_of(rows, columns, _enough_servers(rows), "workers", panels)


def _servers_row(
    machines: Machines, serving: SimulatedServing, num_servers: int, num_workers: int, num_rounds: int, num_seeds: int
) -> ServersRow:
    runs = [
        simulate_serving(machines, num_servers, num_workers, serving, num_rounds, seed) for seed in range(num_seeds)
    ]
    rates = [rate for rate, _, _ in runs]
    mean = sum(rates) / num_seeds
    nodes = machines.nodes_of(num_servers + num_workers)[num_servers:]
    alone = sum(machines.speeds[node] for node in nodes) * serving.num_samples / serving.compute_seconds
    return ServersRow(num_servers, num_workers, mean, min(rates), max(rates), mean / alone, *runs[0][1:])


def _enough_servers(rows: Sequence[ServersRow]) -> list[str]:
    answers = []
    for num_workers in dict.fromkeys(row.num_workers for row in rows):
        own = [row for row in rows if row.num_workers == num_workers]
        best = max(row.samples_per_second for row in own)
        enough = next(row.num_servers for row in own if row.samples_per_second >= _ENOUGH * best)
        answers.append(
            f"{counted(num_workers, 'worker')}: {_ENOUGH:.0%} of the most samples/s with {enough} of these servers"
        )
    return answers
