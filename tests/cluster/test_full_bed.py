"""The same playbooks on nodes with kernels of their own: the real NFS server and client, 4.2 on the wire."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from playbooks import (
    SETUP,
    SHARE,
    TEARDOWN,
    USER,
    difference,
    etc,
    inventory_of,
    playbook,
    root,
    shared_user,
)

from faults.cluster.matrix import findings
from jobs import REPOSITORY
from nodes.beds import full_bed

NODES = ("node1", "node2", "node3")
HELLO = "from mpi4py import MPI; w = MPI.COMM_WORLD; print(w.rank, w.size, MPI.Get_processor_name())"


@pytest.mark.nightly
@pytest.mark.timeout(9000)
def test_the_whole_life_with_real_nfs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with full_bed(3) as bed:
        inventory = inventory_of(bed, tmp_path / "hosts", NODES)
        before = {node: etc(bed, node) for node in NODES}
        plain = {"inventory": inventory, "timeout_seconds": 2400}

        started = time.monotonic()
        first = playbook(bed, SETUP, **plain)
        assert first.code == 0, first.output
        hello = shared_user(
            bed,
            "node1",
            f"cd ~/nfs && mpiexec -n 3 -ppn 1 -hosts {','.join(NODES)} python -c '{HELLO}'",
            timeout_seconds=600,
        )
        assert sorted(line.split()[1:] for line in hello.stdout.splitlines()) == [["3", node] for node in NODES], hello
        with capsys.disabled():
            print(f"\n3 bare nodes with kernels of their own to a first MPI run: {time.monotonic() - started:.0f} s")

        second = playbook(bed, SETUP, **plain)
        assert second.code == 0 and second.changed() == {}, second.output

        for level in ("quick", "full"):
            started = time.monotonic()
            line = ["mpitrain", "check-cluster", "--json", "--level", level, "-i", str(inventory)]
            done = bed.run(line, timeout_seconds=1200, cwd=REPOSITORY)
            document = json.loads(done.stdout)
            found = findings(document)
            # A bed has no Internet access, so chrony has no server and clocks drift. Logins take seconds. Everything
            # else must be right.
            assert found.pop("CLK02") == ("warn", "node1; node2; node3")
            assert found.keys() <= {"CLK01", "SSH01", "SSH04"}, found
            assert done.returncode == 0, found
            with capsys.disabled():
                print(f"check-cluster --level {level} of them: {time.monotonic() - started:.0f} s")

        mounted = root(bed, "node2", f"findmnt -n -t nfs4 -o FSTYPE,OPTIONS {SHARE}").stdout
        options = mounted.split()[1].split(",")
        assert {"vers=4.2", "hard", "nosuid", "nodev", "noatime", "lookupcache=pos"} <= set(options), mounted
        assert shared_user(bed, "node3", "echo written > ~/nfs/note").returncode == 0
        assert root(bed, "node2", f"touch {SHARE}/by-root").returncode != 0

        bed.reboot("node1")
        read = shared_user(bed, "node2", "timeout 380 cat ~/nfs/note")
        assert read.stdout == "written\n", read.stderr

        # The export's file handles become invalid: mounts are stale until the next run.
        root(bed, "node1", f"mv {SHARE} {SHARE}.old && cp -a {SHARE}.old {SHARE} && rm -rf {SHARE}.old && exportfs -f")
        mended = playbook(bed, SETUP, "--tags", "nfs", **plain)
        assert mended.code == 0, mended.output
        assert shared_user(bed, "node2", "timeout 380 cat ~/nfs/note").stdout == "written\n"

        undone = playbook(bed, TEARDOWN, "-e", "confirm=yes", **plain)
        assert undone.code == 0, undone.output
        for node in NODES:
            assert difference(before[node], etc(bed, node)) == set(), node
        assert root(bed, "node1", f"cat {SHARE}/note; id {USER}").stdout == "written\n"
