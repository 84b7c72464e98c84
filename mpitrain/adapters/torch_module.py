"""TorchModule: a PyTorch module with its own optimizer, under the Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy

from mpitrain.adapters.adapter import OnGradient, OptimizerShard, check_fits
from mpitrain.adapters.array_function import PRECISIONS, narrow_dtype
from mpitrain.arrays import Array
from mpitrain.errors import ConfigError, GradientError
from mpitrain.extras import missing
from mpitrain.optim.loss_scale import LossScale
from mpitrain.optim.owned import Owned
from mpitrain.optim.schedules import Schedule
from mpitrain.reducer.bucket import plan_layout
from mpitrain.reducer.means import Remarks
from mpitrain.tree import Tree
from mpitrain.world.world import World

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise missing("mpitrain.TorchModule", "PyTorch", "torch", error) from None

from mpitrain.adapters.torch_arrays import array_of, as_tensors, is_empty, tensor_of
from mpitrain.adapters.torch_buffers import ModuleBuffers, Values
from mpitrain.adapters.torch_checks import check_optimizer, check_places, check_plain, checked_loss
from mpitrain.adapters.torch_optimizer import ScheduledOptimizer
from mpitrain.adapters.torch_parts import DividedModule
from mpitrain.adapters.torch_random import seeded
from mpitrain.adapters.torch_shard import TorchShard
from mpitrain.adapters.torch_state import Scheduler
from mpitrain.adapters.torch_steps import StepsMade
from mpitrain.adapters.torch_trained import Trained

# loss(module, batch) -> the mean loss over the batch's samples, a tensor of one number.
Loss = Callable[[Any, Any], Any]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TorchModule(DividedModule):
    """An Adapter around a module on the CPU, a loss and an optimizer of torch.optim.

    Gradients are exchanged while the backward pass runs. A tied parameter has one gradient, a frozen one
    (requires_grad=False) has none. A warning names once each parameter that a loss does not depend on. If no rank's
    loss depends on it, the optimizer skips it, as in one process. If only some ranks' losses do, the gradients of the
    other ranks count as zero. torch_trained.py has the rule.

    All parameters, including frozen ones, and persistent buffers start with rank 0's values, are in checkpoints, and
    are bitwise identical on all ranks after every step. A floating buffer changes by the mean, weighted by samples, of
    the ranks' changes. Any other buffer takes the values of the first rank with samples. torch_buffers.py has the rule.
    Changes are exchanged with the gradients, so a codec compresses them too. A change from infinity to a number has no
    mean and raises NonFiniteError. The running mean of batch norm becomes that of the whole batch. Its running variance
    is the mean of the variances within the ranks' parts. Batch norm itself normalises each rank's own part, so a model
    with batch norm does not train on several ranks as it does on one.

    Random layers, such as dropout, draw from each rank's own generator. Seed it by rank, with
    `torch.manual_seed(seed + world.rank)`, after the module is made. The generators are not in checkpoints. With
    `mt.Sync(virtual_ranks=)`, each virtual rank draws from the seed of Sync, the step and its number instead, also in
    NumPy's and Python's own generators.

    The script switches the module between training and evaluation (`module.train()`, `module.eval()`).

    Attributes:
        module: the given module; in a Trainer, `trainer.adapter.module`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule | Scheduler | None = None,
        clip_norm: float | None = None,
        precision: str | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Not collective; every rank makes the same module.

        Args:
            module: is on the CPU, and is trained in place. From now on, its parameters must keep their shapes and
                requires_grad.
            loss: `loss(module, batch)` returns the mean loss over the batch's samples, a tensor of one number. The
                batch has tensors in place of arrays, over the same memory if it is writable. `loss` is not called for a
                batch without samples.
            optimizer: has all trained parameters and no others. It may be any optimizer of torch.optim whose step needs
                no closure.
            schedule: the learning rate of every step: a function of the step (from 0), or a scheduler of PyTorch for
                `optimizer`, which is stepped after every step of training. Default: the optimizer's rate.
            clip_norm: the largest 2-norm of the mean gradient over all parameters.
            precision: "bf16" or "fp16", the dtype in which autocast computes, for float32 parameters. Parameters,
                optimizer, exchange and checkpoints stay float32.
            loss_scale: default for fp16: `LossScale()`. Otherwise none, and NaN or infinity in a gradient is an error.

        Raises:
            ConfigError: the module is a DistributedDataParallel; there is nothing to train; a trained parameter of the
                module is not in the optimizer, or the reverse; or the optimizer, schedule or precision cannot be used
                here.
            DeviceError: a parameter or buffer is not on the CPU.
        """
        self.module, self._loss = module, loss
        check_plain(module, "TorchModule()")
        check_places(module)
        trained, buffers = Trained(module, "TorchModule()"), ModuleBuffers(module)
        check_optimizer(optimizer, trained.named, trained.tensors)
        scheduled = ScheduledOptimizer(optimizer, trained.named, schedule, clip_norm)
        self._narrow = narrow_dtype(precision, {entry.name: entry.dtype for entry in trained.layout})
        self._loss_scale = LossScale() if loss_scale is None and precision == "fp16" else loss_scale
        # The buffers come after the parameters: the last entries are exchanged first, and buffers are known early.
        changes = buffers.layout(trained.changes_dtype)
        self._counts = plan_layout(trained.layout).counts
        super().__init__(trained, buffers, optimizer, scheduled, plan_layout([*trained.layout, *changes]))
        self._shard: TorchShard | None = None
        self._steps: StepsMade | None = None
        self._on_gradient: OnGradient | None = None
        self._changed: Values | None = None
        self._trained.watch(self._hand_in)

    @property
    def loss_scale(self) -> LossScale | None:
        """See Adapter."""
        return self._loss_scale

    @property
    def precision(self) -> numpy.dtype:
        """See Adapter."""
        return self._narrow or min(self._counts, key=lambda dtype: dtype.itemsize)

    def loss_and_gradients(self, batch: Tree, on_gradient: OnGradient) -> float:
        """See Adapter. The buffers are restored; `apply_gradients` changes them."""
        now, named, trained = dict(self.module.named_parameters()), self._trained.named, self._trained.tensors
        for name in {**named, **now}:
            parameter = now.get(name)
            same = parameter is not None and parameter is named.get(name)
            if not same or now[name].requires_grad != (name in trained):
                raise GradientError(
                    f"{name} was added, replaced, frozen or thawed after TorchModule was made; do that before, or "
                    "make a new TorchModule and a new Trainer from a checkpoint"
                )
        self._trained.forget_gradients()  # they may be left from a backward pass that was not for this step
        self._changed = None
        if is_empty(batch):
            for index, entry in enumerate(self.layout):
                unused = index < len(trained)
                on_gradient(index, None if unused else numpy.zeros(entry.shape, entry.dtype))
            return 0.0
        scale = self._loss_scale.value if self._loss_scale else 1.0
        self._buffers.keep_all()
        self._trained.begin()
        self._on_gradient = on_gradient
        tensors = as_tensors(batch)
        try:
            with self._autocast():
                loss = checked_loss(self._loss(self.module, tensors))
            changes = self._buffers.changes(self._trained.changes_dtype, scale)
            for index, change in enumerate(changes, start=len(trained)):
                on_gradient(index, change)
            (loss * scale).backward()
            self._changed = self._buffers.changed_others() or None
        finally:
            self._on_gradient = None
            self._buffers.put_back()
        self._hand_in_rest(on_gradient)
        return float(loss.detach())

    def seeded(self, key: tuple[int, ...]) -> AbstractContextManager[None]:
        """See SeededAdapter: PyTorch's, NumPy's and Python's own generators on the CPU."""
        return seeded(key)

    def _autocast(self) -> AbstractContextManager[None]:
        if self._narrow is None:
            return nullcontext()
        name = next(name for name, dtype in PRECISIONS.items() if dtype == self._narrow)
        autocast: AbstractContextManager[None] = torch.autocast("cpu", dtype=_AUTOCAST[name])
        return autocast

    def _hand_in(self, index: int, parameter: Any) -> None:
        """Called in the backward pass when a parameter's gradient is complete."""
        if self._on_gradient is None:
            return  # a backward pass that is not for a step of this adapter
        gradient, parameter.grad = parameter.grad, None  # the exchange has its own memory
        self._trained.check(index, gradient)
        self._trained.come(index)
        self._on_gradient(index, array_of(gradient))

    def _hand_in_rest(self, on_gradient: OnGradient) -> None:
        """Pass on what no backward pass has passed on; None: the loss does not depend on the parameter."""
        for index, parameter, gradient in self._trained.left():
            parameter.grad = None
            on_gradient(index, None if gradient is None else array_of(gradient))

    def note(self) -> Values | None:
        """See Adapter: the buffers that are not floating and that this rank has changed."""
        return self._changed

    def check_note(self, note: Any) -> None:
        """See Adapter.note.

        Raises:
            GradientError: the note does not hold bytes of buffers of this module.
        """
        if note is not None and not self._buffers.fits_others(note):
            raise GradientError(
                "a note has arrived that does not hold values of this module's buffers; allowed are names and bytes"
            )

    def apply_gradients(self, flats: Mapping[numpy.dtype, Array], remarks: Remarks) -> float:
        """See Adapter."""
        is_first = self._parts is None or self._parts.number == 0
        for text in self._trained.report(remarks) if is_first else ():
            warnings.warn(f"{text}. Freeze parameters that are never trained: requires_grad_(False)", stacklevel=2)
        if self._shard is not None:
            rate = self._shard.update(flats, remarks.unused)
            self._buffers.settle_others([note or () for note in remarks.notes])
            return rate
        trained = self._trained.tensors.values()
        if self._parts is None:
            views = dict(enumerate(self._plan.views(dict(flats))))
            gradients = [flats[dtype][:count] for dtype, count in self._counts.items()]
        else:
            views = self._parts.views(flats)
            gradients = [view.reshape(-1) for index, view in views.items() if index < len(trained)]
        for index, parameter in enumerate(trained):
            parameter.grad = None if index in remarks.unused or index not in views else tensor_of(views[index])
        rate = self._optimizer.step(gradients)
        if self._steps is not None:
            self._steps.add(self._torch_optimizer)  # after the step, because the optimizer's hooks may change gradients
        for parameter in trained:
            parameter.grad = None
        self._buffers.add({self.layout[index].name: view for index, view in views.items() if index >= len(trained)})
        self._buffers.settle_others([note or () for note in remarks.notes])
        return rate

    def scale_next_rate(self, factor: float) -> None:
        """See ArrayFunction. The rates of all groups of the optimizer are multiplied."""
        self._optimizer.scale_next_rate(factor)

    def count_steps(self, world: World) -> StepsMade:
        """Return the object that notes the steps from now on, for a strategy with equal steps on all ranks."""
        self._steps = StepsMade(world, self._trained.tensors, is_for_all=False, parameters=False)
        return self._steps

    def shard(self, owned: Owned, norm_of_all: Callable[[float], float]) -> OptimizerShard:
        """See ShardedAdapter. From now on, the optimizer has pieces of the parameters in place of the parameters.

        Raises:
            ConfigError: the optimizer needs whole tensors, or it is divided already.
        """
        if self._shard is not None:
            raise ConfigError("the optimizer is divided between ranks already; make another TorchModule")
        optimizer, trained = self._torch_optimizer, self._trained.tensors
        self._shard = TorchShard(
            optimizer, self._optimizer, trained, self._plan, self._buffers, owned, norm_of_all, self._be_whole
        )
        return self._shard

    def _be_whole(self) -> None:
        self._shard = None

    def measure_gradient_norm(self) -> None:
        """See Adapter."""
        self._optimizer.measure_gradient_norm()

    def gradient_norm(self) -> float | None:
        """See Adapter. The norm does not include the changes of buffers."""
        return self._optimizer.gradient_norm()

    def state(self) -> dict[str, Any]:
        """See Adapter: `parameters`; `optimizer` with `step`, its `groups` and its `state` by parameter; `schedule`, if
        there is a scheduler of PyTorch; and `loss_scale`, if there is a scale."""
        state = {"parameters": self.parameters(), **(self._shard or self._optimizer).state()}
        if self._loss_scale:
            state["loss_scale"] = self._loss_scale.state()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Adapter. A state without a loss scale leaves the current one unchanged."""
        check_fits("parameters", state["parameters"], self.parameters())
        scale = state.get("loss_scale") if self._loss_scale else None
        if self._loss_scale and scale is not None:
            self._loss_scale.check(scale)
        (self._shard or self._optimizer).restore(state)
        self.load_parameters(state["parameters"])
        if self._loss_scale and scale is not None:
            self._loss_scale.restore(scale)
