"""Exchanges inside jit: one ordered callback for all leaves of a pytree; vmap; derivatives.

XLA calls the callbacks from one of its threads, when the computation reaches them, in the order in which the program
was traced. A direct call of the program waits until all earlier callbacks are done (Control.settle). So ranks that
compute at different speeds still make their calls in the same order.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import TracebackType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy
from jax._src.effects import remat_allowed_effects
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpitrain.allreduce.algorithm import DTYPES, FLOATS
from mpitrain.errors import ConfigError, TreeError
from mpitrain.jax.leaves import Leaf, back, check, on_host
from mpitrain.job.start import init
from mpitrain.reducer.driver import allows_threads
from mpitrain.world.world import World

_COPY_SECONDS = 60.0  # a copy within memory takes far less, however busy the machine is
_NAP_SECONDS = 1e-4

_here = threading.local()  # `inside`: whether this thread is in a callback
_failed: list[BaseException] = []  # the error of the last callback that failed
_leaving: list[bool] = []  # not empty: the program is ending, because a callback asked for it


_new_array = jax.jit(lambda: jnp.zeros((), bool))


def is_traced(values: Sequence[Leaf]) -> bool:
    """True if JAX is tracing now, so that nothing can be exchanged yet.

    JAX may be tracing even if none of the values is traced: every run of the program must also exchange constants.
    """
    return any(isinstance(value, jax.core.Tracer) for value in values) or isinstance(_new_array(), jax.core.Tracer)


def in_callback(
    exchange: Callable[..., list[Leaf]], operation: str, names: Sequence[str], arrays: list[jax.Array], weight: Any
) -> list[jax.Array]:
    """Make an exchange a part of the computation that is being traced.

    Raises:
        TreeError: a leaf has a dtype that is not allowed.
        ConfigError: MPI may not be called from XLA's threads.
    """
    world, is_mean = init(), operation == "mean"
    for name, array in zip(names, arrays, strict=True):
        check(name, array)
        if array.dtype not in (FLOATS if is_mean else DTYPES):
            allowed = ", ".join(str(dtype) for dtype in (FLOATS if is_mean else DTYPES))
            raise TreeError(f"{operation} of {name}: its dtype is {array.dtype}; allowed are {allowed}")
    is_known = not isinstance(weight, jax.Array)
    if world.size == 1 and is_known and world.observer is None and world.watch is None:
        exchange("mean", [], [], weight)  # this checks the weight
        return arrays
    return as_callback(partial(exchange, operation, tuple(names)), arrays, weight)


def as_callback(work: Callable[[list[Leaf], Any], list[Leaf]], arrays: list[jax.Array], weight: Any) -> list[jax.Array]:
    """Make `work(arrays, weight)` a part of the computation that is being traced. Its results are like `arrays`.

    Raises:
        ConfigError: MPI may not be called from XLA's threads.
    """
    _prepare(init())
    is_known = not isinstance(weight, jax.Array)
    callback = partial(_callback, work, weight if is_known else None)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    results: list[jax.Array] = io_callback(callback, shapes, arrays, [] if is_known else [weight], ordered=True)
    return results


def tell_in_callback(names: Sequence[str], arrays: list[jax.Array]) -> None:
    """Report parameters to `mpitrain verify`, as a part of the computation that is being traced."""
    io_callback(partial(_told, tuple(names)), (), arrays, ordered=True)


def _told(names: Sequence[str], arrays: Sequence[Leaf]) -> tuple[()]:
    observer = init().observer
    assert observer is not None
    observer.saw_parameters(dict(zip(names, _copied(arrays), strict=True)))
    return ()


def _callback(
    work: Callable[[list[Leaf], Any], list[Leaf]], weight: Any, arrays: Sequence[Leaf], weights: Sequence[Leaf]
) -> list[Leaf]:
    _here.inside = True
    try:
        return work(_copied(arrays), _copied(weights)[0] if weights else weight)
    except BaseException as error:
        _failed[:] = [error]
        raise
    finally:
        _here.inside = False


def _copied(arrays: Sequence[Leaf]) -> list[numpy.ndarray]:
    """Return a callback's arrays as NumPy arrays.

    JAX copies them in a thread of XLA, while this callback occupies another one: with a single thread, this would wait
    for ever.

    Raises:
        ConfigError: XLA's threads do not copy them.
    """
    deadline = time.monotonic() + _COPY_SECONDS
    while not all(one.is_ready() for one in arrays):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{init().name()}: for {_COPY_SECONDS:.0f} s, no thread of XLA has copied the arrays of an exchange "
                f"inside jit. PJRT_NPROC is {os.environ.get('PJRT_NPROC')}; XLA needs 2 threads or more: set it to 2, "
                "or call mpitrain.init() before JAX makes its first array. If callbacks of your own take all of XLA's "
                "threads, set it higher"
            )
        time.sleep(_NAP_SECONDS)
    return [numpy.asarray(one) for one in arrays]


def _prepare(world: World) -> None:
    """Prepare a World for its first callback."""
    if world.size > 1 and not allows_threads():
        raise ConfigError(
            f"{world.name()}: inside jit, MPI is called from XLA's threads, but MPI was initialised without "
            "MPI_THREAD_MULTIPLE; let mpitrain.init() initialise it, or exchange outside jit"
        )
    if _settle not in world.control.elsewhere:
        world.control.elsewhere.append(_settle)
    _tell_causes()


@cache
def _tell_causes() -> None:
    """From now on, report a callback's own error in place of JAX's. Only the first call has an effect."""
    sys.excepthook = partial(_uncaught, sys.excepthook)
    # JAX logs each exception of a callback on every rank, and also raises it.
    logging.getLogger("jax._src.callback").addFilter(_is_news)


def _settle() -> None:
    if not getattr(_here, "inside", False):
        try:
            jax.effects_barrier()
        except jax.errors.JaxRuntimeError:
            if not _has_ended():
                raise
            if not _leaving:
                _leave()


def _has_ended() -> bool:
    """True if a callback has ended the program, because `mpitrain verify` has seen enough."""
    return bool(_failed) and isinstance(_failed[0], SystemExit)


def _leave() -> NoReturn:
    """End the program as the callback asked. JAX has turned its exception into another error."""
    _leaving.append(True)
    raise _failed[0] from None


def _uncaught(previous: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report the callback's error: JAX raises another error in its place, with its text."""
    if isinstance(error, jax.errors.JaxRuntimeError) and _has_ended():
        sys.last_value = sys.last_traceback = None  # the end of a run, not a failure that a hook has hidden
        _leave()  # SystemExit from this hook ends Python too
    if _failed and isinstance(error, jax.errors.JaxRuntimeError) and str(_failed[0]) in str(error):
        kind, error = type(_failed[0]), _failed[0].with_traceback(trace)
    previous(kind, error, trace)


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and record.exc_info[1] in _failed)


