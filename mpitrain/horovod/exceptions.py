"""The errors of Horovod's interface."""

from __future__ import annotations

from mpitrain.errors import MpitrainError


class HorovodInternalError(MpitrainError, RuntimeError):
    """A call has failed after it was submitted: the ranks differ, or a rank is gone. The cause is the error of ours."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """A script raises it on all ranks to have elastic.run call its function again. mpitrain itself never raises it.

    `skip_sync`: the ranks agree already, so rank 0 need not send its state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the function of elastic.run is to be called again")
        self.skip_sync = skip_sync
