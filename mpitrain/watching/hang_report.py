"""The report of who waits for whom, made from what every rank does. Pure functions.

no progress for 10 s: ranks 0-2 on node1,node2 wait in allreduce ring of 4096 float32 (call 381); rank 3 on node2 runs
in dataloader.py:88 (load)

What a rank does, in one word (`doing`), for users who watch a job:

starts     it has not come out of init() yet           busy      it does what the others wait for, such as a checkpoint
computes   the script works, or waits for < 0.1 s      done      its program has finished
waits      it waits for other ranks; nothing moves     failed    an error ends it, and the job with it
wire       it waits, and data arrives or leaves        ended     its process has ended
disk       its process is stuck in the kernel          stopped   its process is stopped, by SIGSTOP or a debugger

A rank publishes a wait after 0.1 s (activity.py). So shorter waits count as `computes`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from mpitrain.user_code import is_of_user
from mpitrain.watching.ranges import rank_ranges
from mpitrain.watching.rank_record import BUSY, CALLED, ENDED, FAILED, PARTED, STARTED, WAITS
from mpitrain.watching.view import RankView

NO_PROGRESS = "no progress for"  # a report begins with it
_MOST_STACKS = 3
_MOST_FRAMES = 30
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
# Where a program that does not use mpitrain waits for other ranks: the backward pass of DDP is one of these places.
_MEETS = re.compile(
    r"/site-packages/(torch/(distributed|nn/parallel|autograd)/|torch/_tensor\.py|horovod/|jax/experimental/multihost)"
)
_WRAPS = re.compile(r"_|wrap|inner|decorate")  # prefixes of names of functions that only pass a call on
_INSTALLED = re.compile(r".*/(site-packages|dist-packages|lib(64)?/python3[^/]*)/")
_IMPORTLIB = "<frozen importlib"

_PLURALS = {"is": "are", "has": "have"}
_STATES = {"R": "runs", "S": "sleeps", "I": "sleeps"}


def report(
    views: Sequence[RankView],
    absent: Mapping[int, str],
    *,
    unseen: str = "cannot be asked",
    answered: Set[str] = frozenset(),
    silent: Mapping[str, float] | None = None,
    unreachable: Mapping[str, Sequence[str]] | None = None,
    hang_seconds: float = 0.0,
) -> list[str]:
    """Return the report, line by line: who waits for whom, then the stacks of the ranks waited for, and of one waiter.

    Args:
        views: the ranks that could be asked, with what they do.
        absent: the other ranks, each with its host.
        unseen: what the report says of these ranks.
        answered: the hosts of absent ranks that answered, but know of no such rank.
        silent: the silent hosts, with the seconds of silence.
        unreachable: by host that was asked, the hosts from which it gets no answer. Used only if `all_wait_in_one`.
        hang_seconds: the job is ended because nothing has moved for that long; 0: the job continues.
    """
    views = [view for view in views if not has_ended(view)]
    waiting = [view for view in views if view.waits]
    culprits = [view for view in views if not view.waits]
    groups: dict[tuple[str, int], list[RankView]] = {}
    for view in waiting:
        groups.setdefault((_doing(view), view.record.calls), []).append(view)
    parts = [
        f"{_ranks(group)} {_verb(group, doing)}" for (doing, _), group in sorted(groups.items(), key=_size_of_group)
    ]
    together: dict[str, list[RankView]] = {}
    for view in culprits:
        together.setdefault(_culprit(view), []).append(view)
    parts += [f"{_ranks(group)} {_plural(text) if len(group) > 1 else text}" for text, group in together.items()]
    for host in dict.fromkeys(absent.values()):
        ranks = sorted(rank for rank, rank_host in absent.items() if rank_host == host)
        seconds = (silent or {}).get(host, 0.0)
        said = f"no message from this host for {seconds:.0f} s: it lost power or its network, or it is frozen"
        has = "have" if len(ranks) > 1 else "has"
        state = f"{has} not called init(), or {has} ended before it" if host in answered else unseen
        parts.append(f"{_numbers(ranks)} on {host}{f': {said}' if seconds else f' {state}'}")
    if not culprits and not absent:
        if len(groups) > 1:
            parts.append("they wait for each other: do all ranks make the same calls in the same order?")
        elif all_wait_in_one(views, absent):
            parts.append(_all_wait({view.host for view in waiting}, unreachable or {}))
    shown = [view for view in culprits if view.stack][:_MOST_STACKS]
    shown += [view for view in waiting if view.stack][:1]
    longest = max((max(view.seconds, view.idle_seconds) for view in views), default=0.0)
    head = f"{NO_PROGRESS} {longest:.{0 if longest >= 5 else 1}f} s"
    if all_have_finished(views, absent):
        head = f"all ranks have finished, but not all of their processes have ended for {longest:.0f} s"
    elif not any(view.record.status == WAITS or view.idle_seconds for view in views):
        head = "not all ranks have finished yet"
    if hang_seconds:
        head = f"nothing has moved for {hang_seconds:g} s (hang_seconds), and the job is ended"
    lines = [f"{head}: {'; '.join(parts)}"]
    for view in shown:
        lines.append(f"    rank {view.record.rank} on {view.host}, most recent call first:")
        lines += [f"      {line}" for line in _shown(view.stack)]
    return lines


def stacks_of(views: Sequence[RankView], silent: Mapping[str, float]) -> list[str]:
    """Return, on demand, what every rank does and its stack, line by line. `silent`: hosts without an answer."""
    lines = []
    for view in sorted(views, key=lambda view: view.record.rank):
        does = _verb([view], _doing(view)) if view.waits else _culprit(view)
        lines.append(f"rank {view.record.rank} on {view.host} {does}")
        lines += [f"    {line}" for line in _shown(view.stack)]
    lines += [
        f"{host} has not answered; it was last heard from {seconds:.0f} s ago" for host, seconds in silent.items()
    ]
    return lines


def as_stacks_show(view: RankView) -> RankView:
    """Return the view of a rank that has not called init() as one that waits, if its stack shows that.

    Such a rank publishes nothing. It waits for others if its main thread is in a call of torch.distributed, or of
    another library of that kind. Call this only for ranks that use no processor.
    """
    call = meeting_of(view.stack)
    if view.record.phase != STARTED or view.ended_seconds is not None or not call:
        return view
    return replace(view, seconds=view.idle_seconds, record=replace(view.record, status=WAITS, words=call))


def meeting_of(stack: str) -> str:
    """Return the call in which a rank waits for others, as in `all_reduce at train.py:12 (main)`; "": none."""
    frames = [match for line in main_thread(stack) if (match := _FRAME.match(line))]
    names: list[str] = []
    for frame in frames:
        if not _MEETS.search(frame[1]):
            break
        names.append(frame[3])
    if not names:
        return ""
    return f"{next((name for name in reversed(names) if not _WRAPS.match(name)), names[-1])} at {place_of(stack)}"


def is_by_design(views: Iterable[RankView]) -> bool:
    """True if no rank is to blame: a rank does what the others should wait for, or all waiting ranks have finished."""
    views = list(views)
    works = [view for view in views if view.record.status == BUSY and view.state in ("R", "S", "D")]
    return bool(works) or not any(view.record.status == WAITS for view in views)


def has_ended(view: RankView) -> bool:
    """True if the program of a rank has finished, and its process has ended."""
    return view.record.phase == PARTED and view.state == "gone"


def all_wait_in_one(views: Sequence[RankView], absent: Mapping[int, str]) -> bool:
    """True if all ranks of a job wait in the same call: none of them is to blame."""
    calls = {(_doing(view), view.record.calls) for view in views}
    return len(calls) == 1 and not absent and all(view.waits and view.record.status == WAITS for view in views)


def all_have_finished(views: Iterable[RankView], absent: Mapping[int, str]) -> bool:
    """True if the programs of all ranks have finished: no rank is waited for, only the ends of processes."""
    return not absent and all(view.record.status == ENDED for view in views)


def _shown(stack: str) -> list[str]:
    """Return the informative lines of the main thread's frames: an import has many others."""
    return [line.strip() for line in main_thread(stack) if f'"{_IMPORTLIB}' not in line][:_MOST_FRAMES]


