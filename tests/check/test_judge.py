"""The engine: verdicts in every place; causes are told apart from their consequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from check.made_up import by_node, check, seen
from mpitrain.check.check import Finding, NotHereError, NotSeenError, Result, Seen
from mpitrain.check.run import judge
from mpitrain.launch.hostfile import Host


def verdicts(results: Sequence[Result], name: str) -> dict[tuple[str, ...], str]:
    return {one.where: one.verdict for one in results if one.check.id == name}


def test_each_node_gets_a_verdict() -> None:
    saw = seen(3)
    saw.nodes = {"node1": {"a": ""}, "node2": {"a": "broken"}, "node3": {"a": {"error": "no answer within 3 s"}}}
    results = judge([check("AAA01", by_node("a"))], saw)
    assert verdicts(results, "AAA01") == {("node1",): "pass", ("node2",): "fail", ("node3",): "unknown"}
    failed, unknown = results[1:]
    assert (failed.observed, failed.remedy) == ("broken", "mend node2")
    assert (unknown.observed, unknown.remedy) == ("no answer within 3 s", "")


def test_what_was_not_looked_at_is_unknown_and_never_passed() -> None:
    assert verdicts(judge([check("AAA01", by_node("a"))], seen(1)), "AAA01") == {("node1",): "unknown"}


def test_what_needs_a_failed_check_is_blocked_by_the_first_cause() -> None:
    saw = seen(2)
    saw.nodes = {"node1": dict.fromkeys("abc", ""), "node2": {"a": "broken", "b": "too", "c": ""}}
    checks = [
        check("AAA01", by_node("a")),
        check("BBB01", by_node("b"), needs=("AAA01",)),
        check("CCC01", by_node("c"), needs=("BBB01",)),
        check("DDD01", by_node("c")),
    ]
    results = judge(checks, saw)
    assert verdicts(results, "BBB01") == {("node1",): "pass", ("node2",): "blocked"}
    assert [one.blocked_by for one in results if one.verdict == "blocked"] == ["AAA01", "AAA01"]
    assert verdicts(results, "DDD01") == {("node1",): "pass", ("node2",): "pass"}


def test_a_warning_and_an_unknown_block_nothing() -> None:
    def warns(_seen: Seen, name: str) -> Iterator[Finding]:
        yield Finding("warn", "odd")

    saw = seen(1)
    saw.nodes = {"node1": {"b": ""}}
    checks = [
        check("AAA01", warns),
        check("AAA02", by_node("none")),
        check("BBB01", by_node("b"), needs=("AAA01", "AAA02")),
    ]
    assert verdicts(judge(checks, saw), "BBB01") == {("node1",): "pass"}


def test_a_pair_is_blocked_by_either_end_and_by_the_pair_itself() -> None:
    def pair(seen: Seen, where: tuple[str, str]) -> Iterator[Finding]:
        if seen.pair(where, "p"):
            yield Finding("fail", "no way")

    saw = seen(3)
    saw.nodes = {"node1": {"a": ""}, "node2": {"a": ""}, "node3": {"a": "off"}}
    saw.pairs = {("node1", "node2"): {"p": True}, ("node2", "node1"): {"p": False}}
    checks = [
        check("AAA01", by_node("a")),
        check("PPP01", pair, "pair", needs=("AAA01",)),
        check("PPP02", pair, "pair", needs=("PPP01",)),
    ]
    results = judge(checks, saw)
    found = verdicts(results, "PPP01")
    assert found[("node1", "node2")] == "fail"
    assert found[("node2", "node1")] == "pass"
    assert {found[place] for place in found if "node3" in place} == {"blocked"}
    assert len(found) == 6
    assert verdicts(results, "PPP02")[("node1", "node2")] == "blocked"
    assert verdicts(results, "PPP02")[("node2", "node1")] == "pass"


def test_a_check_of_the_cluster_goes_on_with_the_nodes_that_are_left() -> None:
    asked = []

    def all_of_them(_seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
        asked.append(list(names))
        yield Finding("fail", "differs", where=("node2",))

    saw = seen(3)
    saw.nodes = {"node1": {"a": "off"}, "node2": {"a": ""}, "node3": {"a": ""}}
    results = judge([check("AAA01", by_node("a")), check("KKK01", all_of_them, "cluster", needs=("AAA01",))], saw)
    assert asked == [["node2", "node3"]]
    assert verdicts(results, "KKK01") == {("node1",): "blocked", ("node2",): "fail", ("node3",): "pass"}


def test_a_job_of_all_nodes_is_blocked_by_any() -> None:
    def job(_seen: Seen, _names: object) -> Iterator[Finding]:
        raise AssertionError("must not be asked")

    saw = seen(2)
    saw.nodes = {"node1": {"a": ""}, "node2": {"a": "off"}}
    results = judge(
        [check("AAA01", by_node("a")), check("JJJ01", job, "cluster", needs=("AAA01",), needs_all=True)], saw
    )
    assert [one.blocked_by for one in results if one.check.id == "JJJ01"] == ["AAA01"]


def test_the_head_blocks_what_hangs_on_it() -> None:
    saw = seen(2)
    saw.nodes = {"node1": {"a": "off", "b": ""}, "node2": {"a": "", "b": "the shared folder hangs"}}
    results = judge([check("AAA01", by_node("a")), check("BBB01", by_node("b"), needs_head=("AAA01",))], saw)
    assert verdicts(results, "BBB01") == {("node1",): "blocked", ("node2",): "blocked"}


def test_a_check_of_the_head_where_the_head_is_not_looked_at() -> None:
    saw = seen(2, inventory_head=Host("node9", "10.0.0.9"))
    results = judge([check("AAA01", by_node("a"), "head")], saw)
    assert [(one.verdict, one.observed) for one in results] == [("skip", "the head, node9, is not examined")]


def test_what_is_not_there_is_skipped() -> None:
    def no_card(_seen: Seen, _name: str) -> Iterator[Finding]:
        raise NotHereError("has no GPU")
        yield

    def part(_seen: Seen, name: str) -> Iterator[Finding]:
        yield Finding("warn", "odd")
        raise NotSeenError("and the rest is not known")

    results = judge([check("GGG01", no_card), check("GGG02", part)], seen(1))
    assert [(one.verdict, one.observed) for one in results] == [
        ("skip", "has no GPU"),
        ("warn", "odd"),
        ("unknown", "and the rest is not known"),
    ]


def test_a_tag_makes_the_line_that_repairs() -> None:
    saw = seen(1)
    saw.nodes = {"node1": {"a": "broken"}}
    (result,) = judge([check("AAA01", by_node("a"), tag="nfs", remedy="")], saw)
    assert result.remedy == "ansible-playbook cluster/setup.yml --tags nfs --limit {limit}"
