"""How busy a host is, from made-up counters; and its GPUs, from a library with functions of NVML that is compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jobs import HANG_SECONDS, clean_environment
from mpitrain.launch import host_attempt
from mpitrain.launch.load import GpuLoad, Load
from mpitrain.launch.reports import Said

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
    assert (first["cores"], first["memory_bytes"], first["memory_used_bytes"]) == (os.cpu_count(), 1024000, 614400)
    assert {name for name, value in first.items() if value is None} == {
        "busy",
        "disk_busy",
        *(f"{word}_bytes_per_second" for word in ("received", "sent", "read", "written")),
    }
    assert machine.at(0.5) is None, "too soon"
    for seconds in (2, 3):
        load = machine.at(seconds)
        # 55 of 400 ticks; 10 and 2 sectors of 512 bytes; sdb is busy for 0.9 of the time.
        assert (load["busy"], load["disk_busy"]) == (0.138, 0.9)
        assert (load["received_bytes_per_second"], load["sent_bytes_per_second"]) == (1030, 204)
        assert (load["read_bytes_per_second"], load["written_bytes_per_second"]) == (5120, 1024)
    later = machine.at(30)
    assert later is not None and later["busy"] is None, "that was long ago"


def test_interfaces(tmp_path: Path) -> None:
    """Where none is a device, all count; and one may have any name."""
    machine = Machine(tmp_path)
    machine.at(0)
    load = machine.at(1)
    assert load is not None and (load["received_bytes_per_second"], load["sent_bytes_per_second"]) == (1530, 704)
    path = machine.proc / "net/dev"
    path.write_bytes(path.read_bytes().replace(b"eth0", b"\xff\xfe"))
    load = machine.load.read(102.0)
    assert load is not None and load["received_bytes_per_second"] == 0


@pytest.mark.parametrize("content", [None, "", "cpu\n", "\0\n"])
def test_what_the_kernel_does_not_tell(tmp_path: Path, content: str | None) -> None:
    """Such as in a container with another /proc: nothing is known, and nothing fails."""
    for name in ("stat", "meminfo", "diskstats"):
        if content is not None:
            (tmp_path / name).write_text(content)
    load = Load(tmp_path, tmp_path)
    load.read(1.0)
    known = load.read(3.0)
    assert {name: value for name, value in known.items() if value is not None} == {"cores": os.cpu_count(), "gpus": []}


def test_a_load_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The agent gives it up, and continues. The launcher says so once."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(host_attempt, "send", sent.append)
    monkeypatch.setattr(Load, "_cores", lambda self: {"ticks": int("a word")})
    census: Any = None
    watched = host_attempt.HostAttempt({"token": "t", "roll_call": "r", "peers": {}}, census)
    sent.clear()
    watched._watched_until = time.monotonic() + 600
    for second in range(3):
        watched._look_at_load(100.0 + second)
    for port in watched._held:
        port.close()
    (message,) = sent
    assert message["load"] is None and message["no_load"].startswith("ValueError: invalid literal for int()")
    said = Said(["node1"])
    said.take("node1", message, 1.0, 1.0)
    assert said.reports["node1"].load is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mpitrain: node1: how busy this host is cannot be read (ValueError: ")


# As nvml.h declares them. The second of three GPUs is a slice, which has no utilisation; the third is lost.
LIBRARY = r"""
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
static int gpus[3];
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **gpu) { *gpu = &gpus[index]; return index == 2 ? 15 : 0; }
int nvmlDeviceGetUtilizationRates(void *gpu, nvmlUtilization_t *rates) {
    rates->gpu = 37; rates->memory = 99;
    return gpu == &gpus[0] ? 0 : 3;
}
int nvmlDeviceGetMemoryInfo(void *gpu, nvmlMemory_t *memory) {
    int place = (int *) gpu - gpus;
    memory->total = 80000000000ULL + place; memory->free = 79000000000ULL; memory->used = 1000000000ULL + place;
    return 0;
}
"""
READ = """
import json, time
from mpitrain.launch.load import GpuLoad
load = GpuLoad()
while not load.read() and load._thread.is_alive():
    time.sleep(0.01)
print(json.dumps(load.read()))
load.end()
load._thread.join(60)
assert not load._thread.is_alive()
"""
FIRST = '{"busy": 0.37, "memory_bytes": 80000000000, "memory_used_bytes": 1000000000}'
SECOND = '{"busy": null, "memory_bytes": 80000000001, "memory_used_bytes": 1000000001}'


# The driver answers once, and then never again. Each of the last ten readers is of another time of watching.
HANGS = """
import threading, time
from mpitrain.launch import load
answers = [{"busy": 0.37}]
class Driver:
    def __getattr__(self, name):
        return lambda *_: 0
def count(number):
    number._obj.value = 1
    return 0
Driver.nvmlDeviceGetCount_v2 = staticmethod(count)
load.ctypes.CDLL = lambda name: Driver()
hanging = threading.Event()
def state(nvml, handle):
    if answers:
        return answers.pop()
    hanging.set()
    time.sleep(600)
load._state = state
load._OLD_GPU_SECONDS = 600.0
gpus = load.GpuLoad()
while not gpus.read():
    time.sleep(0.01)
assert hanging.wait(60)
assert gpus.read() == [{"busy": 0.37}]
load._OLD_GPU_SECONDS = 0.0
assert gpus.read() == []
gpus.end()
for _ in range(10):
    gpus = load.GpuLoad()
    assert gpus.read() == []
    gpus.end()
assert [one.name for one in threading.enumerate()].count("GPUs") == 1
"""


def python(source: str, **environ: str) -> str:
    line, env = [sys.executable, "-c", source], clean_environment(environ)
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_driver_that_hangs() -> None:
    """Its last answer is not shown for ever, and one thread waits for it, not one for each time of watching."""
    python(HANGS)
    load = GpuLoad()  # the first look waits for no driver
    assert load.read() == []
    load.end()


@pytest.mark.parametrize(("init", "answers"), [(0, f"[{FIRST}, {SECOND}]"), (9, "[]")])
def test_each_gpu(tmp_path: Path, init: int, answers: str) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: apt-get install gcc")
    (tmp_path / "nvml.c").write_text(LIBRARY)
    line = [compiler, "-shared", "-fPIC", f"-DINIT={init}", "-o", "libnvidia-ml.so.1", "nvml.c"]
    subprocess.run(line, cwd=tmp_path, check=True, timeout=HANG_SECONDS)
    assert python(READ, LD_LIBRARY_PATH=str(tmp_path)) == answers
