"""The calls that one DistributedOptimizer makes for its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mpitrain.horovod.exceptions import HorovodInternalError
from mpitrain.horovod.operators import Operator
from mpitrain.horovod.process_sets import ProcessSet
from mpitrain.horovod.state import takes_part
from mpitrain.horovod.torch.compression import Compressor
from mpitrain.horovod.torch.reducing import gradients_async_
from mpitrain.horovod.torch.sparse import begin_sparse
from mpitrain.horovod.torch.submission import synchronize

Group = tuple[torch.Tensor, ...]


class GradientCalls:
    """Submits each group of gradients when all of them are there, and puts the results in their places."""

    def __init__(
        self,
        names: Mapping[torch.Tensor, str],
        groups: Sequence[Sequence[torch.Tensor]],
        compression: Compressor,
        op: Operator,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        passes: int,
    ) -> None:
        """`groups` are the parameters whose gradients make one call; `passes` backward passes make a step."""
        self._names = names
        self._compression = compression
        self._op = op
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._passes = passes
        self._groups: list[Group] = [tuple(group) for group in groups]
        self._left: dict[torch.Tensor, int] = {}  # backward passes until the gradient is complete
        self._started: dict[Group, Callable[[], None]] = {}  # each waits for the result, and puts it in its place
        self._waits_for: dict[Group, int] = {}  # gradients of the group that are not complete
        self.forget()
        if takes_part(process_set):
            for group in self._groups:
                for parameter in group:
                    parameter.register_post_accumulate_grad_hook(partial(self._ready, group))  # type: ignore[no-untyped-call]

    def check_idle(self, call: str) -> None:
        """Raise AssertionError if gradients are on their way."""
        if self._started:
            name = self._names[next(iter(self._started))[0]]
            raise AssertionError(
                f"{call} was called while gradients are on their way ({name} and others); call optimizer.step() or "
                "optimizer.synchronize() first"
            )

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes that make a step."""
        self._passes = passes
        self.forget()

    def forget(self) -> None:
        """Begin a step anew."""
        self._started.clear()
        self._left = {parameter: self._passes for group in self._groups for parameter in group}
        self._waits_for = {group: len(group) for group in self._groups}

    def finish(self) -> None:
        """Submit the gradients that the backward passes have not completed, wait for all, and begin anew.

        A parameter without a gradient gets one of zeros, because other ranks may have one.

        Raises:
            HorovodInternalError: a call has failed. The others have ended too, so the next step can be made.
        """
        if not takes_part(self._process_set):
            return
        for group in self._groups:
            if group not in self._started:
                self._submit(group)
        errors: list[HorovodInternalError] = []
        for end in self._started.values():
            try:
                end()
            except HorovodInternalError as error:
                errors.append(error)
        self.forget()
        if errors:
            raise errors[0]

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
        handle = gradients_async_(contiguous, self._names[group[0]], self._op, before, after, self._process_set)

        def end() -> None:
            synchronize(handle)
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
