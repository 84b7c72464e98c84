"""Faults of a test bed's nodes: a cable pulled out, a power cut. Each is undone in time, also if chaos ends.

This is a process of its own on the machine of the bed, `python -m testbed.chaos.bed_outages BED`. It speaks the
language of a saboteur:

    chaos: {"fault": number, "kind", "host", "seconds"}   outages: {"done": number, "deed", "step": 0,
                                                                   "ago_seconds"}, then {"undone": number}
    chaos: {"undo": 1}                                    outages: {"undone": number} if there was anything to undo
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import Any

from mpitrain.errors import MpitrainError
from mpitrain.launch.hearing import send
from mpitrain.reading import MessageLines
from testbed import Bed, find


class BedOutages:
    """At most one node of a bed is broken at a time."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._received = MessageLines()
        self._broken: tuple[int, str] | None = None  # number of the fault, node
        self._until = 0.0

    def run(self) -> None:
        """Run until chaos has ended."""
        while True:
            left_seconds = None if self._broken is None else max(0.0, self._until - time.monotonic())
            ready, _, _ = select.select([0], [], [], left_seconds)
            data = os.read(0, 1 << 16) if ready else b""
            if ready and not data:
                break
            for order in self._received.take(data):
                self._obey(order)
            if self._broken is not None and time.monotonic() >= self._until:
                self._heal()
        self._heal()

    def _obey(self, order: dict[str, Any]) -> None:
        if "undo" in order:
            self._heal()
        if "fault" in order:
            number, node, seconds = order["fault"], order["host"], order["seconds"]
            self._heal()
            made = time.monotonic()
            self._broken, self._until = (number, node), made + seconds
            if order["kind"] == "link":
                self._bed.cut(node)
                deed = f"cable pulled out for {seconds:g} s"
            else:
                self._bed.kill(node)
                deed = f"no power for {seconds:g} s"
            send({"done": number, "deed": deed, "step": 0, "ago_seconds": time.monotonic() - made})

    def _heal(self) -> None:
        if self._broken is not None:
            number, node = self._broken
            self._bed.heal(node)
            self._broken = None
            send({"undone": number})


def main(name: str) -> int:
    """Serve chaos; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        BedOutages(find(name)).run()
    except MpitrainError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
