"""Errors of the driver itself."""


class CUDADriverError(RuntimeError):
    """What loading a kernel raises."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA_ERROR {status}")
        self.status = status
