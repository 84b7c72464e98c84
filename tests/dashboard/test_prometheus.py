"""The text for Prometheus, and the Grafana dashboard that asks for it."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from jobs import REPOSITORY
from mpitrain.dashboard.prometheus import FAMILIES, exposition
from mpitrain.dashboard.shown_jobs import ShownJob

RANK: dict[str, Any] = {"rank": 0, "host": "lab1", "phase": "computes", "since": 0.5, "step": 7}
LOOK: dict[str, Any] = {
    "ids": ["1a2b", "3c4d"],
    "job": "3c4d",
    "script": 'a "quoted"\\name\nof two lines.py',
    "state": "trains",
    "since": 1.5e9,
    "tries": 2,
    "hosts": {"lab1": {"silence": 0.25, "ranks": [0, 1]}},
    "ranks": [RANK, {**RANK, "rank": 1, "phase": "waits", "step": 6, "since": 3}],
    "metrics": {"loss": 0.125, "samples/s": "Infinity", "odd": "NaN"},
}
# A sample, by the grammar of the text format 0.0.4.
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*",?)*)\} (\S+)')

UNESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def samples_of(text: str) -> list[tuple[str, dict[str, str], float]]:
    """What a reader makes of the text, with its own rules of escaping."""
    samples = []
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2])
        labels = {name: re.sub(r"\\.", lambda part: UNESCAPED[part[0]], value) for name, value in pairs}
        samples.append((match[1], labels, float(match[3].replace("Inf", "inf"))))
    return samples


def test_what_is_told_of_a_job() -> None:
    text = exposition([ShownJob(LOOK, time.monotonic())])
    found = {(name, *labels.values()): value for name, labels, value in samples_of(text)}
    assert str(found.pop(("mpitrain_job_metric", "1a2b", "odd"))) == "nan"
    assert found == {
        ("mpitrain_job_info", "1a2b", LOOK["script"], "trains"): 1,
        ("mpitrain_job_start_time_seconds", "1a2b"): 1.5e9,
        ("mpitrain_job_tries", "1a2b"): 2,
        ("mpitrain_job_ranks", "1a2b", "computes"): 1,
        ("mpitrain_job_ranks", "1a2b", "waits"): 1,
        ("mpitrain_job_step", "1a2b"): 7,
        ("mpitrain_job_metric", "1a2b", "loss"): 0.125,
        ("mpitrain_job_metric", "1a2b", "samples/s"): float("inf"),
        ("mpitrain_host_silence_seconds", "1a2b", "lab1"): 0.25,
        ("mpitrain_rank_step", "1a2b", "0", "lab1"): 7,
        ("mpitrain_rank_step", "1a2b", "1", "lab1"): 6,
        ("mpitrain_rank_phase_seconds", "1a2b", "0", "lab1", "computes"): 0.5,
        ("mpitrain_rank_phase_seconds", "1a2b", "1", "lab1", "waits"): 3,
    }


def test_each_family_is_together_and_described_once() -> None:
    jobs = [ShownJob({**LOOK, "ids": [token]}, time.monotonic()) for token in ("a", "b")]
    lines = exposition(jobs).splitlines()
    described = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert described == list(FAMILIES) == [line.split()[2] for line in lines if line.startswith("# HELP")]
    order = list(
        dict.fromkeys(re.split(r"[ {]", line.removeprefix("# TYPE "))[0] for line in lines if "# HELP" not in line)
    )
    assert order == described
    assert exposition([]) == ""


def test_grafana_asks_for_what_there_is() -> None:
    document = json.loads((REPOSITORY / "docs/grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    expressions += [one["query"]["query"] for one in document["templating"]["list"] if one["type"] == "query"]
    names = {name for text in expressions for name in re.findall(r"mpitrain_\w+", text)}
    assert names <= FAMILIES.keys() and len(names) >= 6
    labels = {label for text in expressions for label in re.findall(r"(\w+)=~?\"", text)}
    labels |= {
        label
        for panel in document["panels"]
        for target in panel["targets"]
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
    }
    assert labels <= {"job_id", "name", "phase", "rank", "host"}
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
