"""SGD, Adam and AdamW over one flat buffer, on NumPy and CuPy alike.

All parameters of a model lie in one flat array, and so does every state of the optimizer. A step is then a
dozen array operations whatever the number of layers, each with `out=`, so that a step allocates nothing
(but for clipping float32 gradients on a device, where CuPy's einsum converts them to float64 as a whole).

On the host they go over the arrays block by block, all operations on one block before the next: the block then stays
in the cache, where whole arrays would come from memory once an operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Protocol

from mpitrain.arrays import Array, is_device_array, namespace
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.training.schedules import Schedule

_DTYPES = ("float32", "float64")
# Four float32 arrays of one block take 1 MiB; measured best or equal for 200 thousand to 10 million parameters.
_BLOCK_COUNT = 2**16


class Optimizer(Protocol):
    """What the trainer needs of an optimizer. No method communicates; every rank makes the same calls."""

    def start(self, parameters: Array, decayed: Sequence[slice]) -> None:
        """Keep `parameters` to update them in place, and allocate the state as before step 0.

        parameters: one-dimensional, contiguous, float32 or float64, on host or device.
        decayed: the ranges of `parameters` that weight decay applies to; they must not overlap.
        Raises ConfigError where either is something else.
        """

    def update(self, gradients: Array) -> float:
        """Make one step: overwrite the parameters and return the learning rate that was used.

        gradients: shape, dtype and place as the parameters. Overwritten: what they hold then is undefined.
        Raises ConfigError where the gradients do not fit or the schedule gives a rate that is not allowed.
        """

    def state(self) -> dict[str, Array | int]:
        """The flat buffers by name, themselves and not copies, and "step", the number of steps made."""

    def restore(self, state: Mapping[str, Array | int]) -> None:
        """Copy `state` (host or device arrays, as `state()` gives them) into the buffers.

        Raises CheckpointError, before anything is overwritten, that names what is missing, left over or
        of the wrong size or dtype.
        """


def clip_by_global_norm(gradients: Array, max_norm: float) -> float:
    """Scale `gradients` in place so that their 2-norm is at most `max_norm`; return the norm before that.

    gradients: flat, float32 or float64, host or device. They are left as they are where the norm is at most
    `max_norm`, infinite or NaN.
    Raises ConfigError where `max_norm` is not a finite number > 0.
    Source: Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural networks (2013),
    algorithm 1.
    """
    _check("max_norm", max_norm, "a finite number > 0", max_norm > 0)
    norm = _norm(gradients)
    if max_norm < norm < math.inf:
        namespace(gradients).multiply(gradients, max_norm / norm, out=gradients)
    return norm


def _norm(flat: Array) -> float:
    """The 2-norm, added up in float64 and without overflow."""
    xp = namespace(flat)
    # Not xp.dot: BLAS adds in an order that depends on the CPU model and its threads, so ranks on unequal
    # machines would get different norms and, from then on, different parameters.
    square = float(xp.einsum("i,i->", flat, flat, dtype=xp.float64))
    if square < math.inf:
        return math.sqrt(square)
    largest = max(float(flat.max()), -float(flat.min()))
    if not largest < math.inf:
        return largest
    # Only float64 values above 1e150 come here, so a temporary array does not matter.
    scaled = flat / largest
    return largest * math.sqrt(float(xp.einsum("i,i->", scaled, scaled)))


class _Block:
    """A part of the flat buffers, and the ranges in it that decay, counted from its begin."""

    def __init__(self, begin: int, end: int, decayed: Sequence[slice]) -> None:
        self.part = slice(begin, end)
        self.decayed = [
            slice(max(its.start, begin) - begin, min(its.stop, end) - begin)
            for its in decayed
            if its.start < end and its.stop > begin
        ]


class _FlatOptimizer:
    """What the optimizers below share: checks, clipping, the rate of a step, state and restore."""

    def __init__(self, learning_rate: float | Schedule, state_names: Sequence[str], clip_norm: float | None) -> None:
        if not callable(learning_rate):
            _check(
                "learning_rate",
                learning_rate,
                "a finite number >= 0 or a function of the step",
                learning_rate >= 0,
            )
        if clip_norm is not None:
            _check("clip_norm", clip_norm, "None or a finite number > 0", clip_norm > 0)
        self._learning_rate = learning_rate
        self._clip_norm = clip_norm
        self._state_names = tuple(state_names)
        self._parameters: Array = None

    def start(self, parameters: Array, decayed: Sequence[slice]) -> None:
        if str(parameters.dtype) not in _DTYPES:
            raise ConfigError(f"parameters are {parameters.dtype}; allowed: {' or '.join(_DTYPES)}")
        if parameters.ndim != 1 or not parameters.flags.c_contiguous:
            raise ConfigError(
                f"parameters have shape {parameters.shape} and strides {parameters.strides}; "
                "allowed: one dimension, contiguous"
            )
        xp = namespace(parameters)
        self._parameters = parameters
        decayed = _merged(decayed, parameters.size)
        count = parameters.size if is_device_array(parameters) else min(_BLOCK_COUNT, parameters.size)
        self._scratch = xp.empty(count, parameters.dtype)
        self._blocks = [
            _Block(begin, min(begin + count, parameters.size), decayed)
            for begin in range(0, parameters.size, max(count, 1))
        ]
        self._buffers = {name: xp.zeros_like(parameters) for name in self._state_names}
        self._step = 0

    def update(self, gradients: Array) -> float:
        parameters = self._started()
        if gradients.shape != parameters.shape or gradients.dtype != parameters.dtype:
            raise ConfigError(
                f"gradients are {gradients.dtype}{gradients.shape}; "
                f"allowed, as the parameters: {parameters.dtype}{parameters.shape}"
            )
        rate = self._learning_rate
        if callable(rate):
            rate = rate(self._step)
            _check(f"learning_rate at step {self._step}", rate, "a finite number >= 0", rate >= 0)
        rate = float(rate)  # a NumPy scalar would turn float32 arithmetic into float64
        if self._clip_norm is not None:
            clip_by_global_norm(gradients, self._clip_norm)
        self._step += 1
        xp = namespace(parameters)
        for block in self._blocks:
            part = block.part
            scratch = self._scratch[: part.stop - part.start]
            buffers = [buffer[part] for buffer in self._buffers.values()]
            self._apply(xp, parameters[part], gradients[part], buffers, scratch, block.decayed, rate)
        return rate

    def _apply(
        self,
        xp: ModuleType,
        parameters: Array,
        gradients: Array,
        buffers: Sequence[Array],
        scratch: Array,
        decayed: Sequence[slice],
        rate: float,
    ) -> None:
        """One step on one block: parts of the flat buffers, the state's in the order of its names."""
        raise NotImplementedError

    def state(self) -> dict[str, Array | int]:
        self._started()
        return {**self._buffers, "step": self._step}

    def restore(self, state: Mapping[str, Array | int]) -> None:
        parameters = self._started()
        kind = type(self).__name__
        expected = {*self._buffers, "step"}
        if expected != state.keys():
            missing, left_over = sorted(expected - state.keys()), sorted(state.keys() - expected)
            raise CheckpointError(f"state for {kind}: missing {missing}, not known {left_over}")
        step = state["step"]
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(f"state for {kind}: step is {step!r}; allowed: an int >= 0")
        for name in self._buffers:
            found: Array = state[name]
            if found.shape != parameters.shape or found.dtype != parameters.dtype:
                raise CheckpointError(
                    f"state for {kind}: {name} is {found.dtype}{found.shape}; "
                    f"the parameters are {parameters.dtype}{parameters.shape}"
                )
        for name, buffer in self._buffers.items():
            value: Array = state[name]
            host = value.get() if is_device_array(value) else value
            buffer[...] = namespace(buffer).asarray(host)
        self._step = step

    def _started(self) -> Array:
        if self._parameters is None:
            raise ConfigError(f"{type(self).__name__} has no parameters yet; call start(parameters, decayed) first")
        return self._parameters