def main_thread(stack: str) -> list[str]:
    """Return the lines of the main thread's frames, innermost first. faulthandler writes that thread last."""
    lines: list[str] = []
    for line in stack.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            lines = []
        elif _FRAME.match(line):
            lines.append(line)
    return lines


def importing(stack: str) -> str:
    """Return the module that a rank is importing, as in `torch._dynamo.config`; "": none."""
    frames = [match.groups() for line in main_thread(stack) if (match := _FRAME.match(line))]
    while frames:
        path, _, function = frames.pop(0)
        if path.startswith(_IMPORTLIB):
            place = place_of(stack)
            return f"a module of {place}" if place else "a module"
        if function == "<module>":
            is_imported = any(outer[0].startswith(_IMPORTLIB) for outer in frames)
            return _module_of(path) if is_imported else ""
    return ""


def _module_of(path: str) -> str:
    inside = _INSTALLED.sub("", path)
    if inside == path:
        return "/".join(Path(path).parts[-2:])
    return inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def place_of(stack: str) -> str:
    """Return the innermost line of the user's own code, such as `dataloader.py:88 (load)`; "" if there is none."""
    frames = [match for line in main_thread(stack) if (match := _FRAME.match(line))]
    own = [match for match in frames if is_of_user(match[1])]
    if not (own or frames):
        return ""
    path, line, function = (own or frames)[0].groups()
    return f"{Path(path).name}:{line} ({function})"


