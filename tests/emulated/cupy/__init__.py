"""CuPy without a GPU: device arrays in host memory, for tests of everything around the kernels.

In place of `cupy` where tests/emulated stands first on sys.path. It has the part of CuPy that mpitrain uses, and is
stricter than a GPU where that finds mistakes:

- what goes to a stream (copies, kernels, assignments) is done only when somebody waits for it: a stream, an event, or
  an operation whose result the host sees. Memory that is read or reused too early holds something else;
- a host array does not pass for a device array, nor the reverse, and numpy.asarray of a device array raises;
- an array of another device than the current one raises; the current device belongs to the thread, as in CUDA.

It says nothing about speed, about races between blocks, or about the real driver: tests/gpu is for those.
"""

from __future__ import annotations

import os
import types
from typing import Any

import numpy

from . import cuda
from .cuda import _current, _device

__version__ = "0.0 (emulated)"
float16, float32, float64 = numpy.float16, numpy.float32, numpy.float64
int8, int32, int64 = numpy.int8, numpy.int32, numpy.int64
uint8, uint16, uint32, uint64 = numpy.uint8, numpy.uint16, numpy.uint32, numpy.uint64
bool_, dtype, inf, nan, pi, newaxis = numpy.bool_, numpy.dtype, numpy.inf, numpy.nan, numpy.pi, None


class ndarray:
    """An array in emulated device memory."""

    __array_priority__ = 100

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None) -> None:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = numpy.dtype(dtype)
        num_bytes = int(numpy.prod(shape, dtype=numpy.int64)) * dtype.itemsize
        if memptr is None:
            memptr = cuda.alloc(num_bytes)
        if memptr.device_id != _device():
            raise ValueError(f"memory of device {memptr.device_id} while device {_device()} is current")
        buffer = memptr.mem._bytes[memptr._offset : memptr._offset + num_bytes]
        self._set(buffer.view(dtype).reshape(shape), memptr.mem)

    def _set(self, host: numpy.ndarray, mem: Any) -> None:
        self._host, self._mem = host, mem

    # Properties that are known without a look at the memory.
    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    strides = property(lambda self: self._host.strides)
    T = property(lambda self: _wrap(self._host.T, self._mem))

    @property
    def flags(self) -> Any:
        its = self._host.flags
        # CuPy has no `writeable`.
        return types.SimpleNamespace(c_contiguous=its.c_contiguous, f_contiguous=its.f_contiguous, owndata=its.owndata)

    @property
    def device(self) -> Any:
        return cuda.Device(self._mem.device_id)

    @property
    def data(self) -> Any:
        offset = self._host.__array_interface__["data"][0] - self._mem._bytes.__array_interface__["data"][0]
        return cuda.MemoryPointer(self._mem, offset)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # With EMULATED_AWARE=0 the address is invalid on the host, like a GPU's for an MPI that is not CUDA-aware.
        pointer = self.data.ptr if os.environ.get("EMULATED_AWARE", "1") == "1" else 0x7000
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (pointer, False), "version": 3}

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct one.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        return _call(function, inputs, options)

    def __array_function__(self, function: Any, _: Any, inputs: Any, options: Any) -> Any:
        return _call(function, inputs, options)

    def __len__(self) -> int:
        return len(self._host)

    def __getitem__(self, key: Any) -> Any:
        found = self._checked()._host[_host_key(key)]
        if isinstance(found, numpy.ndarray) and (found.size == 0 or _shares(found, self._host)):
            return _wrap(found, self._mem)
        _current()._drain()
        return _new(numpy.asarray(self._host[_host_key(key)]))

    def __setitem__(self, key: Any, value: Any) -> None:
        key, target = _host_key(key), self._checked()._host
        if isinstance(value, numpy.ndarray) and value.ndim > 0:
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        source = value._checked()._host if isinstance(value, ndarray) else value
        _current()._add(lambda: target.__setitem__(key, source))

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> numpy.ndarray:
        stream = stream or _current()
        host = numpy.empty(self.shape, self.dtype) if out is None else out
        if not isinstance(host, numpy.ndarray) or host.shape != self.shape or host.dtype != self.dtype:
            raise ValueError(f"out must be a NumPy array of {self.dtype} {self.shape}")
        if not (host.flags.c_contiguous and self._host.flags.c_contiguous) and out is not None:
            raise RuntimeError("out must be C-contiguous, and so must the array be")
        stream._add(lambda: numpy.copyto(host, self._host))
        if blocking:
            stream._drain()
        return host

    def set(self, arr: numpy.ndarray, stream: Any = None) -> None:
        if not isinstance(arr, numpy.ndarray):
            raise TypeError("only numpy.ndarray can be set to a device array")
        if arr.shape != self.shape or arr.dtype != self.dtype:
            raise ValueError(f"{arr.dtype} {arr.shape} cannot be set to {self.dtype} {self.shape}")
        stream = stream or _current()
        stream._add(lambda: numpy.copyto(self._host, arr))

    def fill(self, value: Any) -> None:
        host = self._checked()._host
        _current()._add(lambda: host.fill(value))

    def view(self, dtype: Any = None) -> ndarray:
        return _wrap(self._host.view() if dtype is None else self._host.view(dtype), self._mem)

    def reshape(self, *shape: Any) -> ndarray:
        if not self._host.flags.c_contiguous:  # otherwise it is a view, which waits for nothing
            _current()._drain()
        return _wrap(self._host.reshape(*shape), self._mem)

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def copy(self) -> ndarray:
        return _call(numpy.copy, (self,), {})

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        return self if not copy and self.dtype == dtype else _method(self, "astype", dtype)

    def tolist(self) -> Any:
        return self.get().tolist()

    def item(self) -> Any:
        return self.get().item()

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    def __index__(self) -> int:
        return self.get().__index__()

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return repr(self.get())

    def __format__(self, text: str) -> str:
        return format(self.item() if self.ndim == 0 else str(self), text)

    def _checked(self) -> ndarray:
        if self._mem.device_id != _device():
            raise ValueError(f"the array is on device {self._mem.device_id}, the current one is {_device()}")
        return self


