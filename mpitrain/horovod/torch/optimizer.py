"""DistributedOptimizer: an optimizer whose step() uses the combined gradients of all ranks.

Each gradient becomes a named call when the backward pass has computed it. The order may differ between ranks.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mpitrain.horovod.named_call import NamedCall, Operator
from mpitrain.horovod.process_sets import ProcessSet, current, global_process_set, takes_part
from mpitrain.horovod.torch.calls import Adasum, Average, How, begin_allreduce
from mpitrain.horovod.torch.compression import Compression, Compressor
from mpitrain.horovod.torch.gradient_calls import GradientCalls, check_sets, code_of_set


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class, state and options, whose step() uses the combined gradients of all ranks.

    All ranks of the set call this, and later step(), the same number of times. Parameters that are added by
    add_param_group, or that require a gradient only later, are included from the next step() on, if all ranks do the
    same.

    Args:
        optimizer: any optimizer of torch. Its parameters and its state now belong to the result.
        named_parameters: names for all parameters of the optimizer, such as `model.named_parameters()`. Default:
            numbers.
        compression: Compression.none, Compression.fp16, or an object with the same methods.
        backward_passes_per_step: the number of backward passes before each step(). Their gradients are accumulated.
        op: Average, Sum, Min, Max, Product, or Adasum. Average is the mean over ranks, not over samples. With Adasum,
            step() combines the changes that each rank's optimizer would make.
        gradient_predivide_factor: with Average, gradients are divided by it before the sum, and multiplied after it.
        num_groups: deprecated; `groups` as a number.
        groups: gradients that are sent in one call: the number of groups, or lists of parameters. Default: each
            gradient separately.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: the ranks whose gradients are combined. Other ranks train alone.

    Raises:
        ValueError: a parameter has no name, or two have the same; the process set has not been added; or another
            argument is not allowed.
    """
    where = current().world.name()
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(f"{where}: gradient_predivide_factor={gradient_predivide_factor} is for op=Average only")
    if backward_passes_per_step < 1:
        raise ValueError(f"{where}: backward_passes_per_step={backward_passes_per_step}; give at least 1")
    if num_groups and groups is None:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups
    takes_part(process_set)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = _names(where, parameters, named_parameters)
    if op == Adasum:
        kind: Any = type(type(optimizer).__name__, (_AdasumOptimizer, type(optimizer)), {})
        result = _taken_over(kind, optimizer)
        result._compression, result._process_set = compression, process_set
        result._parameter_names, result._stepped = names, set()
        return result
    kind = type(type(optimizer).__name__, (_DistributedOptimizer, type(optimizer)), {})
    result = _taken_over(kind, optimizer)
    result._calls = GradientCalls(
        names,
        _groups(where, parameters, groups),
        compression,
        Operator(op),
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
        backward_passes_per_step,
    )
    result._is_synchronized, result._synchronizes = False, True
    result._parameter_names = names  # as in Horovod's optimizer, because scripts read it
    return result


class _NamedOptimizer:
    """The common part of both kinds of DistributedOptimizer."""

    _parameter_names: dict[torch.Tensor, str]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch. All ranks of the set add the same parameters. Their gradients are also combined over all ranks."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._name_added()

    def _name_added(self) -> None:
        """Name the parameters that have been added to the optimizer. A program may change param_groups itself."""
        for group in self.param_groups:  # type: ignore[attr-defined]
            for parameter in group["params"]:
                self._parameter_names.setdefault(parameter, f"added.{len(self._parameter_names)}")


class _DistributedOptimizer(_NamedOptimizer):
    """The methods that the result of DistributedOptimizer has instead of the optimizer's own."""

    _calls: GradientCalls
    _is_synchronized: bool
    _synchronizes: bool

    def synchronize(self) -> None:
        """Wait until all gradients are combined over all ranks, for example before clipping."""
        self._finish()
        self._is_synchronized = True

    def _finish(self) -> None:
        self._name_added()
        self._calls.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this block, step() uses the gradients unchanged. Use it after synchronize().

        Between the two, change gradients in the same way on all ranks. The next exchange compares what the ranks' steps
        have used.
        """
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients of all ranks, and change the parameters. See torch.

        A closure runs its backward pass first; then its gradients are also combined over all ranks.

        Raises:
            AssertionError: in skip_synchronize(), without synchronize() since the last backward pass.
            MismatchError: since the previous exchange, the ranks have made different steps. Raised on every rank.
        """
        if self._synchronizes and self._is_synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): the "
                "gradients of all ranks are reduced again. Write: with optimizer.skip_synchronize(): optimizer.step()",
                stacklevel=2,
            )
        self._is_synchronized, is_counted = False, False

        def reduce() -> None:
            nonlocal is_counted
            if self._synchronizes:
                self._finish()
            if not is_counted:
                self._calls.before_step(self)  # type: ignore[arg-type]
            is_counted = True

        if closure is None:
            reduce()
            return super().step()  # type: ignore[misc]

        def reduced() -> Any:
            loss = closure()
            reduce()
            return loss

        return super().step(reduced)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch.

        Raises:
            AssertionError: gradients are being exchanged; call step() or synchronize() first.
        """
        self._calls.check_idle("optimizer.zero_grad()")
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before each step()."""
        self._calls.set_passes(passes)

    def load_state_dict(self, state: Any) -> None:
        """See torch. Gradients that are being exchanged are dropped."""
        self._calls.forget()
        super().load_state_dict(state)  # type: ignore[misc]


