"""What the list of runs shows of one: from its record, and from its job if it goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.dashboard.index import IndexedRun
from mpitrain.dashboard.run_state import state_of
from mpitrain.dashboard.shown_jobs import ShownJob
from mpitrain.launch.roster import launcher_pid
from mpitrain.training.writers.json_lines import plain_number

OF_JOB = "job-"  # ids of jobs without a record begin so


def id_of(job: ShownJob) -> str:
    return OF_JOB + (job.ids[0] if job.ids else "")


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
    state, why = state_of(document, look, is_alive=is_alive, age_seconds=time.time() - run.changed)
    if job is not None and job.is_silent:
        why = "its launcher does not answer"
    last = run.events[-1] if run.events else None
    hosts = list(document.hosts) if document else []
    num_ranks = sum(map(len, document.hosts.values())) if document else 0
    if look is not None:
        hosts, num_ranks = list(look.get("hosts", {})), len(look.get("ranks", ()))
    return {
        "id": run.id,
        "name": Path(run.folder).name,
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
        "last": plain_row(run.last),
        "event": last["text"] if last else "",
        "problems": run.problems,
        **_now(look),
    }


def summary_of_job(job: ShownJob) -> dict[str, Any]:
    look = job.look
    state, why = state_of(None, look, is_alive=True, age_seconds=0.0)
    script = " ".join([str(look.get("script", "")), *map(str, look.get("arguments", ()))])
    events = look.get("events") or [{"text": ""}]
    return {
        "id": id_of(job),
        "name": f"job {job.ids[-1] if job.ids else ''}",
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
        "last": {},
        "event": str(events[-1].get("text", "")),
        "problems": [],
        **_now(look),
    }


def _now(look: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the step and the metrics of a live job, which are newer than the last row."""
    if look is None:
        return {"step": None, "metrics": {}}
    steps = [entry["step"] for entry in look.get("ranks", ()) if isinstance(entry.get("step"), int)]
    return {"step": max(steps, default=None), "metrics": look.get("metrics", {})}
