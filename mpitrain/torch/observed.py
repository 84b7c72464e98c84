"""How a PyTorch program is recorded for `mpitrain verify`: at each step of an optimizer, whatever averages gradients.

When `optimizer.step()` returns, p.grad holds the means that it used: those of `prepare`, of DistributedDataParallel,
FSDP and other wrappers, and of a loop that averages by itself. The parameters then hold the result of the step, and of
anything else that has changed them since the previous step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import numpy
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from mpitrain.adapters.torch_arrays import array_of
from mpitrain.context import JobContext
from mpitrain.job.start import has_begun, init
from mpitrain.torch.batches import arrays_of
from mpitrain.verify.comparison import ROUNDOFFS
from mpitrain.verify.record_file import STEP
from mpitrain.verify.run_record import TORCH, Recorder


class _TorchWatch:
    """Watches the optimizers, modules and loaders of one rank."""

    def __init__(self) -> None:
        self.is_divided = False  # True: prepare() or shard() divides batches, so loaders yield more than this rank's
        self._weight: float | None = None  # the weight of the batches since the last step, if it is known
        self._waiting: list[tuple[list[numpy.ndarray], int | None]] = []  # batches that no model has computed with
        self._is_evaluated = False  # True: a model has computed with them, but without gradients
        self._names: dict[int, str] = {}  # the names of parameters, by id
        self._modules: WeakSet[torch.nn.Module] = WeakSet()  # modules whose parameters have names
        self._precisions: set[str] = set()  # the dtypes in which autocast has computed
        self._has_optimizer = False
        self.alone: WeakSet[torch.optim.Optimizer] = (
            WeakSet()
        )  # each rank steps with gradients of its own, as with local updates
        register_optimizer_step_pre_hook(self._steps)
        register_optimizer_step_post_hook(self._stepped)
        register_module_forward_pre_hook(self._forward)
        self._see_loaders()
        self._see_optimizers()

    def expect_steps(self) -> None:
        """Record no call before the first step as a line."""
        recorder = init().observer
        assert isinstance(recorder, Recorder)
        recorder.attach(TORCH)

    def saw(self, batch: Any, count: int | None) -> None:
        """Note a batch of this rank, of which the first `count` samples count; None: all do, without a weight.

        The batch counts when a model computes with it and keeps gradients, or at the next step.
        """
        self._forget_evaluated()
        if init().observer is not None and torch.is_grad_enabled():
            self._waiting.append(([array[:count] for array in arrays_of(batch)], count))

    def _forget_evaluated(self) -> None:
        """Forget a batch that a model has used only without gradients, once the loop takes the next batch."""
        if self._is_evaluated:
            self._waiting.clear()
        self._is_evaluated = False

    def _count_waiting(self) -> None:
        observer = init().observer
        assert observer is not None
        for arrays, count in self._waiting:
            observer.saw(arrays)
            if count is not None:
                self._weight = (self._weight or 0.0) + count
        self._waiting.clear()
        self._is_evaluated = False

    def _see_loaders(self) -> None:
        take = dataloader._BaseDataLoaderIter.__next__

        def take_and_tell(batches: Any) -> Any:
            self._forget_evaluated()
            batch = take(batches)
            if not self.is_divided:
                self.saw(batch, None)
            return batch

        dataloader._BaseDataLoaderIter.__next__ = take_and_tell  # type: ignore[method-assign, assignment]

    def _see_optimizers(self) -> None:
        make = torch.optim.Optimizer.__init__

        def make_and_tell(*args: Any, **kwargs: Any) -> None:
            make(*args, **kwargs)
            self._has_optimizer = True

        torch.optim.Optimizer.__init__ = make_and_tell  # type: ignore[method-assign]

    def _forward(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not torch.is_grad_enabled():
            self._is_evaluated = True
        else:
            if self._has_optimizer and has_begun():  # a world.mean of gradients before its step is not a line
                self.expect_steps()
            if self._waiting:
                self._count_waiting()
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self._precisions.add(str(torch.get_autocast_dtype(device)).removeprefix("torch."))
        if module not in self._modules:  # with nested modules, the outermost comes first
            self._modules.update(module.modules())
            for name, parameter in module.named_parameters():
                self._names.setdefault(id(parameter), name)

    def _steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        recorder = init().observer
        assert isinstance(recorder, Recorder)
        if recorder.attach(TORCH):
            recorder.begin_step(dict(self._named(optimizer, lambda parameter: parameter)))

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        recorder = init().observer
        assert isinstance(recorder, Recorder)
        if not recorder.attach(TORCH):
            return
        self._count_waiting()
        gradients = dict(self._named(optimizer, lambda parameter: parameter.grad))
        parameters = dict(self._named(optimizer, lambda parameter: parameter))
        weight, self._weight = self._weight, None
        narrow = max(self._precisions & ROUNDOFFS.keys(), key=lambda dtype: ROUNDOFFS[dtype], default="")
        rate = float(optimizer.param_groups[0]["lr"])
        alone = optimizer in self.alone
        recorder.add(STEP, weight, gradients, parameters, precision=narrow, learning_rate=rate, alone=alone)
        recorder.end_if_done()

    def _named(
        self, optimizer: torch.optim.Optimizer, choose: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> Iterator[tuple[str, numpy.ndarray]]:
        """Yield in full what `choose` returns for each parameter, unless it is None. Collective with FSDP."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = [self._names.get(id(parameter), "parameter") for parameter in parameters]
        for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
            chosen: Any = choose(parameter)
            if chosen is None:
                continue
            chosen = chosen.detach()
            if hasattr(chosen, "full_tensor"):  # with FSDP, each rank has a part
                chosen = chosen.full_tensor()
            if chosen.is_sparse:
                chosen = chosen.to_dense()
            yield (name if names.count(name) == 1 else f"{name} ({number})"), array_of(chosen.cpu())


_watches: list[_TorchWatch] = []


def watch() -> None:
    """Watch this process if `mpitrain verify` has started it. Only the first call has an effect."""
    if JobContext.read(os.environ).verify.record and not _watches:
        _watches.append(_TorchWatch())


def samples_come_divided() -> None:
    """From now on, use this rank's part of each batch, which `saw` gets, and ignore what loaders yield."""
    for one in _watches:
        one.is_divided = True


def expect_steps() -> None:
    """Note that prepare() was called: the exchange of its gradients is a part of a step, not a line."""
    for one in _watches:
        one.expect_steps()


def steps_alone(optimizer: torch.optim.Optimizer) -> None:
    """Note that this optimizer steps with gradients that are a rank's own."""
    for one in _watches:
        one.alone.add(optimizer)


def saw(batch: Any, count: int) -> None:
    """Note this rank's part of a batch, of which the first `count` samples count."""
    for one in _watches:
        one.saw(batch, count)
