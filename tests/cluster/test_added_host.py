"""`mpitrain cluster add` while an elastic job trains: the job takes the new host in by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import NODES, SHARE, as_user, training, write
from playbooks import inventory_of
from test_elastic import SLOW, counted_steps
from test_joining import COPIES

from jobs import REPOSITORY
from testbed import Bed

pytestmark = [pytest.mark.timeout(2400), pytest.mark.usefixtures("healed"), pytest.mark.nightly]

Cluster = Callable[..., str]


@pytest.fixture
def cluster(bed: Bed, tmp_path: Path) -> Iterator[Cluster]:
    """`mpitrain cluster` on the controller. Inside, node4 is no node of the cluster until the test adds it."""
    inventory = inventory_of(bed, tmp_path / "hosts", NODES)

    def change(action: str, *words: str) -> str:
        line = ["mpitrain", "cluster", action, "--inventory", str(inventory), *words, "--", "--skip-tags"]
        done = bed.run([*line, "verify,examples"], timeout_seconds=1200, cwd=REPOSITORY)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # Of the tests before, sshd may have sessions whose network was cut: the node has not heard of their end.
    bed.node_run("node4", ["bash", "-c", "kill $(pgrep -u cluster -x sshd)"])
    change("remove", "--yes", "node4")
    yield change
    if "node4" not in as_user(bed, "node1", "cat /etc/mpitrain/hosts").stdout:
        inventory_of(bed, inventory, NODES)
        change("setup")


def fingerprint(bed: Bed, node: str) -> str:
    done = bed.node_run(node, ["ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub"])
    return done.stdout.split()[1]


def test_a_running_job_takes_in_a_host_that_is_added(bed: Bed, cluster: Cluster) -> None:
    job = training(bed, "moves.py", SLOW, "--ppn 1 --restarts 3 --elastic 2:4 moves.py 4000", setting=COPIES)
    assert as_user(bed, "node1", "ssh node4 true").returncode == 255
    key = f"node4={fingerprint(bed, 'node4')}"
    cluster("add", "--user", "admin", "--fingerprints", key, f"node4={bed.address('node4')}")
    job.wait_for(
        "node4 answers; node4 joins after the next copy of the state, and then it goes on on node1, node2, node3"
    )
    job.wait_for("going on on node1, node2, node3, node4 with 4 ranks\n")
    job.wait_for("resumed from memory at step ")
    write(bed, "node1", f"{SHARE}/enough", "")
    end = job.end()
    assert end.code == 0, end.output
    assert "failed" not in end.output
    assert len(re.findall(r"after step \d+; going on", end.output)) == 1
    sizes = [size for size, _, _ in counted_steps(end.output).values()]
    assert (sizes[0], sizes[-1]) == (3, 4)
    assert sizes == sorted(sizes)
