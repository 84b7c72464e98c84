"""The judges of the environment that a job finds on each node."""

from __future__ import annotations

from typing import Any

import pytest

from check.made_up import seen
from mpitrain.check.check import Result, Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.run import judge
from mpitrain.launch.conditions import differences

PACKAGES = {"mpi4py": "4.1.2", "numpy": "2.4.6", "mpitrain": "0.1.0", "pip": "23.0"}
PYTHON = {
    "path": "python",
    "python": "3.11.2",
    "machine": "x86_64",
    "libc": "glibc 2.36",
    "packages": PACKAGES,
    "mpitrain": "abcdef0123",
    "files": {"train.py": "1", "model.py": "2"},
}
SHELL = {"programs": {"mpiexec": "/b/mpiexec", "python": "/b/python"}, "environment": {"PATH": "/b:/usr/bin"}}


def looked(python: dict[str, Any] | None = None, shell: dict[str, Any] | None = None, **fields: Any) -> Seen:
    """Three equal nodes, except for the given values of the third."""
    found = seen(3, **fields)
    for name in found.target.names:
        found.nodes[name] = {"programs": {"python": PYTHON}, "shell": SHELL}
    found.nodes["node3"] = {"programs": {"python": python or PYTHON}, "shell": shell or SHELL}
    return found


def judged(id_: str, found: Seen) -> list[Result]:
    return [one for one in judge([CHECKS[id_]], found) if one.verdict != "pass"]


@pytest.mark.parametrize(
    ("script", "remedy"),
    [("/s/train.py", "ssh 10.0.0.3 'sudo chmod a+r /s/train.py'"), ("/home/cluster/nfs/a b.py", "ssh 10.0.0.1 ")],
)
def test_a_script_that_may_not_be_read(script: str, remedy: str) -> None:
    python = {**PYTHON, "files": None, "unreadable": "Permission denied"}
    (one,) = judged("ENV04", looked(python, script=script))
    assert (one.verdict, one.where) == ("fail", ("node3",))
    assert one.observed == f"cluster cannot read {script}: Permission denied"
    assert one.remedy.startswith(remedy)
    assert not judged("ENV01", looked(python, script=script))


def test_equal_nodes_pass() -> None:
    for id_ in ("ENV01", "ENV02", "ENV03", "ENV05", "ENV06"):
        assert not judged(id_, looked())
    assert not judged("ENV04", looked(script="/s/train.py"))
    assert judged("ENV04", looked())[0].verdict == "skip"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"python": "3.12.1"},
        {"machine": "aarch64"},
        {"packages": {**PACKAGES, "six": "1.16"}},
        {"packages": {}},
        {"mpitrain": "fedcba3210"},
        {"files": {"train.py": "1"}},
        {"files": {"train.py": "2", "model.py": "2"}, "python": "3.11.3"},
    ],
)
def test_a_check_fails_exactly_where_run_refuses(change: dict[str, Any]) -> None:
    there = {name: {"paths": {}, "environment": PYTHON} for name in ("node1", "node2")}
    there["node3"] = {"paths": {}, "environment": {**PYTHON, **change}}
    refused = {check for one in differences("node1", there) for check in one.condition.checks}
    ids = {"ENV01", "ENV02", "ENV04"}
    found = looked({**PYTHON, **change}, script="/s/train.py")
    assert {id_ for id_ in ids if judged(id_, found)} == refused & ids


@pytest.mark.parametrize(
    ("python", "verdict", "words"),
    [
        ({"path": "python", "why": "python: not found"}, "fail", "does not run: python: not found"),
        ({**PYTHON, "python": "3.12.1"}, "fail", "Python 3.12.1 on x86_64"),
        ({**PYTHON, "machine": "aarch64"}, "fail", "Python 3.11.2 on aarch64"),
        ({**PYTHON, "python": "3.11.9"}, "fail", "Python 3.11.9 on x86_64"),
        ({**PYTHON, "libc": "glibc 2.31"}, "warn", "Python 3.11.2 with glibc 2.31"),
    ],
)
def test_python(python: dict[str, Any], verdict: str, words: str) -> None:
    (one,) = judged("ENV01", looked(python))
    assert (one.verdict, one.where) == (verdict, ("node3",))
    assert words in one.observed
    assert one.allowed
    assert one.remedy


@pytest.mark.parametrize(
    ("packages", "verdict", "here", "others"),
    [
        ({"mpi4py": "3.1.6"}, "fail", "mpi4py 3.1.6", "mpi4py 4.1.2, as on the others"),
        ({"pip": "24.0"}, "fail", "pip 24.0", "pip 23.0, as on the others"),  # `mpitrain run` refuses this too
        ({"rich": "13.0"}, "fail", "rich 13.0", "no rich, as on the others"),
        ({"pip": "24.0", "numpy": "1.0"}, "fail", "numpy 1.0, pip 24.0", "numpy 2.4.6, pip 23.0, as on the others"),
    ],
)
def test_packages(packages: dict[str, str], verdict: str, here: str, others: str) -> None:
    (one,) = judged("ENV02", looked({**PYTHON, "packages": {**PACKAGES, **packages}}))
    assert (one.verdict, one.where, one.observed, one.allowed) == (verdict, ("node3",), here, others)


def test_other_files_of_mpitrain_under_the_same_version() -> None:
    (one,) = judged("ENV02", looked({**PYTHON, "mpitrain": "0000000099"}))
    assert (one.verdict, one.observed) == ("fail", "mpitrain files 00000000")


