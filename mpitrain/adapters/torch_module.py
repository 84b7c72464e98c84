"""TorchModule: a PyTorch module with its own optimizer, under the Trainer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakMethod

import numpy

from mpitrain.adapters.adapter import OnGradient
from mpitrain.adapters.array_function import PRECISIONS
from mpitrain.adapters.fits import check_fits
from mpitrain.arrays import Array, is_array
from mpitrain.errors import CheckpointError, ConfigError, GradientError
from mpitrain.exchange.bucket import Parameter, plan_layout
from mpitrain.training.flat_optimizer import check, global_norm
from mpitrain.training.loss_scale import LossScale
from mpitrain.training.schedules import Schedule
from mpitrain.tree import Leaf, Tree, leaves, rebuild

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ConfigError(f"mpitrain.TorchModule needs PyTorch ({error}); pip install 'mpitrain[torch]'") from None

from mpitrain.adapters.torch_arrays import array_of, tensor_of
from mpitrain.adapters.torch_buffers import Buffers
from mpitrain.adapters.torch_checks import check_optimizer, check_places, check_schedule, checked_loss, narrow_dtype
from mpitrain.adapters.torch_state import (
    Scheduler,
    check_optimizer_state,
    optimizer_state,
    read_scheduler_state,
    restore_optimizer_state,
    scheduler_state,
)

# loss(module, batch) -> the mean loss over the batch's samples, a tensor of one number.
Loss = Callable[[Any, Any], Any]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TorchModule:
    """An Adapter around a module on the host, a loss and an optimizer of torch.optim.

    Gradients are handed in while the backward pass runs, tied parameters once, frozen ones (requires_grad=False) never.
    For a parameter that the loss does not depend on, zeros are handed in, and it is named once in a warning: so weight
    decay and momentum go on for it, where PyTorch alone would pass it over.

    Parameters, frozen ones too, and persistent buffers are those of rank 0 at the start, belong to checkpoints, and
    have the same bits on all ranks after every step: buffers by the mean of what the ranks' samples have changed in
    them. For the running mean of batch norm that is the mean of the whole batch; its running variance is the mean of
    the variances within the ranks' parts. Batch norm itself normalises by each rank's own part, so with it training on
    several ranks is not the training on one.

    What is random in the module, such as dropout, draws from each rank's own generator: seed it by rank, with
    `torch.manual_seed(seed + world.rank)` after the module is made. The generators are not in checkpoints.

    Whether the module trains or evaluates (`module.train()`, `module.eval()`) is left to the script.
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
            module: on the CPU. It is trained in place; from now on its parameters keep their shapes and requires_grad.
            loss: `loss(module, batch)` returns the mean loss over the batch's samples, a tensor of one number. The
                batch's arrays are tensors, over the same memory where that may be written. Not called for a batch of
                no samples.
            optimizer: of all trained parameters and no others; any of torch.optim whose step needs no closure.
            schedule: the rate of every step, a function of the step (from 0) or a scheduler of PyTorch for `optimizer`,
                which is stepped after every step of training. Default: the optimizer's rate.
            clip_norm: the largest 2-norm of the mean gradient over all parameters.
            precision: for float32 parameters: "bf16" or "fp16", what autocast computes in. Parameters, optimizer,
                exchange and checkpoints stay float32.
            loss_scale: default for fp16: `LossScale()`; else none, and NaN or infinity in a gradient is an error.

        Raises:
            ConfigError: nothing to train; a parameter of the module that is trained and not in the optimizer, or the
                reverse; an optimizer, schedule or precision that cannot be used here.
            DeviceError: a parameter or buffer that is not on the CPU.
        """
        self._module, self._loss, self._optimizer, self._schedule = module, loss, optimizer, schedule
        self._named = dict(module.named_parameters())
        check_places(module)
        self._trained: dict[str, Any] = {name: its for name, its in self._named.items() if its.requires_grad}
        check_optimizer(optimizer, self._named, self._trained)
        check_schedule(schedule, optimizer)
        if clip_norm is not None:
            check("clip_norm", clip_norm, "None or a finite number > 0", clip_norm > 0)
        self._clip_norm = clip_norm
        self._narrow = narrow_dtype(precision, self._trained)
        self._loss_scale = LossScale() if loss_scale is None and precision == "fp16" else loss_scale
        double = any(its.dtype == torch.float64 for its in self._trained.values())
        self._buffers = Buffers(module, torch.float64 if double else torch.float32)
        trained = [Parameter(name, tuple(its.shape), array_of(its).dtype) for name, its in self._trained.items()]
        # Behind the parameters, for the last ones are exchanged first: they are known before the backward pass.
        wide = numpy.dtype("float64" if double else "float32")
        buffers = [Parameter(name, its.shape, wide) for name, its in self._buffers.arrays().items()]
        self._counts = plan_layout(trained).counts
        self._plan = plan_layout([*trained, *buffers])
        self._on_gradient: OnGradient | None = None
        self._handed_in: set[int] = set()
        self._said_unused: set[int] = set()
        self._steps = 0
        self._measures_norm = False
        self._last_norm: float | None = None
        for index, parameter in enumerate(self._trained.values()):
            # Python cannot see that PyTorch's hooks end with their parameter; one that kept this would never end.
            parameter.register_post_accumulate_grad_hook(partial(_call, WeakMethod(self._hand_in), index))

    @property
    def layout(self) -> Sequence[Parameter]:
        """See Adapter: the trained parameters, then the changes of buffers."""
        return self._plan.parameters

    @property
    def loss_scale(self) -> LossScale | None:
        """See Adapter."""
        return self._loss_scale

    @property
    def precision(self) -> numpy.dtype:
        """See Adapter."""
        return self._narrow or min(self._counts, key=lambda dtype: dtype.itemsize)

    def parameters(self) -> dict[str, Array]:
        """See Adapter: by the names of the module's `state_dict`, with frozen parameters and persistent buffers."""
        return {**{name: array_of(its) for name, its in self._named.items()}, **self._buffers.arrays()}

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """See Adapter."""
        for name, array in self.parameters().items():
            array[...] = values[name]

    def loss_and_gradients(self, batch: Tree, on_gradient: OnGradient) -> float:
        """See Adapter. The buffers are left as they were; `apply_gradients` changes them."""
        now = dict(self._module.named_parameters())
        for name in {**self._named, **now}:
            parameter = now.get(name)
            same = parameter is not None and parameter is self._named.get(name)
            if not same or now[name].requires_grad != (name in self._trained):
                raise GradientError(
                    f"{name} was added, replaced, frozen or thawed after TorchModule was made; do that before, or "
                    "make a new one, and a new Trainer, from a checkpoint"
                )
        for parameter in self._trained.values():
            parameter.grad = None  # of a backward pass that was not for this step
        if _is_empty(batch):
            for index, its in enumerate(self.layout):
                on_gradient(index, numpy.zeros(its.shape, its.dtype))
            return 0.0
        scale = self._loss_scale.value if self._loss_scale else 1.0
        tensors = (_tensor(leaf) for _, leaf in leaves(batch))
        batch = rebuild(batch, tensors.__next__)
        self._buffers.keep()
        self._on_gradient, self._handed_in = on_gradient, set()
        try:
            with self._autocast():
                loss = checked_loss(self._loss(self._module, batch))
            for index, change in enumerate(self._buffers.changes(scale), start=len(self._trained)):
                on_gradient(index, change)
            (loss * scale).backward()
        finally:
            self._on_gradient = None
            self._buffers.put_back()
        self._hand_in_unused(on_gradient)
        return float(loss.detach())

    def _autocast(self) -> AbstractContextManager[None]:
        if self._narrow is None:
            return nullcontext()
        name = next(name for name, dtype in PRECISIONS.items() if dtype == self._narrow)
        autocast: AbstractContextManager[None] = torch.autocast("cpu", dtype=_AUTOCAST[name])
        return autocast

    def _hand_in(self, index: int, parameter: Any) -> None:
        """Called in the backward pass, when a parameter's gradient is complete."""
        if self._on_gradient is None:
            return  # somebody else's backward pass
        gradient = parameter.grad
        name = self.layout[index].name
        if gradient.layout != torch.strided:
            raise GradientError(f"the gradient of {name} is {gradient.layout}; dense ones are exchanged: sparse=False")
        if index in self._handed_in:
            raise GradientError(
                f"the gradient of {name} came in twice in one backward pass; with torch.utils.checkpoint, "
                "use_reentrant=False has it come once"
            )
        self._handed_in.add(index)
        parameter.grad = None  # the exchange has its own memory
        self._on_gradient(index, array_of(gradient))

    def _hand_in_unused(self, on_gradient: OnGradient) -> None:
        unused = [index for index in range(len(self._trained)) if index not in self._handed_in]
        for index in unused:
            on_gradient(index, numpy.zeros(self.layout[index].shape, self.layout[index].dtype))
        if names := [self.layout[index].name for index in unused if index not in self._said_unused]:
            self._said_unused.update(unused)
            warnings.warn(
                f"the loss does not depend on {', '.join(names)}: a gradient of zeros is exchanged in such a step. "
                "Freeze what is never trained with requires_grad_(False)",
                stacklevel=2,
            )

    def apply_gradients(self, flats: Mapping[numpy.dtype, Array]) -> float:
        """See Adapter."""
        self._clip([flats[dtype][:count] for dtype, count in self._counts.items()])
        views = self._plan.views(dict(flats))
        for parameter, view in zip(self._trained.values(), views, strict=False):
            parameter.grad = tensor_of(view)
        groups = self._optimizer.param_groups
        if callable(self._schedule):
            rate = float(self._schedule(self._steps))
            check(f"learning_rate at step {self._steps}", rate, "a finite number >= 0", rate >= 0)
            for group in groups:
                _set_rate(group, rate)
        rate = float(groups[0]["lr"])
        self._optimizer.step()
        for parameter in self._trained.values():
            parameter.grad = None
        self._buffers.add(views[len(self._trained) :])
        self._steps += 1
        if isinstance(self._schedule, Scheduler):
            self._schedule.step()
        return rate

    def _clip(self, parts: Sequence[numpy.ndarray]) -> None:
        """`parts` are the gradients of all trained parameters, flat, one array a dtype."""
        self._last_norm = None
        if self._clip_norm is None and not self._measures_norm:
            return
        self._measures_norm = False
        wide = (part if part.dtype.itemsize > 2 else part.astype(numpy.float32) for part in parts)
        self._last_norm = norm = math.hypot(*(global_norm(part) for part in wide))
        if self._clip_norm is not None and self._clip_norm < norm < math.inf:
            for part in parts:
                numpy.multiply(part, part.dtype.type(self._clip_norm / norm), out=part)

    def measure_gradient_norm(self) -> None:
        """See Adapter."""
        self._measures_norm = True

    def gradient_norm(self) -> float | None:
        """See Adapter. Without the changes of buffers."""
        return self._last_norm

    def state(self) -> dict[str, Any]:
        """See Adapter: `parameters`; `optimizer` with `step`, its `groups` and its `state` by parameter; and
        `schedule` and `loss_scale`, where there is a scheduler of PyTorch or a scale."""
        state: dict[str, Any] = {
            "parameters": self.parameters(),
            "optimizer": {"step": self._steps, **optimizer_state(self._optimizer, self._named)},
        }
        if isinstance(self._schedule, Scheduler):
            state["schedule"] = scheduler_state(self._schedule)
        if self._loss_scale:
            state["loss_scale"] = self._loss_scale.state()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Adapter. One without a loss scale leaves it as it is."""
        check_fits("parameters", state["parameters"], self.parameters())
        optimizer = state["optimizer"]
        check_optimizer_state(self._optimizer, self._named, optimizer)
        if not isinstance(optimizer["step"], int) or optimizer["step"] < 0:
            raise CheckpointError(f"the optimizer's step is {optimizer['step']!r}; allowed: an int >= 0")
        scale = state.get("loss_scale") if self._loss_scale else None
        if self._loss_scale and scale is not None:
            self._loss_scale.check(scale)
        if isinstance(self._schedule, Scheduler):
            schedule = read_scheduler_state(self._schedule, state["schedule"])
            self._schedule.load_state_dict(schedule)
        self.load_parameters(state["parameters"])
        restore_optimizer_state(self._optimizer, self._named, optimizer)
        self._steps = optimizer["step"]
        if self._loss_scale and scale is not None:
            self._loss_scale.restore(scale)


def _call(method: WeakMethod[Callable[[int, Any], None]], index: int, parameter: Any) -> None:
    found = method()
    if found is not None:
        found(index, parameter)


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _is_empty(batch: Tree) -> bool:
    lengths = [len(leaf) for _, leaf in leaves(batch) if is_array(leaf) and leaf.ndim]
    return bool(lengths) and not any(lengths)


def _tensor(leaf: Leaf) -> Any:
    """Over the same memory where PyTorch can have that: writable, and no step backwards."""
    if not is_array(leaf):
        return leaf
    if not leaf.flags.writeable or any(step < 0 for step in leaf.strides):
        leaf = leaf.copy()
    return tensor_of(leaf)
