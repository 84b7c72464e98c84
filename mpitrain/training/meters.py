"""The meters of a run's record: loss, learning rate, gradient norm, speed, exchange, memory, GPU, workers.

A meter measures numbers over the steps since the last row of a record. `combine` makes one number from those of all
ranks. No other module imports NVML's bindings.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.arrays import is_device_array
from mpitrain.errors import ConfigError
from mpitrain.server.status import ServerStats

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


@dataclass(frozen=True)
class Reading:
    """The number of one rank.

    Attributes:
        value: the number of this rank.
        weight: its weight in the mean over ranks, such as a number of samples. With weight 0 the value is ignored, also
            NaN.
        over_ranks: "mean" for the weighted mean, "max" for the maximum, "root" for rank 0's value (if all are equal).
    """

    value: float
    weight: float = 1.0
    over_ranks: str = "mean"


class Meter:
    """The base class of meters. Its methods are empty; a meter overrides those that it needs.

    Every rank makes the same calls. No method is collective.

    Attributes:
        reads_model: this meter may read parameters or the optimizer's state; see Hook.reads_model.
    """

    reads_model = True

    def start(self, trainer: Trainer) -> str:
        """Called once, before the first step. Return why this rank has nothing to measure; "" if it has."""
        return ""

    def before_row(self, trainer: Trainer) -> None:
        """Called before the step that ends a row, for numbers that are too expensive to measure in every step."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Called after every step."""

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """Return readings by name, over the steps since the last call. Leave out a name without a reading."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint between two rows. It is the same on every rank."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The reverse of `state`."""


def combine(of_ranks: Sequence[Mapping[str, Reading]]) -> dict[str, float]:
    """Combine the readings of all ranks, given in rank order, into one number for each name.

    A name for which no rank has a value is left out. A mean is weighted and rounded once, whatever the order of ranks.
    """
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for readings in of_ranks for name in readings):
        readings_of_name = [
            reading for readings in of_ranks if (reading := readings.get(name)) is not None and reading.weight > 0
        ]
        if not readings_of_name:
            continue
        if readings_of_name[0].over_ranks == "max":
            combined[name] = max(reading.value for reading in readings_of_name)
        elif readings_of_name[0].over_ranks == "root" or len(readings_of_name) == 1:
            combined[name] = readings_of_name[0].value
        else:
            try:
                total = math.fsum(reading.value * reading.weight for reading in readings_of_name)
            except (OverflowError, ValueError):  # fsum raises these for sums of infinities
                total = sum(reading.value * reading.weight for reading in readings_of_name)
            combined[name] = total / math.fsum(reading.weight for reading in readings_of_name)
    return combined


class Loss(Meter):
    """`loss`: the mean over all samples of the steps of the row. The loss of a step is already the mean over ranks."""

    reads_model = False

    def __init__(self) -> None:
        self._sum = self._samples = 0.0

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Meter."""
        self._sum += step.loss * step.samples
        self._samples += step.samples

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter."""
        reading = Reading(self._sum / self._samples, over_ranks="root")
        self._sum = self._samples = 0.0
        return {"loss": reading}

    def state(self) -> dict[str, Any]:
        """See Meter. So the next row of a resumed run includes the steps before the checkpoint."""
        return {"sum": self._sum, "samples": self._samples}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Meter."""
        self._sum, self._samples = float(state["sum"]), float(state["samples"])


class LearningRate(Meter):
    """`learning_rate`: the rate of the last step of the row, 0 if the step was skipped.

    With a loss scale also `loss_scale`, and `skipped_steps` since the start of training.
    """

    reads_model = False

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Meter."""
        self._rate = step.learning_rate

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter."""
        values = {"learning_rate": self._rate}
        if scale := trainer.adapter.loss_scale:
            values |= {"loss_scale": scale.value, "skipped_steps": float(scale.skipped_steps)}
        return {name: Reading(value, over_ranks="root") for name, value in values.items()}


class GradientNorm(Meter):
    """`gradient_norm`: the 2-norm of the last mean gradient of the row, over all parameters and before clipping.

    The optimizer measures the norm. An optimizer that clips has the norm anyway. Any other optimizer makes an extra
    pass over the gradient, only in the last step of a row. A skipped step has no norm, and neither has a last row that
    ends early.
    """

    reads_model = False

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Meter."""
        self._skipped = step.skipped

    def before_row(self, trainer: Trainer) -> None:
        """See Meter."""
        trainer.adapter.measure_gradient_norm()

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter. The mean gradient is bitwise identical on every rank."""
        norm = None if self._skipped else trainer.adapter.gradient_norm()
        return {} if norm is None else {"gradient_norm": Reading(norm, over_ranks="root")}


class Throughput(Meter):
    """`samples_per_second` of all ranks together, `tokens_per_second` and `step_seconds`, over the steps of the row.

    The time includes the steps and their data, but not the hooks between them (evaluation, checkpoints). With a server
    it includes the hooks, because workers with a unit compute during that time.
    """

    reads_model = False

    def __init__(self, *, tokens_per_sample: int | None = None) -> None:
        """`tokens_per_sample` is the length of each sample. Without it there is no `tokens_per_second`."""
        if tokens_per_sample is not None and tokens_per_sample < 1:
            raise ConfigError(f"Throughput: tokens_per_sample={tokens_per_sample}; it must be at least 1")
        self._tokens_per_sample = tokens_per_sample
        self._clear()

    def _clear(self) -> None:
        self._steps, self._samples, self._seconds = 0, 0.0, 0.0

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Meter."""
        self._steps += 1
        self._samples += step.samples
        self._seconds += step.seconds

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter."""
        if not self._steps:
            return {}
        rate = self._samples / self._seconds
        readings = {"samples_per_second": Reading(rate), "step_seconds": Reading(self._seconds / self._steps)}
        if self._tokens_per_sample:
            readings["tokens_per_second"] = Reading(rate * self._tokens_per_sample)
        self._clear()
        return readings


class Communication(Meter):
    """The cost of exchanging gradients, over the steps of the row and all ranks.

    `communication_share`: the share of the steps' time in which they waited for the exchange, or for a slower rank.
    `wire_seconds`: the communication time of a step's gradients. `wire_hidden_share`: the share of this time that
    overlapped with computation.
    """

    reads_model = False

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._steps, self._seconds, self._exposed, self._wire = 0, 0.0, 0.0, 0.0

    def start(self, trainer: Trainer) -> str:
        """See Meter."""
        return "it is a server, which exchanges nothing with ranks; use Workers" if trainer.served else ""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Meter."""
        self._steps += 1
        self._seconds += step.seconds
        self._exposed += step.overlap.exposed_seconds
        self._wire += step.overlap.wire_seconds

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter. The mean of the shares, weighted by time, is the share of the time of all ranks."""
        if not self._steps:
            return {}
        readings = {
            "communication_share": Reading(self._exposed / self._seconds, self._seconds),
            "wire_seconds": Reading(self._wire / self._steps),
        }
        if self._wire:
            readings["wire_hidden_share"] = Reading(max(0.0, 1 - self._exposed / self._wire), self._wire)
        self._clear()
        return readings


def gpu_of(trainer: Trainer) -> Any:
    """Return CuPy's Device that the parameters are on; None if they are on the CPU."""
    return next((value.device for value in trainer.adapter.parameters().values() if is_device_array(value)), None)


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


