"""TorchLayers: a model that is a list of PyTorch modules. If a strategy cuts it, each rank makes only its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import numpy

from mpitrain.adapters.adapter import OnGradient
from mpitrain.adapters.layered_model import LayeredModel, check_parameters
from mpitrain.adapters.staged import LayerCost, LayerPiece
from mpitrain.arrays import Array
from mpitrain.errors import ConfigError
from mpitrain.extras import missing
from mpitrain.optim.schedules import Schedule
from mpitrain.tree import Tree

try:
    import torch
    import torch.utils.checkpoint
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise missing("mpitrain.TorchLayers", "PyTorch", "torch", error) from None

from mpitrain.adapters.torch_arrays import array_of, as_tensors, tensor_of
from mpitrain.adapters.torch_checks import checked_loss
from mpitrain.adapters.torch_module import TorchModule
from mpitrain.adapters.torch_random import seeded

# A module, or a function without arguments that makes it. Only ranks that have the layer call it.
TorchLayer: TypeAlias = "torch.nn.Module | Callable[[], torch.nn.Module]"
# loss(output, targets) -> the mean loss over the samples, a tensor of one number.
TorchLoss: TypeAlias = Callable[[Any, Any], Any]


class TorchLayers(LayeredModel):
    """An Adapter around a list of modules, a loss and an optimizer of torch.optim. mt.Pipeline can cut it.

    Parameters are named as in `torch.nn.Sequential`, such as `3.weight`, so checkpoints of TorchLayers and of
    TorchModule with the same layers in a Sequential are interchangeable. A batch is a pair: the input of the first
    layer, and the second argument of the loss. Each layer takes one tensor and returns one tensor. See
    docs/how-to/large-models.md.
    """

    def __init__(
        self,
        layers: Sequence[TorchLayer] | torch.nn.Sequential,
        loss: TorchLoss,
        optimizer: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer],
        *,
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
    ) -> None:
        """Not collective; every rank gives the same layers.

        Args:
            layers: modules, or functions that make one each. A rank calls only the functions of its own layers. Such a
                function seeds PyTorch's generator itself, because other ranks have not made the layers before.
            loss: `loss(output, targets)` returns the mean loss over the samples, a tensor of one number.
            optimizer: makes the optimizer of these parameters, such as
                `lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)`.
            schedule, clip_norm: as for TorchModule. The norm is that over all layers.

        Raises:
            ConfigError: there are no layers.
        """
        super().__init__(len(layers))
        self._layers: list[TorchLayer] = [*layers]
        self._loss, self._optimizer = loss, optimizer
        self._schedule, self._clip_norm = schedule, clip_norm

    @property
    def module(self) -> torch.nn.Module:
        """The layers that this rank has, as one module, for `train()` and `eval()`."""
        module: torch.nn.Module = self._inner.module
        return module

    def _check_cut(self, owners: Sequence[int]) -> None:
        """See LayeredModel. Layers that functions make cannot be compared."""
        first: dict[torch.nn.Parameter, tuple[str, int]] = {}
        for number, layer in enumerate(self._layers):
            if isinstance(layer, torch.nn.Module):
                for name, parameter in layer.named_parameters():
                    full = f"{number}.{name}"
                    other, owner = first.setdefault(parameter, (full, owners[number]))
                    if owner != owners[number]:
                        raise ConfigError(
                            f"{full} (stage {owners[number]}) and {other} (stage {owner}) are one parameter; "
                            "parameters cannot be tied across stages. Cut so that both are on one stage, or untie them"
                        )

    def _make(self, pieces: Sequence[range], *, recompute: bool) -> tuple[_OwnLayers, Sequence[LayerPiece]]:
        layers = {n: self._module_of(n) for piece in pieces for n in piece}
        self._layers = []  # free the memory of other ranks' layers
        module = torch.nn.ModuleDict({str(number): layer for number, layer in layers.items()})
        made = [_TorchPiece([layers[n] for n in piece], self._loss, piece.start, recompute) for piece in pieces]
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        check_parameters(trained, list(layers))
        own = _OwnLayers(
            module, self._optimizer(list(trained.values())), self._run, made, self._schedule, self._clip_norm
        )
        return own, made

    def layer_costs(self, batch: Tree, *, recompute: bool) -> list[LayerCost]:
        """See StagedAdapter. It does not change random numbers that are drawn later."""
        with seeded((0,)):
            return super().layer_costs(batch, recompute=recompute)

    @contextmanager
    def _alone(self, number: int, *, recompute: bool) -> Iterator[tuple[LayerPiece, int]]:
        module = self._module_of(number)
        piece = _TorchPiece([module], self._loss, number, recompute)
        yield piece, sum(one.nbytes for one in module.parameters() if one.requires_grad)
        module.zero_grad()  # a module that was passed in remains

    def _module_of(self, number: int) -> torch.nn.Module:
        layer = self._layers[number]
        made: Any = layer if isinstance(layer, torch.nn.Module) else layer()
        if not isinstance(made, torch.nn.Module):
            raise ConfigError(f"layer {number} is a {type(made).__name__}; give a torch.nn.Module or a function of one")
        return made


class _OwnLayers(TorchModule):
    """A TorchModule whose gradients come from several backward passes."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        run: Callable[[Tree], float],
        pieces: Sequence[_TorchPiece],
        schedule: Schedule | None,
        clip_norm: float | None,
    ) -> None:
        super().__init__(module, lambda _, batch: run(batch), optimizer, schedule=schedule, clip_norm=clip_norm)
        self._run, self._of_step = run, pieces
        num_pieces = Counter(id(one) for piece in pieces for one in piece.parameters())
        trained = enumerate(self._trained.tensors.values())
        self._in_several = {index for index, one in trained if num_pieces[id(one)] > 1}
        if self.num_buffers:
            name = self.layout[-1].name
            raise ConfigError(
                f"the layers have the buffer {name}, which changes with the samples of each micro-batch. Use layers "
                "without running statistics, such as LayerNorm or GroupNorm, or TorchModule, which is not cut"
            )

    def loss_and_gradients(self, batch: Tree, on_gradient: OnGradient) -> float:
        """See Adapter. A gradient is passed on in the last backward pass of its piece; or at the end, if it belongs to
        several pieces or that pass does not reach it."""
        self._trained.forget_gradients()
        for piece in self._of_step:
            piece.begin(partial(self._hands_in, on_gradient))
        self._trained.begin()
        loss = self._run(batch)
        self._hand_in_rest(on_gradient)
        return loss

    @contextmanager
    def _hands_in(self, on_gradient: OnGradient) -> Iterator[None]:
        """A backward pass after which no further pass adds to the gradients that it reaches."""
        self._on_gradient = on_gradient
        try:
            yield
        finally:
            self._on_gradient = None

    def _hand_in(self, index: int, parameter: Any) -> None:
        """See TorchModule."""
        if index not in self._in_several:
            super()._hand_in(index, parameter)

    def update_only(self, number: int, num_servers: int, norm_of_all: Callable[[float], float]) -> None:
        """See DividedAdapter: the optimizer has no other parameters, so only the norm covers all parts."""
        self._optimizer.take_norm_of_all(norm_of_all)


