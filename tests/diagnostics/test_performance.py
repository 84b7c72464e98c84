"""Whose fault it is that a way is slow, and the judges of speeds."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from diagnostics.made_up import seen
from mpitrain.diagnostics.check import Result, Seen
from mpitrain.diagnostics.checks import CHECKS
from mpitrain.diagnostics.checks.performance import slow_pairs, whose_fault
from mpitrain.diagnostics.judge import judge

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


def test_all_alike() -> None:
    assert places(4) == [] and places(2) == []


def test_a_slow_link() -> None:
    ((place, words),) = places(4, ("node2", "node3"))
    assert place == ("node2", "node3") and words.startswith("the link")
    assert [place for place, _ in places(4, ("node2", "node3"), ("node3", "node2"))] == [
        ("node2", "node3"),
        ("node3", "node2"),
    ]


def test_a_slow_node() -> None:
    for out, into, words in ((True, False, "sends"), (False, True, "receives"), (True, True, "sends and receives")):
        assert places(4, *ways(4, "node3", out=out, into=into)) == [(("node3",), f"the node: it {words} slowly")]


def test_a_slow_node_and_a_slow_link() -> None:
    found = places(5, *ways(5, "node3", out=True, into=False), ("node1", "node2"))
    assert [place for place, _ in found] == [("node3",), ("node1", "node2")]


def test_three_nodes_are_a_weak_sign() -> None:
    assert places(3, *ways(3, "node1", out=True, into=True)) == [
        (("node1",), "probably the node: it sends and receives slowly")
    ]
    assert places(3, ("node1", "node2"))[0][0] == ("node1", "node2")


def test_two_nodes_cannot_tell() -> None:
    ((place, words),) = places(2, ("node1", "node2"))
    assert place == ("node1", "node2") and "cannot be told which end" in words


def judged(id_: str, looked: Seen) -> list[Result]:
    return [one for one in judge([CHECKS[id_]], looked) if one.verdict != "pass"]


def measured(found: dict[Pair, float]) -> Seen:
    looked = seen(4)
    looked.cluster["ways"] = {
        " ".join(pair): {"bytes_per_second": rate, "latency_seconds": 1e-4} for pair, rate in found.items()
    }
    return looked


def test_the_matrix() -> None:
    assert judged("PRF01", measured(rates(4))) == []
    (result,) = judged("PRF01", measured(rates(4, *ways(4, "node3", out=True, into=True))))
    assert (result.verdict, result.where) == ("fail", ("node3",))
    assert "10 MiB/s" in result.observed and result.allowed.startswith("500 MiB/s") and "ssh 10.0.0.3" in result.remedy
    (result,) = judged("PRF01", measured(rates(4, ("node2", "node4"))))
    assert result.where == ("node2", "node4") and "the link" in result.observed


def test_a_way_that_could_not_be_measured_is_unknown() -> None:
    looked = measured(rates(4))
    looked.cluster["ways"]["node1 node2"] = {"error": "no answer within 30 s"}
    (result,) = judged("PRF01", looked)
    assert (result.verdict, result.where, result.observed) == ("unknown", ("node1", "node2"), "no answer within 30 s")
    assert {one.verdict for one in judged("PRF01", seen(4))} == {"unknown"}


def test_a_straggler() -> None:
    def looked(**seconds: Any) -> Seen:
        found = seen(4)
        found.cluster["computation"] = {"node1": [0.11, 0.1], "node2": [0.1], "node3": [0.1], **seconds}
        return found

    assert judged("PRF03", looked(node4=[0.5, 0.4, 0.1])) == []  # something ran beside it by chance
    (result,) = judged("PRF03", looked(node4=[0.14]))
    assert (result.verdict, result.where) == ("warn", ("node4",))
    (result,) = judged("PRF03", looked(node4=[0.25]))
    assert result.verdict == "fail" and "2.5 times" in result.observed and "uptime" in result.remedy
    (result,) = judged("PRF03", looked(node4={"error": "no answer"}))
    assert (result.verdict, result.observed) == ("unknown", "no answer")


def test_the_share() -> None:
    looked = seen(2)
    looked.cluster["share speed"] = {name: {"bytes_per_second": 100 * 2.0**20} for name in ("node1", "node2")}
    assert judged("PRF04", looked) == []
    looked.cluster["share speed"]["node2"] = {"bytes_per_second": 5 * 2.0**20}
    (result,) = judged("PRF04", looked)
    assert (result.verdict, result.where) == ("warn", ("node2",))
    assert "at 5 MiB/s" in result.observed and result.allowed == "20 MiB/s or more"
    looked.cluster["share speed"] = {}
    assert {one.verdict for one in judged("PRF04", looked)} == {"skip"}
