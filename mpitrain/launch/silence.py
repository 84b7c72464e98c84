"""Why a job must be ended because of its hosts: a connection has broken, a host is silent, or a guard stands still.

A guard gives a sign of life every second, from a thread that does nothing else, so a busy host is late by less than a
second or two. What makes all hosts late at once is on this machine: its cable, or its own load.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from mpitrain.launch.connections import Connection
from mpitrain.launch.host_report import HostReport

SILENCE_SECONDS = 5.0  # a host is lost after this silence
# So long all other hosts together may be silent, this machine's own guard, and a guard that lives but does not answer.
PATIENCE_SECONDS = 15.0
GUARD_SILENCE_SECONDS = 30.0  # after this silence of the launcher, a guard ends the job on its host
# A host that is silent for longer may be lost too. It is soon known: hosts that are lost together are found together.
_DOUBT_SECONDS = SILENCE_SECONDS / 2


def trouble(
    connections: Mapping[str, Connection],
    reports: Mapping[str, HostReport],
    answered: Mapping[str, float],
    own: str,
    now: float,
) -> str | None:
    """Return why the job must be ended; None: it need not. Note in the reports which hosts have vanished.

    Args:
        connections: to the guard of each host.
        reports: of each host.
        answered: when each guard has last answered a beat, by the clock of `now`.
        own: the name of this machine among the hosts.
        now: the present time, by the clock of the connections.
    """
    closed = [host for host, one in connections.items() if one.is_closed and reports[host].left is None]
    if closed:
        for host in closed:
            reports[host].has_vanished = True
        return "\n".join([*(_why_closed(connections[host]) for host in closed), "The job is ended on all hosts"])
    silent = {host: now - connection.heard_seconds for host, connection in connections.items()}
    lost = lost_hosts(silent, own)
    for host in lost:
        reports[host].has_vanished = True
    if lost:
        return account_of(lost, silent)
    for host, seconds in answered.items():
        if now - seconds > PATIENCE_SECONDS:
            reports[host].has_vanished = True
            return (
                f"{host}: the guard of the job there lives, but has not answered for {now - seconds:.0f} s: the host "
                "has too little memory, or a disk or share there hangs. The job is ended on all hosts"
            )
    return None


def _why_closed(connection: Connection) -> str:
    if killed := connection.how_killed():
        return f"{connection.host}: the guard of the job there {killed}"
    return f"the connection to {connection.why_closed()}"


def lost_hosts(silent: Mapping[str, float], own: str) -> list[str]:
    """Return the hosts that are lost.

    Args:
        silent: how long each host has been silent, in seconds.
        own: the name of this machine among them.
    """
    others = {host: seconds for host, seconds in silent.items() if host != own}
    late = [host for host, seconds in others.items() if seconds > _DOUBT_SECONDS]
    lost = [host for host in late if others[host] > SILENCE_SECONDS]
    are_all_late = len(late) == len(others) > 1
    if lost and (are_all_late or len(late) > len(lost)) and max(others.values()) <= PATIENCE_SECONDS:
        lost = []
    return lost + [host for host, seconds in silent.items() if host == own and seconds > PATIENCE_SECONDS]


def account_of(lost: Sequence[str], silent: Mapping[str, float]) -> str:
    """Say in a line what is known of hosts that are lost."""
    seconds = max(silent[host] for host in lost)
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    noun, pronoun = ("this host", "it") if len(lost) == 1 else ("these hosts", "each of them")
    return (
        f"{', '.join(lost)}: no message from {noun} since {since}, for {seconds:.0f} s: {pronoun} lost power or its "
        f"network, or it is frozen. Does `ssh {lost[0]} true` return? The job is ended on all hosts; the rest on "
        f"{', '.join(lost)} ends {GUARD_SILENCE_SECONDS:g} s after it last heard from here"
    )
