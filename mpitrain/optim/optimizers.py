"""SGD, Adam and AdamW over one flat buffer, with NumPy or CuPy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy

from mpitrain.arrays import Array
from mpitrain.cuda import kernels
from mpitrain.errors import ConfigError
from mpitrain.optim.flat_optimizer import Block, FlatOptimizer, check
from mpitrain.optim.schedules import Schedule


class Optimizer(Protocol):
    """The methods of an optimizer that the Trainer uses. None communicates; every rank makes the same calls."""

    def start(self, parameters: Array, decayed: Sequence[slice]) -> None:
        """Keep `parameters` to update them in place, and allocate the initial state.

        parameters: one-dimensional, contiguous, float32 or float64, on the CPU or a GPU.
        decayed: the ranges of `parameters` to which weight decay applies. They must not overlap.
        Raises ConfigError if either argument is different.
        """

    def update(self, gradients: Array) -> float:
        """Make one step: overwrite the parameters and return the learning rate that was used.

        gradients: have the shape, dtype and device of the parameters. They are overwritten with undefined values.
        Raises ConfigError if the gradients do not fit, or the schedule returns a rate that is not allowed.
        """

    def measure_gradient_norm(self) -> None:
        """Make the next `update` measure the norm of its gradients, even if it does not clip them."""

    def gradient_norm(self) -> float | None:
        """The 2-norm of the gradients of the last `update`, before clipping. None if it was not measured."""

    def state(self) -> dict[str, Array | int]:
        """Return the flat buffers by name (not copies), and "step", the number of steps made."""

    def restore(self, state: Mapping[str, Array | int]) -> None:
        """Copy `state` (CPU or GPU arrays, as returned by `state()`) into the buffers.

        Raises CheckpointError, before anything is overwritten. The error names the entry that is missing, unexpected,
        or of the wrong size or dtype.
        """


def described(optimizer: object) -> str:
    """Return an optimizer's class and plain settings, for a comparison between processes."""
    values = getattr(optimizer, "__dict__", {}).items()
    plain = {
        name: value.item() if isinstance(value, numpy.generic) else value
        for name, value in values
        if isinstance(value, bool | int | float | numpy.generic | None)
    }
    return f"{type(optimizer).__name__} {plain}"


class SGD(FlatOptimizer):
    """Stochastic gradient descent with momentum; an `Optimizer`.

    It overwrites float32 or float64 parameters, on the host or a device. Make the same one on every rank.
    For a gradient g with weight_decay * parameter added in the decayed ranges (L2 regularisation):

        velocity  = momentum * velocity + g
        parameter = parameter - rate * velocity                     ordinary
        parameter = parameter - rate * (g + momentum * velocity)    nesterov

    learning_rate: a number, or a function of the step (from 0) that returns one. clip_norm: the largest global norm of
    the gradients, taken before the decay is added. State: "velocity", if momentum is not 0. Raises ConfigError for a
    value that is not allowed. Source: Sutskever et al., On the importance of initialization and momentum (2013), with
    the rate outside the velocity, as in PyTorch, so that a schedule takes effect at once.
    """

    def __init__(
        self,
        learning_rate: float | Schedule,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
    ) -> None:
        check("momentum", momentum, "0 <= momentum < 1", 0 <= momentum < 1)
        check("weight_decay", weight_decay, "a finite number >= 0", weight_decay >= 0)
        if nesterov and momentum == 0:
            raise ConfigError("nesterov is True and momentum is 0; allowed: nesterov with a momentum above 0")
        super().__init__(learning_rate, ["velocity"] if momentum else [], clip_norm)
        self._momentum, self._nesterov, self._weight_decay = float(momentum), nesterov, float(weight_decay)

    def _apply(self, block: Block, rate: float) -> None:
        parameters, gradients, buffers, scratch, decayed = block
        if self._weight_decay:
            for part in decayed:
                numpy.multiply(parameters[part], self._weight_decay, out=scratch[part])
                numpy.add(gradients[part], scratch[part], out=gradients[part])
        direction = gradients
        if self._momentum:
            direction = velocity = buffers[0]
            numpy.multiply(velocity, self._momentum, out=velocity)
            numpy.add(velocity, gradients, out=velocity)
            if self._nesterov:
                numpy.multiply(velocity, self._momentum, out=scratch)
                direction = numpy.add(scratch, gradients, out=scratch)
        numpy.multiply(direction, rate, out=scratch)
        numpy.subtract(parameters, scratch, out=parameters)

    def _apply_on_device(
        self, parameters: Array, gradients: Array, buffers: Sequence[Array], rate: float, fused: kernels.Fused
    ) -> None:
        kernels.sgd(
            parameters,
            gradients,
            *buffers,
            rate=rate,
            momentum=self._momentum,
            nesterov=self._nesterov,
            weight_decay=self._weight_decay,
            fused=fused,
        )


