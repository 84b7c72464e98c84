"""Every fault of the matrix, really made: the check that must fire fires and names the place, and nothing else does."""

from __future__ import annotations

import pytest

from faults.cluster.faults_machine import FAULTS as MACHINE
from faults.cluster.faults_network import FAULTS as NETWORK
from faults.cluster.faults_share import FAULTS as SHARE
from faults.cluster.faults_start import FAULTS as START
from faults.cluster.faults_told_apart import FAULTS as TOLD_APART
from faults.cluster.matrix import UNPROVED, Fault, apply, check, findings, table
from jobs import REPOSITORY
from mpitrain.diagnostics.checks import CHECKS
from mpitrain.testbed.bed import Bed

pytestmark = pytest.mark.timeout(3000)
FAULTS: dict[str, Fault] = {**NETWORK, **MACHINE, **SHARE, **START, **TOLD_APART}
SHOWN: list[str] = []  # names of the faults that were found as they should be, in this run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * fault.is_slow) for name, fault in FAULTS.items()]
)
def test_the_right_check_fires(bed: Bed, name: str) -> None:
    fault = FAULTS[name]
    mended = False
    apply(bed, fault.do)
    try:
        code, document = check(bed, "--level", fault.level, *fault.options, env=fault.env)
        assert findings(document, fault.fires) == dict(fault.fires), document["findings"]
        failed = any(verdict == "fail" for verdict, _ in fault.fires.values())
        assert code == (1 if failed else 3 if any(v == "unknown" for v, _ in fault.fires.values()) else 0)
        for text in fault.shows:
            assert text in str(document["findings"])
        assert all(one["remedy"] for one in document["findings"] if one["verdict"] in ("warn", "fail"))
        if fault.repair or fault.has_line:
            wanted = f"--tags {fault.repair}" if fault.repair else ""
            own = [one for one in document["findings"] if one["id"] in fault.fires]
            lines = {one["remedy"] for one in own if wanted in one["remedy"]}
            assert lines, document["findings"]
            for line in lines:
                command = ["bash", "-c", line]
                if fault.console:
                    done = bed.node_run(fault.console, command, timeout_seconds=1200)
                else:
                    done = bed.run(command, timeout_seconds=1200, cwd=REPOSITORY)
                assert done.returncode == 0, done.stdout + done.stderr
            mended = True
            code, document = check(bed, "--level", fault.level, *fault.options, env=fault.env)
            assert (code, findings(document)) == (0, {}), document["findings"]
            assert not {one["id"] for one in document["findings"]} & {"SSH10"} & fault.fires.keys()
        SHOWN.append(name)
    finally:
        if not mended or fault.has_line:
            apply(bed, fault.undo)
            if fault.repair:  # the test has failed; the next one shall not
                line = ["ansible-playbook", "cluster/setup.yml", "--tags", fault.repair]
                bed.run(line, timeout_seconds=1200, cwd=REPOSITORY)


def test_every_check_is_proved_or_named() -> None:
    assert len(FAULTS) >= 40
    proved = {name for fault in FAULTS.values() for name in fault.fires}
    assert proved | UNPROVED.keys() == CHECKS.keys()
    assert not proved & UNPROVED.keys()


def test_the_table_in_the_docs() -> None:
    """It is written by a run in which every fault was shown (scripts/test --full), and by no other."""
    path = REPOSITORY / "docs/fault-matrix.md"
    before = path.read_text() if path.exists() else ""
    if set(SHOWN) == set(FAULTS):
        path.write_text(table(FAULTS))
    assert before == table(FAULTS), "the table is not that of the faults; a run of all of them writes it"


def test_a_healthy_cluster_has_no_findings(bed: Bed) -> None:
    """Last, so that it also shows that every fault was undone. Three runs, because some faults come and go."""
    for _ in range(3):
        code, document = check(bed, "--level", "full")
        assert (code, findings(document)) == (0, {}), document["findings"]
