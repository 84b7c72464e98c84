"""Memory of host and GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.training.meters.meter import Meter, Reading
from mpitrain.training.meters.place import gpu_of

if TYPE_CHECKING:
    from mpitrain.training.trainer import Trainer


class Memory(Meter):
    """`host_memory_peak_bytes`: the most memory that a rank has used since it began; the maximum over the ranks.

    On GPUs also `gpu_memory_bytes`: the memory in use on the fullest GPU at the end of the row, by all processes.
    """

    reads_model = False

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter."""
        readings = {"host_memory_peak_bytes": Reading(peak_bytes(), over_ranks="max")}
        gpu = gpu_of(trainer)
        if gpu is not None:
            free, total = gpu.mem_info
            readings["gpu_memory_bytes"] = Reading(float(total - free), over_ranks="max")
        return readings


def peak_bytes() -> float:
    """Return the peak of this process's resident memory, in bytes."""
    # Do not use getrusage: its ru_maxrss starts with the value of the parent process (Linux keeps it across exec).
    line = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert line
    return float(line[1]) * 1024
