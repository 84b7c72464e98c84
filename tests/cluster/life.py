"""The cluster whose whole life test_cycle.py tests: three of the four machines of a bed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playbooks import FASHION, SETUP, USER, Run, checkout_copy, etc, inventory_of, playbook, root, shared_user

from testbed import up
from testbed.bed import Bed

NODES = ("node1", "node2", "node3")
OWN_LINE = "192.0.2.7 printer # the user's own line"
# Low enough for a container on a machine that may not raise its own limits.
NOFILE = 4096


@dataclass
class Cluster:
    """A cluster on a bed: where its inventories are, and /etc of the nodes as it was before."""

    bed: Bed
    inventory: Path
    smaller: Path
    key: Path
    checkout: Path
    before: dict[str, dict[str, list[object]]]

    def setup(self, *arguments: str, inventory: Path | None = None) -> Run:
        variables = {
            "mpitrain_authorized_keys": [self.key.with_suffix(".pub").read_text().strip()],
            "mpitrain_nofile": NOFILE,
            "mpitrain_sshd_passwords": False,
        }
        return self.play(SETUP, "-e", json.dumps(variables), *arguments, inventory=inventory)

    def play(self, *arguments: str, inventory: Path | None = None) -> Run:
        return playbook(self.bed, *arguments, inventory=inventory or self.inventory, checkout=self.checkout)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cycle")
    with up(4, name=f"cycle{os.getpid()}") as bed:
        for node in bed.names:
            root(bed, node, f"echo {OWN_LINE!r} >> /etc/hosts")
        bed.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")])
        yield Cluster(
            bed,
            inventory_of(bed, folder / "hosts", NODES),
            inventory_of(bed, folder / "smaller", NODES[:-1]),
            folder / "key",
            checkout_copy(tmp_path_factory.mktemp("checkout")),
            {node: etc(bed, node) for node in bed.names},
        )


@pytest.fixture(scope="module")
def cluster(bare: Cluster) -> Cluster:
    if root(bare.bed, "node1", f"id {USER}").returncode != 0:  # the preceding test has not run
        run = bare.setup()
        assert run.code == 0, run.output
    assert shared_user(bare.bed, "node2", "echo from node2 > ~/nfs/note").returncode == 0
    return bare


def needs_fashion() -> None:
    if not FASHION.is_dir():
        pytest.skip("Fashion-MNIST is not here: scripts/get-data fashion")


def wait_for_the_note(cluster: Cluster, node: str) -> None:
    deadline = time.monotonic() + 300
    while (
        read := shared_user(cluster.bed, node, "timeout 30 cat ~/nfs/note")
    ).returncode and time.monotonic() < deadline:
        time.sleep(0.5)
    assert read.stdout == "from node2\n", read.stderr
