"""The gradients of one unit: collected by a worker, coded for the wire, and checked by the server."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from mpitrain.arrays import Array, is_device_array
from mpitrain.compression import make_codec, power_sgd
from mpitrain.compression.codec import Codec
from mpitrain.errors import ConfigError, GradientError, MissingGradientError
from mpitrain.reducer.bucket import Layout
from mpitrain.reducer.checks import check_gradient
from mpitrain.reducer.division import Division, Part, counts_of, members
from mpitrain.reducer.means import Told
from mpitrain.server.wire import MOST_HEADER_BYTES

_CODED = numpy.dtype("float32")  # the only dtype that codecs take


@dataclass(frozen=True)
class Answer:
    """What a worker reports about its unit, besides the gradients.

    Attributes:
        loss: the mean loss.
        scale: the loss scale by which the gradients are multiplied.
        version: of the parameters with which the gradients were computed.
        told: the parameters that the loss does not depend on, and the note of the adapter.
    """

    loss: float
    scale: float
    version: int
    told: Told


class GradientBuffer:
    """Collects the gradients of one unit on a worker. It keeps its codec's residual, and adds it to the next unit's
    gradients."""

    def __init__(self, division: Division, codec: Codec | None, name: str) -> None:
        """`name` is the worker's name, for errors."""
        layout = self._layout = division.layout
        self._parts = division.parts
        self._codec, self._name = codec, name
        self._flats = {dtype: numpy.zeros(count, dtype) for dtype, count in layout.counts.items()}
        self._views = layout.views(self._flats)
        self._residual, self._scale = numpy.zeros(layout.counts.get(_CODED, 0), _CODED), 1.0
        self.begin()

    def begin(self) -> None:
        """Begin a unit."""
        self._missing = set(range(len(self._views)))
        self._unused: list[int] = []

    def take(self, index: int, gradient: Array | None) -> None:
        """Accept one gradient; see OnGradient.

        Raises:
            GradientError: it has another shape or dtype, or was already passed.
        """
        if index not in self._missing:
            raise GradientError(
                f"{self._name}: the gradient of {self._layout.parameters[index].name} was handed in twice in one step"
            )
        if gradient is None:
            self._unused.append(index)
            self._views[index][...] = 0
        else:
            check_gradient(self._name, self._layout.parameters[index], gradient)
            self._views[index][...] = on_host(gradient)
        self._missing.remove(index)

    def finish(self, scale: float) -> tuple[list[int], list[list[numpy.ndarray]]]:
        """Return the parameters that the loss does not depend on, and the arrays for each server, one for each dtype.

        Args:
            scale: the loss scale by which the gradients of this unit are multiplied. It may differ from unit to unit.

        Raises:
            MissingGradientError: a gradient is missing.
        """
        if self._missing:
            raise MissingGradientError(
                f"{self._name} ended its backward pass without the gradient of "
                f"{self._layout.parameters[min(self._missing)].name}; pass zeros for a parameter that a batch "
                "does not use"
            )
        self._residual *= _CODED.type(scale / self._scale)
        self._scale = scale
        arrays = [[self._coded(dtype, own) for dtype, own in part.items()] for part in self._parts]
        return sorted(self._unused), arrays

    def _coded(self, dtype: numpy.dtype, own: slice) -> numpy.ndarray:
        flat = self._flats[dtype][own]
        if self._codec is None or dtype != _CODED:
            return flat
        wire, residual = numpy.empty(self._codec.wire_bytes(flat.size), numpy.uint8), self._residual[own]
        residual += flat
        self._codec.encode(residual, wire, error=residual)
        return wire


def on_host(value: Array) -> numpy.ndarray:
    """Return a CPU array itself, or a CPU copy of a GPU array."""
    host: numpy.ndarray = value.get() if is_device_array(value) else value
    return host


def codec_of(compression: str) -> Codec | None:
    """Return the codec for pushes; None: they are not compressed. All workers and the server have the same setting.

    Raises:
        ConfigError: `compression` is "auto", for which there is no measured profile here, or power_sgd.
    """
    if compression == "none":
        return None
    if compression.partition(":")[0] == power_sgd.NAME:
        raise ConfigError(
            f"compression={compression} needs two sums over the ranks, but a server does not sum with its workers; "
            "name a codec, as in MPITRAIN_COMPRESSION=int8, or leave it out"
        )
    if compression == "auto":
        raise ConfigError(
            "compression=auto chooses a codec from the links between nodes, but a server does not know the "
            "links to its workers; name a codec, as in MPITRAIN_COMPRESSION=int8, or leave it out"
        )
    return make_codec(compression)


