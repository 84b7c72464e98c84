"""What pages show of a run, from its record and from its job: its state, its figures, and how it differs from others.

Functions of what was read; nothing here reads a file.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.dashboard.index import IndexedRun
from mpitrain.dashboard.shown_jobs import ShownJob
from mpitrain.dashboard.versus import best_of, main_metric
from mpitrain.launch.processes import launcher_pid
from mpitrain.training.run_document import DONE, LEFT, RunDocument
from mpitrain.training.writers.json_lines import plain_number

# The states that the page shows, besides those of a live job: starts, trains, restarts, waits, ends.
TRAINS, DONE_STATE, FAILED, LOST, STALLED, UNKNOWN = "trains", "done", "failed", "lost", "stalled", "unknown"
PAUSED = "paused"
# A run that may be on another host counts as running while its record is so young.
_YOUNG_SECONDS = 60.0
_STALL_SECONDS = 10.0  # of a wait in which nothing moves, as of the report on stderr
_TROUBLE = ("stopped", "lost", "failed", "unknown")


def state_of(
    document: RunDocument | None,
    live: Mapping[str, Any] | None,
    *,
    is_alive: bool,
    age_seconds: float,
    step: float = 0,
    event: Mapping[str, Any] | None = None,
) -> tuple[str, str]:
    """Return the state of a run, and why.

    Args:
        document: what the record says of the run.
        live: the last look at its job; None: no launcher here has it.
        is_alive: the process of rank 0 is alive on this host.
        age_seconds: since the record was last written.
        step: of the last row.
        event: the last one of the record.
    """
    if live is not None:
        return _of_job(live)
    age = f"the last row is {_ago(age_seconds)} old"
    if document is None:
        return (TRAINS, age) if age_seconds < _YOUNG_SECONDS else (UNKNOWN, f"the record has no run.json; {age}")
    if document.end == DONE:
        if step <= 0 or 0 < document.steps <= step:
            return DONE_STATE, "all steps were made"
        is_told = event is not None and event.get("source") == "told" and event.get("after_step") == step
        how = f"was stopped by {event['teller']}" if is_told and event is not None else "ended"
        total = f" of {document.steps:,}" if document.steps else ""  # some scripts know no number
        return DONE_STATE, f"it {how} after step {step:,.0f}{total}"
    if document.end == LEFT:
        return LOST, "another attempt was to continue with it, and has not"
    if document.end:
        return FAILED, document.end
    host = document.process.partition(" ")[0]
    if is_alive:
        return TRAINS, f"rank 0 is alive on {host}; no launcher shows more"
    if age_seconds < _YOUNG_SECONDS:
        return TRAINS, age
    return LOST, f"rank 0 on {host} has ended without a message, or cannot be seen from here; {age}"


def _of_job(live: Mapping[str, Any]) -> tuple[str, str]:
    state = str(live.get("state", UNKNOWN))
    ended = live.get("ended")
    if isinstance(ended, Mapping):
        return (FAILED if ended.get("code") != 0 else DONE_STATE), str(ended.get("text", ""))
    ranks = [entry for entry in live.get("ranks", ()) if isinstance(entry, Mapping)]
    trouble = [f"rank {entry.get('rank')} {entry.get('phase')}" for entry in ranks if entry.get("phase") in _TROUBLE]
    still = max((entry.get("still", 0.0) for entry in ranks), default=0.0)
    if state == TRAINS and trouble:
        return STALLED, "; ".join(trouble[:5])
    if state == TRAINS and live.get("stall") and still >= _STALL_SECONDS:
        return STALLED, str(live["stall"])
    if state != "ends" and live.get("paused"):
        return PAUSED, str(live["paused"]).removeprefix("paused ")
    return state, ""


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172800 else f"{seconds / 86400:.0f} days"


OF_JOB = "job-"  # ids of jobs without a record begin so


def ids_of(job: ShownJob) -> list[str]:
    """Return the ids under which a job without a record is found; the first one is that which the list shows.

    A launcher that has not begun an attempt is known by its process, also after it has begun one.
    """
    launchers = [hashlib.sha256(job.launcher.encode()).hexdigest()[:16]] if job.launcher else []
    return [OF_JOB + one for one in [*job.ids, *launchers]]


def job_of(run: IndexedRun, jobs: Sequence[ShownJob]) -> ShownJob | None:
    """Return the job that makes this run now. A later run of the same job may have taken the same folder."""
    for job in jobs:
        if job.look.get("record") == run.folder or (run.document is not None and run.document.job in job.ids):
            return job
    return None


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers as JSON can hold them."""
    return {
        name: plain_number(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def summary_of_run(run: IndexedRun, job: ShownJob | None) -> dict[str, Any]:
    document, look = run.document, job.look if job is not None else None
    is_alive = document is not None and not document.end and launcher_pid(document.process) is not None
    last = run.events[-1] if run.events else None
    step, age = run.last.get("step", 0.0), time.time() - run.changed
    state, why = state_of(document, look, is_alive=is_alive, age_seconds=age, step=step, event=last)
    if job is not None and job.is_silent:
        why = "its launcher does not answer"
    hosts = list(document.hosts) if document else []
    num_ranks = sum(map(len, document.hosts.values())) if document else 0
    if look is not None:
        hosts, num_ranks = list(look.get("hosts", {})), len(look.get("ranks", ()))
    now = _now(look)
    return {
        "id": run.id,
        "name": run.notes.name or Path(run.folder).name,
        "folder": run.folder,
        "job": job.ids[-1] if job is not None and job.ids else document.job if document else "",
        "is_live": look is not None,
        "state": state,
        "why": why,
        "script": " ".join([document.script, *document.arguments]) if document else "",
        "started": document.first_started if document else None,
        "ended": document.ended if document else None,
        "changed": run.changed,
        "hosts": hosts,
        "ranks": num_ranks,
        "rows": run.num_rows,
        "steps": document.steps if document else 0,
        "last": plain_row(run.last),
        "speed": _mean_speed(run.last),
        "event": last["text"] if last else "",
        "slow": job.slow if job is not None else "",
        "problems": run.problems,
        "arguments": arguments_of(document.arguments) if document else {},
        "bests": {name: best_of(extremes, name)[0] for name, extremes in run.extremes.items()},
        "best": _best(run),
        "curve": [float(f"{value:.3g}") for value in run.thinned],
        "note": run.notes.note,
        "tags": run.notes.tags,
        "isHidden": run.notes.is_hidden,
        **now,
        "left": (_left_in(look) or _seconds_left(document, now["step"] or step, time.time() if look else run.changed))
        if state in (TRAINS, STALLED)
        else None,
    }


def summary_of_job(job: ShownJob) -> dict[str, Any]:
    look = job.look
    state, why = state_of(None, look, is_alive=True, age_seconds=0.0)
    script = " ".join([str(look.get("script", "")), *map(str, look.get("arguments", ()))])
    events = look.get("events") or [{"text": ""}]
    return {
        "id": ids_of(job)[0],
        "name": f"job {job.ids[-1]}" if job.ids else "a job that begins",
        "folder": "",
        "job": job.ids[-1] if job.ids else "",
        "is_live": True,
        "state": state,
        "why": "its launcher does not answer" if job.is_silent else why,
        "script": script,
        "started": look.get("since"),
        "ended": None,
        "changed": look.get("at"),
        "hosts": list(look.get("hosts", {})),
        "ranks": len(look.get("ranks", ())),
        "rows": 0,
        "steps": 0,
        "last": {},
        "speed": None,
        "event": str(events[-1].get("text", "")),
        "slow": job.slow,
        "problems": [],
        "arguments": arguments_of([str(one) for one in look.get("arguments", ())]),
        "bests": {},
        "best": None,
        "curve": [],
        "note": "",
        "tags": [],
        "isHidden": False,
        "left": None,
        **_now(look),
    }


def _mean_speed(last: Mapping[str, float]) -> float | None:
    """Return the samples per second over the whole run: the last row alone may be of a slow or a fast moment."""
    samples, seconds = last.get("samples", 0.0), last.get("seconds", 0.0)
    if samples > 0 and seconds > 0 and math.isfinite(samples / seconds):
        return samples / seconds
    speed = last.get("samples_per_second")  # a record of another program may have only this
    return speed if speed is not None and math.isfinite(speed) else None


def _best(run: IndexedRun) -> dict[str, Any] | None:
    """Return the best value of the metric by which a run is judged, and its step."""
    name = main_metric(run.names)
    if name not in run.extremes:
        return None
    value, step = best_of(run.extremes[name], name)
    return {"name": name, "value": value, "step": step}


def _left_in(look: Mapping[str, Any] | None) -> float | None:
    """Return how long the remaining steps take, as reported by the ranks, which know of their pauses."""
    return next((entry["left"] for entry in (look or {}).get("ranks", ()) if entry.get("left")), None)


def _seconds_left(document: RunDocument | None, step: float, now: float) -> float | None:
    """Return how long the remaining steps take at the mean speed of all: the speed of a few would make it jump."""
    if document is None or not document.after_step < step <= document.steps:
        return None
    seconds = (document.steps - step) * (now - document.started) / (step - document.after_step)
    return seconds if 0 <= seconds < math.inf else None


_IS_OPTION = re.compile(r"--?[A-Za-z]")


def arguments_of(words: Sequence[str]) -> dict[str, str]:
    """Return the arguments of a script as a table: of `--lr 0.1 --fast data`, {"--lr": "0.1", "--fast": "data"}.

    What follows an option counts as its value, because only the script knows; "on": there is none. Other words are
    numbered.
    """
    table: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if _IS_OPTION.match(word):
            name, _, value = word.partition("=")
            table[name] = [value] if value else []
        else:
            table.setdefault(name or f"argument {len(table) + 1}", []).append(word)
    return {name: " ".join(values) or "on" for name, values in table.items()}


def _now(look: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the step and the metrics of a live job, which are newer than the last row."""
    if look is None:
        return {"step": None, "metrics": {}}
    steps = [entry["step"] for entry in look.get("ranks", ()) if isinstance(entry.get("step"), int)]
    return {"step": max(steps, default=None), "metrics": look.get("metrics", {})}


_PACKAGE = "package "  # there are many, so they come last


def differences(documents: Sequence[RunDocument | None], folders: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the facts that are not equal in all documents: {"name": text, "values": [text or None...]}.

    Where each run writes says nothing: a fact is left out if in each run it names the folder of its record. `folders`
    has these; empty: no fact is left out.
    """
    tables = [{} if document is None else _facts(document) for document in documents]
    own = [Path(folder).name for folder in folders] or [""] * len(documents)
    names = dict.fromkeys(name for table in tables for name in table)
    ordered = sorted(names, key=lambda name: name.startswith(_PACKAGE))
    rows = [{"name": name, "values": [table.get(name) for table in tables]} for name in ordered]

    def is_place(row: Mapping[str, Any]) -> bool:
        return all(name and name in str(value) for name, value in zip(own, row["values"], strict=True))

    return [row for row in rows if len(set(row["values"])) > 1 and not is_place(row)]


def _hosts(ranks: Mapping[str, Sequence[int]]) -> str:
    """Return the hosts, with the number of ranks of each if any has several."""
    if all(len(numbers) == 1 for numbers in ranks.values()):
        return ", ".join(ranks)
    return ", ".join(f"{host}: {len(numbers)}" for host, numbers in ranks.items())


def _facts(document: RunDocument) -> dict[str, str]:
    facts = {
        "script": document.script,
        **arguments_of(document.arguments),
        "folder": document.folder,
        "commit": document.commit[:12] + (" and changes" if document.is_changed else ""),
        "strategy": document.strategy,
        "ranks": str(sum(map(len, document.hosts.values()))),
        "hosts": _hosts(document.hosts),
        "Python": document.python,
    }
    facts |= {f"setting {name}": str(value) for name, value in document.settings.items()}
    return facts | {_PACKAGE + name: str(version) for name, version in sorted(document.packages.items())}
