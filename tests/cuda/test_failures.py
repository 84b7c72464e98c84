"""Which errors say that a GPU is lost, and who hears of them. tests/faults/test_recovery.py has a job with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from mpitrain.context import JobContext
from mpitrain.cuda import memory, peers
from mpitrain.cuda.failures import lost_gpu
from mpitrain.errors import DeviceError

# The GPU could not be used from the beginning: cudaErrorDevicesUnavailable, cudaErrorNoDevice.
NEVER_USED = (46, ""), (100, "")


def world(*devices: str) -> Any:
    """Rank 1 of a job, to which the launcher gave these devices."""
    return SimpleNamespace(rank=1, context=JobContext(devices=devices))


@pytest.mark.parametrize(
    ("number", "name"), [(214, "ECCUncorrectable"), (999, "Unknown"), (700, ""), (2, ""), *NEVER_USED]
)
def test_errors_of_pytorch(number: int, name: str) -> None:
    """An error counts, and so does the one that another error was raised from."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    error = torch.AcceleratorError("CUDA error: no more words")
    error.error_code = number  # as PyTorch sets it
    outer = ValueError("what came of it")
    outer.__cause__ = error
    for one in (error, outer):
        assert lost_gpu(one, world("cpu", "cuda:1")) == (f"cuda:1 is lost (cudaError{name})" if name else "")
        assert lost_gpu(one, world()) == (f"its GPU is lost (cudaError{name})" if name else "")


def test_other_errors() -> None:
    error, other = ValueError("999"), ValueError("raised from itself")
    other.__cause__ = error.__cause__ = other
    for one in (error, other):
        assert lost_gpu(one, world("cpu", "cuda:1")) == ""


class CudaError(RuntimeError):
    """As CUDARuntimeError of CuPy."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class Memory:
    """A GPU, without its calls."""

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def memory(self) -> tuple[int, int]:
        return 5, 10

    def __str__(self) -> str:
        return "GPU 0"


GPU: Any = Memory()


def make_events() -> None:
    """All messages are this rank's own."""
    work = peers.make_events(GPU, SimpleNamespace(index=1), 1)  # type: ignore[arg-type]
    for _ in work:
        pass


PLACES: dict[str, Callable[[], Any]] = {
    "pinned": lambda: memory.pinned(7),
    "page_lock": lambda: memory.page_lock(numpy.zeros(7)),
    "raw": lambda: memory.raw(GPU, 7, "a test"),
    "open_block": lambda: memory.open_block(GPU, bytes(64)),
    "exported": lambda: peers._exported(5),
    "make_events": make_events,
}


@pytest.mark.parametrize("status", [214, 999, 700, 2])
@pytest.mark.parametrize("place", PLACES)
def test_a_lost_gpu_ends_its_rank_alone(monkeypatch: pytest.MonkeyPatch, place: str, status: int) -> None:
    """Wherever memory is taken or shared, all ranks hear of any other error."""

    def fail(*_: Any) -> None:
        raise CudaError(status)

    calls = dict.fromkeys(("hostRegister", "ipcOpenMemHandle", "ipcGetMemHandle", "ipcOpenEventHandle"), fail)
    runtime = SimpleNamespace(CUDARuntimeError=CudaError, ipcGetEventHandle=lambda _: bytes(64), **calls)
    cuda = SimpleNamespace(
        runtime=runtime,
        driver=SimpleNamespace(CUDADriverError=CudaError),
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        alloc_pinned_memory=fail,
        Memory=fail,
    )
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool))
    monkeypatch.setattr(peers, "make_event", lambda gpu, interprocess: SimpleNamespace(ptr=5))
    monkeypatch.setattr(peers, "exchange", given)
    monkeypatch.setattr(peers, "raise_among", raised)
    with pytest.raises(CudaError if status in (214, 999) else DeviceError, match=f"cudaError {status}"):
        PLACES[place]()


def given(mates: Any, own: bytes) -> Generator[None, None, list[bytes]]:
    yield
    return [own, own]


def raised(mates: Any, problem: str) -> Iterator[None]:
    yield
    if problem:
        raise DeviceError(problem)
