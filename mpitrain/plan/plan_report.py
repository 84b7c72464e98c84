"""What a plan says: the table, the lines that run its best rows, and the sentence that a person needs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from mpitrain.errors import ConfigError
from mpitrain.plan.forecast import Forecast, Planner
from mpitrain.plan.host_times import HostTimes
from mpitrain.plan.measured_steps import doubts
from mpitrain.shown import shown_bytes
from mpitrain.simulate.report import Panel, Point, SimulationReport, counted, shown_seconds

_SHOWN = 2  # ways for each number of ranks, besides the plain one
_FASTER = 10  # times the rate of the links, for the question whether another switch would help


def plan_report(
    planner: Planner,
    hosts: Sequence[HostTimes],
    ranks: Sequence[int],
    command: Callable[[Forecast], str],
    *,
    shows_all: bool,
    tell: Callable[[str], object],
) -> SimulationReport:
    """Forecast every number of ranks.

    Args:
        ranks: numbers of ranks, each at least 1.
        command: the line that runs a row.
        shows_all: every way is shown, and not only the best few.
        tell: called with what is being simulated.

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
    return SimulationReport(
        columns,
        cells,
        [_digits(row, command(row)) for row in every],
        [
            *_lines_to_run(rows, command),
            *left_out,
            *doubts(hosts),
            sentence(planner, hosts[0], rows),
        ],
        "ranks",
        [
            Panel("samples/s", _lines(rows, lambda row: row.samples_per_second)),
            Panel("efficiency", _lines(rows, lambda row: row.efficiency)),
        ],
    )


def sentence(planner: Planner, host: HostTimes, rows: Mapping[int, Sequence[Forecast]]) -> str:
    """Say in a sentence what the most machines make of the script, plain, with bf16, and with faster links."""
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
    coded = [row for row in rows[number] if row.way.codec != "none" and row.way.is_safe]
    if coded and coded[0].step_seconds < plain.step_seconds:
        text += f"; {coded[0].way.codec} makes it {coded[0].speedup:.1f}"
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
    return "; ".join(part for part in (row.way.warning, row.way.advice()) if part)


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


def _lines_to_run(rows: Mapping[int, Sequence[Forecast]], command: Callable[[Forecast], str]) -> list[str]:
    """For each number of ranks, the line that runs the fastest way which trains as one rank does."""
    lines = []
    for number, ways in rows.items():
        best = next(row for row in ways if row.way.is_safe and row.way.is_setting)
        lines.append(f"{counted(number, 'rank')}: {command(best)}")
    return lines


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
