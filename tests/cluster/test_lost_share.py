"""A host loses the share of the cluster while its other connections work: its rank is stuck, and the job goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from launching import SHARE, training, write
from test_split_network import SCRIPT

from testbed import Bed
from testbed.processes import execute

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("healed"), pytest.mark.nightly]

# Every rank looks for a file that is not there, so it asks the server.
LOOKS = SCRIPT.replace("        time.sleep(0.05)\n", "        time.sleep(0.05)\n        LOOK\n").replace(
    "LOOK", "assert not pathlib.Path(f'no-{time.time()}').exists()"
)
SETTING = "MPITRAIN_MEMORY_STEPS=1 MPITRAIN_STALL_SECONDS=5 MPITRAIN_HANG_SECONDS=20"


@contextmanager
def without_share(bed: Bed, node: str) -> Iterator[None]:
    """Nothing that the node sends to the server of the share arrives."""
    nft = ["ip", "netns", "exec", bed.record.node_namespace(node), "nft"]
    chain = "chain out { type filter hook output priority 0; tcp dport 2049 drop; }"
    execute([*nft, "-f", "-"], input=f"table inet lost_share {{\n{chain}\n}}\n")
    try:
        yield
    finally:
        execute([*nft, "delete", "table", "inet", "lost_share"])


def test_a_host_loses_the_share(bed: Bed, python: str) -> None:
    arguments = "-n 4 --restarts 2 looks.py"
    job = training(bed, "looks.py", LOOKS, arguments, begun="made step 50 ", python=python, setting=SETTING)
    with without_share(bed, "node3"):
        job.wait_for("starting again on node1, node2, node4 with 3 ranks, without node3\n")
        job.wait_for(" on 3 ranks")
        write(bed, "node1", f"{SHARE}/enough", "")
        end = job.end()
    assert end.code == 0, end.output
    assert re.search(r"no progress for \d+ s: .*; rank 2 on node3 .* in looks\.py:\d+ \(after_step\)", end.output)
    assert re.search(r"try 1 of 3 failed at step \d+: .*nothing has moved for 20 s", end.output), end.output
    assert end.output.count("resumed from memory at step ") == 1
