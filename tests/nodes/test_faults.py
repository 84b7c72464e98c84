"""The visible effect of every fault, and that healing undoes it."""

from __future__ import annotations

import subprocess
import time

import pytest

from mpitrain.errors import ConfigError, LaunchError
from testbed import Bed, find


def ping(bed: Bed, *options: str) -> subprocess.CompletedProcess[str]:
    """One ping from node1 to node2."""
    return bed.node_run("node1", ["ping", "-c", "1", "-W", "5", *options, bed.address("node2")])


def connect(bed: Bed, port: int) -> str:
    """The result of a connection from node1 to node2: open, refused or timeout."""
    program = (
        "import socket, sys\n"
        "try: socket.create_connection((sys.argv[1], int(sys.argv[2])), 5); print('open')\n"
        "except ConnectionRefusedError: print('refused')\n"
        "except TimeoutError: print('timeout')\n"
    )
    return bed.node_run("node1", ["python3", "-c", program, bed.address("node2"), str(port)]).stdout.strip()


def test_kill_is_a_power_cut(healthy: Bed) -> None:
    bed = healthy
    assert bed.ssh("node2", "echo kept | sudo tee /etc/kept; sync").returncode == 0
    program = (
        "import socket, sys\ns = socket.create_connection((sys.argv[1], 22), 60)\ns.recv(100)\nprint('on', flush=True)"
        "\ns.settimeout(4)\ntry: print('end' if s.recv(100) == b'' else 'more')\nexcept TimeoutError: print('silence')"
    )
    inside = ["ip", "netns", "exec", bed.record.namespace, "python3", "-c"]
    watcher = subprocess.Popen([*inside, program, bed.address("node2")], stdout=subprocess.PIPE, text=True)
    with watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "on\n"
        bed.kill("node2")
        # No side closes the connection. That is why a power cut is hard to notice.
        assert watcher.stdout.read() == "silence\n"
    assert not bed.is_up("node2")
    assert ping(bed).returncode != 0
    with pytest.raises(LaunchError, match=r"node2 of test bed .* is off: scripts/testbed heal node2"):
        bed.node_run("node2", ["true"])
    bed.heal("node2")
    assert bed.ssh("node2", "cat /etc/kept").stdout == "kept\n"


@pytest.mark.nightly
def test_reboot(healthy: Bed) -> None:
    before = healthy.ssh("node2", "cat /proc/sys/kernel/random/boot_id").stdout
    key = healthy.host_keys()["node2"]
    healthy.reboot("node2")
    after = healthy.ssh("node2", "cat /proc/sys/kernel/random/boot_id")
    assert after.returncode == 0
    assert after.stdout != before
    assert healthy.host_keys()["node2"] == key


def test_freeze(healthy: Bed) -> None:
    healthy.freeze("node2")
    assert ping(healthy).returncode == 0
    assert connect(healthy, 22) == "open"
    with pytest.raises(LaunchError, match="did not end within 2 s"):
        healthy.ssh("node2", "true", timeout_seconds=2)
    with pytest.raises(LaunchError, match="node2 is frozen"):
        healthy.node_run("node2", ["true"])
    healthy.thaw("node2")
    assert healthy.ssh("node2", "true").returncode == 0


def test_cut(healthy: Bed) -> None:
    healthy.cut("node2")
    assert ping(healthy).returncode != 0
    assert healthy.node_run("node2", ["hostname"]).stdout == "node2\n"  # the node is still up
    healthy.heal("node2")
    assert ping(healthy).returncode == 0


def test_drop_and_reject(healthy: Bed) -> None:
    healthy.drop("node2", "22")
    healthy.reject("node2", "8000-8100,9000")
    assert connect(healthy, 22) == "timeout"
    assert connect(healthy, 8050) == "refused"
    assert ping(healthy).returncode == 0
    healthy.drop("node2", "8050")  # replaces the drop on port 22; the rejected ports stay
    assert connect(healthy, 22) == "open"
    assert healthy.faults("node2") == {"drop": "8050", "reject": "8000-8100,9000"}
    healthy.undrop("node2")
    assert healthy.faults("node2") == {}
    assert connect(healthy, 8050) == "refused"  # because nothing listens


@pytest.mark.nightly
def test_shape_limits_both_ways(healthy: Bed) -> None:
    healthy.shape("node2", "80mbit")  # 10 MB/s
    size = 5_000_000
    for line in (f"head -c {size} /dev/zero", f"head -c {size} >/dev/null"):
        started = time.monotonic()
        done = healthy.run(["sh", "-c", f"head -c {size} /dev/zero | ssh node2 '{line}' | wc -c"])
        assert done.returncode == 0
        # At most the bucket's size gets through at once, however fast the machine is.
        assert time.monotonic() - started > 0.4
    assert "rate 80Mbit" in healthy.node_run("node2", ["tc", "qdisc", "show", "dev", "eth0"]).stdout
    healthy.heal("node2")
    assert "tbf" not in healthy.node_run("node2", ["tc", "qdisc", "show", "dev", "eth0"]).stdout


@pytest.mark.nightly
def test_mtu_larger_than_the_networks(healthy: Bed) -> None:
    for node in healthy.names:
        healthy.mtu(node, 9000)
    assert ping(healthy).returncode == 0
    assert ping(healthy, "-M", "do", "-s", "8000").returncode != 0  # lost on the way
    for node in healthy.names:
        healthy.heal(node)
    assert "message too long" in ping(healthy, "-M", "do", "-s", "8000").stderr  # seen at once


@pytest.mark.nightly
def test_clock(healthy: Bed) -> None:
    healthy.clock("node2", -3600)
    now, skewed = time.time(), float(healthy.ssh("node2", "date +%s").stdout)
    assert -3700 < skewed - now < -3500
    assert healthy.ssh("node2", "python3 -c 'import time; print(time.time())'").stdout < str(now - 3000)
    healthy.heal("node2")
    assert abs(float(healthy.ssh("node2", "date +%s").stdout) - time.time()) < 60
    assert "FAKETIME" not in healthy.ssh("node2", "cat /etc/environment").stdout


def test_faults_are_noted_and_outlive_the_process_that_made_them(healthy: Bed) -> None:
    healthy.cut("node1")
    other = find(healthy.name)
    assert other.faults("node1") == {"cut": ""}
    other.heal("node1")
    assert healthy.faults("node1") == {}
    healthy.shape("node1", "1gbit")
    with pytest.raises(ConfigError, match="node1 is broken or not up"):
        healthy.save("never")
    with pytest.raises(ConfigError, match="is not a list of ports"):
        healthy.drop("node1", "22-")
    assert healthy.faults("node1") == {"shape": "1gbit"}
