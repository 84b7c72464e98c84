"""Checks of a call's tensors before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy
import torch

from mpitrain.allreduce.algorithm import Progress
from mpitrain.errors import MismatchError, everywhere
from mpitrain.waiting.control import until

if TYPE_CHECKING:
    from mpitrain.torch.work import Call
    from mpitrain.world.world import World


def kind(tensor: torch.Tensor) -> str:
    """Describe the tensor's dtype and device."""
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"


def count(tensor: torch.Tensor) -> str:
    """Describe the tensor's dtype, device and number of elements. Shapes may differ between ranks."""
    return f"{tensor.numel()} {kind(tensor)}"


def tensors(given: Sequence[torch.Tensor], *, dtypes: bool = True) -> None:
    """Check that all tensors can be sent, are on one device, and, with `dtypes`, have one dtype.

    Raises:
        TypeError: a tensor fails the check.
        ValueError: there are no tensors.
    """
    if not given:
        raise ValueError("there is no tensor; give at least one")
    for tensor in given:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{type(tensor).__name__} in place of a tensor; give a torch.Tensor, such as torch.tensor(x). Arrays "
                "and numbers are for mpitrain.horovod.numpy"
            )
        if tensor.layout != torch.strided:
            raise TypeError(f"a tensor of layout {tensor.layout}; use tensor.to_dense() first")
        if tensor.device.type not in ("cpu", "cuda"):
            raise TypeError(f"a tensor on {tensor.device}; it can be on cpu or cuda: use tensor.cpu()")
        if tensor.is_quantized:
            raise TypeError("a quantized tensor; use tensor.dequantize() or tensor.int_repr() first")
        if tensor.device != given[0].device:
            raise TypeError(f"tensors on {given[0].device} and on {tensor.device}; all must be on one device")
        if dtypes and tensor.dtype != given[0].dtype:
            raise TypeError(f"tensors of {given[0].dtype} and of {tensor.dtype}; all must be of one dtype")


def whole(tensor: torch.Tensor) -> None:
    """Raise TypeError for a tensor of a subclass, in a call whose result is a new tensor."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise TypeError(
            f"a {type(tensor).__name__}; the result would be a plain torch.Tensor, without what the class adds. Give "
            "x.as_subclass(torch.Tensor), or for a class with several tensors each of them"
        )


def peer(given: Sequence[torch.Tensor], rank: int, size: int, tag: int, largest_tag: int, where: str) -> torch.Tensor:
    """Check the arguments of a send or recv, and return its only tensor.

    Raises:
        TypeError, ValueError: the tensor, the rank or the tag is not allowed.
    """
    if len(given) != 1:
        raise ValueError(f"{where}: {len(given)} tensors; give one")
    try:
        tensors(given)
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from None
    if not 0 <= rank < size:
        raise ValueError(f"{where}: rank {rank}; ranks of the group are 0 to {size - 1}")
    if not 0 <= tag <= largest_tag:
        raise ValueError(f"{where}: tag {tag}; tags are 0 to {largest_tag}")
    return given[0]


def splits(tensor: torch.Tensor, sizes: Sequence[int], size: int, role: str) -> list[int]:
    """Return the byte offsets of the ranks' parts. `sizes` are along the first dimension; empty: equal parts.

    Raises:
        ValueError: the sizes do not fit the tensor.
    """
    length = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if length % size:
            raise ValueError(f"the {role} has {length} rows, which {size} ranks cannot share equally; give split sizes")
        sizes = [length // size] * size
    if len(sizes) != size or min(sizes) < 0 or sum(sizes) != length:
        raise ValueError(
            f"split sizes {list(sizes)} for the {role} of {length} rows and {size} ranks; give one for each rank, "
            f"together {length}"
        )
    row = tensor.numel() * tensor.element_size() // max(length, 1)
    ends: list[int] = (numpy.cumsum(sizes)[:-1] * row).tolist()
    return ends


class Sizes:
    """The sizes that the ranks send to each other and expect from each other; all ranks compare them."""

    def __init__(
        self, world: World, call: Call, sends: Sequence[numpy.ndarray], receives: Sequence[numpy.ndarray]
    ) -> None:
        self._world, self._call = world, call
        self._own = numpy.array([[part.nbytes for part in sends], [part.nbytes for part in receives]], numpy.int64)

    def compare(self) -> Progress:
        """Raise MismatchError on every rank if a size is not what its receiver expects."""
        world = self._world
        of_all = numpy.empty((world.size, *self._own.shape), numpy.int64)
        yield from until(world.background.comm.Iallgather(self._own, of_all).Test)
        sent, expected = of_all[:, 0], of_all[:, 1].T
        wrong = numpy.argwhere(sent != expected)
        if len(wrong):
            source, target = wrong[0].tolist()
            raise everywhere(
                MismatchError(
                    f"{self._call}: {world.name(source)} sends {sent[source, target]} bytes to {world.name(target)}, "
                    f"which expects {expected[source, target]}; the split sizes of both must be equal"
                )
            )