def test_another_mpi_library_with_the_same_packages() -> None:
    """The system's library is not a package. It is compared only between nodes with the same packages."""
    found = looked()
    for name, version in (("node1", "4.2.1"), ("node2", "4.2.1"), ("node3", "4.1.0")):
        found.nodes[name]["programs"] = {"python": PYTHON, "mpi": {"library": f"MPICH Version: {version}\nrest"}}
    (one,) = judged("ENV02", found)
    assert (one.verdict, one.where, one.observed) == ("fail", ("node3",), "the MPI library MPICH Version: 4.1.0")
    assert one.allowed == "MPICH Version: 4.2.1, as on the others"
    found.nodes["node3"]["programs"]["mpi"] = {"why": "no libmpi.so"}  # which MPI01 reports
    assert judged("ENV02", found) == []


def test_many_packages_are_counted() -> None:
    (one,) = judged("ENV02", looked({**PYTHON, "packages": {**PACKAGES, **{f"p{i}": "1" for i in range(9)}}}))
    assert one.observed.endswith("and 5 more")


def test_programs() -> None:
    other = {**SHELL, "programs": {"mpiexec": "/usr/bin/mpiexec", "python": None}}
    first, second = judged("ENV03", looked(shell=other))
    assert (first.verdict, first.where, first.observed) == ("fail", ("node3",), "mpiexec is /usr/bin/mpiexec")
    assert first.allowed == "/b/mpiexec, as on the others"
    assert second.observed == "there is no python in PATH"
    assert "ssh 10.0.0.3 sudo grep" in first.remedy
    found = looked()
    for node in found.nodes.values():
        node["shell"] = {**SHELL, "programs": {"mpiexec": None, "python": "/b/python"}}
    (one,) = judged("ENV03", found)
    assert (one.verdict, one.where) == ("warn", ())


def test_the_same_program() -> None:
    (one,) = judged("ENV04", looked({**PYTHON, "files": {"train.py": "1", "model.py": "3"}}, script="/s/train.py"))
    assert (one.verdict, one.where) == ("fail", ("node3",))
    assert one.observed == "the content differs, in /s/train.py or beside it: model.py"
    (one,) = judged("ENV04", looked({**PYTHON, "files": None}, script="/s/train.py"))
    assert one.observed == "there is no /s/train.py"
    assert "/home/cluster/nfs" in one.remedy


@pytest.mark.parametrize(
    ("environment", "is_fine"),
    [
        ({"http_proxy": "http://p:1"}, False),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "localhost"}, False),
        ({"http_proxy": "http://p:1", "no_proxy": "node1,node2,node3"}, False),  # no_proxy lacks the addresses
        ({"http_proxy": "http://p:1", "no_proxy": "node1,node2,node3,10.0.0.0/24"}, True),
        ({"http_proxy": "http://p:1", "no_proxy": "*"}, True),
        ({"http_proxy": ""}, True),
        ({"no_proxy": "localhost"}, True),
    ],
)
def test_proxies(environment: dict[str, str], is_fine: bool) -> None:
    found = judged("ENV05", looked(shell={**SHELL, "environment": environment}))
    if is_fine:
        assert not found
        return
    (one,) = found
    assert (one.verdict, one.where) == ("warn", ("node3",))
    assert "no_proxy does not have the nodes" in one.observed
    assert "node1,node2,node3,10.0.0.1" in one.remedy


def test_stray_variables() -> None:
    (one,) = judged("ENV06", looked(shell={**SHELL, "environment": {"PATH": "/other", "UCX_TLS": "tcp"}}))
    assert (one.verdict, one.where, one.observed) == ("warn", ("node3",), "UCX_TLS=tcp")
    assert one.allowed == "not set, as on the others"
    assert "UCX_TLS" in one.remedy
    found = looked()
    for node in found.nodes.values():  # a choice of the user, not an outlier
        node["shell"] = {**SHELL, "environment": {"UCX_TLS": "tcp"}}
    assert not judged("ENV06", found)
    found.nodes["node2"]["shell"] = SHELL
    (one,) = judged("ENV06", found)
    assert (one.where, one.observed, one.allowed) == (("node2",), "UCX_TLS is not set", "UCX_TLS=tcp, as on the others")


@pytest.mark.parametrize("id_", ["ENV01", "ENV02", "ENV03", "ENV04", "ENV06"])
def test_a_node_without_an_answer_does_not_hide_the_others(id_: str) -> None:
    found = looked(
        {**PYTHON, "python": "3.9.1", "packages": {}, "files": None}, {**SHELL, "environment": {"FI_A": "1"}}
    )
    found.target = looked(script="/s/train.py").target
    found.nodes["node3"]["shell"]["programs"] = {"mpiexec": "/x", "python": "/b/python"}
    found.nodes["node2"] = {"programs": {"error": "too slow"}, "shell": {"error": "too slow"}}
    verdicts = {one.where[0]: one.verdict for one in judged(id_, found)}
    assert verdicts["node2"] == "unknown"
    assert verdicts["node3"] in ("warn", "fail")


def test_a_login_that_was_dropped() -> None:
    refused = {"refused": "ended with code 255: Connection reset"}
    found = looked(shell=refused, script="/s/train.py")
    found.nodes["node3"]["programs"] = refused
    for id_ in ("ENV01", "ENV02", "ENV03", "ENV04", "ENV05", "ENV06", "MPI01"):
        of_node3 = [one for one in judged(id_, found) if one.where == ("node3",)]
        assert [one.verdict for one in of_node3] == ["unknown"]
        assert "Connection reset" in of_node3[0].observed
