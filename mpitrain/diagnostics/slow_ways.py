"""Which ways between nodes are slow, and whose fault that is. A busy node makes any way look slow, now and then.

So a way that seems slow is measured several times again, in turns with one that does not. It is slow if its best is
below half of what the other reached at worst, and sound if it reaches half of what the other usually does. Otherwise
the measurements differ by more than a finding would claim, and it was not measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from mpitrain.diagnostics.agent import UnansweredError
from mpitrain.diagnostics.check import Seen
from mpitrain.diagnostics.collect import Cluster, rounds

Pair = tuple[str, str]
Rates = Mapping[str, Any]  # what is known of a way
_SLOW = 0.5  # of what most others reach
_TURNS = 5
_BUSY = 0.2  # of the time, in which what measures waits for a processor


def measure_ways(cluster: Cluster) -> dict[str, Any]:
    """Rates of all pairs, "a b" -> rates; those that seem slow also have "again", "beside" and "beside_way"."""
    measured: dict[Pair, dict[str, Any]] = {}
    for pairs in rounds([name for name in cluster.target.names if name in cluster.agents]):
        for both in (pairs, [pair[::-1] for pair in pairs]):
            turn = [pair for pair in both if _is_open(cluster.seen, pair)]
            with ThreadPoolExecutor(len(turn) or 1) as pool:
                measured |= zip(turn, pool.map(lambda pair: _way(cluster, pair), turn), strict=True)
    rates = rates_of(measured)
    if suspects := slow_pairs(rates):
        _measure_again(cluster, measured, suspects, usual_pair(rates))
    return {" ".join(pair): one for pair, one in measured.items()}


def _measure_again(cluster: Cluster, measured: dict[Pair, dict[str, Any]], suspects: list[Pair], usual: Pair) -> None:
    """Measure the usual way and those that do not yet look sound, in turns, each alone."""
    beside = [_way(cluster, usual)]
    for pair in suspects:
        measured[pair] |= {"again": [], "beside": beside, "beside_way": " ".join(usual)}
    for _ in range(_TURNS):
        for pair in suspects:
            again = _way(cluster, pair)
            measured[pair]["again"].append(again)
            measured[pair]["bytes_per_second"] = max(_all_rates([measured[pair], again]))
        beside.append(_way(cluster, usual))
        suspects = [pair for pair in suspects if state(measured[pair]) != "sound"]
        if not suspects:
            return


def _is_open(seen: Seen, pair: Pair) -> bool:
    """True if large messages get through there, as far as is known; other checks say so where they do not."""
    reach = seen.pairs.get(pair, {}).get("reach", {})
    return bool(reach.get("connect", "ok") == "ok" and reach.get("large_is_complete", True))


def _way(cluster: Cluster, pair: Pair) -> dict[str, Any]:
    a, b = pair
    address = cluster.target.addresses[b]
    try:
        echo, sink = (
            cluster.ask(b, "listen", {"address": address, "seconds": 20.0}, seconds=5.0, user="login") for _ in range(2)
        )
        wish = {"address": address, "echo_port": echo, "sink_port": sink}
        rates: dict[str, Any] = cluster.ask(a, "way", wish, seconds=30.0, user="login")
    except UnansweredError as error:
        return {"error": str(error)}
    return rates


def rates_of(measured: Mapping[Pair, Rates]) -> dict[Pair, float]:
    """Bytes a second of those that could be measured."""
    return {pair: one["bytes_per_second"] for pair, one in measured.items() if "bytes_per_second" in one}


def usual_pair(rates: Mapping[Pair, float]) -> Pair:
    """A pair with the rate of a sound one: the upper quartile. Of three nodes, a slow one spoils four of six pairs."""
    return sorted(rates, key=lambda pair: rates[pair])[len(rates) * 3 // 4]


def slow_pairs(rates: Mapping[Pair, float]) -> list[Pair]:
    """The directed pairs that stayed far below the others in the first measurement."""
    return [pair for pair, rate in rates.items() if rate < _SLOW * rates[usual_pair(rates)]]


def state(one: Rates) -> Literal["sound", "slow", "unclear"]:
    """What the turns say about a way. A way without turns had not seemed slow."""
    if "again" not in one:
        return "sound"
    own, others = _all_rates(one["again"]), _all_rates(one["beside"])
    if not own or not others:
        return "unclear"
    if max(own) >= _SLOW * statistics.median(others):
        return "sound"
    return "slow" if max(own) < _SLOW * min(others) else "unclear"


def _all_rates(turns: Sequence[Rates]) -> list[float]:
    return [one["bytes_per_second"] for one in turns if "bytes_per_second" in one]


def own_and_usual(ways: Sequence[Rates]) -> tuple[float, float]:
    """The median of the best rates of slow ways, and the rate of the usual way."""
    bests = [max(_all_rates(one["again"])) for one in ways]
    return statistics.median(bests), statistics.median(_all_rates(ways[0]["beside"]))


def why_unclear(pair: Pair, one: Rates) -> str:
    """The reason why nothing is known about a way: which node is busy, and what was measured."""
    own, others = _all_rates(one["again"]), _all_rates(one["beside"])
    if not own or not others:
        errors = [turn["error"] for turn in [*one["again"], *one["beside"]] if "error" in turn]
        return f"seemed slow, and could not be measured again: {errors[0]}"
    waited = [statistics.median(turn["waited"][end] for turn in one["again"] if "waited" in turn) for end in (0, 1)]
    busy = [f"{name} ({share:.0%} of the time)" for name, share in zip(pair, waited, strict=True) if share >= _BUSY]
    cause = f"programs wait for a processor on {' and on '.join(busy)}" if busy else "the rates differ too much"
    beside = one["beside_way"].replace(" ", " -> ")
    return f"not measured: {cause}. {_span(own)} MiB/s, in turns with {beside}, {_span(others)} MiB/s"


def _span(rates: Sequence[float]) -> str:
    return f"{mib(min(rates))} to {mib(max(rates))}"


def mib(rate: float) -> str:
    """A rate in MiB/s, for people."""
    return f"{rate / 2**20:.3g}"


def whose_fault(
    slow: Sequence[Pair], names: Sequence[str], unclear: Collection[Pair] = ()
) -> list[tuple[tuple[str, ...], str]]:
    """What is slow: a node (all its ways out, all its ways in, or both), or single links. Each is (place, words).

    With two nodes the end cannot be told; with three, two ways of two are a weak sign. Where other ways of the same
    nodes are unclear, it may be the node or the link.
    """
    if len(names) < 3:
        return [(pair, "from the one to the other; with two nodes it cannot be told which end it is") for pair in slow]
    probably = "probably " if len(names) == 3 else ""
    left = set(slow)
    faults: list[tuple[tuple[str, ...], str]] = []
    explained: set[Pair] = set()
    for name in names:
        others = [other for other in names if other != name]
        out, into = {(name, other) for other in others}, {(other, name) for other in others}
        ways = [(pairs, words) for pairs, words in ((out, "sends"), (into, "receives")) if pairs <= left]
        if not ways:
            continue
        faults.append(((name,), f"{probably}the node: it {' and '.join(words for _, words in ways)} slowly"))
        explained |= {pair for pairs, _ in ways for pair in pairs}
    for pair in slow:
        if pair in explained:
            continue
        hidden = any(a == pair[0] or b == pair[1] for a, b in unclear)
        words = "from the one to the other; whether others of their ways are slow too was not measured"
        faults.append((pair, words if hidden else "the link between them: each has faster ones"))
    return faults
