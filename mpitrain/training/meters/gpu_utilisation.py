"""Measures how busy the GPU is. No other module imports NVML's bindings."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mpitrain.training.meters.meter import Meter, Reading
from mpitrain.training.meters.place import gpu_of

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer

# NVML reports on its last sampling period, which is 1/6 to 1 s long, depending on the GPU's model.
_SECONDS = 0.2


class GpuUtilisation(Meter):
    """`gpu_utilisation`: the share of time, 0 to 1, in which a kernel ran on the GPU. Mean over the row and the ranks.

    NVML (nvidia-ml-py) measures the utilisation for the whole GPU. Kernels of all processes count, also those that use
    few of the GPU's units. Ranks on the host have no reading. If all ranks are on the host, the meter says so at the
    beginning.
    """

    reads_model = False

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._sampled = 0.0

    def start(self, trainer: Trainer) -> str:
        """See Meter."""
        gpu = gpu_of(trainer)
        if gpu is None:
            return "it computes on the host"
        try:
            import pynvml
        except ImportError as error:
            return f"{error}; pip install 'mpitrain[cuda]'"
        try:
            pynvml.nvmlInit()
            # Find the GPU by its address, because NVML counts all GPUs of the machine, but CUDA only the visible ones.
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(gpu.pci_bus_id.encode())
            pynvml.nvmlDeviceGetUtilizationRates(self._handle)  # raises for a slice of a GPU, which has no utilisation
        except pynvml.NVMLError as error:
            return f"NVML: {error}"
        self._rates = pynvml.nvmlDeviceGetUtilizationRates
        return ""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Meter."""
        if time.monotonic() - self._sampled >= _SECONDS:
            self._samples.append(self._rates(self._handle).gpu / 100)
            self._sampled = time.monotonic()

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter. A row that is shorter than the time between samples may have no reading."""
        if not self._samples:
            return {}
        samples, self._samples = self._samples, []
        return {"gpu_utilisation": Reading(sum(samples) / len(samples))}