def read_gradients(
    arrays: Sequence[numpy.ndarray], part: Part, codec: Codec | None
) -> dict[numpy.dtype, numpy.ndarray]:
    """Read a part of the gradients of a unit from a worker's message. Its content is not trusted.

    Raises:
        GradientError: the message does not belong to this model; the text says what does not fit.
    """
    counts = counts_of(part)
    if len(arrays) != len(counts):
        raise GradientError(f"{len(arrays)} arrays of gradients came; allowed are {len(counts)}")
    flats = {}
    for (dtype, count), array in zip(counts.items(), arrays, strict=True):
        kind: tuple[Any, tuple[int, ...]] = dtype, (count,)
        is_coded = codec is not None and dtype == _CODED
        if codec is not None and is_coded:
            kind = numpy.dtype("uint8"), (codec.wire_bytes(count),)
        if (array.dtype, array.shape) != kind:
            raise GradientError(f"gradients {array.dtype}{array.shape} came; allowed are {kind[0]}{kind[1]}")
        flats[dtype] = array
        if codec is not None and is_coded:
            flats[dtype] = numpy.empty(count, dtype)
            if not codec.is_valid(array, flats[dtype]):
                raise GradientError(f"gradients of {codec.name} came for places that do not exist")
            codec.decode(array, flats[dtype])
    return flats


def read_answer(fields: Mapping[str, Any], num_parameters: int) -> Answer:
    """Read the answer to a unit. Its content is not trusted.

    Raises:
        GradientError: the message does not belong to this model; the text says what does not fit.
    """
    try:
        unused, version = tuple(_whole(index) for index in fields["unused"]), _whole(fields["version"])
        loss, scale = _real(fields["loss"]), _real(fields["scale"])
        note = read_note(fields["note"])
        check_told((unused, note))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise GradientError(
            f"the answer to a work unit is incomplete or malformed: {type(error).__name__}: {error}"
        ) from None
    if not all(0 <= index < num_parameters for index in unused) or not scale >= 1 or math.isinf(scale):
        raise GradientError(
            f"unused={str(unused)[:100]} scale={scale} came; allowed are indices of parameters, and 1 or above"
        )
    return Answer(loss, scale, version, (unused, note))


def _whole(value: Any) -> int:
    if type(value) is not int:  # True is an int for isinstance
        raise TypeError(f"{str(value)[:100]} is no int")
    return value


def _real(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{str(value)[:100]} is not a number")
    return float(value)


def first_not_finite(flats: Mapping[numpy.dtype, numpy.ndarray], layout: Layout, part: Part) -> str:
    """Return the name of the first parameter with NaN or infinity in this part of the gradients; "": there is none."""
    if all(bool(numpy.isfinite(flat).all()) for flat in flats.values()):
        return ""
    for index, _, place in members(layout, part):
        if not numpy.isfinite(flats[layout.parameters[index].dtype][place]).all():
            return layout.parameters[index].name
    raise AssertionError("all gradients are finite")


def mean_of(
    gradients: Sequence[Mapping[numpy.dtype, numpy.ndarray]], shares: Sequence[float]
) -> dict[numpy.dtype, numpy.ndarray]:
    """Return the weighted mean of gradients, added up in this order."""
    means = {}
    for dtype, first in gradients[0].items():
        mean = first.copy() if shares[0] == 1.0 else first * dtype.type(shares[0])
        for flats, share in zip(gradients[1:], shares[1:], strict=True):
            mean += flats[dtype] * dtype.type(share)
        means[dtype] = mean
    return means


def plain_told(told: Told) -> list[Any]:
    """Return a worker's remarks as JSON values. Raises as `plain_note`."""
    unused, note = told
    return [list(unused), plain_note(note)]


def read_told(plain: Sequence[Any]) -> Told:
    """The reverse of `plain_told`."""
    unused, note = plain
    return tuple(unused), read_note(note)


def check_told(told: Told) -> None:
    """Raise ConfigError if the remarks are too long for a message between servers."""
    length = len(json.dumps(plain_told(told)))
    if length > MOST_HEADER_BYTES // 2:
        raise ConfigError(
            f"the note of the adapter, with the parameters that its loss does not depend on, takes {length} bytes as "
            f"JSON; allowed are {MOST_HEADER_BYTES // 2}"
        )


def plain_note(note: Any) -> Any:
    """Return an adapter's note as JSON values.

    Raises:
        ConfigError: it holds something other than numbers, texts, bytes, None, and lists or tuples of these.
    """
    if isinstance(note, bytes):
        return {"bytes": base64.b64encode(note).decode()}
    if isinstance(note, tuple | list):
        return {type(note).__name__: [plain_note(part) for part in note]}
    if note is None or isinstance(note, bool | int | float | str):
        return note
    raise ConfigError(
        f"the note of the adapter holds a {type(note).__name__}; a worker can send numbers, texts, bytes, None, and "
        "lists and tuples of them"
    )


def read_note(plain: Any) -> Any:
    """The reverse of `plain_note`. Raises ValueError if the value is malformed."""
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind == "bytes":
        return base64.b64decode(value, validate=True)
    if kind not in ("tuple", "list"):
        raise ValueError(f"a note of kind {kind!r}")
    parts = [read_note(part) for part in value]
    return tuple(parts) if kind == "tuple" else parts
