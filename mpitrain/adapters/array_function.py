"""ArrayFunction: a model that is a function of NumPy or CuPy arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy

from mpitrain.adapters.adapter import OnGradient, OptimizerShard, check_fits
from mpitrain.adapters.array_shard import ArrayShard
from mpitrain.arrays import Array, check_class, is_array, is_device_array, like, namespace
from mpitrain.errors import ConfigError, GradientError
from mpitrain.optim.loss_scale import LossScale
from mpitrain.optim.optimizers import Optimizer, described
from mpitrain.optim.owned import Owned
from mpitrain.reducer.bucket import Parameter, plan_layout
from mpitrain.reducer.division import Division, divide
from mpitrain.reducer.means import Remarks
from mpitrain.tree import Leaf, Tree, leaves, rebuild

# function(parameters, batch, on_gradient) -> loss. It calls on_gradient(name, gradient) for every parameter. With a
# loss scale, it gets one more argument, loss_scale=. If it has a parameter `random`, it gets a NumPy generator.
LossAndGradients = Callable[..., float]

# The dtypes in which a model may compute if its parameters are kept in float32; None: in the parameters' own dtype.
PRECISIONS: dict[str, numpy.dtype | None] = {
    "float32": None,
    "bf16": numpy.dtype(ml_dtypes.bfloat16),
    "fp16": numpy.dtype(numpy.float16),
}


class ArrayFunction:
    """An Adapter around `function(parameters, batch, on_gradient) -> loss`.

    All parameters are in one flat buffer, so the optimizer needs only a few array operations. The function gets views
    of this buffer by name.

    With 16-bit precision the function gets views of a rounded copy, made anew for every step, and a batch with rounded
    floating arrays. Parameters, the optimizer's state, the exchange and checkpoints stay float32, because an
    update is often too small for 16 bits. Source: Micikevicius et al., Mixed Precision Training (2018).
    """

    def __init__(
        self,
        function: LossAndGradients,
        parameters: Mapping[str, Array],
        optimizer: Optimizer,
        *,
        precision: str | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        """
        Args:
            function: returns the mean loss over the samples of the batch, and calls `on_gradient(name, gradient)` once
                for every parameter, as soon as that gradient is final. With a loss scale, the function also gets the
                keyword `loss_scale`: a number by which it must multiply all gradients, but not the loss. Multiply at
                the beginning of the backward pass: there it costs nothing, and avoids gradients that round to 0.
                If the function has a parameter `random`, it gets the generator of its virtual rank there, a
                `numpy.random.Generator`, for dropout and the like: see `mt.Sync(virtual_ranks=)`.
            parameters: initial values by name, in the order in which the model uses them. All are on the CPU or all on
                one GPU, and all have the same floating dtype. They are copied.
            optimizer: its weight decay, if any, applies to parameters of two and more dimensions.
            precision: the name in PRECISIONS of the dtype in which the function computes, for float32 parameters.
                Gradients may be passed on in this dtype or in float32. Default: the dtype of the parameters.
            loss_scale: default for fp16: `LossScale()`. Default for other precisions: none, so NaN or infinity in a
                gradient is an error.

        Raises:
            ConfigError: there are no parameters, or they have several dtypes or places; or the precision does not
                exist, or does not fit the parameters.
        """
        self._function = function
        try:
            self._parameter = inspect.signature(function).parameters.get("random")
        except (TypeError, ValueError):  # a function of a C extension may have no signature
            self._parameter = None
        self._random: numpy.random.Generator | None = None  # that of the current virtual rank
        self._optimizer: Optimizer = optimizer
        narrow = narrow_dtype(precision, {name: value.dtype for name, value in parameters.items()})
        self._loss_scale = LossScale() if loss_scale is None and narrow == numpy.float16 else loss_scale
        for name, value in parameters.items():
            check_class(value, f"parameter {name}")
        values = list(parameters.values())
        if len({(value.dtype, is_device_array(value)) for value in values}) != 1:
            given = ", ".join(f"{name} {value.dtype}" for name, value in parameters.items()) or "none"
            raise ConfigError(f"parameters must be of one dtype, all on the CPU or all on one GPU: {given}")
        plan = plan_layout([Parameter(name, value.shape, value.dtype) for name, value in parameters.items()])
        self._layout = plan.parameters
        self._index = {parameter.name: index for index, parameter in enumerate(plan.parameters)}
        dtype, count = next(iter(plan.counts.items()))
        self._flat = namespace(values[0]).empty(count, dtype)
        views = plan.views({dtype: self._flat})
        for view, value in zip(views, values, strict=True):
            view[...] = value
        self._views: dict[str, Array] = dict(zip(self._index, views, strict=True))
        self._places = plan.places
        self._narrow: Array = None if narrow is None else namespace(self._flat).empty(count, narrow)
        # The views that the function gets. The layout's dtype is that of the copy's flat buffer.
        self._seen = (
            self._views if narrow is None else dict(zip(self._index, plan.views({dtype: self._narrow}), strict=True))
        )
        decayed = [slice(*place) for place, view in zip(plan.places, views, strict=True) if len(view.shape) > 1]
        optimizer.start(self._flat, decayed)

    @property
    def layout(self) -> Sequence[Parameter]:
        """See Adapter."""
        return self._layout

    @property
    def loss_scale(self) -> LossScale | None:
        """See Adapter."""
        return self._loss_scale

    @property
    def precision(self) -> numpy.dtype:
        """See Adapter."""
        seen: numpy.dtype = (self._flat if self._narrow is None else self._narrow).dtype
        return seen

    def parameters(self) -> dict[str, Array]:
        """See Adapter. Each call returns a new dict of the same views."""
        return dict(self._views)

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """See Adapter."""
        for name, view in self._views.items():
            view[...] = like(values[name], view) if isinstance(values[name], numpy.ndarray) else values[name]

    def loss_and_gradients(self, batch: Tree, on_gradient: OnGradient) -> float:
        """See Adapter. A batch on the CPU is copied to the device of the parameters."""
        if self._narrow is not None:
            # This is done here, not after the optimizer's step, so that any other change of the parameters counts too.
            with numpy.errstate(over="ignore"):  # a value that is infinite in fp16 shows up in the loss
                self._narrow[...] = self._flat
        if self._narrow is not None or is_device_array(self._flat):
            values = (self._as_seen(leaf) for _, leaf in leaves(batch))
            batch = rebuild(batch, values.__next__)

        def hand_in(name: str, gradient: Array) -> None:
            if name not in self._index:
                raise GradientError(
                    f"a gradient was handed in for {name!r}; the parameters are {', '.join(self._index)}"
                )
            if gradient is None:
                raise GradientError(f"the gradient of {name} is None; hand in zeros if the batch does not use it")
            if self._narrow is not None and getattr(gradient, "dtype", None) == self._narrow.dtype:
                gradient = gradient.astype(self._flat.dtype)  # exact
            on_gradient(self._index[name], gradient)

        more: dict[str, Any] = {} if self._loss_scale is None else {"loss_scale": self._loss_scale.value}
        if self._parameter is not None and self._random is not None:
            more["random"] = self._random
        elif self._parameter is not None and self._parameter.default is inspect.Parameter.empty:
            raise GradientError(
                "the function has a parameter `random`, the generator of a virtual rank, but there are no "
                "virtual ranks; train with mt.Sync(virtual_ranks=...), or give the parameter a default"
            )
        if self._narrow is None:
            return float(self._function(self._seen, batch, hand_in, **more))
        with numpy.errstate(over="ignore", invalid="ignore"):  # the exchange finds these; the loss scale handles them
            return float(self._function(self._seen, batch, hand_in, **more))

    def _as_seen(self, leaf: Leaf) -> Leaf:
        """Return a leaf of a batch as the function gets it. Rounding before the copy to the GPU halves the size of the
        copy."""
        if self._narrow is not None and is_array(leaf) and leaf.dtype.kind == "f":
            with numpy.errstate(over="ignore"):
                leaf = leaf.astype(self._narrow.dtype)
        return leaf if is_device_array(leaf) else like(leaf, self._flat)

    @contextmanager
    def seeded(self, key: tuple[int, ...]) -> Iterator[None]:
        """See SeededAdapter: this seeds the generator that the function gets, not NumPy's global one."""
        self._random = numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence(key)))
        try:
            yield
        finally:
            self._random = None

    def note(self) -> None:
        """See Adapter. There is no note."""

    def apply_gradients(self, flats: Mapping[numpy.dtype, Array], remarks: Remarks) -> float:
        """See Adapter."""
        gradients = flats[self._flat.dtype]
        return self._optimizer.update(gradients if is_device_array(gradients) else like(gradients, self._flat))

    def scale_next_rate(self, factor: float) -> None:
        """Make the next `apply_gradients` multiply its learning rate by this finite number of at least 0.

        Raises:
            ConfigError: the optimizer is not one of mpitrain's, and has no method scale_next_rate(factor).
        """
        optimizer: Any = self._optimizer
        if not hasattr(optimizer, "scale_next_rate"):
            raise ConfigError(
                f"{type(optimizer).__name__} has no method scale_next_rate(factor), so the learning rate of one step "
                "cannot be scaled; mt.optim.SGD, mt.optim.Adam and mt.optim.AdamW have it"
            )
        optimizer.scale_next_rate(factor)

    def divisions(self, num_servers: int) -> tuple[Division, Division]:
        """See DividedAdapter: evenly, so that a large parameter is on several servers."""
        division = divide(plan_layout(self._layout), num_servers)
        return division, division

    def dividable_optimizer(self) -> str:
        """See DividedAdapter.

        Raises:
            ConfigError: the optimizer is not one of mpitrain's, and cannot update a part.
        """
        if not hasattr(self._optimizer, "update_only"):
            raise ConfigError(
                f"{type(self._optimizer).__name__} has no method update_only(part, norm_of_all), so it cannot be "
                "divided between servers; mt.optim.SGD, mt.optim.Adam and mt.optim.AdamW can. Start one server"
            )
        return described(self._optimizer)

    def update_only(self, number: int, num_servers: int, norm_of_all: Callable[[float], float]) -> None:
        """See DividedAdapter."""
        self.dividable_optimizer()
        optimizer: Any = self._optimizer
        self._parts = [part[self._flat.dtype] for part in self.divisions(num_servers)[0].parts]
        optimizer.update_only(self._parts[number], norm_of_all)

    def plan_update(self) -> dict[str, Any]:
        """See DividedAdapter."""
        optimizer: Any = self._optimizer
        plan: dict[str, Any] = optimizer.plan_update()
        return plan

    def follow_plan(self, plan: Mapping[str, Any]) -> None:
        """See DividedAdapter."""
        optimizer: Any = self._optimizer
        optimizer.follow_plan(plan)

    def part_state(self, number: int) -> dict[str, Any]:
        """See DividedAdapter: `parameters` and the buffers of the optimizer, flat."""
        state = self._optimizer.state().items()
        flats = {"parameters": self._flat, **{name: value for name, value in state if not isinstance(value, int)}}
        return {name: flat[self._parts[number]] for name, flat in flats.items()}

    def take_part_state(self, number: int, state: Mapping[str, Any], gone: Sequence[str]) -> None:
        """See DividedAdapter."""
        for name, flat in self.part_state(number).items():
            if name in state:
                flat[...] = like(state[name], flat)

    def shard(self, owned: Owned, norm_of_all: Callable[[float], float]) -> OptimizerShard:
        """See ShardedAdapter."""
        self._optimizer = shard = ArrayShard(self._optimizer, self._flat, owned[self._flat.dtype], norm_of_all)
        return shard

    def measure_gradient_norm(self) -> None:
        """See Adapter."""
        self._optimizer.measure_gradient_norm()

    def gradient_norm(self) -> float | None:
        """See Adapter."""
        return self._optimizer.gradient_norm()

    def state(self) -> dict[str, Any]:
        """See Adapter. The state has `parameters`, `optimizer` (its step, and its buffers by parameter name) and, if
        there is one, `loss_scale`.

        The parameters are in float32, whatever the precision.
        """
        optimizer: dict[str, Any] = {}
        for key, value in self._optimizer.state().items():
            optimizer[key] = value if isinstance(value, int) else self._by_name(value)
        state = {"parameters": self.parameters(), "optimizer": optimizer}
        return state if self._loss_scale is None else {**state, "loss_scale": self._loss_scale.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Adapter.

        The state may come from another precision. A state without a loss scale leaves the current one unchanged.
        """
        check_fits("parameters", state["parameters"], self._views)
        scale = state.get("loss_scale") if self._loss_scale else None
        if self._loss_scale and scale is not None:
            self._loss_scale.check(scale)
        optimizer: dict[str, Any] = {}
        for key, value in state["optimizer"].items():
            if isinstance(value, int):
                optimizer[key] = value
                continue
            check_fits(key, value, self._views)
            optimizer[key] = namespace(self._flat).concatenate(
                [like(value[name], self._flat).ravel() for name in self._views]
            )
        self._optimizer.restore(optimizer)
        self.load_parameters(state["parameters"])
        if self._loss_scale and scale is not None:
            self._loss_scale.restore(scale)

    def _by_name(self, flat: Array) -> dict[str, Array]:
        return {
            name: flat[slice(*place)].reshape(self._views[name].shape)
            for name, place in zip(self._views, self._places, strict=True)
        }


def narrow_dtype(precision: str | None, dtypes: Mapping[str, numpy.dtype]) -> numpy.dtype | None:
    """Return the 16-bit dtype in which a model computes, if any. `dtypes` are those of the parameters by name.

    Raises:
        ConfigError: there is no such precision, or it does not fit the parameters.
    """
    if precision is None:
        return None
    if precision not in PRECISIONS:
        raise ConfigError(f"there is no precision {precision!r}; known: {', '.join(PRECISIONS)}")
    for name, dtype in dtypes.items():
        if dtype != numpy.float32:
            raise ConfigError(f"precision={precision}: {name} is {dtype}; parameters are kept in float32")
    return PRECISIONS[precision]