METHODS = "sum mean max min all any argmax argsort transpose swapaxes squeeze dot clip take std var"
OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
for _name in METHODS.split():
    setattr(ndarray, _name, lambda self, *a, _name=_name, **k: _method(self, _name, *a, **k))
for _name in OPERATORS.split():
    for _form in (f"__{_name}__", f"__r{_name}__"):
        setattr(ndarray, _form, lambda self, other, _f=_form: _operator(self, _f, other))

    def _in_place(self: ndarray, other: Any, _form: str = f"__{_name}__") -> ndarray:
        result = _operator(self, _form, other)
        if result is NotImplemented:
            return result
        target, source = self._host, result._host
        numpy.copyto(target, source, casting="same_kind")
        return self

    setattr(ndarray, f"__i{_name}__", _in_place)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(ndarray, f"__{_name}__", lambda self, other, _f=f"__{_name}__": _operator(self, _f, other))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(ndarray, f"__{_name}__", lambda self, _f=f"__{_name}__": _method(self, _f))


def _operator(array: ndarray, form: str, other: Any) -> Any:
    if isinstance(other, numpy.ndarray) and other.ndim > 0:
        raise TypeError(f"Unsupported type {type(other)}")
    return _method(array, form, other)


def _method(array: ndarray, name: str, *inputs: Any, **options: Any) -> Any:
    return _call(lambda host, *a, **k: getattr(host, name)(*a, **k), (array, *inputs), options)


def _call(function: Any, inputs: Any, options: Any) -> Any:
    """Call NumPy's function on the memory, after all that the current stream has before it."""
    arrays = _found([*inputs, *options.values()])
    for array in arrays:
        array._checked()
    _current()._drain()
    out = options.get("out")
    with numpy.errstate(all="ignore"):
        result = function(*_plain(inputs), **{key: _plain(value) for key, value in options.items()})
    if out is not None:
        return out[0] if isinstance(out, tuple) else out
    if isinstance(result, tuple | list):
        return type(result)(_result(one, arrays) for one in result)
    return _result(result, arrays)


