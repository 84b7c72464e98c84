"""Counters and rates of network interfaces, from recorded and made-up files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.forecast.cluster_profile import busiest, nominal_gbit, parse_counters

BEFORE = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo: 6300021   20100    0    0    0     0          0         0  6300021   20100    0    0    0     0       0
  eth0:12345678   10000    0    0    0     0          0         0 87654321   20000    0    0    0     0       0
enp3s0:       0       0    0    0    0     0          0         0        0       0    0    0    0     0       0
"""


def test_counters() -> None:
    found = parse_counters(BEFORE)
    assert found == {"lo": (6300021, 6300021), "eth0": (12345678, 87654321), "enp3s0": (0, 0)}


def test_the_one_that_moved() -> None:
    before = {"lo": (0, 0), "eth0": (5, 7), "eth1": (0, 0)}
    assert busiest(before, {"lo": (9**9, 9**9), "eth0": (2**21, 2**21 + 100), "eth1": (400, 300)}) == "eth0"
    # A bond sends what its two parts send together.
    assert busiest({"bond0": (0, 0), "eth0": (0, 0)}, {"bond0": (0, 2**21), "eth0": (0, 2**20)}) == "bond0"
    assert busiest(before, {"lo": (9**9, 9**9), "eth0": (500, 700), "eth1": (0, 0)}) == ""
    assert busiest({}, {"eth0": (9**9, 9**9)}) == ""  # it has come up in between
    assert busiest({}, {}) == ""


def interface(folder: Path, name: str, speed: str | None, *, hardware: bool, lower: tuple[str, ...] = ()) -> None:
    (folder / name).mkdir()
    if speed is not None:
        (folder / name / "speed").write_text(f"{speed}\n")
    if hardware:
        (folder / name / "device").mkdir()
    for other in lower:
        (folder / name / f"lower_{other}").symlink_to(folder / other)


@pytest.mark.parametrize(
    ("speed", "gbit"), [("1000", 1.0), ("2500", 2.5), ("100", 0.1), ("-1", None), ("", None), (None, None)]
)
def test_the_rate_of_hardware(tmp_path: Path, speed: str | None, gbit: float | None) -> None:
    interface(tmp_path, "eth0", speed, hardware=True)
    assert nominal_gbit("eth0", tmp_path) == gbit


def test_the_rate_of_what_stands_on_others(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", "1000", hardware=True)
    interface(tmp_path, "eth1", "1000", hardware=True)
    interface(tmp_path, "veth0", "10000", hardware=False)  # as the kernel says of every such pair
    interface(tmp_path, "bond0", "2000", hardware=False, lower=("eth0", "eth1"))
    interface(tmp_path, "bond0.5", "2000", hardware=False, lower=("bond0",))
    interface(tmp_path, "br0", "10000", hardware=False, lower=("eth0", "veth0"))
    assert [nominal_gbit(name, tmp_path) for name in ("bond0", "bond0.5", "veth0", "br0")] == [2.0, 2.0, None, None]
