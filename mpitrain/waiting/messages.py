"""Python objects from one rank to one other."""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from mpitrain.errors import MismatchError
from mpitrain.waiting.control import Control, until
from mpitrain.waiting.pace import patient_naps

if TYPE_CHECKING:
    from mpi4py import MPI

# Tags below this one belong to the algorithms, which share the communicator with the user's messages.
_USER_TAG = 1000
_LARGEST_TAG = 32767 - _USER_TAG  # MPI promises tags up to 32767 (MPI-4.1, section 9.1.2), and no more


class Messages:
    """The sends and receives of one rank. `World.send` and `World.receive` say what they promise."""

    def __init__(self, comm: MPI.Comm, control: Control) -> None:
        self._comm = comm
        self._control = control
        self._to_myself: defaultdict[int, deque[bytes]] = defaultdict(deque)  # sent and not yet received, by tag

    def send(self, value: Any, to: int, tag: int) -> None:
        """Send `value`, and wait until it has left."""
        self._check_tag(tag)
        if to == self._control.rank:  # MPI would wait for a receive that this very call holds up
            self._to_myself[tag].append(pickle.dumps(value, protocol=5))
            return
        self._control.check()
        request = self._comm.isend(value, to, _USER_TAG + tag)
        self._control.wait(until(lambda: request.test()[0]), f"send to {self._control.name(to)}", (to,))

    def receive(self, source: int, tag: int) -> Any:
        """Wait for the next object."""
        self._check_tag(tag)
        control = self._control
        if source == control.rank:
            if not self._to_myself[tag]:
                raise MismatchError(
                    f"{control.name()}: receives from itself, and has sent itself nothing with tag {tag}"
                )
            return pickle.loads(self._to_myself[tag].popleft())
        message: MPI.Message | None = None

        def arrived() -> bool:
            nonlocal message
            message = self._comm.improbe(source, _USER_TAG + tag)
            return message is not None

        control.wait(until(arrived, patient_naps()), f"receive from {control.name(source)}", (source,))
        assert message is not None
        return message.recv()

    def _check_tag(self, tag: int) -> None:
        # A negative one could meet the messages of an algorithm.
        if not 0 <= tag <= _LARGEST_TAG:
            raise ValueError(f"{self._control.name()}: tag={tag}; tags are 0 to {_LARGEST_TAG}")
