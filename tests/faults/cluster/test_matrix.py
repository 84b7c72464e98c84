"""Every fault of the matrix, really made: the right check fires and names the place, and no other check fires."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from faults.cluster.every_fault import FAULTS
from faults.cluster.matrix import (
    ON_THE_SHARE,
    OURS,
    PAGE,
    Fault,
    apply,
    assert_that_nothing_stays,
    check,
    findings,
    table,
)
from jobs import REPOSITORY, run_command
from testbed.bed import Bed

pytestmark = pytest.mark.timeout(3000)
SHOWN: list[str] = []  # names of the faults that were found as they should be, in this run


# These faults are made at the same time, and the check finds each. `scripts/test --nightly` makes each of all alone.
TOGETHER = (
    "another address for node2 in /etc/hosts of node4, above the lines of set-up",
    "/dev/shm of 64 MiB on node2, as Docker gives it",
    "the shared folder exported to all the world, in another file",
    "OMPI_MCA_btl set by .bashrc on one node",
    "a file of a dead job of MPICH in /dev/shm of node3",
)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(TOGETHER, id="together"),
        *(pytest.param((name,), id=name, marks=pytest.mark.nightly) for name in FAULTS),
    ],
)
def test_the_right_check_fires(bed: Bed, names: tuple[str, ...]) -> None:
    faults = [FAULTS[name] for name in names]
    (level,) = {fault.level for fault in faults}
    options = ["--level", level, *(word for fault in faults for word in fault.options)]
    env = {name: value for fault in faults for name, value in fault.env.items()}
    fires = {name: found for fault in faults for name, found in fault.fires.items()}
    assert len(fires) == sum(len(fault.fires) for fault in faults), "two of these faults have one finding"
    mended = False
    for fault in faults:
        apply(bed, fault.do)
    try:
        code, document = check(bed, *options, env=env)
        assert findings(document, fires) == fires, document["findings"]
        verdicts = {verdict for verdict, _ in fires.values()}
        assert code == (1 if "fail" in verdicts else 3 if "unknown" in verdicts else 0)
        for text in (text for fault in faults for text in fault.shows):
            assert text in str(document["findings"])
        assert all(one["remedy"] for one in document["findings"] if one["verdict"] in ("warn", "fail"))
        if all(fault.repair or fault.has_line for fault in faults):
            for fault in faults:
                run_the_lines(bed, fault, document["findings"])
            mended = True
            code, document = check(bed, *options, env=env)
            assert (code, findings(document)) == (0, {}), document["findings"]
            assert not {one["id"] for one in document["findings"]} & {"SSH10"} & fires.keys()
        SHOWN.extend(names if len(names) == 1 else ())
    finally:
        for fault in reversed(faults):
            if not mended or fault.has_line:
                apply(bed, fault.undo)
            if fault.repair and not mended:  # the test has failed; the next one must not
                line = ["ansible-playbook", "cluster/setup.yml", "--tags", fault.repair]
                bed.run(line, timeout_seconds=1200, cwd=REPOSITORY)


def run_the_lines(bed: Bed, fault: Fault, found: list[dict[str, Any]]) -> None:
    """Run the lines that the findings print as remedies; of set-up's lines, only those with the fault's tag."""
    wanted = f"--tags {fault.repair}" if fault.repair else ""
    lines = {one["remedy"] for one in found if one["id"] in fault.fires and wanted in one["remedy"]}
    assert lines, found
    for line in lines:
        command = ["bash", "-c", line]
        if fault.console:
            done = bed.node_run(fault.console, command, timeout_seconds=1200)
        else:
            done = bed.run(command, timeout_seconds=1200, cwd=REPOSITORY)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--yes"], "--yes answers the question that --fix asks"), (["--fix"], "there is no terminal to ask on")],
)
def test_a_repair_that_nobody_can_confirm(tmp_path: Path, words: list[str], says: str) -> None:
    (tmp_path / "hosts").write_text("[head]\na ansible_host=127.0.0.1\n[workers]\n[cluster:children]\nhead\nworkers\n")
    job = run_command([sys.executable, "-m", "mpitrain", "check-cluster", "-i", "hosts", *words], cwd=tmp_path)
    assert (job.code, job.stdout) == (2, "")
    assert says in job.stderr


def test_a_run_of_all_faults_writes_the_page() -> None:
    if set(SHOWN) == set(FAULTS):
        PAGE.write_text(table(FAULTS))


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_healthy_cluster_has_no_findings(bed: Bed, times: int) -> None:
    """The last test: it also shows that every fault was undone. It checks several times, as some faults come and go."""
    for _ in range(times):
        code, document = check(bed, "--level", "full")
        assert (code, findings(document)) == (0, {}), document["findings"]
    for listing in (OURS, ON_THE_SHARE.format("")):
        assert_that_nothing_stays(bed, listing)