# NVML reports on its last sampling period, which is 1/6 to 1 s long, depending on the GPU's model.
_SECONDS = 0.2


class GpuUtilisation(Meter):
    """`gpu_utilisation`: the share of time, 0 to 1, in which a kernel ran on the GPU. Mean over the row and the ranks.

    NVML (nvidia-ml-py) measures the utilisation for the whole GPU. Kernels of all processes count, also those that use
    few of the GPU's units. Ranks on the CPU have no reading. If all ranks are on the CPU, the meter prints a warning at
    the beginning.
    """

    reads_model = False

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._sampled = 0.0

    def start(self, trainer: Trainer) -> str:
        """See Meter."""
        gpu = gpu_of(trainer)
        if gpu is None:
            return "it computes on the CPU"
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


class Workers(Meter):
    """`workers`: the number of workers now. The others are over the updates of the row, in a job with a server.

    `waiting_share`: the share of the workers' time in which they had no unit; a wait counts when it has ended.
    `staleness`, `largest_staleness`: of the gradients. `pulled_bytes`, `pushed_bytes`: bytes of parameters and
    gradients, by all workers, per update.
    """

    reads_model = False

    def __init__(self) -> None:
        self._steps = 0
        self._stats = ServerStats()
        self._note()

    def _note(self) -> None:
        """Note the numbers at which the next row begins."""
        workers = self._stats.workers
        self._bytes_in, self._bytes_out = self._stats.bytes_in, self._stats.bytes_out
        self._worked = sum(one.seconds for one in workers)
        self._waited = sum(one.waited_seconds for one in workers)
        self._staleness = self._stats.staleness.copy()
        self._steps = 0

    def start(self, trainer: Trainer) -> str:
        """See Meter."""
        return "" if trainer.served else "it has no workers"

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Meter."""
        assert trainer.served is not None
        if trainer.served.stats is not self._stats:  # the server has started, or restarted from another state
            self._stats = ServerStats()
            self._note()
            self._stats = trainer.served.stats
        self._steps += 1

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter."""
        if not self._steps:
            return {}
        stats = self._stats
        readings = {
            "workers": float(sum(one.is_here for one in stats.workers)),
            "pulled_bytes": (stats.bytes_out - self._bytes_out) / self._steps,
            "pushed_bytes": (stats.bytes_in - self._bytes_in) / self._steps,
        }
        waited = sum(one.waited_seconds for one in stats.workers) - self._waited
        worked = sum(one.seconds for one in stats.workers) - self._worked
        if waited + worked > 0:
            readings["waiting_share"] = waited / (waited + worked)
        if staleness := stats.staleness - self._staleness:  # none if the updates were skipped
            readings["staleness"] = sum(value * count for value, count in staleness.items()) / staleness.total()
            readings["largest_staleness"] = float(max(staleness))
        self._note()
        return {name: Reading(value, over_ranks="root") for name, value in readings.items()}
