"""The judges of the environment that a job finds on each node."""

from __future__ import annotations

from typing import Any

import pytest

from check.made_up import judged, of_each, only, sound
from mpitrain.check.check import Seen
from mpitrain.launch.conditions import differences

PACKAGES = {"mpi4py": "4.1.2", "numpy": "2.4.6", "mpitrain": "0.1.0", "pip": "23.0"}
PYTHON = {"path": "python", "python": "3.11.2", "machine": "x86_64", "libc": "glibc 2.36", "packages": PACKAGES}
PYTHON |= {"mpitrain": "abcdef0123", "files": {"train.py": "1", "model.py": "2"}}
SHELL = {"programs": {"mpiexec": "/b/mpiexec", "python": "/b/python"}, "environment": {"PATH": "/b:/usr/bin"}}
PROXY = {"http_proxy": "http://p:1"}
NAMES = "node1,node2,node3"
AT_NODE3 = ("fail", "node3")


def looked(
    python: dict[str, Any] | None = None, shell: dict[str, Any] | None = None, script: str | None = None
) -> Seen:
    """Three equal nodes, except for the given values of the third."""
    found = of_each(3, {"programs": {"python": PYTHON}, "shell": SHELL}, **({"script": script} if script else {}))
    found.nodes["node3"] = {"programs": {"python": {**PYTHON, **(python or {})}}, "shell": {**SHELL, **(shell or {})}}
    return found


def having(**packages: str) -> Seen:
    return looked({"packages": {**PACKAGES, **packages}})


def variables(**environment: str) -> Seen:
    return looked(shell={"environment": environment})


def test_equal_nodes_pass() -> None:
    for id_ in ("ENV01", "ENV02", "ENV03", "ENV05", "ENV06"):
        sound(id_, looked())
    sound("ENV04", looked(script="/s/train.py"))
    assert judged("ENV04", looked())[0].verdict == "skip"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"python": "3.12.1"},
        {"machine": "aarch64"},
        {"machine": "armv7l"},
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
    found = looked(change, script="/s/train.py")
    assert {id_ for id_ in ids if judged(id_, found)} == refused & ids


BROKEN = looked()
BROKEN.nodes["node3"]["programs"]["python"] = {"path": "python", "why": "python: not found"}
UNREADABLE = {"files": None, "unreadable": "Permission denied"}
NO_FILES: dict[str, Any] = {"files": None}
OTHER = {"files": {"train.py": "1", "model.py": "3"}}
MANY = having(**{f"p{number}": "1" for number in range(9)})


@pytest.mark.parametrize(
    ("id_", "found", "verdict", "observed", "remedy", "allowed"),
    [
        ("ENV01", BROKEN, "fail", "does not run: python: not found", "", ""),
        ("ENV01", looked({"python": "3.12.1"}), "fail", "Python 3.12.1 on x86_64", "", ""),
        ("ENV01", looked({"machine": "armv7l"}), "fail", "Python 3.11.2 on armv7l", "", ""),
        ("ENV01", looked({"python": "3.11.9"}), "fail", "Python 3.11.9 on x86_64", "", ""),
        ("ENV01", looked({"libc": "glibc 2.31"}), "warn", "Python 3.11.2 with glibc 2.31", "", ""),
        ("ENV02", having(mpi4py="3.1.6"), "fail", "mpi4py 3.1.6", "", "mpi4py 4.1.2, as on the others"),
        ("ENV02", having(pip="24.0"), "fail", "pip 24.0", "", "pip 23.0, as on the others"),  # `run` refuses it too
        ("ENV02", having(rich="13.0"), "fail", "rich 13.0", "", "no rich, as on the others"),
        ("ENV02", having(pip="24.0", numpy="1"), "fail", "numpy 1, pip 24.0", "", "numpy 2.4.6, pip 23.0, as on the o"),
        ("ENV02", MANY, "fail", "and 5 more", "", ""),
        ("ENV02", looked({"mpitrain": "0000000099"}), "fail", "mpitrain files 00000000", "", ""),  # of this version
        ("ENV04", looked(OTHER, script="/s/a.py"), "fail", "differs, in /s/a.py or beside it: model.py", "", ""),
        ("ENV04", looked(NO_FILES, script="/s/a.py"), "fail", "there is no /s/a.py", "/home/cluster/nfs", ""),
        ("ENV04", looked(UNREADABLE, script="/s/a.py"), "fail", "cluster cannot read /s/a.py", "3 'sudo chmod a+r", ""),
        ("ENV04", looked(UNREADABLE, script="/home/cluster/nfs/a b.py"), "fail", "Permission", "ssh 10.0.0.1 ", ""),
        ("ENV05", variables(**PROXY), "warn", "no_proxy does not have the nodes", f"{NAMES},10.0.0.1", ""),
        ("ENV05", variables(HTTPS_PROXY="http://p:1", NO_PROXY="localhost"), "warn", "no_proxy does not", NAMES, ""),
        ("ENV05", variables(**PROXY, no_proxy=NAMES), "warn", "no_proxy does not have", f"{NAMES},10.0.0.1", ""),
        ("ENV06", variables(PATH="/other", UCX_TLS="tcp"), "warn", "UCX_TLS=tcp", "UCX_TLS", "not set, as on the oth"),
    ],
)
def test_findings(id_: str, found: Seen, verdict: str, observed: str, remedy: str, allowed: str) -> None:
    one = only(id_, found, verdict, "node3", observed, remedy, allowed)
    assert id_ != "ENV02" or found is MANY or one.observed == observed


