"""Optimizers whose gradients are not exchanged, in a program with a process group: what their steps have used.

Some libraries wrap a model in DistributedDataParallel only for backends that they know by name, and a program may
forget to wrap it. Then each rank silently trains a model of its own. mpitrain/reducer/unexchanged.py compares what is
noted here when all ranks have finished. Nothing is sent before that.

There is no warning where a program may intend this: the ranks begin with different values or settings; something
besides the optimizer changes parameters, as in averaging by hand; or arrays travel between the ranks about as often as
the optimizer steps, as in a pipeline. Optimizers with hooks of their own, which may exchange anything, and those of
parameters on GPUs or of subclasses of Tensor, such as DTensor, are left out.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from ctypes import Array, c_char
from typing import Any, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpitrain.job.start import has_begun, init
from mpitrain.reducer.unexchanged import ALL_KNOWN, EXCHANGED, NUMBER_IN_FINAL, UNKNOWN, UnexchangedSteps
from mpitrain.torch.bare_group import BareGroup
from mpitrain.torch.channel import Channel
from mpitrain.torch.uncompiled import uncompiled

# How many tensors of an optimizer are examined, and how many numbers of each.
_TENSORS, _NUMBERS = 64, 16
_KEPT_BYTES = 1 << 16
_MOST_OPTIMIZERS = 16  # their order is the same on all ranks; a program may make a new one for every task
_PLAIN = (torch.Tensor, torch.nn.Parameter)

_watched: dict[int, _OwnSteps] = {}  # by id of the optimizer
_in_order: list[_OwnSteps] = []


def watch_own_steps() -> None:
    """Watch all optimizers of this process from now on."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


@uncompiled
def _before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    one = _watched.get(id(optimizer))
    if one is None:
        if not (dist.is_initialized() and has_begun() and dist.get_world_size() > 1 and init().size > 1):
            return
        one = _watched[id(optimizer)] = _OwnSteps(optimizer)
        if not _in_order:
            init().control.last_waits.append(_tell)
        if len(_in_order) < _MOST_OPTIMIZERS:
            _in_order.append(one)
        else:
            one.known = UNKNOWN
    if one.known == ALL_KNOWN and one.is_changed():
        one.leave_out(EXCHANGED)


@uncompiled
def _after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    one = _watched.get(id(optimizer))
    if one is not None and one.known == ALL_KNOWN:
        one.made(optimizer)


def _tell() -> None:
    """Put what is known into the note with which this rank ends."""
    final = init().control.notes.final
    final[NUMBER_IN_FINAL] = tuple(itertools.chain.from_iterable(one.noted().numbers() for one in _in_order))