@dataclass(frozen=True, eq=False)
class StagedCall:
    """A sum or a mean over ranks. Its operands are the leaves, and then the weight unless it is known."""

    exchange: Callable[..., list[Leaf]]
    operation: str
    names: tuple[str, ...]
    weight: Any
    is_derivative: bool = False

    @property
    def has_no_value(self) -> bool:
        """True for the derivative of a mean, which must not be computed. JAX may omit the call."""
        return self.is_derivative and self.operation == "mean"

    def refuse(self) -> NoReturn:
        raise TypeError(
            "a mean over ranks has no derivative here: put mean() around jax.value_and_grad(loss), or build the loss "
            "with mpitrain.jax.sum"
        )


def staged(call: StagedCall, arrays: list[jax.Array], weights: list[jax.Array]) -> list[jax.Array]:
    """Make an exchange a part of the computation that is being traced; if JAX has values, make it now."""
    results: list[jax.Array] = _exchange.bind(*arrays, *weights, call=call)
    return results


_exchange = Primitive("mpitrain_exchange")
_exchange.multiple_results = True


def _divided(call: StagedCall, operands: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return the leaves and the weight."""
    leaves = list(operands[: len(call.names)])
    return leaves, operands[-1] if len(operands) > len(leaves) else call.weight


def _now(*operands: Any, call: StagedCall) -> list[Any]:
    if call.has_no_value:
        call.refuse()
    leaves, weight = _divided(call, operands)

    def exchanged() -> list[Any]:
        return back(call.exchange(call.operation, call.names, on_host(call.names, leaves), weight), leaves)

    if not call.is_derivative:
        return exchanged()
    with init().same_call("derivative of mpitrain.jax.sum"):
        return exchanged()


def _in_jit(*operands: Any, call: StagedCall) -> list[Any]:
    if call.has_no_value:
        call.refuse()
    leaves, weight = _divided(call, operands)
    return in_callback(call.exchange, call.operation, call.names, leaves, weight)


def _shapes(*operands: Any, call: StagedCall) -> tuple[list[Any], Any]:
    if call.has_no_value:
        return list(operands[: len(call.names)]), set()
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in operands]
    traced = jax.make_jaxpr(partial(_in_jit, call=call))(*shapes)
    for effect in traced.effects:
        remat_allowed_effects.add_type(type(effect))  # in jax.checkpoint, all ranks make the same exchanges twice
    return list(traced.out_avals), traced.effects


def _pushed(primals: Sequence[Any], tangents: Sequence[Any], call: StagedCall) -> tuple[list[Any], list[Any]]:
    """Forward mode: a sum's tangents are summed."""
    results = _exchange.bind(*primals, call=call)
    places = [place for place, one in enumerate(results) if jnp.issubdtype(one.dtype, jnp.inexact)]
    moved = list(tangents[: len(results)])
    if any(not isinstance(one, ad.Zero) for one in tangents):
        names = tuple(f"tangent of {call.names[place]}" for place in places)
        derivative = replace(call, names=names, weight=1.0, is_derivative=True)
        given = [ad.instantiate_zeros(tangents[place]) for place in places]
        for place, one in zip(places, _exchange.bind(*given, call=derivative), strict=True):
            moved[place] = one
    return results, moved


def _pulled(cotangents: Sequence[Any], *_: Any, call: StagedCall) -> list[Any]:
    """Reverse mode: a sum's cotangents are summed. Ranks may use different leaves: missing cotangents are zeros."""
    if call.operation == "mean":
        call.refuse()
    names = tuple(f"cotangent of {name.removeprefix('tangent of ')}" for name in call.names)
    given = [ad.instantiate_zeros(one) for one in cotangents]
    return list(_exchange.bind(*given, call=replace(call, names=names, is_derivative=True)))


def _mapped(operands: Sequence[Any], places: Sequence[Any], call: StagedCall) -> tuple[list[Any], list[Any]]:
    """Under vmap, the elements of a leaf are exchanged in one call."""
    of_leaves, of_weight = places[: len(call.names)], places[len(call.names) :]
    if any(place is not None for place in of_weight):
        raise TypeError(
            "vmap of a mean over ranks with a weight for each element: give one weight for all, or build the mean with "
            "mpitrain.jax.sum"
        )
    return _exchange.bind(*operands, call=call), list(of_leaves)


_exchange.def_impl(_now)
_exchange.def_effectful_abstract_eval(_shapes)
mlir.register_lowering(_exchange, mlir.lower_fun(_in_jit, multiple_results=True))
ad.primitive_jvps[_exchange] = _pushed
ad.primitive_transposes[_exchange] = _pulled
batching.primitive_batchers[_exchange] = _mapped