class _AdasumOptimizer(_NamedOptimizer):
    """The same for op=Adasum."""

    _compression: Compressor
    _process_set: ProcessSet
    _stepped: set[torch.Tensor]  # trained in the last step

    def synchronize(self) -> None:
        """Do nothing: the ranks combine the changes of step()."""

    def skip_synchronize(self) -> Any:
        """Refuse.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("optimizer.skip_synchronize() with op=Adasum: gradients are not exchanged; call step()")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the parameters by the adaptive sum of the ranks' changes. See torch.

        Raises:
            MismatchError: the ranks have different parameters. Raised on every rank.
        """
        if not takes_part(self._process_set):
            return super().step(closure)  # type: ignore[misc]
        self._name_added()
        trained = [parameter for parameter in self._parameter_names if parameter.requires_grad]
        trained.sort(key=lambda parameter: parameter not in self._stepped)  # the new ones last
        num_known = len(self._stepped.intersection(trained)) or len(trained)
        self._stepped = set(trained)
        names = [self._parameter_names[parameter] for parameter in trained]
        before = [parameter.detach().clone() for parameter in trained]
        result = super().step(closure)  # type: ignore[misc]
        detail = (code_of_set(names),)
        started: list[tuple[NamedCall, Any]] = []
        for number, (name, parameter, old) in enumerate(zip(names, trained, before, strict=True), 1):
            short, context = self._compression.compress(parameter.detach() - old)
            call = begin_allreduce(
                "allreduce", [short], f"step.{name}", How(Adasum), self._process_set, in_place=True, detail=detail
            )
            started.append((call, context))
            if number == num_known:
                started[0][0].ended()
                check_sets(self._process_set, names, [code for (code,) in filter(None, started[0][0].details)])
        with torch.no_grad():
            for parameter, old, (call, context) in zip(trained, before, started, strict=True):
                parameter.copy_(old + self._compression.decompress(call.ended(), context))
        return result

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients are accumulated until step() is called."""


def _taken_over(kind: Any, optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer of another class with the same parameters, state and options."""
    result = kind.__new__(kind)
    # Learning rate schedulers and tools put a `step` of the old optimizer there, which would not exchange anything.
    result.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    if "step" in vars(optimizer):  # a scheduler warns unless it learns that its optimizer has made a step

        def made(*_: object) -> None:
            optimizer._opt_called = True  # type: ignore[attr-defined]

        result.register_step_post_hook(made)
    return result


def _names(
    where: str, parameters: Sequence[torch.Tensor], named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """The name of each parameter."""
    if named is None:
        return {parameter: f"noname.{number}" for number, parameter in enumerate(parameters)}
    pairs = list(named)
    wrong = next((pair for pair in pairs if not isinstance(pair, tuple)), None)
    if wrong is not None:
        raise ValueError(
            f"{where}: named_parameters has a {type(wrong).__name__}; give pairs of name and parameter, such as "
            "model.named_parameters()"
        )
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"{where}: named_parameters has a name more than once: {', '.join(twice)}")
    names = {parameter: name for name, parameter in pairs}
    missing = sum(parameter not in names for parameter in parameters)
    if missing:
        raise ValueError(
            f"{where}: named_parameters has no name for {missing} of {len(parameters)} parameters of the optimizer"
        )
    return {parameter: names[parameter] for parameter in parameters}


def _groups(
    where: str, parameters: Sequence[torch.Tensor], groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> list[list[torch.Tensor]]:
    """The parameters whose gradients make one call."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if groups is None:
        return [[parameter] for parameter in trained]
    if isinstance(groups, int):
        if groups < 1:
            raise ValueError(f"{where}: groups={groups}; give at least 1, or lists of parameters")
        length = max(1, -(-len(trained) // groups))
        return [trained[begin : begin + length] for begin in range(0, len(trained), length)]
    given = [parameter for group in groups for parameter in group]
    if not all(isinstance(parameter, torch.Tensor) for parameter in given):
        raise ValueError(f"{where}: groups has an entry that is not a parameter; give a number, or lists of parameters")
    if len(set(given)) != len(given):
        raise ValueError(f"{where}: groups has a parameter more than once")
    chosen = [[parameter for parameter in group if parameter.requires_grad] for group in groups]
    return [*filter(None, chosen), *([parameter] for parameter in trained if parameter not in set(given))]