class _TorchPiece:
    """See LayerPiece."""

    def __init__(self, layers: Sequence[torch.nn.Module], loss: TorchLoss, first: int, recompute: bool) -> None:
        self._module = torch.nn.Sequential(*layers)
        self._loss, self._is_first, self._recompute = loss, first == 0, recompute
        self._kept: dict[int, tuple[Any, Any]] = {}  # by micro-batch: the inputs, the output or loss

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters of the layers, tied ones once."""
        return self._module.parameters()

    def begin(self, hands_in: Callable[[], AbstractContextManager[None]]) -> None:
        """Begin a step. The last backward pass runs in a block of `hands_in()`."""
        self._hands_in = hands_in
        self._kept.clear()  # an error may have ended the step before

    def forward(self, micro: int, inputs: Array) -> Array:
        """See LayerPiece."""
        given, output = self._through(inputs)
        self._kept[micro] = given, output
        return array_of(output)

    def measure(self, inputs: Array) -> tuple[Array, int]:
        """See LayerPiece. The memory of parameters is not counted; memory with several views is counted once."""
        counted = {one.untyped_storage().data_ptr(): 0 for one in self._module.parameters()}

        def count(kept: torch.Tensor) -> torch.Tensor:
            storage = kept.untyped_storage()
            counted.setdefault(storage.data_ptr(), storage.nbytes())
            return kept.detach()  # the tensor itself would keep its graph alive for ever

        with torch.autograd.graph.saved_tensors_hooks(count, lambda kept: kept):
            given, output = self._through(inputs)
        count(given)
        return array_of(output), sum(counted.values())

    def loss(self, micro: int, inputs: Array, targets: Tree, share: float) -> float:
        """See LayerPiece."""
        given, output = self._through(inputs)
        loss = checked_loss(self._loss(output, as_tensors(targets)))
        self._kept[micro] = given, loss if share == 1.0 else loss * share
        return float(loss.detach())

    def backward(self, micro: int, gradient: numpy.ndarray | None, *, is_last: bool) -> Array | None:
        """See LayerPiece."""
        given, output = self._kept.pop(micro)
        if self._is_first and not output.requires_grad:
            return None  # nothing is trained here: with interleaved, another piece has the parameters
        with self._hands_in() if is_last else nullcontext():
            output.backward(None if gradient is None else tensor_of(gradient))
        return None if given.grad is None else array_of(given.grad)

    def _through(self, inputs: Array) -> tuple[Any, Any]:
        given = as_tensors(inputs)
        if not self._is_first:
            given.requires_grad_()
        if self._recompute:
            checkpoint: Any = torch.utils.checkpoint.checkpoint
            output = checkpoint(self._module, given, use_reentrant=False)
        else:
            output = self._module(given)
        if not isinstance(output, torch.Tensor):
            raise ConfigError(f"the layers give a {type(output).__name__}; each must return one tensor")
        return given, output
