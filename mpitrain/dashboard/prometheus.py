"""The numbers of live jobs in Prometheus' text format, version 0.0.4. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mpitrain.dashboard.shown_jobs import ShownJob
from mpitrain.watching.rank_facts import FACTS

_OF_RANKS = {f"mpitrain_rank_{fact.name}": fact for fact in FACTS if fact.has_family}
# Of each family: type, help.
FAMILIES = {
    "mpitrain_job_info": ("gauge", "1 for each running job"),
    "mpitrain_job_start_time_seconds": ("gauge", "When the job began, in seconds since the epoch"),
    "mpitrain_job_tries": ("gauge", "How often the job has been started"),
    "mpitrain_job_ranks": ("gauge", "Ranks of the job, by what they do"),
    "mpitrain_job_step": ("gauge", "The last step that a rank has begun"),
    "mpitrain_job_metric": ("gauge", "The last reported value of a metric of the training"),
    "mpitrain_host_silence_seconds": ("gauge", "For how long a host of the job has been silent"),
    **{name: ("gauge", fact.help[0].upper() + fact.help[1:]) for name, fact in _OF_RANKS.items()},
    "mpitrain_rank_phase_seconds": ("gauge", "For how long the rank has done what it does"),
}


def exposition(jobs: Iterable[ShownJob]) -> str:
    """Return the text that Prometheus reads."""
    samples: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for job in jobs:
        for name, labels, value in _samples(job.look):
            pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            samples[name].append(f"{name}{{{pairs}}} {_number(value)}")
    lines = []
    for name, (kind, words) in FAMILIES.items():
        if samples[name]:
            lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}", *samples[name]]
    return "".join(line + "\n" for line in lines)


def _samples(look: Mapping[str, Any]) -> Iterable[tuple[str, dict[str, str], Any]]:
    job = {"job_id": str(look["ids"][0]) if look.get("ids") else str(look.get("job", ""))}
    yield "mpitrain_job_info", {**job, "script": str(look.get("script", "")), "state": str(look.get("state", ""))}, 1
    yield "mpitrain_job_start_time_seconds", job, look.get("since", "NaN")
    yield "mpitrain_job_tries", job, look.get("tries", "NaN")
    ranks = [entry for entry in look.get("ranks", ()) if isinstance(entry, dict)]
    phases = [str(entry.get("phase", "")) for entry in ranks]
    for phase in sorted(set(phases)):
        yield "mpitrain_job_ranks", {**job, "phase": phase}, phases.count(phase)
    steps = [entry["step"] for entry in ranks if isinstance(entry.get("step"), int)]
    if steps:
        yield "mpitrain_job_step", job, max(steps)
    for name, value in look.get("metrics", {}).items():
        yield "mpitrain_job_metric", {**job, "name": name}, value
    for host, entry in look.get("hosts", {}).items():
        yield "mpitrain_host_silence_seconds", {**job, "host": host}, entry.get("silence", "NaN")
    for entry in ranks:
        rank = {**job, "rank": str(entry.get("rank", "")), "host": str(entry.get("host", ""))}
        for name, fact in _OF_RANKS.items():
            yield name, rank, entry.get(fact.name, "NaN")
        yield (
            "mpitrain_rank_phase_seconds",
            {**rank, "phase": str(entry.get("phase", ""))},
            entry.get("since", "NaN"),
        )


def _escaped(text: str) -> str:
    text = text.encode(errors="replace").decode()  # names of files need not be UTF-8
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: Any) -> str:
    """Return a number as Prometheus writes it."""
    words = {"Infinity": "+Inf", "-Infinity": "-Inf"}
    if isinstance(value, str):
        return words.get(value, "NaN")
    return repr(float(value)) if isinstance(value, (int, float)) else "NaN"