class Sgd(_FlatOptimizer):
    """Stochastic gradient descent with momentum; an `Optimizer`.

    For a gradient g with weight_decay * parameter added in the decayed ranges (L2 regularisation):

        velocity  = momentum * velocity + g
        parameter = parameter - rate * velocity                     ordinary
        parameter = parameter - rate * (g + momentum * velocity)    nesterov

    learning_rate: a number, or a function from the step (from 0) to one. clip_norm: the largest global norm,
    taken before the decay is added. State: "velocity", where momentum is not 0.
    Raises ConfigError for a value that is not allowed.
    Source: Sutskever et al., On the importance of initialization and momentum (2013), with the rate outside
    the velocity, as PyTorch has it, so that a schedule acts at once.
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
        _check("momentum", momentum, "0 <= momentum < 1", 0 <= momentum < 1)
        _check("weight_decay", weight_decay, "a finite number >= 0", weight_decay >= 0)
        if nesterov and momentum == 0:
            raise ConfigError("nesterov is True and momentum 0; allowed: nesterov with a momentum above 0")
        super().__init__(learning_rate, ["velocity"] if momentum else [], clip_norm)
        self._momentum, self._nesterov, self._weight_decay = float(momentum), nesterov, float(weight_decay)

    def _apply(
        self,
        xp: ModuleType,
        parameters: Array,
        gradients: Array,
        buffers: Sequence[Array],
        scratch: Array,
        decayed: Sequence[slice],
        rate: float,
    ) -> None:
        if self._weight_decay:
            for part in decayed:
                xp.multiply(parameters[part], self._weight_decay, out=scratch[part])
                xp.add(gradients[part], scratch[part], out=gradients[part])
        direction = gradients
        if self._momentum:
            direction = velocity = buffers[0]
            xp.multiply(velocity, self._momentum, out=velocity)
            xp.add(velocity, gradients, out=velocity)
            if self._nesterov:
                xp.multiply(velocity, self._momentum, out=scratch)
                direction = xp.add(scratch, gradients, out=scratch)
        xp.multiply(direction, rate, out=scratch)
        xp.subtract(parameters, scratch, out=parameters)


class Adam(_FlatOptimizer):
    """Adam; an `Optimizer`. The decayed ranges are not used.

        first     = beta1 * first  + (1 - beta1) * g
        second    = beta2 * second + (1 - beta2) * g * g
        parameter = parameter - rate * (first / (1 - beta1^t)) / (sqrt(second / (1 - beta2^t)) + epsilon)

    with t = 1 at the first step. learning_rate: a number, or a function from the step (from 0) to one.
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
        _check("epsilon", epsilon, "a finite number > 0", epsilon > 0)
        super().__init__(learning_rate, ["first", "second"], clip_norm)
        self._beta1, self._beta2 = map(float, betas)
        self._epsilon = float(epsilon)

    def _apply(
        self,
        xp: ModuleType,
        parameters: Array,
        gradients: Array,
        buffers: Sequence[Array],
        scratch: Array,
        decayed: Sequence[slice],
        rate: float,
    ) -> None:
        first, second = buffers
        xp.multiply(first, self._beta1, out=first)
        xp.multiply(gradients, 1 - self._beta1, out=scratch)
        xp.add(first, scratch, out=first)
        xp.multiply(second, self._beta2, out=second)
        xp.multiply(gradients, gradients, out=scratch)
        xp.multiply(scratch, 1 - self._beta2, out=scratch)
        xp.add(second, scratch, out=second)
        # Both bias corrections are numbers, so they cost no pass over the arrays of their own.
        xp.sqrt(second, out=scratch)
        xp.multiply(scratch, 1 / math.sqrt(1 - self._beta2**self._step), out=scratch)
        xp.add(scratch, self._epsilon, out=scratch)
        xp.divide(first, scratch, out=scratch)
        xp.multiply(scratch, rate / (1 - self._beta1**self._step), out=scratch)
        xp.subtract(parameters, scratch, out=parameters)


