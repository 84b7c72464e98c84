"""The reports for people and for programs."""

from __future__ import annotations

import json

import jsonschema
import pytest

from check.made_up import by_node, check, seen
from jobs import REPOSITORY
from mpitrain.check.check import Finding, Result
from mpitrain.check.report import counts, document, exit_code, fold, fold_pairs, group, nagios, text
from mpitrain.check.run import judge

NAMES = ("node1", "node2", "node3", "node4")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["node1"], "node1"),
        (["node2", "node1", "node3"], "node[1-3]"),
        (["node1", "node3", "node4", "node7"], "node[1,3-4,7]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n09", "n10"], "n[09-10]"),
        (["n9", "n010"], "n[9,010]"),
        (["gpu", "node1", "node2"], "gpu,node[1-2]"),
        (["rack1-a", "rack2-a"], "rack[1-2]-a"),
        (["node1", "node1"], "node1"),
    ],
)
def test_fold(names: list[str], text: str) -> None:
    assert fold(names) == text


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([], ""),
        ([("node1", "node2")], "node1 -> node2"),
        ([("node1", "node2"), ("node2", "node1")], "node1 <-> node2"),
        ([("node3", "node1"), ("node3", "node2"), ("node3", "node4")], "node3 -> every other"),
        ([("node1", "node3"), ("node2", "node3"), ("node4", "node3")], "every other -> node3"),
        (
            [("node3", "node1"), ("node3", "node2"), ("node3", "node4"), ("node1", "node2")],
            "node3 -> every other, node1 -> node2",
        ),
    ],
)
def test_fold_pairs(pairs: list[tuple[str, str]], text: str) -> None:
    assert fold_pairs(pairs, NAMES) == text
    assert fold_pairs([("node1", "node2")], NAMES[:2]) == "node1 -> node2"  # of two nodes, a pair is a pair


def results_of_three() -> tuple[list[Result], object]:
    saw = seen(3)
    saw.nodes = {name: {"a": "not mounted", "b": "", "c": ""} for name in NAMES[:3]}
    saw.nodes["node1"]["a"] = ""
    saw.nodes["node3"]["c"] = {"error": "no answer within 3 s"}
    checks = [
        check("AAA01", by_node("a"), tag="nfs", remedy="", why="Ranks write there."),
        check("BBB01", by_node("b"), needs=("AAA01",)),
        check("CCC01", by_node("c")),
    ]
    return judge(checks, saw), saw.target


def test_the_same_of_several_nodes_is_one_line_with_one_repair() -> None:
    results, target = results_of_three()
    groups = group(results, target)  # type: ignore[arg-type]
    assert [(one.check.id, one.verdict, one.places, one.blocks) for one in groups] == [
        ("AAA01", "fail", "node[2-3]", ("BBB01",)),
        ("CCC01", "unknown", "node3", ()),
    ]
    assert groups[0].remedy == "ansible-playbook cluster/setup.yml --tags nfs --limit node2,node3"
    assert groups[0].is_mended_by_set_up
    assert not groups[1].is_mended_by_set_up
    # Each check counts by its gravest verdict.
    assert {name: count for name, count in counts(results).items() if count} == {"fail": 1, "blocked": 1, "unknown": 1}


def test_text() -> None:
    results, target = results_of_three()
    assert text(results, target, 100) == (  # type: ignore[arg-type]
        "FAIL    AAA01 on node[2-3]: not mounted\n"
        "        why: Ranks write there.\n"
        "        blocks: BBB01\n"
        "        $ ansible-playbook cluster/setup.yml --tags nfs --limit node2,node3\n"
        "\n"
        "UNKNOWN CCC01 on node3: no answer within 3 s\n"
        "        why: w.\n"
        "\n"
        "3 nodes, 3 checks: 1 failed, 1 unknown, 1 blocked somewhere"
    )


def test_long_words_are_wrapped_and_a_remedy_is_not() -> None:
    saw = seen(1)
    saw.nodes = {"node1": {"a": "word " * 40}}
    remedy = "run this " * 20
    lines = text(judge([check("AAA01", by_node("a"), remedy=remedy)], saw), saw.target, 60).splitlines()
    assert [line for line in lines if len(line) > 60] == [f"        $ {remedy}"]


def test_the_whole_cluster_has_no_place_and_no_limit() -> None:
    def whole(_seen: object, _names: object) -> list[Finding]:
        return [Finding("fail", "does not start")]

    saw = seen(2)
    results = judge([check("MMM01", whole, "cluster", tag="runtime", remedy="")], saw)
    (one,) = group(results, saw.target)
    assert (one.places, one.remedy) == ("", "ansible-playbook cluster/setup.yml --tags runtime")


@pytest.mark.parametrize(
    ("verdicts", "strict", "code", "nagios_code"),
    [
        (["pass", "skip"], False, 0, 0),
        (["pass", "warn"], False, 0, 1),
        (["pass", "warn"], True, 1, 1),
        (["warn", "unknown"], False, 3, 3),
        (["unknown", "fail", "blocked"], False, 1, 2),
    ],
)
def test_exit_codes(verdicts: list[str], strict: bool, code: int, nagios_code: int) -> None:
    one = check("AAA01", by_node("a"))
    results = [Result(one, verdict, ("node1",), "odd") for verdict in verdicts]  # type: ignore[arg-type]
    assert exit_code(results, strict=strict) == code
    line, found = nagios(results, seen(1).target)
    assert found == nagios_code
    assert line.startswith(f"MPITRAIN {['OK', 'WARNING', 'CRITICAL', 'UNKNOWN'][nagios_code]} - ")
    assert "\n" not in line and "|" not in line


def test_the_document_is_as_its_schema_says() -> None:
    results, target = results_of_three()
    found = document(results, target, started="2026-01-01T00:00:00+00:00", seconds=1.0, interrupted=False)  # type: ignore[arg-type]
    schema = json.loads((REPOSITORY / "docs/check-cluster.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(json.dumps(found)), schema)
    assert found["findings"][0]["places"] == "node[2-3]"
    assert len(found["results"]) == 9
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**found, "schema": 2}, schema)
