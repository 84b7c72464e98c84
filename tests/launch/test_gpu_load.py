"""The load of GPUs, from a library with the functions of NVML that a test has compiled: no GPU is needed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import HANG_SECONDS, clean_environment
from mpitrain.launch.load import GpuLoad

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


def test_a_driver_that_hangs() -> None:
    """Its last answer is not shown for ever, and one thread waits for it, not one for each time of watching."""
    line = [sys.executable, "-c", HANGS]
    done = subprocess.run(line, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("init", "answers"), [(0, f"[{FIRST}, {SECOND}]"), (9, "[]")])
def test_each_gpu(tmp_path: Path, init: int, answers: str) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: apt-get install gcc")
    (tmp_path / "nvml.c").write_text(LIBRARY)
    line = [compiler, "-shared", "-fPIC", f"-DINIT={init}", "-o", "libnvidia-ml.so.1", "nvml.c"]
    subprocess.run(line, cwd=tmp_path, check=True, timeout=HANG_SECONDS)
    done = subprocess.run(
        [sys.executable, "-c", READ],
        env=clean_environment({"LD_LIBRARY_PATH": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, answers), done.stderr


def test_the_first_look_waits_for_no_driver() -> None:
    load = GpuLoad()
    assert load.read() == []
    load.end()
