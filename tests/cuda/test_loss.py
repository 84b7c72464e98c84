"""Which errors say that a GPU is lost. tests/faults/test_recovery.py has a job, with errors of CuPy."""

from __future__ import annotations

import pytest

from mpitrain.cuda.loss import lost_gpu


@pytest.mark.parametrize(("number", "name"), [(214, "ECCUncorrectable"), (999, "Unknown"), (700, ""), (2, "")])
def test_errors_of_pytorch(number: int, name: str) -> None:
    """An error counts, and so does the one that another error was raised from."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    error = torch.AcceleratorError("CUDA error: no more words")
    error.error_code = number  # as PyTorch sets it
    outer = ValueError("what came of it")
    outer.__cause__ = error
    for one in (error, outer):
        assert lost_gpu(one, "cuda:1") == (f"cuda:1 is lost (cudaError{name})" if name else "")
        assert lost_gpu(one, "") == (f"its GPU is lost (cudaError{name})" if name else "")


def test_other_errors() -> None:
    assert lost_gpu(ValueError("999"), "cuda:1") == ""
