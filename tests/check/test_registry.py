"""The rules that every check must meet."""

from __future__ import annotations

import os
import re
from itertools import permutations
from pathlib import Path

import pytest
import yaml

from check.made_up import target
from jobs import REPOSITORY
from mpitrain.check.check import Check
from mpitrain.check.checks import ASKS, CHECKS, CLUSTER, PAIRS, SUBJECTS
from mpitrain.check.collect import rounds
from mpitrain.check.report import explain, table
from mpitrain.check.run import select
from mpitrain.check.target import DEFAULTS, find_target
from mpitrain.errors import ConfigError

# Checks whose answers come from the login itself and from the command line.
OTHER_SECTIONS = {"login", "baseline"}


@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_a_check_is_whole(check: Check) -> None:
    assert re.fullmatch(r"[A-Z]{3}[0-9]{2}", check.id)
    earlier = list(CHECKS)[: list(CHECKS).index(check.id)]
    for need in (*check.needs, *check.needs_head):
        assert need in earlier, f"{need} must come earlier"
    assert set(check.uses) <= {*ASKS, *PAIRS, *CLUSTER, *OTHER_SECTIONS}
    for words in (check.looks, check.why):
        assert words.endswith("."), words
    assert not check.title.endswith(".")
    assert max(len(line) for line in explain(check, 100).splitlines()) <= 110


def test_names_are_given_once() -> None:
    ids = [check.id for subject in SUBJECTS for check in subject.CHECKS]
    assert len(ids) == len(set(ids))
    sections = [
        *(ask.section for subject in SUBJECTS for ask in getattr(subject, "ASKS", ())),
        *(name for subject in SUBJECTS for kind in ("PAIRS", "CLUSTER") for name in getattr(subject, kind, {})),
    ]
    assert len(sections) == len(set(sections))


def test_tags_are_the_playbooks() -> None:
    setup = yaml.safe_load((REPOSITORY / "cluster/setup.yml").read_text())
    tags = {Path(play["ansible.builtin.import_playbook"]).stem for play in setup}
    assert {check.tag for check in CHECKS.values() if check.tag} <= tags


def test_the_table_in_the_docs_is_made_from_the_checks() -> None:
    path = REPOSITORY / "docs/reference/checks.md"
    if os.environ.get("WRITE_DOCS"):
        path.write_text(table(CHECKS.values()))
    assert path.read_text() == table(CHECKS.values()), "WRITE_DOCS=1 writes it anew"


@pytest.mark.parametrize("number", range(8))
def test_rounds_have_every_pair_once_and_each_node_once_a_round(number: int) -> None:
    names = [f"n{i}" for i in range(number)]
    found = list(rounds(names))
    for pairs in found:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
    both = {pair for pairs in found for one in pairs for pair in (one, one[::-1])}
    assert both == set(permutations(names, 2))
    assert sum(len(pairs) for pairs in found) == number * (number - 1) // 2
    assert len(found) == max(0, number - 1 + number % 2)


def test_levels_grow() -> None:
    quick, full, bench = ([check.id for check in select(level)] for level in ("quick", "full", "bench"))  # type: ignore[arg-type]
    assert set(quick) <= set(full) <= set(bench)
    assert bench == list(CHECKS)


def test_only_takes_what_it_needs_along() -> None:
    assert [check.id for check in select("quick", only=["PRB01"])] == ["SSH01", "SSH03", "SSH02", "PRB01"]
    assert "SSH01" not in [check.id for check in select("quick", skip=["SSH01"])]


def test_an_unknown_id() -> None:
    with pytest.raises(ConfigError, match="there is no check SSH1; did you mean SSH"):
        select("quick", only=["SSH1"])


def test_defaults_are_those_of_group_vars() -> None:
    given = yaml.safe_load((REPOSITORY / "cluster/group_vars/all.yml").read_text())
    assert {name: given[name] for name in DEFAULTS} == DEFAULTS


def test_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path
    (folder / "group_vars").mkdir()
    (folder / "group_vars/all.yml").write_text(
        "ansible_user: root\nmpitrain_user: ada\nmpitrain_share: /data\nmpitrain_venv: '{{ mpitrain_share }}/v'\n"
    )
    (folder / "hosts").write_text(
        "[head]\na ansible_host=10.0.0.1\n[workers]\nb ansible_host=10.0.0.2\n[cluster:children]\nhead\nworkers\n"
        "[all:vars]\nansible_port = 2222\n"
    )
    monkeypatch.chdir(folder)
    found = find_target(Path("hosts"), None, None, {"UCX_TLS": "tcp", "HOME": "/"})
    assert (found.user, found.share, found.venv) == ("ada", "/data", "/data/v")
    assert found.addresses == {"a": "10.0.0.1", "b": "10.0.0.2"}
    assert found.environ == {"UCX_TLS": "tcp"}
    assert found.set_up == "mpitrain cluster setup --inventory hosts --"
    (folder / "cluster").mkdir()
    (folder / "cluster/setup.yml").touch()
    assert find_target(Path("hosts"), None, None, {}).set_up == "ansible-playbook -i hosts cluster/setup.yml"
    assert found.hosts[0].variables == {"ansible_user": "root", "ansible_port": "2222"}
    assert find_target(Path("hosts"), "b,a", None, {}).names == ("a", "b")
    only_b = find_target(Path("hosts"), "b", None, {})
    assert (only_b.names, only_b.head, only_b.addresses["a"]) == (("b",), "a", "10.0.0.1")
    with pytest.raises(ConfigError, match="b is named twice"):
        find_target(Path("hosts"), "b,b", None, {})
    (folder / "group_vars/all.yml").write_text("mpitrain_share: \"{{ lookup('env', 'X') }}\"\n")
    with pytest.raises(ConfigError, match="which only Ansible can fill in"):
        find_target(Path("hosts"), None, None, {})
    monkeypatch.chdir("/")
    with pytest.raises(ConfigError, match="there is no inventory"):
        find_target(None, None, None, {})
    assert target(2).names == ("node1", "node2")
