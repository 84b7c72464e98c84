"""The trained parameters of a module, and the rule for those that a loss does not use, for TorchModule and prepare.

- If no rank's loss depends on a parameter, it has no gradient: p.grad is None, and the optimizer leaves it alone, as in
  one process.
- If some rank's loss depends on a parameter, every rank gets the mean over all samples. On the other ranks, the samples
  count with a gradient of zeros.
- A rank without samples does not count, whatever its loss depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch

from mpitrain.adapters.torch_arrays import array_of
from mpitrain.errors import GradientError
from mpitrain.exchange.bucket import Parameter
from mpitrain.exchange.remarks import Remarks


class Trained:
    """The parameters of one module with requires_grad=True, tied ones once.

    Attributes:
        named: all parameters of the module by name.
        tensors: the trained parameters by name, in the order of their indices.
        layout: their description for a GradientReducer, in the same order.
    """

    def __init__(self, module: torch.nn.Module, call: str) -> None:
        """`call` is the name of the call that got the module, such as `prepare()`, for errors."""
        self.named = dict(module.named_parameters())
        self.tensors: dict[str, Any] = {name: one for name, one in self.named.items() if one.requires_grad}
        self.layout = [Parameter(name, tuple(one.shape), array_of(one).dtype) for name, one in self.tensors.items()]
        self._names = list(self.tensors)
        self._values = list(self.tensors.values())
        self._dtypes = [one.dtype for one in self._values]
        self._call = call
        self._reported: set[int] = set()

    def watch(self, came: Callable[[int, Any], None], gone: str = "") -> None:
        """Let every backward pass call the method `came(index, parameter)` when a gradient is final in p.grad.

        The method's object is not kept alive. Once it is gone, a backward pass raises GradientError(gone), or goes on
        if `gone` is "".
        """
        for index, parameter in enumerate(self._values):
            parameter.register_post_accumulate_grad_hook(partial(call_weakly, WeakMethod(came), gone, index))

    def problem(self, index: int, gradient: torch.Tensor) -> str:
        """Return why this tensor cannot be exchanged as the gradient of its parameter; "" if it can."""
        dtype = self._dtypes[index]
        if (gradient.layout, gradient.dtype, gradient.device.type) == (torch.strided, dtype, "cpu"):
            return ""
        return (
            f"the gradient of {self._names[index]} is {gradient.layout} {gradient.dtype} on {gradient.device}; at "
            f"{self._call} it was {torch.strided} {dtype} on cpu. Use sparse=False, and call {self._call} when the "
            "model has its dtype and device"
        )

    def report(self, remarks: Remarks) -> Iterator[str]:
        """Yield lines about parameters that ranks have not used, if they were not reported before."""
        for indices, text in (
            (remarks.unused, "no rank's loss depends on these parameters, so the optimizer leaves them alone"),
            (remarks.partly_used, "some ranks' losses do not depend on these parameters; zeros count there"),
        ):
            if names := sorted(self._names[index] for index in indices - self._reported):
                yield f"{text}: {', '.join(names)}"
            self._reported |= indices


def call_weakly(method: WeakMethod[Callable[..., Any]], gone: str, *arguments: Any) -> Any:
    """Call a hook without keeping its object: Python cannot see that PyTorch's hooks end with their parameter."""
    bound = method()
    if bound is not None:
        return bound(*arguments)
    if gone:
        raise GradientError(gone)
    return None
