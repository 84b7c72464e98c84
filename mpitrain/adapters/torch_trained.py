"""A module's trained parameters, and how their gradients arrive in a backward pass: for TorchModule and prepare.

- If no rank's loss depends on a parameter, it has no gradient: p.grad is None, and the optimizer skips it, as in one
  process.
- If some rank's loss depends on a parameter, every rank gets the mean over all samples. On the other ranks, the samples
  count with a gradient of zeros.
- A rank without samples does not count, whatever its loss depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch

from mpitrain.adapters.torch_arrays import array_of
from mpitrain.adapters.torch_buffers import ModuleBuffers
from mpitrain.arrays import Array
from mpitrain.errors import GradientError
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.means import Remarks


class Trained:
    """The parameters of one module with requires_grad=True, tied ones once.

    Attributes:
        named: all parameters of the module by name.
        tensors: the trained parameters by name, in the order of their indices.
        layout: their description for a GradientReducer, in the same order.
        changes_dtype: the dtype of the changes of buffers that are exchanged with the gradients.
        missing: those whose gradients have not arrived in the current backward pass.
    """

    def __init__(self, module: torch.nn.Module, call: str, who: str = "") -> None:
        """`call` is the name of the call that got the module, such as `prepare()`, and `who` this rank, for errors."""
        self.named = dict(module.named_parameters())
        self.tensors: dict[str, Any] = {name: one for name, one in self.named.items() if one.requires_grad}
        self.layout = [Parameter(name, tuple(one.shape), array_of(one).dtype) for name, one in self.tensors.items()]
        self.changes_dtype = (
            torch.float64 if any(one.dtype == torch.float64 for one in self.tensors.values()) else torch.float32
        )
        self.missing: set[int] = set()
        self._names = list(self.tensors)
        self._values = list(self.tensors.values())
        self._dtypes = [one.dtype for one in self._values]
        self._call, self._who = call, f"{who}: " if who else ""
        self._reported: set[int] = set()

    def watch(self, came: Callable[[int, Any], None], gone: str = "") -> None:
        """Make every backward pass call the method `came(index, parameter)` when a gradient in p.grad is final.

        The method's object is not kept alive. Once it is gone, a backward pass raises GradientError(gone), or continues
        if `gone` is "".
        """
        for index, parameter in enumerate(self._values):
            parameter.register_post_accumulate_grad_hook(partial(call_weakly, WeakMethod(came), gone, index))

    def begin(self) -> None:
        """Begin a backward pass: no gradient has arrived yet."""
        self.missing = set(range(len(self._values)))

    def forget_gradients(self) -> None:
        """Remove what earlier backward passes have left in p.grad."""
        for parameter in self._values:
            parameter.grad = None

    def check(self, index: int, gradient: torch.Tensor) -> None:
        """Check that a gradient fits its parameter before it is exchanged.

        Raises:
            GradientError: its layout, dtype or device differs from the parameter's.
        """
        dtype = self._dtypes[index]
        if (gradient.layout, gradient.dtype, gradient.device.type) != (torch.strided, dtype, "cpu"):
            raise GradientError(
                f"{self._who}the gradient of {self._names[index]} is {gradient.layout} {gradient.dtype} on "
                f"{gradient.device}; at {self._call} it was {torch.strided} {dtype} on cpu. Use sparse=False, and call "
                f"{self._call} when the model has its dtype and device"
            )

    def come(self, index: int, cause: str = "") -> None:
        """Note that a gradient has arrived. `cause` is a sentence for the error, about another possible cause.

        Raises:
            GradientError: it has already arrived.
        """
        if index not in self.missing:
            raise GradientError(
                f"{self._who}the gradient of {self._names[index]} came twice in one step. {cause}With "
                "torch.utils.checkpoint, pass use_reentrant=False"
            )
        self.missing.discard(index)

    def left(self) -> Iterator[tuple[int, Any, torch.Tensor | None]]:
        """Yield each parameter whose gradient has not arrived, with the content of p.grad, checked; None: it is not
        used."""
        for index in sorted(self.missing):
            parameter = self._values[index]
            if parameter.grad is not None:
                self.check(index, parameter.grad)
            yield index, parameter, parameter.grad

    def report(self, remarks: Remarks) -> Iterator[str]:
        """Yield messages about parameters that ranks have not used, unless already reported."""
        for indices, text in (
            (remarks.unused, "no rank's loss depends on these parameters, so the optimizer skips them"),
            (remarks.partly_used, "some ranks' losses do not depend on these parameters; zeros count there"),
        ):
            if names := sorted(self._names[index] for index in indices - self._reported):
                yield f"{text}: {', '.join(names)}"
            self._reported |= indices


class ModuleTensors:
    """The tensors of a module by name, as a LocalModel has them: for TorchModule and for the model of a loop."""

    def __init__(self, trained: Trained, buffers: ModuleBuffers) -> None:
        self._trained, self._buffers = trained, buffers

    @property
    def num_buffers(self) -> int:
        """See LocalModel.layout."""
        return len(self._buffers.floats)

    def parameters(self) -> dict[str, Array]:
        """See LocalModel: by the names of the module's `state_dict`, with frozen parameters and persistent buffers."""
        named = self._trained.named.items()
        return {**{name: array_of(parameter) for name, parameter in named}, **self._buffers.arrays()}

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """See LocalModel."""
        for name, array in self.parameters().items():
            array[...] = values[name]


def call_weakly(method: WeakMethod[Callable[..., Any]], gone: str, *arguments: Any) -> Any:
    """Call a hook without keeping its object alive: Python cannot see that PyTorch's hooks end with their parameter."""
    bound = method()
    if bound is not None:
        return bound(*arguments)
    if gone:
        raise GradientError(gone)
    return None
