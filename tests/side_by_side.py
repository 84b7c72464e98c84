"""Run commands side by side, each with a deadline, and with nothing of any left afterwards."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from jobs import REPOSITORY, RUN_TOKEN, clean_environment, kill_all, processes_of

# After SIGTERM, before SIGKILL: on a loaded machine a bed of nodes takes its time to go down.
GRACE_SECONDS = 60.0
# With more failed tests than these in a run, the load of the machine is not what they have in common.
MOST_AGAIN = 3
TESTS_FAILED = 1  # pytest's exit code: the run itself came to its end


@dataclass(frozen=True)
class Part:
    """A command, and what it takes.

    Attributes:
        name: is printed, and names its files.
        command: in the repository's root.
        deadline_seconds: far above what it takes; one that reaches it hangs, and is ended.
        is_pytest: it is given --junit-xml, and counts its tests.
        cores: that it keeps busy, on average; 0 if it mostly waits.
        again: a test of it that failed is tried once more at the end, when nothing else runs. The command is pytest's.
        alone: what runs one of its tests alone, with the name of the test behind it.
    """

    name: str
    command: Sequence[str]
    deadline_seconds: float = 3600.0
    is_pytest: bool = True
    cores: float = 1
    again: bool = False
    alone: str = "scripts/test"


@dataclass
class Running:
    """A part that has begun."""

    part: Part
    folder: Path
    started: float = field(default_factory=time.monotonic)
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    cpu_seconds: float = 0.0

    def __post_init__(self) -> None:
        report = [f"--junit-xml={self.report}"] if self.part.is_pytest else []
        report += ["-o", f"cache_dir={self.cache}"] if self.part.again else []
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*self.part.command, *report],
                cwd=REPOSITORY,
                env=clean_environment({RUN_TOKEN: self.token}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def report(self) -> Path:
        """Its tests, as XML."""
        return self.folder / "report.xml"

    @property
    def output(self) -> Path:
        """All that it printed."""
        return self.folder / "output"

    @property
    def cache(self) -> Path:
        """pytest's, of a part that may be tried again."""
        return self.folder / "cache"

    @property
    def failed_tests(self) -> list[str]:
        """The failed tests that may be tried again, by pytest's names; none of a part that did not reach its end."""
        names = self.cache / "v/cache/lastfailed"
        ended = self.process.returncode == TESTS_FAILED and names.exists()
        return sorted(json.loads(names.read_text())) if ended else []

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.started

    def has_ended(self) -> bool:
        """True if the part has ended. Note the CPU seconds of all its processes that were waited for."""
        if self.process.returncode is None:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.process.returncode = os.waitstatus_to_exitcode(status)
                self.cpu_seconds = usage.ru_utime + usage.ru_stime
        return self.process.returncode is not None

    def end(self) -> None:
        """End it and all the jobs in it, also those in sessions of their own, some time after `ask_to_end`."""
        processes_of(self.token, patience=GRACE_SECONDS)
        self.signal(signal.SIGKILL)
        while processes_of(self.token):  # again: one may have started another in between
            kill_all(self.token)
            time.sleep(0.05)
        while not self.has_ended():
            time.sleep(0.02)

    def ask_to_end(self) -> None:
        """Send SIGTERM once. A second one would end a process that is clearing up."""
        self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        """To all of it that is in its session."""
        if self.process.returncode is None:  # not waited for, so that its number cannot be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    @functools.cached_property
    def counts(self) -> Counter[str]:
        """The counts of the part's tests. A part that ends badly without a failed test counts as one failure."""
        counts: Counter[str] = Counter()
        code = self.process.returncode
        if self.part.is_pytest and self.report.exists():
            suite = next(ElementTree.parse(self.report).iter("testsuite")).attrib
            bad = int(suite["failures"]) + int(suite["errors"])
            skipped = int(suite["skipped"])
            counts.update(failed=bad, skipped=skipped, passed=int(suite["tests"]) - bad - skipped)
        elif not self.part.is_pytest:
            counts["failed" if code else "passed"] += 1
        if code and not counts["failed"]:
            print(f"exit code {code} from {' '.join(self.part.command)}")
            counts["failed"] += 1
        return counts

    def print_output(self) -> None:
        """All of it in one piece, so that those of different parts are not mixed."""
        print(f"\n=== {self.part.name}\n{self.output.read_text(errors='replace')}", end="", flush=True)

    def print_repeats(self) -> None:
        """For each failed test, the command that runs it alone."""
        if self.part.is_pytest and self.report.exists():
            for case in ElementTree.parse(self.report).iter("testcase"):
                if case.find("failure") is not None or case.find("error") is not None:
                    print(f"this test alone: {self.part.alone} {shlex.quote(_node_id(case.attrib))}")


