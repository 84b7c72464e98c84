"""How a caller waits for a named call."""

from __future__ import annotations

from typing import Any

from mpitrain.errors import MpitrainError, everywhere
from mpitrain.horovod.exceptions import HorovodInternalError
from mpitrain.horovod.named_call import NamedCall


def ended(call: NamedCall) -> Any:
    """Wait for a call, and return its output.

    Raises:
        HorovodInternalError: the call has failed.
    """
    try:
        call.wait()
    except HorovodInternalError:
        raise
    except MpitrainError as error:
        raise everywhere(HorovodInternalError(str(error)), error.known_everywhere) from error
    except Exception as error:  # MPI's own: a rank is lost
        raise HorovodInternalError(f"{call.channel.world.name()}: {call} ended by {error!r}") from error
    return call.output


def is_ended(call: NamedCall) -> bool:
    """Return whether a call has ended, and do what can be done for it without waiting."""
    # The answer is from before this look. So a call is never complete at once, even if this rank is alone.
    was_done = call.is_done
    call.channel.engine.look()
    return was_done