def _result(value: Any, arrays: list[ndarray]) -> Any:
    if not isinstance(value, numpy.ndarray | numpy.generic):
        return value
    for array in arrays:
        if isinstance(value, numpy.ndarray) and _shares(value, array._host):
            return _wrap(value, array._mem)
    return _new(numpy.asarray(value))


def _found(values: Any) -> list[ndarray]:
    """The device arrays in there. A host array among them is a mistake."""
    result = []
    for value in values:
        if isinstance(value, ndarray):
            result.append(value)
        elif isinstance(value, numpy.ndarray) and value.ndim > 0:
            raise TypeError(f"Unsupported type {type(value)}")
        elif isinstance(value, list | tuple):
            result += _found(value)
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, ndarray):
        return value._host
    return type(value)(_plain(one) for one in value) if type(value) in (list, tuple) else value


def _host_key(key: Any) -> Any:
    if isinstance(key, ndarray):
        return key.get()
    return tuple(_host_key(one) for one in key) if isinstance(key, tuple) else key


def _shares(one: numpy.ndarray, other: numpy.ndarray) -> bool:
    return one.size > 0 and numpy.may_share_memory(one, other)


def _wrap(host: numpy.ndarray, mem: Any) -> ndarray:
    array = ndarray.__new__(ndarray)
    array._set(host, mem)
    return array


def _new(host: numpy.ndarray) -> ndarray:
    array = ndarray(host.shape, host.dtype)
    array._host[...] = host
    return array


def array(value: Any, dtype: Any = None, copy: bool = True) -> ndarray:
    if isinstance(value, ndarray):
        found = value if dtype is None else value.astype(dtype, copy=False)
        return found.copy() if copy and found is value else found
    # Copy from the host at once, as for pageable memory.
    return _new(numpy.asarray(_plain(value), dtype))


def asarray(value: Any, dtype: Any = None) -> ndarray:
    return array(value, dtype, copy=False)


def ascontiguousarray(value: Any, dtype: Any = None) -> ndarray:
    return _call(numpy.ascontiguousarray, (asarray(value, dtype),), {})


def asnumpy(value: Any) -> numpy.ndarray:
    return value.get() if isinstance(value, ndarray) else numpy.asarray(value)


def empty(shape: Any, dtype: Any = float) -> ndarray:
    array = ndarray(shape, dtype)
    array._host.reshape(-1).view(numpy.uint8)[:] = 0xA5  # no zeros by chance
    return array


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return _new(numpy.zeros(shape, dtype))


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return _new(numpy.ones(shape, dtype))


def full(shape: Any, value: Any, dtype: Any = None) -> ndarray:
    return _new(numpy.full(shape, _plain(value), dtype))


def arange(*values: Any, **options: Any) -> ndarray:
    return _new(numpy.arange(*values, **options))


def empty_like(like: ndarray, dtype: Any = None) -> ndarray:
    return empty(like.shape, dtype or like.dtype)


def zeros_like(like: ndarray, dtype: Any = None) -> ndarray:
    return zeros(like.shape, dtype or like.dtype)


def copyto(target: ndarray, source: Any) -> None:
    if not isinstance(target, ndarray):
        raise TypeError("the target of copyto must be a cupy.ndarray")
    target[...] = source


def may_share_memory(one: ndarray, other: ndarray) -> bool:
    return _shares(one._host, other._host)


def is_available() -> bool:
    return cuda.is_available()


_pool = cuda.MemoryPool()


def get_default_memory_pool() -> cuda.MemoryPool:
    return _pool


def _as_strided(x: ndarray, shape: Any, strides: Any) -> ndarray:
    return _wrap(numpy.lib.stride_tricks.as_strided(x._host, shape, strides), x._mem)


lib = types.SimpleNamespace(stride_tricks=types.SimpleNamespace(as_strided=_as_strided))


RawModule = cuda.RawModule


def __getattr__(name: str) -> Any:
    function = getattr(numpy, name)
    if isinstance(function, types.ModuleType | type) or not callable(function):
        raise AttributeError(f"cupy.{name} is not emulated")

    def call(*inputs: Any, **options: Any) -> Any:
        return _call(function, inputs, options)

    return call