def _node_id(case: Mapping[str, str]) -> str:
    """pytest's name of the test that a report calls so: tests.training.test_a.TestB and test_c."""
    words = case["classname"].split(".")
    for count in range(len(words), 0, -1):
        path = Path(*words[:count]).with_suffix(".py")
        if (REPOSITORY / path).exists():
            return "::".join([str(path), *words[count:], case["name"]])
    return case["name"]  # a file that could not be read


def run(parts: Sequence[Part], cores: int) -> dict[str, Counter[str]]:
    """Run the parts, as many at once as the cores are for, the first ones first. Prints each one's output at its end.

    A test of a part with `again` that failed beside the others may have met the load of the machine: it runs alone
    then. What passes there counts as passed, and the last lines name it: it has a race, or too short a deadline.

    Returns:
        By name: the numbers of tests that passed, failed and were skipped.
    """
    with tempfile.TemporaryDirectory() as folder:
        ended = list(_side_by_side(parts, cores, folder))
        counts = {one.part.name: one.counts for one in ended}
        if sum(counts.values(), Counter[str]())["failed"] <= MOST_AGAIN:
            for one in ended:
                if one.failed_tests and (passed := _passed_alone(one, folder)):
                    counts[one.part.name] = one.counts + Counter(passed=passed, failed=-one.counts["failed"])
    return counts


def _passed_alone(first: Running, folder: str) -> int:
    """The number of the part's failed tests, if all of them pass now that nothing else runs; else 0."""
    names = first.failed_tests
    command = [*first.part.command, "--last-failed", "-o", f"cache_dir={first.cache}"]
    (second,) = _side_by_side([Part(f"{first.part.name}, again", command, first.part.deadline_seconds)], 1, folder)
    # Where pytest does not find a name again it runs all tests, and keeps the name.
    if second.counts["failed"] or second.counts["passed"] < len(names) or first.failed_tests:
        return 0
    print(f"\nfailed beside other parts and passed alone, so mend it: {', '.join(names)}", flush=True)
    return second.counts["passed"]


def _side_by_side(parts: Sequence[Part], cores: int, folder: str) -> Iterator[Running]:
    """Yield the parts that have ended and were printed."""
    waiting, running = list(parts), list[Running]()
    try:
        while waiting or running:
            for part in list(waiting):
                busy = sum(min(other.part.cores, cores) for other in running)
                if busy + min(part.cores, cores) <= cores:
                    waiting.remove(part)
                    print(f"... {part.name} begins", flush=True)
                    running.append(Running(part, Path(tempfile.mkdtemp(dir=folder))))
            time.sleep(0.05)
            for one in list(running):
                is_late = one.seconds > one.part.deadline_seconds
                if not is_late and not one.has_ended():
                    continue
                if is_late:
                    one.ask_to_end()
                    one.end()
                running.remove(one)
                one.print_output()
                if is_late:
                    print(f"ended: it ran longer than {one.part.deadline_seconds:.0f} s")
                took = f"{one.seconds:.0f} s, {one.cpu_seconds:.0f} s of CPU time"
                one.print_repeats()
                print(f"--- {one.part.name}: {dict(one.counts)}, {took}", flush=True)
                yield one
    except BaseException:  # Ctrl-C comes to this process alone
        for one in running:
            one.ask_to_end()
        for one in running:
            one.end()
            one.print_output()
            print(f"--- {one.part.name}: interrupted after {one.seconds:.0f} s", flush=True)
        raise
