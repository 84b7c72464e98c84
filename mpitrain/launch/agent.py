"""The agent of a job on a host: one program over one connection, from the first attempt to the end of the last.

The launcher sends it as text over ssh; on its own host it is a child of the launcher. It imports only the modules that
come with it, and must run with old Pythons. It has three parts. All attempts on this host (host_attempt.py): the one
that trains, the next one, and one that takes over from the present one. The memory of the ranks (keeper.py). And the
warm interpreter (holder.py). Both sides send one JSON object per line:

    launcher: {"beat": number}, every second      agent: {"echo": number, "time": now, by its own clock}
                                                  agent: {"alive": 1}, every second, from a thread: it says that this
                                                         host has not fallen silent, whatever the agent waits for
    launcher: {"bye": 1}, the last one: nobody needs the agent any more, and what it holds is dropped

Of an attempt. Each of these messages has "attempt": the id of the attempt.

    launcher: {"wish": ...}                       agent: {"facts": ...}, or {"error": ...,
                                                         "condition": the name of a conditions.Condition}
                                                  agent: {"ranks": [view.RankView...]}, every second
                                                  agent: {"first_end": census.FirstEnd or null}
                                                  agent: {"files": [[path, inode]...], of the job,
                                                         "since": when it began, by time.time() there}
    launcher: {"begin": 1}, to an idle one
    launcher: {"facts": 1}, to ask again          agent: {"facts": ...}
    launcher: {"paths": [path...]}                agent: {"paths": {path: facts.look_at_paths(...)}}
    launcher: {"look": 1}                         agent: {"seen": [view.RankView..., with stacks]}
    launcher: {"look": "all"}, with the stacks of all ranks
    launcher: {"watch": seconds}                  agent: {"ranks": ...} as often, with their states, for some seconds
                                                  agent: {"load": as load.py says}, every second meanwhile;
                                                         null, with "no_load": why it cannot be read, once
    launcher: {"order": as orders.py says}, for the ranks
    launcher: {"processes": 1}                    agent: {"processes": [[pid, state, command line]...],
                                                         "unreachable": [host...]}
    launcher: {"end": linger_seconds}             agent: {"ended": [[pid, command line]...], "immortal": [...],
                                                         "lost": whether somebody removed the roll call}
    launcher: {"bye": 1, "roll_call": path}: its remaining processes are ended; an agent in place of one that was
                                             killed removes the roll call

An attempt whose ranks need no MPI has these messages too: host_ranks.py.

A wish with `linger_seconds` is for an attempt whose agent was killed: it has the `token` and the `roll_call`, the
`files` that the agent knew and the start `since`, or null. The answer is {"ended": ...}.

Of the memory. Each of these messages is the value of "memory", and has a "number", which its answer repeats.

    launcher: {"name": of the keeper's socket,    agent: {"ready": process of the keeper}, or {"error": text}
               "launcher", "keep_seconds";
               "is_new": what is held there is
               older; "heir": for whom the
               memory of a launcher that has
               gone is claimed; and "wish",
               "of", "step", "estate"}
    launcher: {"wish": as kept.py names it,
               "of": the try, "step": number,
               "estate": as keepers.py says},
               any of them
    launcher: {"room": 1}                         agent: {the fields of keepers.Room}
    launcher: {"rename": name, "launcher"}        agent: {"inherited": 1}
    launcher: {"stay": 1}                         agent: {"stays": whether it holds something}
    launcher: {"leave": 1}: it waits for another launcher
    launcher: {"drop": name}                      agent: {"dropped": 1}

Of the warm interpreter. Each of these messages is the value of "warm".

    launcher: {"program": [word...], "hook":      agent: {"said": text for the user}
               what makes it a warm interpreter,
               for PYTHONPATH, and the other
               arguments of Holder.start}

There is one rule for silence. The agent takes its launcher for lost when the connection closes without a "bye", and
when the launcher has been silent for `silence_seconds` (0: never). Then it leaves the memory to another launcher, ends
the processes of all attempts (processes.py), removes their files (shared_files.py), and ends the interpreter, then
itself.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mpitrain.launch.hearing import Hearing, send
from mpitrain.launch.holder import Holder
from mpitrain.launch.host_attempt import BEAT_SECONDS, HostAttempt, begun, sweep
from mpitrain.launch.keeper import HeldMemory
from mpitrain.launch.processes import remove, remove_unheard
from mpitrain.reading import MessageLines

_LOOK_SECONDS = 0.5


class HostAgent:
    """All that the job has on this host."""

    def __init__(self, wish: dict[str, Any], probe: str) -> None:
        """`wish` has `silence_seconds`; on the launcher's host `live`, its socket, and `stderr`, a descriptor of it."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))  # it needs four per rank, and the keeper two
        self._probe, self._limit = probe, limit
        self._live = wish.get("live", "")
        self._attempts: dict[str, HostAttempt] = {}
        self._memory = HeldMemory(wish["silence_seconds"], wish.get("stderr"))
        self._holder = Holder(limit)
        self._hearing = Hearing(wish["silence_seconds"], self._end_processes)
        self._received = MessageLines()

    def run(self) -> None:
        """Run until nobody needs it."""
        is_lost = True
        try:
            is_lost = self._is_lost_at_last()
        finally:
            if is_lost:
                self._memory.leave()
            for attempt in self._attempts.values():
                attempt.close()
            self._holder.close()
            self._memory.drop()
            if is_lost and self._live:
                remove_unheard(self._live)

    def _is_lost_at_last(self) -> bool:
        """Serve the launcher to the end. True: it is lost. False: it has said goodbye."""
        while True:
            now, attempts = time.monotonic(), list(self._attempts.values())
            wait_seconds = min([_LOOK_SECONDS, *(attempt.patience(now) for attempt in attempts)])
            ready = _readable(
                [0, *self._holder.files(), *(one for attempt in attempts for one in attempt.files())], wait_seconds
            )
            for attempt in attempts:
                attempt.look()
            self._holder.look(ready)
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    return True
                for message in self._received.take(data):
                    if "bye" in message and "attempt" not in message:
                        return False
                    self._obey(message)
            if self._hearing.is_lost(has_come=0 in ready):
                return True
            now = time.monotonic()
            for attempt in self._attempts.values():
                attempt.go_on(now)

    def _obey(self, message: dict[str, Any]) -> None:
        if "beat" in message:
            send({"echo": message["beat"], "time": time.monotonic()})
        if "memory" in message:
            self._memory.obey(message["memory"])
        if "warm" in message:
            self._holder.start(**message["warm"])
        if "attempt" in message:
            self._obey_of(message["attempt"], message)

    def _obey_of(self, token: str, message: dict[str, Any]) -> None:
        wish = message.get("wish")
        if wish is not None and "linger_seconds" in wish:
            sweep(wish)
        elif wish is not None:
            attempt = begun(wish, self._probe, self._limit)
            if attempt is not None:
                self._attempts[token] = attempt
        elif token in self._attempts and self._attempts[token].obey(message):
            self._attempts.pop(token).close()
        elif token not in self._attempts and "bye" in message:  # the agent that had this attempt was killed
            remove(message["roll_call"])

    def _end_processes(self) -> None:
        for attempt in list(self._attempts.values()):
            attempt.end_at_once()


def _readable(descriptors: Sequence[int], seconds: float) -> set[int]:
    """Those that can be read within that time. With many ranks, their numbers are too high for select(2)."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(1000 * seconds)}


def say_alive() -> None:
    """Send a sign of life every second, for ever."""
    while True:
        send({"alive": 1})
        time.sleep(BEAT_SECONDS)


def main(wish: dict[str, Any], probe: str) -> None:
    """Run the agent; `probe` is the text of facts.py of the package."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.set_blocking(1, True)
    threading.Thread(target=say_alive, daemon=True).start()
    HostAgent(wish, probe).run()
    with suppress(OSError):
        sys.stdout.flush()
