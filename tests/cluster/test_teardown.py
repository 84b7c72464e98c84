"""The end of a cluster. These tests take the cluster of all others apart, so they are the last (tests/conftest.py)."""

from __future__ import annotations

import os
import re

import pytest
from launching import NODES
from playbooks import SHARE, TEARDOWN, USER, changed_files, playbook, root, shared_user

from nodes.beds import OWN_LINE
from testbed import Bed

pytestmark = [pytest.mark.timeout(3000), pytest.mark.skipif("TEST_BED" in os.environ, reason="it stays")]


def test_it_asks_first_and_waits_for_the_users_processes(bed: Bed) -> None:
    run = playbook(bed, TEARDOWN)
    assert run.code != 0
    assert "-e confirm=yes" in run.text
    assert run.changed() == {}
    root(bed, "node3", f"systemd-run --uid={USER} --unit=at-work sleep 300")
    try:
        run = playbook(bed, TEARDOWN, "-e", "confirm=yes")
        assert run.code != 0
        assert re.search(r"node3: cluster still runs \d+ .*sleep 300", run.text), run.output
        assert run.changed() == {}
    finally:
        root(bed, "node3", "systemctl stop at-work")


def test_it_leaves_etc_as_it_was_and_keeps_the_data(bed: Bed) -> None:
    shared_user(bed, "node1", "echo precious > ~/nfs/precious; echo mine > ~/mine")
    run = playbook(bed, TEARDOWN, "-e", "confirm=yes")
    assert run.code == 0, run.output
    for node in NODES:
        assert changed_files(bed, node) == set(), node
        assert root(bed, node, f"id {USER}").returncode != 0
        assert root(bed, node, "ls -d /usr/local/lib/mpitrain").returncode != 0
        assert OWN_LINE in root(bed, node, "cat /etc/hosts").stdout
    assert root(bed, "node1", f"cat {SHARE}/precious /home/{USER}/mine").stdout == "precious\nmine\n"
    kept = f"/home/{USER}, {SHARE}, {SHARE}/venv"
    remedy = f"sudo rm -rf {kept.replace(',', '')}"
    assert f"node1: what is in {kept} stays. To remove it: {remedy}" in run.text
    assert root(bed, "node1", f"{remedy} && ls -d /home/{USER}").returncode != 0


@pytest.mark.nightly
def test_a_second_teardown_finds_nothing_to_do(bed: Bed) -> None:
    again = playbook(bed, TEARDOWN, "-e", "confirm=yes")
    assert again.code == 0, again.output
