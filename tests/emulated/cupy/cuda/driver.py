"""Errors of the driver itself."""


class CUDADriverError(RuntimeError):
    """The error of loading a kernel."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA_ERROR {status}")
        self.status = status
