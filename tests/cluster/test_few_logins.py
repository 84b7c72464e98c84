"""An sshd that lets only one login at a time begin, as a host that all logins pass does with more of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launching import SHARE, training, write
from test_joining import COPIES, SCRIPT, change

from testbed import Bed

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("healed"), pytest.mark.nightly]

OURS = "/etc/ssh/sshd_config.d/10-mpitrain.conf"


def restart(bed: Bed, node: str, command: str) -> None:
    done = bed.node_run(node, ["bash", "-c", f"{command} && systemctl restart ssh"])
    assert done.returncode == 0, done.stderr


@pytest.fixture
def one_login(bed: Bed) -> Iterator[None]:
    """sshd drops a login on node2 and node3 while another one is being made there."""
    for node in ("node2", "node3"):
        restart(
            bed, node, f"sed -i.before 's/^MaxStartups.*/MaxStartups 1/' {OURS} && grep -q '^MaxStartups 1$' {OURS}"
        )
    yield
    for node in ("node2", "node3"):
        restart(bed, node, f"mv {OURS}.before {OURS}")


def test_a_start_and_a_join(bed: Bed, one_login: None, python: str) -> None:
    """Guards, keepers, holders of spares and mpiexec log in one after the other."""
    arguments = "--hosts node1,node2 --ppn 1 --restarts 2 --spares moves.py 4000"
    job = training(bed, "moves.py", SCRIPT, arguments, python=python, setting=COPIES)
    job.wait_for("mpitrain: 2 spares are ready\n")
    change(bed, python, "join node3")
    job.wait_for("node3 joins after step ")
    job.wait_for("mpitrain: 3 spares are ready\n")
    write(bed, "node1", f"{SHARE}/enough", "")
    end = job.end()
    assert end.code == 0, end.output
    for word in ("no keeper", "no spares", "cannot start beside", "as before"):
        assert word not in end.output, end.output
