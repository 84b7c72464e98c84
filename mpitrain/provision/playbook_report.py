"""The report of a run of `ansible-playbook`, from the lines that callback_plugins/mpitrain_report.py writes."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.provision.remedies import REMEDIES

_INTERRUPTED = 130


@dataclass(frozen=True)
class FailedTask:
    """A task that failed on a node."""

    node: str
    task: str
    message: str

    @property
    def remedy(self) -> str:
        """Return what to do; empty if the message says it all, as preflight's does, which may be about another node."""
        if "Nothing was changed." in self.message:
            return ""
        return next((text for words, text in REMEDIES if re.search(words, self.message)), "").format(node=self.node)


class Report:
    """The report. It grows with the file at `path`. `code` is ansible-playbook's exit code, once it has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun = False
        self.code = 0
        self.seconds = 0.0
        self._offset = 0
        self._running: dict[str, str] = {}  # running task by node
        self._failures: dict[str, FailedTask] = {}  # the last failure of each node
        self._stats: dict[str, dict[str, int]] = {}
        self._changes = False

    def read(self) -> bool:
        """Read new lines. Return whether there were any."""
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole, _, _ = new.rpartition(b"\n")
        for line in whole.splitlines():
            self._take(json.loads(line))
        self._offset += len(whole) + bool(whole)
        self.begun = self.begun or bool(whole)
        return bool(whole)

    def end(self, code: int, seconds: float) -> None:
        """Note that Ansible has ended."""
        self.code, self.seconds = code, seconds

    @property
    def changed_something(self) -> bool:
        """True if a task has changed a machine. An interrupted run may have changed one without reporting it."""
        return self._changes or self.code == _INTERRUPTED

    @property
    def failures(self) -> list[FailedTask]:
        """The last failure of each node that failed. A failure that a rescue has handled does not count."""
        if not self._stats:  # the run did not reach its end
            return list(self._failures.values())
        failed = [node for node, counts in self._stats.items() if counts["failures"] or counts["unreachable"]]
        return [self._failures.get(node, FailedTask(node, "?", "see above")) for node in failed]

    def waiting(self) -> str:
        """Describe which nodes have not ended which task."""
        nodes: dict[str, list[str]] = {}
        for node, task in self._running.items():
            nodes.setdefault(task, []).append(node)
        waits = [f"{', '.join(names)} at {task!r}" for task, names in nodes.items()]
        return f"waiting for {'; '.join(waits)}" if waits else "waiting for ansible-playbook itself"

    def text(self) -> str:
        """Describe the end of a run: what failed where, and what to do about it."""
        if self.code == 0:
            # The controller is among them if a play runs there (the wheel of the checkout).
            counts = [counts for node, counts in self._stats.items() if node != "localhost"]
            changes = sum(count["changed"] for count in counts)
            return f"done in {minutes(self.seconds)}: {len(counts)} nodes, {changes} changes"
        if self.code == _INTERRUPTED:
            return f"interrupted after {minutes(self.seconds)}; run it again: it goes on where it stopped"
        lines = [f"FAILED after {minutes(self.seconds)} (ansible-playbook: code {self.code})"]
        for failure in self.failures:
            lines += ["", f"{failure.node}: {failure.task}", textwrap.indent(failure.message.strip(), "    ")]
            lines += [f"    -> {failure.remedy}"] if failure.remedy else []
        if not self.failures:
            lines.append("See Ansible's output above for the reason.")
        return "\n".join(lines)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "stats":
            self._stats = event["hosts"]
            return
        node, task = event["host"], event["task"]
        if kind == "start":
            self._running[node] = task
            return
        self._running.pop(node, None)
        self._changes = self._changes or event["changed"]
        if kind in ("failed", "unreachable"):
            self._failures[node] = FailedTask(node, task, event["message"])


def minutes(seconds: float) -> str:
    """Format a time for people: 95 s is "1:35"."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
