"""Which node is to blame for a slow way, and the judges of speeds."""

from __future__ import annotations

from itertools import permutations
from typing import Any, cast

import pytest

from check.made_up import judged, only, seen, sound, verdicts
from mpitrain.check.check import Result, Seen
from mpitrain.check.checks.performance import measure_ways, slow_pairs, whose_fault
from mpitrain.check.collect import Cluster

FAST = 500 * 2.0**20
SLOW = 10 * 2.0**20
Pair = tuple[str, str]


def rates(num_nodes: int, *slow: Pair) -> dict[Pair, float]:
    names = [f"node{number}" for number in range(1, num_nodes + 1)]
    return {pair: SLOW if pair in slow else FAST for pair in permutations(names, 2)}


def places(num_nodes: int, *slow: Pair) -> list[tuple[tuple[str, ...], str]]:
    found = rates(num_nodes, *slow)
    return whose_fault(slow_pairs(found), sorted({a for a, _ in found}))


def ways(num_nodes: int, name: str, *, out: bool, into: bool) -> list[Pair]:
    return [(a, b) for a, b in rates(num_nodes) if (out and a == name) or (into and b == name)]


LINK = [("node2", "node3"), ("node3", "node2")]
SENDS = ways(4, "node3", out=True, into=False)
RECEIVES = ways(4, "node3", out=False, into=True)
OF_FIVE = [*ways(5, "node3", out=True, into=False), ("node1", "node2")]


@pytest.mark.parametrize(
    ("num_nodes", "slow", "places_and_words"),
    [
        (4, [], []),
        (2, [], []),
        (4, LINK[:1], [(LINK[0], "the link")]),
        (4, LINK, [(pair, "the link") for pair in LINK]),
        (4, SENDS, [(("node3",), "the node: it sends slowly")]),
        (4, RECEIVES, [(("node3",), "the node: it receives slowly")]),
        (4, SENDS + RECEIVES, [(("node3",), "the node: it sends and receives slowly")]),
        (5, OF_FIVE, [(("node3",), ""), (("node1", "node2"), "")]),
        (3, ways(3, "node1", out=True, into=True), [(("node1",), "probably the node: it sends and receives slowly")]),
        (3, [("node1", "node2")], [(("node1", "node2"), "")]),
        (2, [("node1", "node2")], [(("node1", "node2"), "cannot be told which end")]),
    ],
)
def test_whose_fault(num_nodes: int, slow: list[Pair], places_and_words: list[tuple[tuple[str, ...], str]]) -> None:
    """Of three nodes the sign is weak, and two cannot tell."""
    found = places(num_nodes, *slow)
    assert [place for place, _ in found] == [place for place, _ in places_and_words]
    for (_, said), (_, words) in zip(found, places_and_words, strict=True):
        assert words in said and (said == words or "node" not in words)


TURNS = 5


def turns(*mib_per_second: float) -> list[dict[str, Any]]:
    return [{"bytes_per_second": rate * 2.0**20, "waited": [0.0, 0.0]} for rate in mib_per_second]


def measured(found: dict[Pair, float]) -> Seen:
    """The measurements on a quiet network: each one equals the first."""
    looked = seen(4)
    beside = turns(*[FAST / 2**20] * (TURNS + 1))
    looked.cluster["ways"] = {
        " ".join(pair): {"bytes_per_second": rate, "latency_seconds": 1e-4}
        | ({"again": turns(*[rate / 2**20] * TURNS), "beside": beside, "beside_way": "a b"} if rate == SLOW else {})
        for pair, rate in found.items()
    }
    return looked


def test_the_matrix() -> None:
    sound("PRF01", measured(rates(4)))
    slow = measured(rates(4, *SENDS, *RECEIVES))
    assert only("PRF01", slow, "fail", "node3", "10 MiB/s", "ssh 10.0.0.3").allowed.startswith("500 MiB/s")
    only("PRF01", measured(rates(4, ("node2", "node4"))), "fail", "node2 node4", "the link")


def on_a_busy_node(own: list[float], beside: list[float], waited: float = 0.0) -> list[Result]:
    """The finding about node2 -> node4, which seemed slow. It and a sound way had these rates, measured in turns."""
    looked = measured(rates(4, ("node2", "node4")))
    again = [one | {"waited": [0.05, waited]} for one in turns(*own)]
    looked.cluster["ways"]["node2 node4"] |= {"again": again, "beside": turns(*beside), "beside_way": "node1 node2"}
    return judged("PRF01", looked)


def test_a_way_that_is_as_fast_in_turns_is_not_slow() -> None:
    """Both are slower than before: another program now keeps the cores busy."""
    assert on_a_busy_node([10, 12, 30, 8, 9], [40, 60, 20, 200, 50, 60]) == []


