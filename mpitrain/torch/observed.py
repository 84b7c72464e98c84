"""How a PyTorch program is watched for `mpitrain verify`: at each step of an optimizer, whatever averages gradients.

What p.grad holds when `optimizer.step()` returns are the means that it used: those of `prepare`, of
DistributedDataParallel, FSDP and other wrappers, and of a loop that averages by itself. What the parameters hold then
is what the step has made of them, and whatever else has changed them since the step before.
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
from mpitrain.job.context import JobContext
from mpitrain.job.start import has_begun, init
from mpitrain.torch.batches import arrays_of
from mpitrain.verify.comparison import ROUNDOFFS
from mpitrain.verify.record_file import STEP
from mpitrain.verify.run_record import TORCH, Recorder


class _TorchWatch:
    """What one rank's optimizers, modules and loaders do."""

    def __init__(self) -> None:
        self.is_divided = False  # by prepare() or shard(): what loaders give is not this rank's part
        self._weight: float | None = None  # of the batches since the last step, where they are known
        self._waiting: list[tuple[list[numpy.ndarray], int | None]] = []  # batches that no model has computed with
        self._is_evaluated = False  # a model has computed with them, and without gradients
        self._names: dict[int, str] = {}  # of parameters, by id
        self._modules: WeakSet[torch.nn.Module] = WeakSet()  # whose parameters have names
        self._precisions: set[str] = set()  # that autocast has computed in
        self._has_optimizer = False
        register_optimizer_step_pre_hook(self._steps)
        register_optimizer_step_post_hook(self._stepped)
        register_module_forward_pre_hook(self._forward)
        self._see_loaders()
        self._see_optimizers()

    def expect_steps(self) -> None:
        """What comes before the first step is no line."""
        recorder = init().observer
        assert isinstance(recorder, Recorder)
        recorder.attach(TORCH)

    def saw(self, batch: Any, count: int | None) -> None:
        """This rank has got a batch, of which the first samples count; None: all of them do, and weigh nothing.

        It counts once a model computes with it and keeps gradients, or at the next step.
        """
        self._forget_evaluated()
        if init().observer is not None and torch.is_grad_enabled():
            self._waiting.append(([array[:count] for array in arrays_of(batch)], count))

    def _forget_evaluated(self) -> None:
        """The next batch is asked for: one that a model has computed with, but only without gradients, is no sample."""
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
            if self._has_optimizer and has_begun():  # no world.mean of gradients before its step is a line by itself
                self.expect_steps()
            if self._waiting:
                self._count_waiting()
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self._precisions.add(str(torch.get_autocast_dtype(device)).removeprefix("torch."))
        if module not in self._modules:  # of modules in modules, the outermost comes first
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
        recorder.add(STEP, weight, gradients, parameters, precision=narrow, learning_rate=rate)
        recorder.end_if_done()

    def _named(
        self, optimizer: torch.optim.Optimizer, choose: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> Iterator[tuple[str, numpy.ndarray]]:
        """What is chosen of each parameter, where there is any; whole, which is collective with FSDP."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = [self._names.get(id(parameter), "parameter") for parameter in parameters]
        for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
            chosen: Any = choose(parameter)
            if chosen is None:
                continue
            chosen = chosen.detach()
            if hasattr(chosen, "full_tensor"):  # FSDP has a part on each rank
                chosen = chosen.full_tensor()
            if chosen.is_sparse:
                chosen = chosen.to_dense()
            yield (name if names.count(name) == 1 else f"{name} ({number})"), array_of(chosen.cpu())


_watches: list[_TorchWatch] = []


def watch() -> None:
    """Watch this process, if `mpitrain verify` has started it; once."""
    if JobContext.read(os.environ).verify_record and not _watches:
        _watches.append(_TorchWatch())


def samples_come_divided() -> None:
    """From now on `saw` is told of this rank's part of each batch, and loaders are not listened to."""
    for one in _watches:
        one.is_divided = True


def expect_steps() -> None:
    """prepare() has been called: the exchange of its gradients is part of a step, and no line by itself."""
    for one in _watches:
        one.expect_steps()


def saw(batch: Any, count: int) -> None:
    """This rank has got its part of a batch; `count` samples of it count."""
    for one in _watches:
        one.saw(batch, count)
