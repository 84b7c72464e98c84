"""A fault of the matrix: what it does to a bed, and which findings `mpitrain check-cluster` must then have."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from jobs import REPOSITORY
from testbed.bed import Bed
from testbed.processes import wait_until

CHECK = ("mpitrain", "check-cluster", "--json")
# Findings of any cluster while this machine is busy; their verdict is `warn`.
_BUSY = re.compile("a login takes |listing it twice takes |a new file is listed|MPI_Init takes |a round trip takes ")

# Set-up does not change the passwords of other users, so every node of a bed has this finding.
_USUAL = "SSH10"
_SCHEMA = json.loads((REPOSITORY / "docs/check-cluster.schema.json").read_text())
# Lines of shell for a node. They list all processes that a check may have started there, and its files on the shared
# folder.
OURS = "pgrep -af 'python3 -I -u -c|mpiexec|hydra|sudo -n' | grep -v pgrep; true"
ON_THE_SHARE = "ls -d /home/cluster/nfs/.mpitrain-check-*{} 2>/dev/null; true"

PAGE = REPOSITORY / "docs/dev/fault-coverage.md"
_WHAT_IT_SHOWS = (
    "Each row is a real fault that was made on a test bed of four nodes, and what `mpitrain check-cluster` said: these "
    "findings and no others; checks that could not be judged because of them are blocked. Where a tag is named, the "
    "line of the finding, `ansible-playbook cluster/setup.yml --tags TAG --limit ...`, was run as it stands, and the "
    "check passed again; the same holds where the line of the finding is named. `scripts/test --nightly` makes all of "
    "these faults in one run, checks the healthy cluster five times, without a finding, and writes this page anew."
)

# Checks that no fault of the matrix proves, each with the reason. Unit tests with made-up answers cover their judges.
UNPROVED = {
    "INV01": "what it refuses cannot be an inventory; two nodes on a loopback address cannot be logged in to",
    "CON02": "a node whose address is translated needs another network than the bed's",
    "NAM06": "the same",
    "NET05": "the bed's cables have no speed and make no errors",
    "CLK02": "a container has its host's clock",
    "LIM02": "there is no RDMA",
    "LIM03": "the nodes share this machine's memory",
    "LIM06": "a virtual machine has no governor",
    "GPU01": "there is no GPU",
    "GPU02": "there is no GPU",
    "GPU03": "there is no GPU",
    "GPU04": "there is no GPU",
    "GPU05": "there is no GPU",
    "GPU06": "there is no GPU",
    "GPU07": "there is no GPU; test_doctor.py tries emulated ones",
    "MPI06": "it is about one machine by itself: test_doctor.py makes the fault",
    "NET10": "it is about one machine by itself, which the bed's nodes are not",
    "NFS04": "what delays a file is found before it, by the checks that it needs",
    "MPI03": "a wrong sum cannot be made here",
    "MPI04": "an MPI that outlives a rank cannot be made here; that one does not is shown on the bed",
    "PRF02": "all nodes share one kernel, so it is skipped",
    "WGD01": "proved by test_tunnel.py, on a bed with a tunnel",
    "WGD02": "the same",
    "DRF01": "proved by test_use.py, with a baseline",
}


@dataclass(frozen=True)
class Fault:
    """One row; its key says what was done, for the table.

    Attributes:
        do, undo: shell lines for root on nodes, by node; or a function of the bed.
        fires: id -> (verdict, places) of every finding that is neither a pass, a skip nor blocked. There are no others.
        level: level of the check.
        repair: tag of the set-up that repairs the fault, run as the finding prints it. `undo` is then not needed.
        has_line: True if the line that the finding prints repairs the fault, run on the machine that checks.
        console: the node on whose console to type that line instead.
        shows: text that must be in the findings.
        options, env: further options and environment variables of the command.
    """

    do: Mapping[str, str] | Callable[[Bed], None]
    undo: Mapping[str, str] | Callable[[Bed], None]
    fires: Mapping[str, tuple[str, str]]
    level: str = "quick"
    repair: str = ""
    has_line: bool = False
    console: str = ""
    shows: Sequence[str] = ()
    options: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def apply(bed: Bed, what: Mapping[str, str] | Callable[[Bed], None]) -> None:
    """Make the fault, or undo it."""
    if callable(what):
        what(bed)
        return
    for node, script in what.items():
        done = bed.node_run(node, ["bash", "-c", script], timeout_seconds=400)
        assert done.returncode == 0, f"{node}: {script}\n{done.stdout}{done.stderr}"


def check(
    bed: Bed, *options: str, env: Mapping[str, str] | None = None, checkout: Path = REPOSITORY
) -> tuple[int, dict[str, Any]]:
    """Run the check on the bed's controller, with a checkout's variables. Return its exit code and its document."""
    done = check_process(bed, *options, env=env, checkout=checkout)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    document = json.loads(done.stdout)
    jsonschema.validate(document, _SCHEMA)
    return done.returncode, document


def check_process(
    bed: Bed, *options: str, env: Mapping[str, str] | None = None, checkout: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """Run the check as `check` does. Return the ended process."""
    return bed.run([*CHECK, *options], timeout_seconds=600, cwd=checkout, env=env)


def assert_that_nothing_stays(bed: Bed, listing: str) -> None:
    """A line of shell soon prints nothing more on any node."""
    left: dict[str, str] = {}

    def is_gone() -> bool:
        nonlocal left
        left = {node: found for node in bed.names if (found := bed.node_run(node, ["bash", "-c", listing]).stdout)}
        return not left

    assert wait_until(is_gone, timeout_seconds=120), left


def findings(document: Mapping[str, Any], about: Collection[str] = ()) -> dict[str, tuple[str, str]]:
    """id -> (verdict, places) of the findings that report a fault. Places of several findings of an id are joined.

    Findings of every bed and of a busy machine are left out, except those of the checks in `about`.
    """
    found: dict[str, tuple[str, str]] = {}
    for one in document["findings"]:
        is_load = one["verdict"] == "warn" and one["id"] not in about and _BUSY.match(one["found"])
        is_usual = one["id"] == _USUAL and _USUAL not in about
        if one["verdict"] != "skip" and not is_load and not is_usual:
            before = found.get(one["id"])
            places = one["places"] if before is None else f"{before[1]}; {one['places']}"
            found[one["id"]] = (one["verdict"] if before is None else before[0], places)
    return found


def table(faults: Mapping[str, Fault]) -> str:
    """The text of PAGE."""
    lines = [
        "# The fault matrix",
        "",
        textwrap.fill(_WHAT_IT_SHOWS, 119),
        "",
        "| fault | level | finding | repaired by |",
        "| --- | --- | --- | --- |",
    ]
    for says, fault in faults.items():
        found = [
            f"[{name}](../reference/checks.md) {verdict}{f': {places}' if places else ''}"
            for name, (verdict, places) in fault.fires.items()
        ]
        by_hand = "the line of the finding" if fault.has_line else "by hand, as the finding says"
        repair = f"`--tags {fault.repair}`" if fault.repair else by_hand
        lines.append(f"| {says} | {fault.level} | {'; '.join(found)} | {repair} |".replace("->", "→"))
    lines += ["", "## Not proved by a fault", "", "Their judges have unit tests with made-up answers.", ""]
    lines += [f"- {name}: {why}" for name, why in UNPROVED.items()]
    return "\n".join(lines) + "\n"
