"""Samples/s for numbers of servers and workers, and how many servers are enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mpitrain.simulate.machines import Machines
from mpitrain.simulate.report import Panel, Point, SimulationReport, counted
from mpitrain.simulate.serving import SimulatedServing, check_serving, simulate_serving

_ENOUGH = 0.9  # of what the largest number of servers reaches


@dataclass(frozen=True)
class ServersRow:
    """Some servers and workers.

    Attributes:
        num_servers, num_workers: how many.
        samples_per_second: of all workers, the mean of the seeds.
        lowest, highest: of the seeds.
        efficiency: samples/s as a share of what the workers would make if a job took its computation only.
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
        num_rounds: jobs of each worker that are counted, on average.
        num_seeds: without a spread, one is enough.

    Raises:
        ConfigError: there is no room for so many, or no such mode. Nothing was simulated.
    """
    servers, workers = sorted(set(servers)), sorted(set(workers))
    for num_servers in servers:
        for num_workers in workers:
            check_serving(machines, num_servers, num_workers, serving.mode)
    rows = [
        _row(machines, serving, num_servers, num_workers, num_rounds, num_seeds)
        for num_workers in workers
        for num_servers in servers
    ]
    columns = ("workers", "servers", "samples/s", "slowest and fastest seed", "efficiency", "<busiest link", "busy")
    cells = [
        [
            str(row.num_workers),
            str(row.num_servers),
            f"{row.samples_per_second:.4g}",
            f"{row.lowest:.4g} - {row.highest:.4g}" if num_seeds > 1 else "",
            f"{row.efficiency:.1%}",
            row.link,
            f"{row.link_share:.0%}",
        ]
        for row in rows
    ]
    return SimulationReport(
        columns, cells, [asdict(row) for row in rows], _answers(rows), "workers",
        [
            Panel("samples/s", _lines(rows, per_second=True), is_log=True),
            Panel("efficiency", _lines(rows, per_second=False)),
        ],
    )  # fmt: skip


def _row(
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


def _answers(rows: Sequence[ServersRow]) -> list[str]:
    answers = []
    for num_workers in dict.fromkeys(row.num_workers for row in rows):
        own = [row for row in rows if row.num_workers == num_workers]
        best = max(row.samples_per_second for row in own)
        enough = next(row.num_servers for row in own if row.samples_per_second >= _ENOUGH * best)
        answers.append(
            f"{counted(num_workers, 'worker')}: {_ENOUGH:.0%} of the most samples/s with {enough} of these servers"
        )
    return answers


def _lines(rows: Sequence[ServersRow], *, per_second: bool) -> dict[str, list[Point]]:
    lines: dict[str, list[Point]] = {}
    for row in rows:
        scale = 1.0 if per_second else row.efficiency / row.samples_per_second
        low, middle, high = (scale * rate for rate in (row.lowest, row.samples_per_second, row.highest))
        lines.setdefault(counted(row.num_servers, "server"), []).append((row.num_workers, low, middle, high))
        if per_second and row.num_servers == rows[0].num_servers:
            ideal = row.samples_per_second / row.efficiency
            lines.setdefault("ideal", []).append((row.num_workers, ideal, ideal, ideal))
    return lines