class Adam(FlatOptimizer):
    """Adam; an `Optimizer`. The decayed ranges are not used.

    It overwrites float32 or float64 parameters, on the host or a device. Make the same one on every rank.

        first     = beta1 * first  + (1 - beta1) * g
        second    = beta2 * second + (1 - beta2) * g * g
        parameter = parameter - rate * (first / (1 - beta1^t)) / (sqrt(second / (1 - beta2^t)) + epsilon)

    with t = 1 at the first step. learning_rate: a number, or a function of the step (from 0) that returns one.
    clip_norm: the largest global norm of the gradients. State: "first" and "second".
    Raises ConfigError for a value that is not allowed.
    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization (2015), algorithm 1.
    """

    def __init__(
        self,
        learning_rate: float | Schedule,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        clip_norm: float | None = None,
    ) -> None:
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"betas are {betas!r}; allowed: two numbers, each 0 <= beta < 1")
        check("epsilon", epsilon, "a finite number > 0", epsilon > 0)
        super().__init__(learning_rate, ["first", "second"], clip_norm)
        self._beta1, self._beta2 = map(float, betas)
        self._epsilon = float(epsilon)
        self._weight_decay = 0.0

    def _apply(self, block: Block, rate: float) -> None:
        parameters, gradients, (first, second), scratch, _ = block
        numpy.multiply(first, self._beta1, out=first)
        numpy.multiply(gradients, 1 - self._beta1, out=scratch)
        numpy.add(first, scratch, out=first)
        numpy.multiply(second, self._beta2, out=second)
        numpy.multiply(gradients, gradients, out=scratch)
        numpy.multiply(scratch, 1 - self._beta2, out=scratch)
        numpy.add(second, scratch, out=second)
        # Both bias corrections are numbers, so they need no separate pass over the arrays.
        numpy.sqrt(second, out=scratch)
        numpy.multiply(scratch, 1 / math.sqrt(1 - self._beta2**self._step), out=scratch)
        numpy.add(scratch, self._epsilon, out=scratch)
        numpy.divide(first, scratch, out=scratch)
        numpy.multiply(scratch, rate / (1 - self._beta1**self._step), out=scratch)
        numpy.subtract(parameters, scratch, out=parameters)

    def _apply_on_device(
        self, parameters: Array, gradients: Array, buffers: Sequence[Array], rate: float, fused: kernels.Fused
    ) -> None:
        kernels.adamw(
            parameters,
            gradients,
            *buffers,
            step=self._step,
            rate=rate,
            betas=(self._beta1, self._beta2),
            epsilon=self._epsilon,
            weight_decay=self._weight_decay,
            fused=fused,
        )


class AdamW(Adam):
    """Adam with decoupled weight decay; an `Optimizer`.

    Before Adam's own step the parameters in the decayed ranges are multiplied by 1 - rate * weight_decay.
    Arguments, state and Raises as for `Adam`.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2, with the decay multiplied
    by the rate, as in PyTorch.
    """

    def __init__(
        self,
        learning_rate: float | Schedule,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.01,
        clip_norm: float | None = None,
    ) -> None:
        check("weight_decay", weight_decay, "a finite number >= 0", weight_decay >= 0)
        super().__init__(learning_rate, betas=betas, epsilon=epsilon, clip_norm=clip_norm)
        self._weight_decay = float(weight_decay)

    def _apply(self, block: Block, rate: float) -> None:
        if self._weight_decay:
            for part in block.decayed:
                decayed = block.parameters[part]
                numpy.multiply(decayed, 1 - rate * self._weight_decay, out=decayed)
        super()._apply(block, rate)