def _doing(view: RankView) -> str:
    return "" if view.record.status == ENDED else view.record.words


def _verb(group: Sequence[RankView], doing: str) -> str:
    if not doing:
        return "have finished" if len(group) > 1 else "has finished"
    calls = f" (call {group[0].record.calls})" if group[0].record.calls else ""
    return f"{'wait' if len(group) > 1 else 'waits'} in {doing}{calls}"


def _size_of_group(item: tuple[tuple[str, int], list[RankView]]) -> tuple[int, int]:
    return -len(item[1]), item[1][0].record.rank


def _all_wait(hosts: Set[str], unreachable: Mapping[str, Sequence[str]]) -> str:
    """Return the diagnosis if all ranks wait in one call."""
    pairs = [f"{peer} does not answer {host}" for host, peers in sorted(unreachable.items()) for peer in peers]
    if pairs:
        ports = "on the high ports that MPI uses"
        return f"all ranks are there, but {', '.join(pairs)} {ports}: is a cable, a switch or a firewall at fault?"
    question = "is the load too high, the memory full, or a direct MPI call long?"
    if len(hosts) > 1:
        network = "If not, `mpitrain check-cluster` examines the network"
        answers = ", and their hosts answer each other" if hosts <= unreachable.keys() else ""
        return f"all ranks are there{answers}: {question} {network}"
    return f"all ranks are there, on one machine: {question}"


def _culprit(view: RankView) -> str:
    """Describe what a rank that is not waiting does."""
    place = place_of(view.stack)
    where = f" in {place}" if place else ""
    words = f" in {view.record.words}" if view.record.words else ""
    if view.code is not None and view.code >= 0:
        return f"has left with exit code {view.code}"
    if view.state == "gone" or view.state in ("Z", "X"):
        return f"has lost its process ({view.pid} has ended)"
    if view.state == "T":
        return f"is stopped{words} (SIGSTOP?): kill -CONT {view.pid}"
    if view.state == "t":
        return f"is held{words} by a debugger"
    if view.state == "D":
        kernel = f" ({view.kernel})" if view.kernel not in ("", "0") else ""
        return f"is stuck in the kernel{kernel}{where or words}: does a disk or a network file system not answer?"
    if view.record.status == BUSY:
        return f"is in {view.record.words}, for which the others wait by design{', now' if where else ''}{where}"
    if module := importing(view.stack):
        return f"imports {module}{'' if view.record.calls else ', before init()'}"
    after = f", after call {view.record.calls}" if view.record.calls else ""
    return (
        f"{_STATES.get(view.state, f'is in state {view.state}')}{where}{after or ('' if where else ', before init()')}"
    )


def _plural(text: str) -> str:
    verb = re.match(r"\w+", text)[0]  # type: ignore[index]  # each begins with one
    return _PLURALS.get(verb, verb.removesuffix("s")) + text[len(verb) :]


def _ranks(group: Sequence[RankView]) -> str:
    hosts = ",".join(dict.fromkeys(view.host for view in sorted(group, key=lambda view: view.record.rank)))
    return f"{_numbers(sorted(view.record.rank for view in group))} on {hosts}"


def _numbers(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {rank_ranges(ranks)}"


# A wait counts as moving data if data last moved less than the first time ago, and it began at least the second before.
_STILL_SECONDS, _MOVED_SECONDS = 1.0, 0.05


# In these, `doing_seconds` of a view refers to something else. Only the observer knows when they began.
SEEN_ONLY = ("starts", "stopped", "disk", "lost", "unknown")


def doing(view: RankView) -> str:
    """Return one of the words above. Only a view with the state of the process tells `disk` and `stopped`."""
    record = view.record
    if view.ended_seconds is not None or view.state in ("gone", "Z", "X"):
        return "ended"
    if record.phase == FAILED:
        return "failed"
    if view.state in ("T", "t"):
        return "stopped"
    if view.state == "D":
        return "disk"
    if record.phase in (STARTED, CALLED):
        return "starts"
    if record.status == WAITS:
        has_moved = view.seconds < _STILL_SECONDS and view.doing_seconds - view.seconds > _MOVED_SECONDS
        return "wire" if has_moved else "waits"
    return {BUSY: "busy", ENDED: "done"}.get(record.status, "computes")
