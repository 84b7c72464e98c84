"""How busy a host is: from made-up counters, exactly; and of this machine, by a guard."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import guarding
import pytest
from guarding import begin, wait_for

from mpitrain.launch import agent
from mpitrain.launch.connections import Connection
from mpitrain.launch.load import Load
from mpitrain.launch.reports import Said

# Fixtures: pytest finds them by these names.
wish, connections = guarding.wish, guarding.connections

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\nHugePages_Total:   0\n"


class Machine:
    """Folders like /proc and /sys, of a machine with two disks, one of them in two parts, and these interfaces."""

    def __init__(self, folder: Path, devices: tuple[str, ...] = ()) -> None:
        self.proc, self.sys = folder / "proc", folder / "sys"
        (self.proc / "net").mkdir(parents=True)
        (self.proc / "meminfo").write_text(MEMINFO)
        for name in ("sda", "sdb", "loop0", "dm-0"):
            (self.sys / "block" / name).mkdir(parents=True)
        for name in devices:
            (self.sys / "class/net" / name / "device").mkdir(parents=True)
        self.load = Load(self.proc, self.sys)

    def at(self, seconds: float) -> dict[str, Any] | None:
        """The load after the machine has done the same in each of these seconds."""
        steps = int(seconds)
        # In 100 ticks of each of 4 cores: user 30, nice 5, system 10, idle 250, waiting
        # for a disk 95, interrupts 4 and 3, steal 3. The last two are counted in user and nice already.
        ticks = [steps * number for number in (30, 5, 10, 250, 95, 4, 3, 3, 7, 7)]
        (self.proc / "stat").write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 1 1 1 1 1 1 1 1 1\nintr 1\n")
        head = "Inter-|   Receive\n face |bytes    packets\n"
        rows = [("lo", 9e9, 9e9), ("eth0", 1000, 200), ("eth1", 30, 4), ("docker0", 500, 500)]
        lines = [f"{name}: {int(a) * steps} 1 0 0 0 0 0 0 {int(b) * steps} 1 0 0 0 0 0 0\n" for name, a, b in rows]
        (self.proc / "net/dev").write_text(head + "".join(lines))
        disks = [("sda", 8, 2, 250), ("sda1", 8, 2, 250), ("sdb", 2, 0, 900), ("loop0", 9, 9, 9), ("dm-0", 10, 2, 999)]
        (self.proc / "diskstats").write_text(
            "".join(f" 8 0 {n} 1 1 {r * steps} 1 1 1 {w * steps} 1 0 {b * steps} 1\n" for n, r, w, b in disks)
        )
        return self.load.read(100.0 + seconds)


def test_rates_are_those_of_the_time_between(tmp_path: Path) -> None:
    machine = Machine(tmp_path, devices=("eth0", "eth1"))
    first = machine.at(0)
    assert first is not None
    assert (first["cores"], first["memory_bytes"], first["memory_used_bytes"]) == (os.cpu_count(), 1024000, 614400)
    assert {name for name, value in first.items() if value is None} == {
        "busy",
        "disk_busy",
        *(f"{word}_bytes_per_second" for word in ("received", "sent", "read", "written")),
    }
    assert machine.at(0.5) is None, "too soon"
    for seconds in (2, 3):
        load = machine.at(seconds)
        assert load is not None
        # 55 of 400 ticks; 10 and 2 sectors of 512 bytes; sdb is busy for 0.9 of the time.
        assert (load["busy"], load["disk_busy"]) == (0.138, 0.9)
        assert (load["received_bytes_per_second"], load["sent_bytes_per_second"]) == (1030, 204)
        assert (load["read_bytes_per_second"], load["written_bytes_per_second"]) == (5120, 1024)
    later = machine.at(30)
    assert later is not None and later["busy"] is None, "that was long ago"


def test_where_no_interface_is_a_device(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.at(0)
    load = machine.at(1)
    assert load is not None and (load["received_bytes_per_second"], load["sent_bytes_per_second"]) == (1530, 704)


@pytest.mark.parametrize("content", [None, "", "cpu\n", "\0\n"])
def test_what_the_kernel_does_not_tell(tmp_path: Path, content: str | None) -> None:
    """Such as in a container with another /proc: nothing is known, and nothing fails."""
    for name in ("stat", "meminfo", "diskstats"):
        if content is not None:
            (tmp_path / name).write_text(content)
    load = Load(tmp_path, tmp_path)
    load.read(1.0)
    known = load.read(3.0)
    assert known is not None
    assert {name: value for name, value in known.items() if value is not None} == {"cores": os.cpu_count(), "gpus": []}


def test_an_interface_with_any_name(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.at(0)
    machine.at(1)
    path = machine.proc / "net/dev"
    path.write_bytes(path.read_bytes().replace(b"eth0", b"\xff\xfe"))
    load = machine.load.read(102.0)
    assert load is not None and load["received_bytes_per_second"] == 0


def test_a_load_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The guard gives it up, and goes on. The launcher says so once."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(agent, "send", sent.append)
    monkeypatch.setattr(Load, "_cores", lambda self: {"ticks": int("a word")})
    census: Any = None
    hearing: Any = None
    watched = agent.Guard({"token": "t", "roll_call": "r", "peers": {}, "silence_seconds": 0.0}, census, hearing)
    watched._watched_until = time.monotonic() + 600
    for second in range(3):
        watched._look_at_load(100.0 + second)
    (message,) = sent
    assert message["load"] is None and message["no_load"].startswith("ValueError: invalid literal for int()")
    said = Said(["node1"])
    said.take("node1", message, 1.0, 1.0)
    assert said.reports["node1"].load is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mpitrain: node1: how busy this host is cannot be read (ValueError: ")


def test_a_guard_says_it_while_somebody_watches(wish: dict[str, Any], connections: list[Connection]) -> None:
    there = begin(wish, connections)
    there.send({"watch": 0.2})
    load = wait_for(there, "load")["load"]
    assert load["busy"] is None
    there.send({"watch": 0.2})
    load = wait_for(there, "load", lambda one: one["busy"] is not None)["load"]
    sizes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 <= load["busy"] <= 1
    assert load["memory_bytes"] == pytest.approx(sizes, rel=0.01)
    assert 0 < load["memory_used_bytes"] < load["memory_bytes"]