class _OwnSteps:
    """The steps of one optimizer.

    Attributes:
        known: see UnexchangedSteps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Not its id alone: another optimizer may get that later.
        self._optimizer = ref(optimizer, self._gone_of(id(optimizer)))
        self.known = ALL_KNOWN
        self._after: bytes | None = b""  # what `_now` returned after the last step
        self._kind = self._trained = self._steps = self._begin = self._end = 0
        self._used: list[tuple[float, float]] = []
        # Parameters, the address of their memory, and a part of it. It is read only while the address is unchanged:
        # freed memory may no longer belong to this process. A NumPy array would keep other libraries from resizing the
        # memory.
        self._ends: list[tuple[Any, tuple[int, int], Array[c_char]]] = []
        self._calls = _num_calls()
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        trained = [one for one in parameters if one.requires_grad]
        hooks = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
        is_plain = not hooks and all(map(_is_plain, trained))
        trained = [one for one in trained if one.numel()] if is_plain else []
        if not trained:
            self.known = UNKNOWN
            return
        settings = [{name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
        shapes = [tuple(one.shape) for one in trained]
        self._kind = zlib.crc32(repr((type(optimizer).__name__, settings, shapes)).encode())
        self._trained = sum(one.numel() for one in trained)
        self._begin = zlib.crc32(_sample(trained).numpy().tobytes())
        # The last layer has gradients in every step. An embedding, which may be the first layer, may have none.
        for parameter in dict.fromkeys((trained[0], trained[-1])):
            count = min(_NUMBERS, parameter.numel()) if parameter.is_contiguous() else 1
            begin = (parameter.numel() - count) // 2 if count > 1 else 0
            memory, size = _memory_of(parameter), parameter.itemsize
            numbers = (c_char * (count * size)).from_address(memory[0] + begin * size)
            self._ends.append((parameter, memory, numbers))

    def _gone_of(self, key: int) -> Callable[[Any], None]:
        def gone(_: Any, watched: dict[int, _OwnSteps] = _watched) -> None:  # the module may be gone too
            if watched.get(key) is self:
                del watched[key]
            self._let_go()

        return gone

    def _let_go(self) -> None:
        """Keep only small values until the end of the program: a model may be averaged when its optimizer is gone."""
        self._look_at_end()
        small = [end for end in self._ends if end[0].untyped_storage().nbytes() <= _KEPT_BYTES]
        self._ends = [(parameter.detach(), memory, numbers) for parameter, memory, numbers in small]

    def _now(self) -> bytes | None:
        """A part of the parameters; None: their memory has changed."""
        content = b""
        for parameter, memory, numbers in self._ends:
            if _memory_of(parameter) != memory:
                return None
            content += numbers.raw
        return content

    def _look_at_end(self) -> None:
        now = self._now()
        if now is None:
            self.leave_out(EXCHANGED)
        elif self._ends:
            self._end = zlib.crc32(now)

    def is_changed(self) -> bool:
        """Whether the parameters, or their memory, have changed since the last step."""
        now = self._now()
        return now is None or (self._steps > 0 and now != self._after)

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a completed step."""
        self._steps += 1
        self._after = self._now()
        if self._after is None:  # an optimizer that gives parameters new memory
            self.leave_out(UNKNOWN)
        elif self._steps & (self._steps - 1) == 0:
            self._use([one.grad for group in optimizer.param_groups for one in group["params"]])
            if self._steps > 1 and _num_calls() - self._calls >= (self._steps - 1) / 2:
                self.leave_out(EXCHANGED)

    def leave_out(self, known: int) -> None:
        """Stop watching the optimizer."""
        self.known = known
        self._ends.clear()

    def _use(self, gradients: Iterable[torch.Tensor | None]) -> None:
        present = [one for one in gradients if one is not None]
        if not all(map(_is_plain, present)):
            self.leave_out(UNKNOWN)
            return
        numbers = _sample(present)
        self._used.append((float(numbers.norm()), float(numbers.sum())))

    def noted(self) -> UnexchangedSteps:
        """Return what the ranks compare at the end of the program."""
        self._look_at_end()
        self._ends.clear()
        return UnexchangedSteps(
            self.known, self._kind, self._trained, self._steps, self._begin, self._end, tuple(self._used)
        )


def _memory_of(parameter: torch.Tensor) -> tuple[int, int]:
    """The address and size of a tensor's memory: a smaller tensor may begin where another one was."""
    return parameter.data_ptr(), parameter.nbytes


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout == torch.strided and tensor.is_floating_point()


def _sample(tensors: list[Any]) -> torch.Tensor:
    """A few numbers of some of the tensors, in float64."""
    samples = [torch.empty(0, dtype=torch.float64)]
    for tensor in tensors[:: -(-len(tensors) // _TENSORS) or 1]:
        flat = tensor.detach().reshape(-1)
        samples.append(flat[:: -(-len(flat) // _NUMBERS) or 1].double())
    return torch.cat(samples)


def _num_calls() -> int:
    """How often this rank has sent or received more than a few numbers; with other backends, how often it has sent
    anything."""
    number = Channel.num_large_calls
    for group in _world.pg_map:
        if not isinstance(group, BareGroup):
            with suppress(RuntimeError):  # a backend may not count its calls
                number += cast(Any, group)._get_sequence_number_for_group()
    return number
