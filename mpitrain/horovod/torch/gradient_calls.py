"""The calls that one DistributedOptimizer makes for its gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from mpitrain.adapters.torch_steps import StepsMade
from mpitrain.errors import HorovodInternalError, MismatchError, everywhere
from mpitrain.horovod.named_call import NamedCall, Operator
from mpitrain.horovod.process_sets import ProcessSet, channel_of, current, global_process_set, takes_part
from mpitrain.horovod.torch.calls import How, begin_allreduce, begin_sparse
from mpitrain.horovod.torch.compression import Compressor
from mpitrain.horovod.torch.objects import allgather_object

Group = tuple[torch.Tensor, ...]
_MOST_NAMED = 8  # parameters in an error


def code_of_set(names: Iterable[str]) -> int:
    """Return a number by which ranks compare the parameters whose gradients a step exchanges."""
    return zlib.crc32(repr(sorted(names)).encode())


def check_sets(process_set: ProcessSet, names: Iterable[str], codes: Sequence[int]) -> None:
    """Raise MismatchError, on all ranks, if the ranks exchange different parameters in a step: it would never end.

    Args:
        names: of the parameters whose gradients this rank exchanges in this step.
        codes: `code_of_set` of the ranks that have not joined.
    """
    if len(set(codes)) < 2:
        return
    world = channel_of(process_set).world
    of_ranks = allgather_object(sorted(names), name="gradients.parameters", process_set=process_set)
    rank, own = next(((rank, own) for rank, own in enumerate(of_ranks) if own != of_ranks[0]), (0, of_ranks[0]))
    if not rank:
        return  # in this step, one rank has added parameters later than another
    more, less = sorted({*own} - {*of_ranks[0]}), sorted({*of_ranks[0]} - {*own})
    found = [f"also exchanges {', '.join(more[:_MOST_NAMED])}"] if more else []
    found += [f"does not exchange {', '.join(less[:_MOST_NAMED])}"] if less else []
    raise everywhere(
        MismatchError(
            f"step of the optimizer: {world.name(rank)} {' and '.join(found)}; compared with {world.name(0)}. "
            "All ranks must have the same parameters in the optimizer: add and unfreeze parameters on all "
            "ranks before the same backward()"
        )
    )


class GradientCalls:
    """Submits each group of gradients when all of them are complete, and stores the results."""

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        groups: Sequence[Sequence[torch.Tensor]],
        compression: Compressor,
        op: Operator,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        passes: int,
    ) -> None:
        """`groups` are the parameters whose gradients make one call; `passes` backward passes make a step.

        A parameter that is added to `names` later, or that requires a gradient only later, makes a separate call.
        """
        self._names = names
        self._compression = compression
        self._op = op
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._passes = passes
        self._groups: list[Group] = []
        self._left: dict[torch.Tensor, int] = {}  # backward passes until the gradient is complete
        self._started: dict[Group, Callable[[], None]] = {}  # each waits for the result, and stores it
        self._waits_for: dict[Group, int] = {}  # gradients of the group that are not complete
        self._steps: StepsMade | None = None  # None: no other rank is known
        self._steps_of: object = None  # the channel
        self._calls: list[NamedCall] = []  # those of this step that compare the steps before it
        self._set = 0  # code_of_set of this step, once its first call is made
        self._own: list[Any] = []  # p.grad as set by the last exchange, until a step
        for group in groups:
            self._watch(tuple(group))

    def check_idle(self, call: str) -> None:
        """Raise AssertionError if gradients are being exchanged."""
        if self._started:
            name = self._names[next(iter(self._started))[0]]
            raise AssertionError(
                f"{call} was called while gradients are being exchanged ({name} and others); call optimizer.step() or "
                "optimizer.synchronize() first"
            )

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients that a step will use. The ranks compare them at the next exchange, or at the end of the
        job.

        Raises:
            AssertionError: the step would use gradients of this rank alone.
        """
        if not takes_part(self._process_set) or channel_of(self._process_set).world.size == 1:
            return
        if self._steps is None or any(left < self._passes for left in self._left.values()):
            raise AssertionError(
                f"{channel_of(self._process_set).world.name()}: optimizer.step() in optimizer.skip_synchronize() would "
                "use gradients of this rank alone; call optimizer.synchronize() after backward(), before the step"
            )
        self._steps.add(optimizer, self._own)
        self._own = []  # it would keep the memory beyond zero_grad()

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes that make a step."""
        self._passes = passes
        self.forget()

    def forget(self) -> None:
        """Restart a step, possibly with different parameters."""
        if self._steps is not None:
            self._steps.forget()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._started.clear()
        self._calls.clear()
        self._set = 0
        self._left = {parameter: self._passes for group in self._groups for parameter in group}
        self._waits_for = {group: len(group) for group in self._groups}

    def finish(self) -> None:
        """Submit the gradients that the backward passes have not completed, wait for all, and begin the next step.

        A parameter without a gradient gets one of zeros, because other ranks may have one.

        Raises:
            HorovodInternalError: a call has failed. The others have ended too, so the next step can be made.
            MismatchError: the ranks have made different steps since the last exchange, or have different parameters.
                Raised on every rank.
        """
        if not takes_part(self._process_set):
            return
        self._code()
        for group in self._groups:
            if group not in self._started:
                self._submit(group)
        self._check_sets()
        for parameter in self._new():
            self._watch((parameter,))
            self._submit(self._groups[-1])
        errors: list[HorovodInternalError] = []
        for end in self._started.values():
            try:
                end()
            except HorovodInternalError as error:
                errors.append(error)
        calls = self._calls[:]
        self._begin_anew()
        self._own = [parameter.grad for parameter in self._left]
        if errors:
            if self._steps is not None:
                self._steps.forget()
            raise errors[0]
        if self._steps is not None and calls:
            details = calls[0].details
            codes = [detail[0] if detail else -1 for detail in details]  # () comes from a rank that has joined
            self._steps.exchanged(codes, self._own, with_all=all(details))

    def _code(self) -> tuple[int, ...]:
        """StepsMade.code and code_of_set of this rank, for an exchange that begins; (): there is no other rank."""
        channel = channel_of(self._process_set)
        if channel.world.size == 1:
            return ()
        if self._steps is None or self._steps_of is not channel:
            if self._steps is not None:
                self._steps.forget()  # it belongs to the ranks before a loss
            name = f"steps.{next(iter(self._names.values()))}"
            self._steps = StepsMade(
                channel.world,
                {self._names[parameter]: parameter for parameter in self._left},
                partial(allgather_object, name=name, process_set=self._process_set),
                is_for_all=self._process_set.process_set_id == 0,
                parameters=False,  # ranks that had joined have made fewer steps
            )
            self._steps_of = channel
            channel_of(global_process_set).steps.add(self._steps)
        if not self._set:
            self._set = code_of_set(self._names[parameter] for parameter in (*self._left, *self._new()))
        return self._steps.code, self._set

    def _new(self) -> list[torch.Tensor]:
        """The parameters that were added to the optimizer, or began to require a gradient, since the last step."""
        return [one for one in self._names if one.requires_grad and one not in self._left]

    def _check_sets(self) -> None:
        """Check, by the first call of this step, that all ranks exchange the same gradients; before the new ones."""
        for call in self._calls[:1]:
            try:
                call.ended()
            except HorovodInternalError:
                return  # it is raised again when all calls have ended
            names = [self._names[parameter] for parameter in (*self._left, *self._new())]
            try:
                check_sets(self._process_set, names, [detail[1] for detail in call.details if detail])
            except MismatchError:
                self.forget()
                raise

    def _watch(self, group: Group) -> None:
        """Submit the gradients of these parameters from now on."""
        self._groups.append(group)
        self._waits_for[group] = len(group)
        for parameter in group:
            self._left[parameter] = self._passes
            if self._steps is not None:
                self._steps.watch(self._names[parameter], parameter)
            if takes_part(self._process_set):
                parameter.register_post_accumulate_grad_hook(partial(self._ready, group))  # type: ignore[no-untyped-call]

    def _ready(self, group: Group, parameter: torch.Tensor) -> None:
        """Count a backward pass of a parameter; the last one completes the gradient."""
        self._left[parameter] -= 1
        if self._left[parameter] < 0:
            raise AssertionError(
                f"the gradient of {self._names[parameter]} was computed more than {self._passes} times before "
                "optimizer.step(); raise backward_passes_per_step of DistributedOptimizer"
            )
        if self._left[parameter] == 0:
            self._waits_for[group] -= 1
            if self._waits_for[group] == 0:
                self._submit(group)

    def _submit(self, group: Group) -> None:
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients: list[Any] = [parameter.grad for parameter in group]
        if len(group) == 1 and gradients[0].is_sparse and not self._sparse_as_dense:
            self._started[group] = self._sparse(group[0], gradients[0])
            return
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        short, contexts = zip(*map(self._compression.compress, dense), strict=True)
        before, after = 1.0, 1.0
        if self._op is Operator.Average:
            before, after = 1 / self._predivide, self._predivide
        contiguous = [tensor.contiguous() for tensor in short]
        name, how = self._names[group[0]], How(self._op, None, before, after)
        call = begin_allreduce(
            "gradients",
            contiguous,
            name,
            how,
            self._process_set,
            in_place=True,
            # Within a node, ranks share the cores that compute: an exchange during the backward pass gains nothing.
            hurries=current().world.num_nodes > 1,
            detail=self._code(),
        )
        self._calls.append(call)

        def end() -> None:
            call.ended()
            for parameter, gradient, result, context in zip(group, gradients, contiguous, contexts, strict=True):
                whole = self._compression.decompress(result, context)
                if gradient.is_sparse:
                    parameter.grad = whole.to_sparse(gradient.sparse_dim())
                elif whole is not gradient:
                    gradient.copy_(whole)

        self._started[group] = end

    def _sparse(self, parameter: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
        # Under the key of a dense gradient: a rank that has none sends zeros, and is told that the ranks differ.
        result = begin_sparse("gradients", gradient, self._names[parameter], self._op, self._process_set)

        def end() -> None:
            parameter.grad = result()

        return end
