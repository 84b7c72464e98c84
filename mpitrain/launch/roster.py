"""Which jobs of this user have processes on this host; also ends one of them, or changes its hosts, by its id.

Sent to a host as text, like the agent. So this module imports only the modules that come with it, and must run with old
Pythons. It looks at processes, not at files, so no list has a dead job. One message goes to it and one comes back:

    {"jobs": [{"id", "ranks": [view.RankView...], "pids": [...], "since": seconds since the epoch,
               "script": [word...], "launcher": "HOST PID START", "is_launched_here": bool,
               "is_served": bool: its processes are of `mpitrain serve`,
               "served": what its server here has published (server.status), `seconds` ago; {}: it has published
                         nothing; {"damaged": why}: it cannot be read}...]}
    {"jobs": ..., "kept": [...], as kept() says}, if the wish is `kept`; with the environments if it is 2
    {"ended": [[pid, command line]...], "left": [[pid, command line]...]}, if the wish is to `end` a job; what keepers
               without a launcher hold of it is dropped too, unless the wish has `keeps`
    {"answer": the launcher's (control.py), {} if it is not here}, if the wish is to `change` its hosts
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.context import RANK_VARIABLES, JobContext
from mpitrain.launch.control import ask
from mpitrain.launch.hearing import send
from mpitrain.launch.kept import KEEPER_PREFIX, KeeperLine, drop
from mpitrain.launch.processes import command_line, launcher_pid, ticks
from mpitrain.reading import message_of, whole
from mpitrain.watching.proc import opened, read
from mpitrain.watching.rank_record import RankRecord, read_record
from mpitrain.watching.served_record import read_served
from mpitrain.watching.view import RankView, process_state, to_json, waited

# A launcher gives its ranks 5 s to end by themselves. This is somewhat longer.
_GRACE_SECONDS = 12.0
_KILL_SECONDS = 5.0
_LIFE_SECONDS = 120
NOT_TOLD = "it is of `mpitrain serve`, whose workers have no steps in common, so nothing can be told"


def main(wish: dict[str, Any], _probe: str) -> None:
    """Fulfil the wish, and send the answer."""
    signal.alarm(_LIFE_SECONDS)  # the asker does not wait any longer
    if "change" in wish:
        send({"answer": change(wish["change"], wish["how"])})
    elif "end" in wish:
        send(end(wish["end"], keeps="keeps" in wish))
    else:
        held = kept() if "kept" in wish else []
        if wish.get("kept") != 2:  # the rest of the estate is short, and no secret
            for one in held:
                one["estate"] = {**one["estate"], "environment": {}, "from_file": {}}
        send({"jobs": jobs(), **({"kept": held} if "kept" in wish else {})})


def jobs() -> list[dict[str, Any]]:
    """Return the jobs here, each with the processes that carry its mark."""
    by_token: dict[str, dict[str, Any]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 (names are wanted, many)
        if not entry.isdecimal() or process_state(int(entry)) in ("Z", "X", "gone") or not _is_mine(entry):
            continue
        variables = _environment(int(entry))
        context = JobContext.read(variables)
        token, launcher = context.job, context.launcher
        if not token:
            continue
        job = by_token.setdefault(token, {"id": token, "pids": [], "ranks": [], "since": 0.0, "script": []})
        job["launcher"], job["is_launched_here"] = launcher, launcher_pid(launcher) is not None
        job["is_served"] = bool(context.serve.kind)
        job["pids"].append(int(entry))
        since = _started(int(entry))
        job["since"] = min(job["since"] or since, since)
        rank = next((variables[name] for name in RANK_VARIABLES if name in variables), None)
        if context.serve.kind:
            rank = "0" if context.serve.kind == "server" else None
        if rank is not None:
            number = whole(rank, 0, 1 << 31)
            job["ranks"] += [] if number is None else [(number, _is_stub(entry), since, int(entry))]
    for job in by_token.values():
        ranks: dict[int, int] = {}
        # A rank is older than its children, and younger than a stub for which a warm interpreter has forked it.
        for rank, _, _, pid in sorted(job["ranks"]):
            ranks.setdefault(rank, pid)
        job["ranks"] = [to_json(_view(rank, pid)) for rank, pid in sorted(ranks.items())]
        job["served"] = {}
        if ranks:
            _, first = min(ranks.items())
            job["script"], job["served"] = _script(first), served(first)
    return sorted(by_token.values(), key=lambda job: float(job["since"]))


def kept() -> list[dict[str, Any]]:
    """Return what the keepers here tell of their jobs: what KeeperLine.estate returns, with `estate` as an object.

    `keeper` is the name of its socket. `is_launched_here`: the launcher is alive, whether or not the keeper hears it.
    """
    kept_here = []
    for name in _keepers():
        with contextlib.suppress(OSError, ValueError, KeyError):  # it has just ended, or is of another user
            with contextlib.closing(KeeperLine(name)) as line:
                about, text = line.estate()
            if text:
                estate = message_of(text)
                is_launched = launcher_pid(estate["launcher"]) is not None
                kept_here.append({"keeper": name, "estate": estate, "is_launched_here": is_launched, **about})
    return kept_here


def end(token: str, *, keeps: bool = False) -> dict[str, Any]:
    """End a job: ask its launcher, if it is here, then kill what is left. Keepers without a launcher end, too.

    With `keeps`, these stay.
    """
    parts = [job for job in jobs() if job["id"] == token]
    named = [[pid, command_line(pid)] for job in parts for pid in job["pids"]]
    names = {job["launcher"] for job in parts} | {
        one["estate"]["launcher"] for one in kept() if token in one["estate"]["tries"]
    }
    launchers = {pid for name in names if (pid := launcher_pid(name)) is not None}
    for pid in launchers:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    # On other hosts the launcher may be alive too, and its agent here ends everything in order.
    is_dead = any(job["launcher"].split()[:1] == [socket.gethostname()] for job in parts) and not launchers
    deadline = time.monotonic() + (0.0 if is_dead else _GRACE_SECONDS)
    while (left := _pids(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    deadline = time.monotonic() + _KILL_SECONDS
    while left and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        left = _pids(token)
    for one in [] if keeps else kept():
        if token in one["estate"]["tries"] and "lost_ms" in one:
            drop(one["keeper"])
    return {"ended": named, "left": [[pid, command_line(pid)] for pid in left]}


def change(token: str, wish: dict[str, Any]) -> dict[str, Any]:
    """Return what the launcher of a job answers to a wish (control.py); {} if it is not here."""
    parts = [job for job in jobs() if job["id"] == token and job["is_launched_here"]]
    if any(job["is_served"] for job in parts) and "tell" in wish:
        return {"refused": NOT_TOLD}
    if any(job["is_served"] for job in parts):
        how = "`mpitrain work` adds one at any time, and Ctrl-C ends one"
        return {"refused": f"it is of `mpitrain serve`, whose workers come and go: {how}"}
    launchers = {job["launcher"] for job in parts}
    if not launchers:  # the id may be that of an earlier try
        tries = [one for one in kept() if token in one["estate"]["tries"] and one["is_launched_here"]]
        launchers = {one["estate"]["launcher"] for one in tries}
    return ask(launchers.pop(), wish) if launchers else {}


def _keepers() -> list[str]:
    """Return the names of the sockets of keepers on this host, of all users."""
    mark = b"@" + KEEPER_PREFIX.encode()
    words = [line.split()[-1:] for line in read("/proc/net/unix").splitlines()]
    return sorted({word[1:].decode(errors="replace") for (word,) in filter(None, words) if word.startswith(mark)})


def _pids(token: str) -> list[int]:
    return [pid for job in jobs() if job["id"] == token for pid in job["pids"]]


def _is_stub(entry: str) -> bool:
    """Whether the process stands in for a rank, which is elsewhere or about to be (stub.py)."""
    return any(word.endswith(b"/mpitrain/launch/stub.py") for word in read(f"/proc/{entry}/cmdline").split(b"\0")[:5])


def _is_mine(entry: str) -> bool:
    try:
        return Path("/proc", entry).stat().st_uid == os.geteuid()
    except OSError:
        return False


def _view(rank: int, pid: int) -> RankView:
    records = (read_record(path, rank) for path, _ in opened(pid))
    record = next((record for record in records if record is not None), RankRecord(rank, pid=pid))
    now = time.monotonic()
    doing = now - record.since if record.since else 0.0
    return RankView(record, pid, round(waited(record, now), 1), process_state(pid), doing_seconds=round(doing, 1))


def served(pid: int) -> dict[str, Any]:
    """Return what a server says of its workers."""
    try:
        facts = next((facts for path, _ in opened(pid) if (facts := read_served(path)) is not None), {})
    except ValueError as error:
        return {"damaged": str(error)}
    return {**facts, "seconds": time.monotonic() - facts["at"]} if facts else {}


def _script(pid: int) -> list[str]:
    """Return the command line of a rank without its Python."""
    words = read(f"/proc/{pid}/cmdline").decode(errors="replace").split("\0")[:-1]
    return own_program(words[1:]) if len(words) > 1 else words


def own_program(words: Sequence[str]) -> list[str]:
    """Return the user's part of what a rank's Python runs: `mpitrain plan` adds words (forecast/rehearse.py)."""
    return list(words[6:] if list(words[:3]) == ["-P", "-m", "mpitrain.forecast.rehearse"] else words)


def _environment(pid: int) -> dict[str, str]:
    pairs = (word.partition("=") for word in read(f"/proc/{pid}/environ").decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs}


def _started(pid: int) -> float:
    """Return when a process began, in seconds since the epoch."""
    uptime = float(read("/proc/uptime").split()[0])
    began = ticks(pid)
    return time.time() - uptime + int(began) / os.sysconf("SC_CLK_TCK") if began else time.time()
