"""The only seam that knows a framework: a model's parameters, its gradients and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy

from mpitrain.arrays import Array
from mpitrain.exchange.bucket import Parameter
from mpitrain.exchange.remarks import Remarks
from mpitrain.training.loss_scale import LossScale
from mpitrain.tree import Tree

# Called with a parameter's index and its gradient, as soon as the backward pass has it; with None where the loss does
# not depend on the parameter.
OnGradient: TypeAlias = Callable[[int, Array | None], None]


class Adapter(Protocol):
    """One replica of the model. No method communicates; every rank makes the same calls."""

    @property
    def layout(self) -> Sequence[Parameter]:
        """Name, shape and dtype of every parameter; a parameter's index is its place here.

        Of what is trained, or changes otherwise by a mean over the samples, such as running means.
        """
        ...

    @property
    def loss_scale(self) -> LossScale | None:
        """What the gradients are multiplied by when they are handed in; None where they are not.

        The strategy divides by it, updates it, and skips a step whose gradients it made infinite.
        """
        ...

    @property
    def precision(self) -> numpy.dtype:
        """The narrowest dtype that losses and gradients are computed in."""
        ...

    def parameters(self) -> dict[str, Array]:
        """The parameters by name, and what else must be equal on all ranks: themselves, not copies."""
        ...

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """Overwrite the parameters with `values`, host or device arrays of the same names, shapes and dtypes."""
        ...

    def loss_and_gradients(self, batch: Tree, on_gradient: OnGradient) -> float:
        """This rank's mean loss over its batch, handing in every gradient on the way, in any order.

        A batch of no samples gives loss 0 and gradients of zeros.
        """
        ...

    def note(self) -> Any:
        """What every rank must know of this rank's last `loss_and_gradients`, besides gradients; None for nothing.

        Any value that can be pickled and whose repr tells it from others.
        """
        ...

    def apply_gradients(self, flats: Mapping[numpy.dtype, Array], remarks: Remarks) -> float:
        """One step of the optimizer, with mean gradients in flat buffers by dtype, in layout order.

        The buffers, on the host or where the parameters are, may be overwritten. `remarks` say which parameters no
        rank has used, and what the ranks have noted. Returns the learning rate that was used.
        """
        ...

    def measure_gradient_norm(self) -> None:
        """Let the next `apply_gradients` measure the norm of the mean gradient."""
        ...

    def gradient_norm(self) -> float | None:
        """The 2-norm over all parameters of the last `apply_gradients`, before clipping; None: it was not measured."""
        ...

    def state(self) -> dict[str, Any]:
        """Parameters and optimizer state for a checkpoint: nested dicts of arrays and numbers, by name."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """The reverse of `state`. Raises CheckpointError, before anything is overwritten, where it does not fit."""
        ...
