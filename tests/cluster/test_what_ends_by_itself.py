"""A host that was cut off, or frozen, while the job went on without it: what runs there ends soon after it is back.

Only the memory of the job is kept while nobody can be asked: for 15 min, in case the launcher was lost.
"""

from __future__ import annotations

import time

import pytest
from launching import Job, as_user, left, write
from test_restart_over_hosts import EVERY_STEP, SCRIPT, SHARE

from testbed import Bed

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("healed"), pytest.mark.nightly]
# The keeper asks within 10 s, and once a minute; its silence of 60 s may not be over yet. Far less than 15 min.
GONE_SECONDS = 200.0


@pytest.mark.parametrize("fault", ["freeze", "cut"])
def test_guard_keeper_spares_and_ranks(bed: Bed, fault: str) -> None:
    write(bed, "node1", f"{SHARE}/train.py", SCRIPT)
    as_user(bed, "node1", "rm -rf checkpoints go_on")
    job = Job(bed, "--ppn 1 --restarts 1 --spares --min-nodes 2 train.py 100", setting=EVERY_STEP)
    job.wait_for("made step 50 ")
    getattr(bed, fault)("node3")
    job.wait_for("starting again on node1, node2, node4 with 3 ranks, without node3\n")
    write(bed, "node1", "go_on", "")
    end = job.end()
    assert end.code == 0, end.output
    bed.heal("node3")
    back = time.monotonic()
    assert left(bed, GONE_SECONDS) == []
    print(f"{fault}: nothing was left {time.monotonic() - back:.0f} s after the host was back")
