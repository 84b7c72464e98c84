"""`mpitrain check-cluster --level quick` looks for everything that `mpitrain run` refuses about a host."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import mpitrain.launch
from mpitrain.check.checks import CHECKS
from mpitrain.check.run import select
from mpitrain.launch.conditions import Condition, Refusal, refuse

SOURCES = {path.stem: path.read_text() for path in Path(mpitrain.launch.__path__[0]).glob("*.py")}
# Each function of the launcher that raises an error about a host, and the condition that fails there. Errors that list
# several hosts (conditions.refuse) name the condition of each line in the code.
OF_A_HOST = {
    "foreign_files.refuse_foreign": "INVENTORY",
    "job_here._refuse_absent": "DEVICES",
    "hosts._source_address": "ROUTES",
    "hosts._resolved": "NAMES",
    "hosts._refuse_same": "MACHINES",
    "started_ranks.start": "MPI",
    "launched.check_mpiexec": "MPI",
    "libraries.describe_mpiexec": "MPI",
    "libraries.find_mpiexec": "MPI",
    "libraries.find_library": "MPI",
}
# Modules whose errors are about the request, this machine before anything starts, or a job that already runs.
OF_THE_REQUEST = {
    "batch",
    "chosen_mpiexec",
    "connections",
    "dialects",
    "hostfile",
    "keepers",
    "live_jobs",
    "notify",
    "placement",
    "resume",
}
OF_THE_REQUEST |= {"served", "serving", "start", "torchrun", "variables"}
# The same of functions, in modules with conditions of a host.
OTHERS = {f"launched.{name}" for name in ("check_vendor", "check_size", "_number")}
OTHERS |= {f"hosts.{name}" for name in ("_given", "place_ranks", "placed_again", "widened", "read_hostfile")}
OTHERS |= {"hosts.listed", "hosts.listed_hosts", "watch.facts"}


def raisers() -> set[str]:
    """The functions, as module.function, that raise one of the launcher's errors."""
    return {
        f"{module}.{function.name}"
        for module, source in SOURCES.items()
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("LaunchError", "ConfigError")
    }


def test_every_refusal_has_a_place_in_the_list() -> None:
    raising = raisers() - {"conditions.refuse", "conditions.refuse_here"}
    assert {name for name in raising if name.partition(".")[0] not in OF_THE_REQUEST} == OF_A_HOST.keys() | OTHERS
    assert {name.partition(".")[0] for name in raising} >= OF_THE_REQUEST


def test_every_condition_is_one_that_is_refused() -> None:
    """The agent refuses no other condition. It names conditions in words, because it runs without this package."""
    words = {name for source in SOURCES.values() for name in re.findall(r"Condition\.([A-Z]+)\b", source)}
    of_agents = set(re.findall(r'"condition": "(\w+)"', SOURCES["host_attempt"]))
    assert of_agents == {"MACHINES", "PYTHON", "SOCKETS"}
    assert words | of_agents | set(OF_A_HOST.values()) == set(Condition.__members__)


@pytest.mark.parametrize("condition", Condition)
def test_the_quick_level_finds_it(condition: Condition) -> None:
    quick = {check.id for check in select("quick")}
    assert condition.checks
    assert set(condition.checks) <= quick
    assert condition.says


def test_a_refusal_names_the_checks() -> None:
    refusals = [
        Refusal(Condition.SOCKETS, "node2", "cannot write /tmp/x: Permission denied"),
        Refusal(Condition.SCRIPT, "node3", "train.py differs"),
    ]
    assert str(refuse("these hosts cannot take part", refusals, "/share/train.py")) == (
        "these hosts cannot take part:\n"
        "    node2: cannot write /tmp/x: Permission denied\n"
        "    node3: train.py differs\n"
        "On the machine that set up the cluster, `mpitrain check-cluster --only RUN01,ENV04 --script /share/train.py` "
        "names the cause and the command that repairs it."
    )
    assert {"RUN01", "ENV04"} <= CHECKS.keys()