class AdamW(Adam):
    """Adam with decoupled weight decay; an `Optimizer`.

    Before Adam's own step the parameters in the decayed ranges are multiplied by 1 - rate * weight_decay.
    Arguments, state and Raises as for `Adam`.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2, with the rate in
    front of the decay, as PyTorch has it.
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
        _check("weight_decay", weight_decay, "a finite number >= 0", weight_decay >= 0)
        super().__init__(learning_rate, betas=betas, epsilon=epsilon, clip_norm=clip_norm)
        self._weight_decay = float(weight_decay)

    def _apply(
        self,
        xp: ModuleType,
        parameters: Array,
        gradients: Array,
        buffers: Sequence[Array],
        scratch: Array,
        decayed: Sequence[slice],
        rate: float,
    ) -> None:
        if self._weight_decay:
            for part in decayed:
                xp.multiply(parameters[part], 1 - rate * self._weight_decay, out=parameters[part])
        super()._apply(xp, parameters, gradients, buffers, scratch, decayed, rate)


def _check(name: str, value: float, allowed: str, holds: bool) -> None:
    if not (holds and math.isfinite(value)):
        raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")


def _merged(ranges: Sequence[slice], size: int) -> list[slice]:
    """The ranges in order, adjacent ones as one (fewer and longer operations) and empty ones left out."""
    merged: list[slice] = []
    for part in sorted(ranges, key=lambda part: (part.start, part.stop)):
        if part.step not in (None, 1) or not 0 <= part.start <= part.stop <= size:
            raise ConfigError(f"decayed range {part} is not allowed; the parameters are slice(0, {size})")
        if part.start == part.stop:
            continue
        if merged and part.start < merged[-1].stop:
            raise ConfigError(f"decayed ranges {merged[-1]} and {part} overlap; each parameter decays once")
        if merged and part.start == merged[-1].stop:
            merged[-1] = slice(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return merged
