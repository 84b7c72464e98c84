"""The full bed: nodes with kernels of their own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from mpitrain.errors import ConfigError, LaunchError
from testbed import Bed

from .beds import full_bed, traces

pytestmark = [pytest.mark.timeout(1500), pytest.mark.nightly]


@pytest.fixture(scope="module")
def full(image: str) -> Iterator[Bed]:
    """Two nodes."""
    with full_bed(2) as bed:
        yield bed
    assert traces(bed.name) == []


def output(bed: Bed, node: str, line: str) -> str:
    done = bed.ssh(node, line, timeout_seconds=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_of_their_own_with_real_nfs(full: Bed) -> None:
    assert output(full, "node1", "uname -r").strip() != os.uname().release
    kinds = output(full, "node1", "sudo modprobe -a nfsd nfsv4; cat /proc/filesystems").split()
    assert {"nfsd", "nfs4"} <= set(kinds)
    for question in ("hostname", "cat /etc/machine-id", "cat /etc/ssh/*.pub"):
        assert output(full, "node1", question) != output(full, "node2", question)
    assert output(full, "node2", "systemctl is-system-running --wait") == "running\n"
    assert "\n127.0.1.1\tnode2\n" in output(full, "node2", "cat /etc/hosts")


def test_delay_rate_and_mtu(full: Bed) -> None:
    def rtt_ms() -> float:
        text = output(full, "node1", f"ping -c 3 -i 0.2 {full.address('node2')}")
        return min(float(found) for found in re.findall(r"time=([\d.]+) ms", text))

    full.delay("node1", 15_000)
    full.shape("node1", "100mbit")
    assert rtt_ms() >= 30.0
    queues = output(full, "node1", "/sbin/tc qdisc show dev eth0")
    assert "netem" in queues
    assert "rate 100Mbit" in queues
    full.heal("node1")
    assert "netem" not in output(full, "node1", "/sbin/tc qdisc show dev eth0")
    with pytest.raises(ConfigError, match="allows an MTU of at most 1500 bytes"):
        full.mtu("node1", 9000)


def test_filter_cut_and_power(full: Bed) -> None:
    full.drop("node2", "22")
    probe = f"timeout 10 bash -c 'exec 3<>/dev/tcp/{full.address('node2')}/22'; echo $?"
    assert output(full, "node1", probe) == "124\n"  # between nodes
    with pytest.raises(LaunchError, match="did not end"):
        full.ssh("node2", "true", timeout_seconds=2)  # and from here
    full.heal("node2")
    assert output(full, "node1", probe) == "0\n"
    output(full, "node2", "echo kept | sudo tee /etc/kept; sync")
    full.kill("node2")
    assert not full.is_up("node2")
    full.heal("node2")
    # At once: its neighbours still know the address of its network card.
    assert output(full, "node2", "cat /etc/kept") == "kept\n"
