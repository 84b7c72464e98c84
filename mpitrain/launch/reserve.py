"""The spares of a job, as its launcher sees them: over all tries, until the job is over."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpitrain.launch.conditions import Condition, Refusal, refuse_here
from mpitrain.launch.connections import GUARD, connect
from mpitrain.launch.folders import OF_SOCKETS
from mpitrain.watching.rank_record import RankRecord

# The modules of the holder of spares, each after those that it imports.
SPARES = (*GUARD, "launch.spare", "launch.spares")
_BEGIN_SECONDS = 30.0
_CLOSE_SECONDS = 10.0


class Reserve:
    """The spares of a job on this machine. Use this in `with`: at its end, nothing of them is left."""

    def __init__(self, host: str) -> None:
        """Start the holder of the spares; `host` is the name of this machine."""
        token = secrets.token_hex(4)
        self._host = host
        self._path = f"{OF_SOCKETS}/mpitrain-spares-{token}"
        self._wanted: dict[str, object] = {}
        self._connection = connect(host, True, {"socket": self._path, "token": token}, time.monotonic(), SPARES)
        self._is_listening = self._has_ended = False

    def __enter__(self) -> Reserve:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.hang_up()
        self._connection.close(_CLOSE_SECONDS)
        Path(self._path).unlink(missing_ok=True)  # the holder may have been killed

    def begin_try(self, program: Sequence[str], num_ranks: int) -> list[str]:
        """Return what mpiexec is to start in place of `program`, the command of each rank.

        Raises:
            LaunchError: the holder of the spares cannot listen for the ranks.
        """
        if self._has_ended:
            return list(program)
        deadline = time.monotonic() + _BEGIN_SECONDS
        while not self._is_listening and not self._connection.is_closed and time.monotonic() < deadline:
            self._connection.flush()
            self._is_listening = bool(self._connection.receive(time.monotonic()))
            time.sleep(0.005)
        if not self._is_listening:
            raise refuse_here(Refusal(Condition.SOCKETS, self._host, self._connection.why_closed()))
        self._wanted = {"program": list(program), "count": num_ranks}
        stub = Path(__file__).with_name("stub.py")
        return [sys.executable, "-I", "-S", str(stub), self._path, *program]

    def news(self, records: Mapping[int, RankRecord]) -> list[str]:
        """Start spares when the job has made its first step. Return what to tell the user, one line per entry."""
        if self._has_ended:
            return []
        if self._wanted and any(record.step > record.first_step for record in records.values()):
            self._connection.send({"start": self._wanted})
            self._wanted = {}
        self._connection.flush()
        lines = []
        for message in self._connection.receive(time.monotonic()):
            if "said" in message:
                lines.append(message["said"])
            elif number := message["ready"]:
                lines.append(f"{number} spares are ready")
        self._has_ended = self._connection.is_closed
        if self._has_ended:
            lines.append("the process that holds the spares has ended; from now on ranks start without them")
        return lines
