"""What every failed job must show: a non-zero exit code, nothing left behind, and one report at the end."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jobs import Job

_REPORT = re.compile(
    r"^mpitrain: rank (\d+) on (\S+) failed:\n(.*?)^mpitrain: end of the failure of rank \1 on \2\n", re.M | re.S
)
# Now and then a thread of UCX, on which MPICH is built, still looks at what the abort has closed.
_UCX = re.compile(r"^\[\S+ *:\S+\] +ucp_worker\.c:\d+ +Fatal: failed to modify \d+ event handler .*\n", re.M)


@dataclass(frozen=True)
class Report:
    """The report of the rank that failed first."""

    rank: int
    text: str  # the traceback


def failed(job: Job, *parts: str) -> None:
    """The job failed, wrote each of `parts` to stderr, and left nothing behind."""
    assert job.code != 0, job.output
    assert job.left == [], job.output
    for part in parts:
        assert part in job.stderr, f"{part!r} is not in\n{job.output}"


def report_of(job: Job, *parts: str) -> Report:
    """The job failed with exactly one report, which has each of `parts`. Only mpiexec prints anything after it."""
    failed(job)
    found = list(_REPORT.finditer(job.stderr))
    assert len(found) == 1, f"{len(found)} reports in\n{job.output}"
    rank, _, text = found[0].groups()
    for part in parts:
        assert part in text, f"{part!r} is not in the report in\n{job.output}"
    rest = _UCX.sub("", job.stderr[found[0].end() :])
    # Open MPI's mpiexec writes about the abort after a line of dashes; MPICH's writes to stdout.
    assert "mpitrain" not in rest, job.output
    assert "Traceback" not in rest, job.output
    assert rest == "" or rest.startswith("-----"), job.output
    return Report(int(rank), text)


def succeeded(job: Job) -> None:
    """The job succeeded and left nothing behind."""
    assert job.code == 0, job.output
    assert job.left == [], job.output
