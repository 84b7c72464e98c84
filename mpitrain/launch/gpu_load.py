"""How busy the GPUs of a host are, by the driver's own library (NVML).

A driver may take long to answer, or hang. So a thread asks it, and the others read the last answers.

Sent to the guards as text. So this module imports no other module of mpitrain, and must run with old Pythons. The
bindings of training/meters/gpu_utilisation.py are not installed for the Python of a guard.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_SECONDS = 1.0
# A driver that has not answered for longer hangs. What it said before tells of the past.
_OLD_SECONDS = 5.0
_MOST_GPUS = 64


class _Utilisation(ctypes.Structure):
    """nvmlUtilization_t: per cent of the last sampling period."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _GpuMemory(ctypes.Structure):
    """nvmlMemory_t: bytes."""

    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class GpuLoad:
    """The load of all GPUs that the driver shows. A thread asks from `read` to `end`.

    While a driver hangs, no other thread asks it: also the next reader waits for this answer.
    """

    _asking: threading.Thread | None = None  # of all objects

    def __init__(self) -> None:
        self._answers: list[dict[str, Any]] = []
        self._answered = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def read(self) -> list[dict[str, Any]]:
        """Return for each GPU the share of time in which a kernel ran, and its memory, as docs/live.md describes.

        [] if the driver has not answered for 5 s.
        """
        if self._thread is None and (GpuLoad._asking is None or not GpuLoad._asking.is_alive()):
            self._thread = GpuLoad._asking = threading.Thread(target=self._ask, name="GPUs", daemon=True)
            self._thread.start()
        return self._answers if time.monotonic() - self._answered < _OLD_SECONDS else []

    def end(self) -> None:
        """Let the thread end. Does not wait for it."""
        self._stop.set()

    def _ask(self) -> None:
        try:
            nvml = ctypes.CDLL(_LIBRARY)
        except OSError:  # no driver
            return
        if nvml.nvmlInit_v2() != 0:
            return
        number = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)) != 0:
            return
        handles = []
        for place in range(min(number.value, _MOST_GPUS)):
            handle = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(place, ctypes.byref(handle)) == 0:
                handles.append(handle)
        while not self._stop.wait(_SECONDS if self._answers else 0.0) and handles:
            self._answers = [_state(nvml, handle) for handle in handles]
            self._answered = time.monotonic()
        nvml.nvmlShutdown()


def _state(nvml: Any, handle: ctypes.c_void_p) -> dict[str, Any]:
    """Return what one GPU does. What it does not tell, as a slice of a GPU does not, is None."""
    used, memory = _Utilisation(), _GpuMemory()
    has_used = nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(used)) == 0
    has_memory = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    return {
        "busy": used.gpu / 100 if has_used else None,
        "memory_bytes": memory.total if has_memory else None,
        "memory_used_bytes": memory.used if has_memory else None,
    }
