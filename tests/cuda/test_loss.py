"""Which errors say that a GPU is lost. tests/faults/test_recovery.py has a job, with errors of CuPy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.cuda.loss import lost_gpu
from mpitrain.job.context import JobContext

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
    assert lost_gpu(ValueError("999"), world("cpu", "cuda:1")) == ""
