"""Exchanges inside jit: one ordered callback for all leaves of a pytree.

XLA calls the callbacks from one of its threads, when the computation reaches them, in the order in which the program
was traced. A direct call of the program waits until all earlier callbacks are done (Control.settle). So ranks that
compute at different speeds still make their calls in the same order.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import TracebackType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy
from jax.experimental import io_callback

from mpitrain.allreduce.algorithm import DTYPES, FLOATS
from mpitrain.errors import ConfigError, TreeError
from mpitrain.exchange.driver import allows_threads
from mpitrain.jax.leaves import Leaf, check
from mpitrain.job.start import init
from mpitrain.world import World

_here = threading.local()  # `inside`: this thread is in a callback
_failed: list[BaseException] = []  # the error of the last callback that failed
_leaving: list[bool] = []  # not empty: the program is ending, because a callback asked for it


_new_array = jax.jit(lambda: jnp.zeros((), bool))


def is_traced(values: Sequence[Leaf]) -> bool:
    """True if JAX is tracing now, so that nothing can be exchanged yet.

    JAX may be tracing even if none of the values is traced. Every run of the program must also exchange constants.
    """
    return any(isinstance(value, jax.core.Tracer) for value in values) or isinstance(_new_array(), jax.core.Tracer)


def exchange(operation: str, names: Sequence[str], values: Sequence[Leaf], weight: Any) -> list[Leaf]:
    """Call World.sum or World.mean, as `operation` says, with NumPy arrays and numbers by name."""
    world, tree = init(), dict(zip(names, values, strict=True))
    results = world.sum(tree) if operation == "sum" else world.mean(tree, float(weight))
    return [results[name] for name in names]


def in_callback(operation: str, names: Sequence[str], arrays: list[jax.Array], weight: Any) -> list[jax.Array]:
    """Make the same exchange a part of the computation that is being traced.

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
    """Tell `mpitrain verify` of parameters, as a part of the computation that is being traced."""
    io_callback(partial(_told, tuple(names)), (), arrays, ordered=True)


def _told(names: Sequence[str], arrays: Sequence[Leaf]) -> tuple[()]:
    observer = init().observer
    assert observer is not None
    observer.saw_parameters({name: numpy.asarray(array) for name, array in zip(names, arrays, strict=True)})
    return ()


def _callback(
    work: Callable[[list[Leaf], Any], list[Leaf]], weight: Any, arrays: Sequence[Leaf], weights: Sequence[Leaf]
) -> list[Leaf]:
    _here.inside = True
    try:
        return work([numpy.asarray(one) for one in arrays], weights[0] if weights else weight)
    except BaseException as error:
        _failed[:] = [error]
        raise
    finally:
        _here.inside = False


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
    """Report a callback's own error in place of JAX's from now on. Only the first call does something."""
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
        _leave()  # SystemExit from this hook ends Python too
    if _failed and isinstance(error, jax.errors.JaxRuntimeError) and str(_failed[0]) in str(error):
        kind, error = type(_failed[0]), _failed[0].with_traceback(trace)
    previous(kind, error, trace)


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and record.exc_info[1] in _failed)
