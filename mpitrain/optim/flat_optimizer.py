"""The common part of the optimizers: one flat buffer for all parameters, and one for each state.

On the CPU a step is a dozen array operations, whatever the number of layers. Each has an `out=`, so a step allocates
nothing. The operations go through the arrays block by block: all of them run on one block before the next. So the block
stays in the cache. Whole arrays would be read from memory for each operation.

On a GPU a step is one kernel, with the same roundings in the same order, so it computes the same bits. The norm for
clipping is summed in a different order, which depends only on the number of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpitrain.arrays import Array, is_device_array, namespace
from mpitrain.cuda import kernels
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.optim.owned import cut
from mpitrain.optim.schedules import Schedule

_DTYPES = ("float32", "float64")
# Four float32 arrays of one block take 1 MiB; measured as the best size, or equal, for 200 thousand to 10 million
# parameters.
_BLOCK_COUNT = 2**16


class Block(NamedTuple):
    """One block of a step: parts of the flat buffers, which the step overwrites."""

    parameters: Array
    gradients: Array
    buffers: Sequence[Array]  # the state's, in the order of its names
    scratch: Array
    decayed: Sequence[slice]  # the ranges in the block that weight decay applies to


class FlatOptimizer:
    """The common part of the optimizers: checks, clipping, the learning rate of a step, state and restore."""

    def __init__(self, learning_rate: float | Schedule, state_names: Sequence[str], clip_norm: float | None) -> None:
        if not callable(learning_rate):
            check(
                "learning_rate",
                learning_rate,
                "a finite number >= 0 or a function of the step",
                learning_rate >= 0,
            )
        if clip_norm is not None:
            check("clip_norm", clip_norm, "None or a finite number > 0", clip_norm > 0)
        self._learning_rate = learning_rate
        self._clip_norm = None if clip_norm is None else float(clip_norm)
        self._state_names = tuple(state_names)
        self._parameters: Array = None
        self._rate_factor = 1.0
        self._given_rate: float | None = None
        self._norm_of_all: Callable[[float], float] | None = None
        self._measures_norm = False
        self._last_norm: float | None = None
        self._kept: Sequence[slice] | None = None  # see keep_only
        self._norm_is_on_device = False  # True: the square of the norm is in self._squared

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
        self._decayed = _merged(decayed, parameters.size)
        self._buffers = {name: xp.zeros(parameters.size, parameters.dtype) for name in self._state_names}
        self._step = 0
        # An optimizer can be started again, for another World or strategy: no trace of a division may remain.
        self._kept, self._norm_of_all, self._given_rate = None, None, None
        self._take(slice(0, parameters.size))

    def _take(self, part: slice) -> None:
        """Prepare for steps of these parameters."""
        self._part, parameters = part, self._parameters[part]
        xp, decayed = namespace(parameters), _within(part, self._decayed)
        if is_device_array(parameters):
            self._bounds = kernels.decay_bounds(decayed, parameters)
            self._squared, self._factor = xp.empty(1, xp.float64), xp.empty(1, xp.float64)
            return
        count = min(_BLOCK_COUNT, parameters.size)
        self._scratch = xp.empty(count, parameters.dtype)
        # Each buffer with its place in the state.
        self._blocks = [(block, block, _within(block, decayed)) for block in _cut_up(0, parameters.size)]

    def update(self, gradients: Array) -> float:
        parameters = self._started()[self._part]
        state = [buffer if self._kept is not None else buffer[self._part] for buffer in self._buffers.values()]
        if gradients.shape != parameters.shape or gradients.dtype != parameters.dtype:
            raise ConfigError(
                f"gradients are {gradients.dtype}{gradients.shape}; "
                f"allowed, as the parameters: {parameters.dtype}{parameters.shape}"
            )
        rate = self._next_rate() if self._given_rate is None else self._given_rate
        self._given_rate = None
        self._step += 1
        self._last_norm, self._norm_is_on_device = None, False
        is_on_device = is_device_array(parameters)
        # A norm over several servers is computed on the CPU.
        clips_here = self._clip_norm is not None and not (is_on_device and self._norm_of_all is None)
        if clips_here or (self._measures_norm and self._clip_norm is None):
            norm = math.hypot(*(global_norm(part) for part in self._parts_of(gradients)))
            self._last_norm = norm if self._norm_of_all is None else self._norm_of_all(norm)
        self._measures_norm = False
        if clips_here and self._clip_norm is not None and self._last_norm is not None:
            for part in self._parts_of(gradients):
                _scale_down(part, self._last_norm, self._clip_norm)
        if is_on_device:
            self._apply_on_device(parameters, gradients, state, rate, self._fused(gradients))
            return rate
        for part, of_state, decayed in self._blocks:
            scratch = self._scratch[: part.stop - part.start]
            buffers = [buffer[of_state] for buffer in state]
            self._apply(Block(parameters[part], gradients[part], buffers, scratch, decayed), rate)
        return rate

    def _parts_of(self, gradients: Array) -> list[Array]:
        return [gradients] if self._kept is None else [gradients[one] for one in self._kept]

    def _next_rate(self) -> float:
        rate = self._learning_rate
        if callable(rate):
            rate = rate(self._step)
            check(f"learning_rate at step {self._step}", rate, "a finite number >= 0", rate >= 0)
        rate = float(rate) * self._rate_factor  # a NumPy scalar would turn float32 arithmetic into float64
        self._rate_factor = 1.0
        return rate

    def update_only(self, part: slice, norm_of_all: Callable[[float], float]) -> None:
        """Make `update` change only this part of the parameters, and take gradients of this part only.

        The buffers of `state` keep their size. `norm_of_all` gets the norm of the part's gradients, and returns the
        norm of the gradients of all parts.
        """
        self._started()
        self._norm_of_all = norm_of_all
        self._take(part)

    def keep_only(self, ranges: Sequence[slice], norm_of_all: Callable[[float], float]) -> None:
        """From now on, keep the state of only these ranges of the parameters, on the CPU.

        `update` still takes gradients of all parameters, and uses and changes only these ranges. The buffers of `state`
        and `restore` have these ranges, one after the other. `norm_of_all` is as for `update_only`.
        """
        self._started()
        self._kept, self._norm_of_all = ranges, norm_of_all
        self._buffers = {name: cut(ranges, buffer) for name, buffer in self._buffers.items()}
        self._blocks, before = [], 0
        for one in ranges:
            for block in _cut_up(one.start, one.stop):
                begin = before + block.start - one.start
                of_state = slice(begin, begin + block.stop - block.start)
                self._blocks.append((block, of_state, _within(block, self._decayed)))
            before += one.stop - one.start

    def plan_update(self) -> dict[str, Any]:
        """Return what the optimizers of all parts must know about the next update: numbers by name."""
        return {"step": self._step, "rate": self._next_rate(), "measures_norm": self._measures_norm}

    def follow_plan(self, plan: Mapping[str, Any]) -> None:
        """Make the next `update` follow the result of `plan_update`, of this optimizer or of another part's."""
        self._step, self._given_rate, self._measures_norm = plan["step"], plan["rate"], plan["measures_norm"]

    def scale_next_rate(self, factor: float) -> None:
        """Make the next `update` multiply its learning rate by this finite number of at least 0."""
        check("factor of the learning rate", factor, "a finite number >= 0", factor >= 0)
        self._rate_factor = float(factor)

    def measure_gradient_norm(self) -> None:
        self._measures_norm = True

    def gradient_norm(self) -> float | None:
        return math.sqrt(float(self._squared[0])) if self._norm_is_on_device else self._last_norm

    def _fused(self, gradients: Array) -> kernels.Fused:
        """The rest of the kernel: weight decay in some ranges, and clipping by a factor that stays on the GPU."""
        if self._clip_norm is None or self._norm_of_all is not None:
            return kernels.Fused(decayed=self._bounds)
        self._norm_is_on_device = True
        kernels.squared_norm(gradients, self._squared)
        kernels.clip_factor(self._squared, self._clip_norm, self._factor)
        return kernels.Fused(decayed=self._bounds, factor=self._factor)

    def _apply(self, block: Block, rate: float) -> None:
        """Make one step on one block, on the CPU."""
        raise NotImplementedError

    def _apply_on_device(
        self, parameters: Array, gradients: Array, buffers: Sequence[Array], rate: float, fused: kernels.Fused
    ) -> None:
        """Make one step on all parameters at once, on a GPU."""
        raise NotImplementedError

    def state(self) -> dict[str, Array | int]:
        self._started()
        return {**self._buffers, "step": self._step}

    def restore(self, state: Mapping[str, Array | int]) -> None:
        self._started()
        kind = type(self).__name__
        expected = {*self._buffers, "step"}
        if expected != state.keys():
            wrong = {"lacks": sorted(expected - state.keys()), "has besides": sorted(state.keys() - expected)}
            said = " and ".join(f"{verb} {', '.join(map(str, names))}" for verb, names in wrong.items() if names)
            raise CheckpointError(
                f"state for {kind}: the saved one {said}, so another optimizer saved it. Resume with that "
                "optimizer, or start the training again"
            )
        step = state["step"]
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(f"state for {kind}: step is {step!r}; allowed: an int >= 0")
        for name in self._buffers:
            saved: Array = state[name]
            own = self._buffers[name]
            if saved.shape != own.shape or saved.dtype != own.dtype:
                raise CheckpointError(
                    f"state for {kind}: {name} is {saved.dtype}{saved.shape}; the parameters are {own.dtype}{own.shape}"
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


def clip_by_global_norm(gradients: Array, max_norm: float) -> float:
    """Scale `gradients` in place so that their 2-norm is at most `max_norm`. Return the norm before scaling.

    gradients: flat, float32 or float64, on the CPU or a GPU. They do not change if the norm is at most `max_norm`,
    infinite or NaN.
    Raises ConfigError if `max_norm` is not a finite number > 0.
    Source: Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural networks (2013),
    algorithm 1.
    """
    check("max_norm", max_norm, "a finite number > 0", max_norm > 0)
    norm = global_norm(gradients)
    _scale_down(gradients, norm, max_norm)
    return norm


def _scale_down(gradients: Array, norm: float, max_norm: float) -> None:
    if max_norm < norm < math.inf:
        namespace(gradients).multiply(gradients, max_norm / norm, out=gradients)


def global_norm(flat: Array) -> float:
    """Return the 2-norm, added up in float64 and without overflow."""
    xp = namespace(flat)
    if is_device_array(flat):
        out = xp.empty(1, xp.float64)
        kernels.squared_norm(flat, out)
        square = float(out[0])
    else:
        # Not numpy.dot: BLAS adds in an order that depends on the CPU model and the number of threads, so ranks on
        # different machines would get different norms and, from then on, different parameters.
        square = float(xp.einsum("i,i->", flat, flat, dtype=xp.float64))
    if square < math.inf:
        return math.sqrt(square)
    largest = max(float(flat.max()), -float(flat.min()))
    if not largest < math.inf:
        return largest
    # Only float64 values above 1e150 reach this line, so a temporary array does not matter.
    scaled = flat / largest
    return largest * math.sqrt(float(xp.einsum("i,i->", scaled, scaled)))


def check(name: str, value: float, allowed: str, holds: bool) -> None:
    """Raise ConfigError unless a setting's value is finite and `holds`."""
    if not (holds and math.isfinite(value)):
        raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")


def _cut_up(begin: int, end: int) -> Iterator[slice]:
    """Cut a range into blocks."""
    for first in range(begin, end, _BLOCK_COUNT):
        yield slice(first, min(first + _BLOCK_COUNT, end))


def _merged(ranges: Sequence[slice], size: int) -> list[slice]:
    """The ranges in order, with adjacent ones merged (fewer and longer operations) and empty ones left out."""
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


def _within(block: slice, ranges: Sequence[slice]) -> list[slice]:
    """The parts of `ranges` that lie in `block`, counted from its beginning."""
    begin, end = block.start, block.stop
    return [
        slice(max(part.start, begin) - begin, min(part.stop, end) - begin)
        for part in ranges
        if part.start < end and part.stop > begin
    ]
