"""Any Python value as a state that a copy in memory can hold: its arrays and tensors, and a pickle of all the rest.

The arrays are not copied: they share memory with the value, so a large model is copied once, into its slot.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy

from mpitrain.errors import CheckpointError
from mpitrain.training.checkpoint.tensors import NAMES


def pack(name: str, value: Any) -> dict[str, Any]:
    """Return `value` as nested dicts of host arrays. `name` is for the error.

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
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from arrays_in(f"{name}[{key!r}]", entry)
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from arrays_in(f"{name}[{number}]", entry)
    elif hasattr(value, "dtype") and len(getattr(value, "shape", "")):  # a number may become one of NumPy's
        yield name, f"{value.dtype} {tuple(value.shape)}"


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