def test_what_differs_by_more_than_a_finding_claims_was_not_measured() -> None:
    """The best rate, 24, is below half of the sound way's usual rate, and above half of its worst rate."""
    own, beside = [10.0, 24, 9, 12, 11], [40.0, 60, 20, 200, 50, 60]
    (result,) = on_a_busy_node(own, beside, waited=0.4)
    assert (result.verdict, result.where) == ("unknown", ("node2", "node4"))
    assert result.observed == (
        "not measured: programs wait for a processor on node4 (40% of the time). 9 to 24 MiB/s, in turns with "
        "node1 -> node2, 20 to 200 MiB/s"
    )
    (result,) = on_a_busy_node(own, beside)
    assert "not measured: the rates differ too much. 9 to 24 MiB/s" in result.observed
    (result,) = on_a_busy_node(own, [])
    assert result.verdict == "unknown"


def test_a_slow_way_is_found_on_a_busy_node() -> None:
    (result,) = on_a_busy_node([1, 1.1, 0.9, 1, 1], [40, 60, 20, 200, 50, 60], waited=0.4)
    assert (result.verdict, result.where) == ("fail", ("node2", "node4"))
    assert result.observed == "the link between them: each has faster ones; 1.1 MiB/s"
    assert result.allowed.startswith("55 MiB/s")


def test_the_link_is_not_blamed_where_other_ways_are_unclear() -> None:
    looked = measured(rates(4, ("node2", "node4"), ("node2", "node3")))
    looked.cluster["ways"]["node2 node3"]["again"] = turns(10, 240)
    looked.cluster["ways"]["node2 node3"]["beside"] = turns(400, 900, 900)
    unclear, slow = judged("PRF01", looked)
    assert (unclear.verdict, slow.verdict, slow.where) == ("unknown", "fail", ("node2", "node4"))
    assert "whether others of their ways are slow too was not measured" in slow.observed


class Nodes:
    """Nodes that answer the measurements of ways. The machine is busy during the first measurement of some pairs."""

    def __init__(self, *held_up: Pair, slow: Pair | None = None) -> None:
        self.target = seen(3).target
        self.seen = seen(3)
        self.agents = dict.fromkeys(self.target.names)
        self.asked: list[Pair] = []
        self._held_up, self._slow = list(held_up), slow

    def ask(self, name: str, call: str, wish: dict[str, Any], **_: Any) -> Any:
        if call == "listen":
            return 1
        other = next(node for node, address in self.target.addresses.items() if address == wish["address"])
        pair = (name, other)
        self.asked.append(pair)
        rate = FAST
        if pair in self._held_up:
            self._held_up.remove(pair)
            rate = SLOW
        return {"bytes_per_second": SLOW if pair == self._slow else rate, "waited": [0.0, 0.0]}


def test_a_way_that_seemed_slow_is_measured_in_turns_with_one_that_did_not() -> None:
    cluster = Nodes(("node1", "node2"), slow=("node2", "node3"))
    found = measure_ways(cast(Cluster, cluster))
    cluster.seen.cluster["ways"] = found
    (result,) = judged("PRF01", cluster.seen)
    assert (result.verdict, result.where) == ("fail", ("node2", "node3"))
    assert found["node1 node2"]["bytes_per_second"] == FAST  # PRF02 compares with it
    usual = cluster.asked[6]
    assert usual not in (("node1", "node2"), ("node2", "node3"))
    turns_of_it = [pair for pair in cluster.asked[7:] if pair != ("node1", "node2")]
    assert turns_of_it == [("node2", "node3"), usual] * TURNS
    assert len(cluster.asked) == 7 + 2 * TURNS + 1  # the way that was held up is sound at the next measurement


def test_a_way_that_could_not_be_measured_is_unknown() -> None:
    looked = measured(rates(4))
    looked.cluster["ways"]["node1 node2"] = {"error": "no answer within 30 s"}
    only("PRF01", looked, "unknown", "node1 node2", "no answer within 30 s")
    assert verdicts("PRF01", seen(4)) == {"unknown"}


def test_a_straggler() -> None:
    def looked(**seconds: Any) -> Seen:
        found = seen(4)
        found.cluster["computation"] = {"node1": [0.11, 0.1], "node2": [0.1], "node3": [0.1], **seconds}
        return found

    sound("PRF03", looked(node4=[0.5, 0.4, 0.1]))  # another program ran at the same time by chance
    only("PRF03", looked(node4=[0.14]), "warn", "node4", "")
    only("PRF03", looked(node4=[0.25]), "fail", "node4", "2.5 times", "uptime")
    (result,) = judged("PRF03", looked(node4={"error": "no answer"}))
    assert (result.verdict, result.observed) == ("unknown", "no answer")


def test_the_share() -> None:
    looked = seen(2)
    looked.cluster["share speed"] = {name: {"bytes_per_second": 100 * 2.0**20} for name in ("node1", "node2")}
    sound("PRF04", looked)
    looked.cluster["share speed"]["node2"] = {"bytes_per_second": 5 * 2.0**20}
    only("PRF04", looked, "warn", "node2", "at 5 MiB/s", allowed="20 MiB/s or more")
    looked.cluster["share speed"] = {}
    assert verdicts("PRF04", looked) == {"skip"}
