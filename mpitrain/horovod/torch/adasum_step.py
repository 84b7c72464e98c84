"""A step of an optimizer by Adasum: the ranks combine what each of them would change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mpitrain.horovod.operators import Operator
from mpitrain.horovod.process_sets import ProcessSet
from mpitrain.horovod.state import takes_part
from mpitrain.horovod.torch.compression import Compressor
from mpitrain.horovod.torch.reducing import allreduce_async_
from mpitrain.horovod.torch.submission import synchronize


class AdasumStep:
    """The steps of one optimizer."""

    def __init__(self, names: Mapping[torch.Tensor, str], compression: Compressor, process_set: ProcessSet) -> None:
        self._names = names
        self._compression = compression
        self._process_set = process_set

    def make(self, step: Callable[[], Any]) -> Any:
        """Make a step, and replace what it has changed by the adaptive sum over ranks. Return what the step returns."""
        if not takes_part(self._process_set):
            return step()
        trained = [parameter for parameter in self._names if parameter.requires_grad]
        before = [parameter.detach().clone() for parameter in trained]
        result = step()
        started = []
        for parameter, old in zip(trained, before, strict=True):
            short, context = self._compression.compress(parameter.detach() - old)
            name = f"step.{self._names[parameter]}"
            handle = allreduce_async_(short, None, name, Operator.Adasum, process_set=self._process_set)
            started.append((handle, context))
        with torch.no_grad():
            for parameter, old, (handle, context) in zip(trained, before, started, strict=True):
                parameter.copy_(old + self._compression.decompress(synchronize(handle), context))
        return result
