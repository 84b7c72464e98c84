"""The errors of Horovod's interface."""

from __future__ import annotations

from mpitrain.errors import MpitrainError


class HorovodInternalError(MpitrainError, RuntimeError):
    """A call has failed after it was submitted: the ranks differ, or a rank is gone. The cause is the error of ours."""