@pytest.mark.parametrize("no_proxy", [f"{NAMES},10.0.0.0/24", "*"])
def test_proxies_that_do_no_harm(no_proxy: str) -> None:
    sound("ENV05", variables(**PROXY, no_proxy=no_proxy), variables(http_proxy=""), variables(no_proxy="localhost"))
    sound("ENV01", looked(UNREADABLE, script="/s/train.py"))


def test_another_mpi_library_with_the_same_packages() -> None:
    """The system's library is not a package. It is compared only between nodes with the same packages."""
    found = looked()
    for name, version in (("node1", "4.2.1"), ("node2", "4.2.1"), ("node3", "4.1.0")):
        found.nodes[name]["programs"] = {"python": PYTHON, "mpi": {"library": f"MPICH Version: {version}\nrest"}}
    allowed = "MPICH Version: 4.2.1, as on the others"
    only("ENV02", found, *AT_NODE3, "the MPI library MPICH Version: 4.1.0", allowed=allowed)
    found.nodes["node3"]["programs"]["mpi"] = {"why": "no libmpi.so"}  # which MPI01 reports
    sound("ENV02", found)


def test_programs() -> None:
    first, second = judged("ENV03", looked(shell={"programs": {"mpiexec": "/usr/bin/mpiexec", "python": None}}))
    assert (first.verdict, first.where, first.observed) == ("fail", ("node3",), "mpiexec is /usr/bin/mpiexec")
    assert first.allowed == "/b/mpiexec, as on the others"
    assert second.observed == "there is no python in PATH"
    assert "ssh 10.0.0.3 sudo grep" in first.remedy
    found = looked()
    for node in found.nodes.values():
        node["shell"] = {**SHELL, "programs": {"mpiexec": None, "python": "/b/python"}}
    only("ENV03", found, "warn", "", "")


def test_a_variable_of_all_nodes_is_a_choice() -> None:
    found = looked()
    for node in found.nodes.values():
        node["shell"] = {**SHELL, "environment": {"UCX_TLS": "tcp"}}
    sound("ENV06", found)
    found.nodes["node2"]["shell"] = SHELL
    only("ENV06", found, "warn", "node2", "UCX_TLS is not set", allowed="UCX_TLS=tcp, as on the others")


@pytest.mark.parametrize("id_", ["ENV01", "ENV02", "ENV03", "ENV04", "ENV06"])
def test_a_node_without_an_answer_does_not_hide_the_others(id_: str) -> None:
    shell = {"environment": {"FI_A": "1"}, "programs": {"mpiexec": "/x", "python": "/b/python"}}
    found = looked({"python": "3.9.1", "packages": {}, **NO_FILES}, shell, script="/s/train.py")
    found.nodes["node2"] = {"programs": {"error": "too slow"}, "shell": {"error": "too slow"}}
    verdicts = {one.where[0]: one.verdict for one in judged(id_, found)}
    assert verdicts["node2"] == "unknown"
    assert verdicts["node3"] in ("warn", "fail")


@pytest.mark.parametrize("id_", ["ENV01", "ENV02", "ENV03", "ENV04", "ENV05", "ENV06", "MPI01"])
def test_a_login_that_was_dropped(id_: str) -> None:
    found = looked(script="/s/train.py")
    refused = {"refused": "ended with code 255: Connection reset"}
    found.nodes["node3"] = {"programs": refused, "shell": refused}
    (one,) = (one for one in judged(id_, found) if one.where == ("node3",))
    assert (one.verdict, "Connection reset" in one.observed) == ("unknown", True)
