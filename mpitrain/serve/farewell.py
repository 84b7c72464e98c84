"""The farewell of a server: all workers hear that the run has ended before the connections close."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from mpitrain.serve.attendance import Attendance, ServerRules
from mpitrain.serve.link import Event, Gone, ServerLink

_LOOK_SECONDS = 0.5
# Workers that wait for a job answer a farewell at once.
_FAREWELL_SECONDS = 5.0


def send_home(
    link: ServerLink,
    attendance: Attendance,
    events: deque[Event],
    rules: ServerRules,
    kind: str,
    fields: Mapping[str, Any],
    is_server: Callable[[Hashable], bool],
) -> None:
    """Tell all workers that the run has ended, also those that come now. Wait for their farewell, but not for long.

    A worker that still computes reads of the end when it has sent its answer. What it has not read is lost with the
    connection, so the connection stays for `hang_seconds`, or until the worker has gone.

    Args:
        events: those that have come and are not handled. In the end it has those of other servers.
        kind, fields: of the message that says so.
        is_server: whether a peer is no worker.
    """
    here = attendance.here
    for attendee in here.values():
        link.send(attendee.peer, kind, fields)
    told, left = set(here), set[Hashable]()
    busy = {attendee.peer: attendee.tally.name for attendee in here.values() if attendee.waits_since is None}
    begun = said = rules.now()
    missing = rules.expected - len(attendance.ledger.workers)
    while told - left or len(told) - len(here) < missing:
        now = rules.now()
        patience = rules.hang_seconds if rules.expected or busy else _FAREWELL_SECONDS
        if patience and now - begun > patience:
            return
        if busy and now - said >= rules.stall_seconds:
            rules.say(f"the run has ended; the server waits for {', '.join(busy.values())} to read of it")
            said = now
        come = [*events, *link.receive(_LOOK_SECONDS)]
        events.clear()
        for event in come:
            if is_server(event.peer):
                events.append(event)
                continue
            if busy.pop(event.peer, None) and not busy:
                begun = rules.now()  # the last one has read of the end by now, or is about to
            if isinstance(event, Gone) or event.kind == "bye":
                left.add(event.peer)
            elif event.peer not in told:
                told.add(event.peer)
                link.send(event.peer, kind, fields)
