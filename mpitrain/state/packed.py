"""Any Python value as a state that an in-memory checkpoint can hold: its arrays and tensors, and a pickle of all the
rest.

The arrays are not copied: they share memory with the value, so a large model is copied only once, into its slot.
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy

from mpitrain.errors import CheckpointError
from mpitrain.state.tensors import NAMES


def pack(name: str, value: Any) -> dict[str, Any]:
    """Return `value` as nested dicts of CPU arrays. `name` is for the error.

    Raises:
        CheckpointError: a part of the value cannot be pickled.
    """
    file = io.BytesIO()
    packer = _Packer(file, protocol=5)
    try:
        packer.dump(value)
    except Exception as error:  # whatever the value's own code raises
        raise CheckpointError(
            f"{name} cannot be kept: {error}. Allowed are arrays, tensors and all that pickle can write"
        ) from None
    arrays = {str(number): array for number, array in enumerate(packer.arrays)}
    return {"pickle": numpy.frombuffer(file.getvalue(), numpy.uint8), "arrays": arrays}


def unpack(packed: Mapping[str, Any]) -> Any:
    """Reverse `pack`. The value takes the memory of the arrays in `packed`."""
    return _Unpacker(packed["pickle"].tobytes(), packed.get("arrays", {})).load()


def arrays_in(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield name, dtype and shape of each array and tensor in dicts, lists and tuples."""
    for place, leaf in _leaves_in(name, value):
        if hasattr(leaf, "dtype") and len(getattr(leaf, "shape", "")):  # a number may become one of NumPy's
            yield place, f"{leaf.dtype} {tuple(leaf.shape)}"


def lines_of(name: str, value: Any) -> Iterator[str]:
    """Yield a line for each array, tensor, number and text in dicts, lists and tuples: equal lines mean equal values.

    Of other objects it has only the type, because equal objects may have different pickles.
    """
    for place, leaf in _leaves_in(name, value):
        plain = leaf.item() if isinstance(leaf, numpy.generic) else leaf
        array = leaf if isinstance(leaf, numpy.ndarray) else _array_of_tensor(leaf)
        if array is not None and not array.dtype.hasobject:
            bits = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
            yield f"{place} is {leaf.dtype} {tuple(leaf.shape)}, checksum {zlib.crc32(bits.data):08x}"
        elif plain is None or isinstance(plain, bool | int | float | complex | str | bytes):
            yield f"{place} is {plain!r}"
        else:
            yield f"{place} is a {type(leaf).__name__}"


def _leaves_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what dicts, lists and tuples hold, with its place."""
    if isinstance(value, Mapping):
        for number, (key, entry) in enumerate(value.items()):
            # The text of any other object may have its address, which differs by rank.
            shown = repr(key) if isinstance(key, int | str | bytes) else f"key {number}"
            yield from _leaves_in(f"{name}[{shown}]", entry)
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from _leaves_in(f"{name}[{number}]", entry)
    else:
        yield name, value


class _Packer(pickle.Pickler):
    """Writes arrays and tensors as numbers. `arrays` has them."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.arrays: list[numpy.ndarray] = []
        self._written: dict[int, tuple[Any, tuple[str, int]]] = {}  # by id; the object stays alive, and so its id

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        if id(value) in self._written:
            return self._written[id(value)][1]
        kind, array = "array", value
        if type(value) is not numpy.ndarray:
            array = _array_of_tensor(value)
            if array is None:
                return None
            kind = "tensor"
        if array.dtype not in NAMES:
            return None
        place = kind, len(self.arrays)
        self._written[id(value)] = value, place
        self.arrays.append(array)
        return place


class _Unpacker(pickle.Unpickler):
    def __init__(self, content: bytes, arrays: Mapping[str, numpy.ndarray]) -> None:
        super().__init__(io.BytesIO(content))
        self._arrays = arrays

    def persistent_load(self, place: tuple[str, int]) -> Any:
        kind, number = place
        array = self._arrays[str(number)]
        if kind == "array":
            return array
        from mpitrain.adapters.torch_arrays import tensor_of

        return tensor_of(array)


def _array_of_tensor(value: Any) -> numpy.ndarray | None:
    """An array over the memory of a plain tensor on the host; None: pickle writes this value itself."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor or value.requires_grad or value.device.type != "cpu":
        return None
    from mpitrain.adapters.torch_arrays import array_of

    try:
        return array_of(value)
    except (TypeError, RuntimeError):  # NumPy has no such dtype or layout
        return None
