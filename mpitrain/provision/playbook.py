"""One run of `ansible-playbook`: start it, watch it, sum it up. Its output goes to the terminal unchanged.

The events come in the lines that callback_plugins/mpitrain_report.py writes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mpitrain.errors import ClusterError
from mpitrain.launch.processes import adopt_orphans, alive_below, children, kill_all, start_child
from mpitrain.provision.project import Project, ansible_program
from mpitrain.reading import MessageLines

# A pattern, and what to do. The first pattern in the message counts.
REMEDIES = (
    (
        r"Host key verification failed|IDENTIFICATION HAS CHANGED|host key for .* has changed",
        "look at its key: mpitrain cluster trust {node}",
    ),
    (
        r"Permission denied \(|Too many authentication failures",
        "let {node} accept your key (ssh-copy-id), or correct ansible_user and the key in its line of the inventory",
    ),
    (
        r"[Ii]ncorrect (sudo |su )?password|Sorry, try again",
        "enter the right password: --ask-become-pass asks for it",
    ),
    (
        r"[Mm]issing (sudo|become) password|a password is required|privilege output closed",
        "sudo on {node} asks for a password: add --ask-become-pass",
    ),
    (
        # Usually a kept connection to a machine that has lost its power since.
        r"waiting for privilege escalation prompt",
        "check that {node} is on: mpitrain cluster trust {node}; if it is, find out what its sudo waits for",
    ),
    (
        (
            r"could not be sent to remote host|timed out|No route to host|Connection refused|Network is unreachable|"
            r"Connection (closed|reset)"
        ),
        "check that {node} is on and that its sshd answers: mpitrain cluster trust {node}",
    ),
    (
        r"No space left on device",
        "free space on {node} (df -h), then run it again",
    ),
)


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
        self._lines = MessageLines()
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
        events = list(self._lines.take(new))
        for event in events:
            self._take(event)
        self._offset += len(new)
        self.begun = self.begun or bool(events)
        return bool(events)

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
            return f"interrupted after {minutes(self.seconds)}; run it again: it continues where it stopped"
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
    """Format a time for display: 95 s is "1:35"."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


# -- the run -----------------------------------------------------------------------------------------------------------

# Ansible's own deadlines end most logins and commands that hang, but not a module that waits forever.
NOTICE_SECONDS = 60.0
STALL_SECONDS = 30 * 60.0
_END_SECONDS = 15.0
_PLUGINS = Path(__file__).parent / "callback_plugins"


def run_playbook(project: Project, playbook: str, options: Sequence[str]) -> Report:
    """Run a playbook of `cluster/`, and return the report. Print the line that does the same without mpitrain.

    Raises:
        ClusterError: Ansible is missing; nothing has happened for half an hour.
    """
    path = str(project.playbooks / playbook)
    command = [ansible_program("ansible-playbook"), path, *project.inventory_options, *options]
    print(f"$ {project.shown(['ansible-playbook', *command[1:]])}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mpitrain-ansible-") as folder:
        report = Report(Path(folder, "report.jsonl"))
        began = time.monotonic()
        adopt_orphans()
        others = children()
        # It runs in this process group, so it may ask for passwords at the terminal, and gets the terminal's Ctrl-C.
        environment = {**_environment(report.path), **project.environment}
        process = start_child(command, stdin=None, start_new_session=False, cwd=project.folder, env=environment)
        try:
            with _ended(process, others):
                code = _watch(process, report)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        report.read()
    report.end(code, time.monotonic() - began)
    return report


def _watch(process: subprocess.Popen[bytes], report: Report) -> int:
    """Wait for the end. Report from time to time what the run waits for, and give up when nothing happens."""
    last_event = last_notice = time.monotonic()
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            pass
        now = time.monotonic()
        if report.read() or not report.begun:  # not begun: it may be asking for a password
            last_event = last_notice = now
        elif now - last_event > STALL_SECONDS:
            raise ClusterError(f"nothing has happened for {minutes(now - last_event)}: {report.waiting()}; run ended")
        elif now - last_notice > NOTICE_SECONDS:
            last_notice = now
            print(f"[{minutes(now - last_event)}] {report.waiting()}", file=sys.stderr, flush=True)


@contextmanager
def _ended(process: subprocess.Popen[bytes], others: set[int]) -> Iterator[None]:
    """Whatever happens, leave no Ansible process that continues changing machines. `others` belong to other runs.

    Ansible's workers are in their own sessions, and a worker that starts just when the signal comes outlives Ansible.
    """
    ends = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, partial(_interrupt, process)) for number in ends]
    try:
        yield
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):  # Ansible got this signal too, and ends in its own way
            process.terminate()
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(timeout=_END_SECONDS)
        kill_all(lambda: alive_below(others))
        raise
    finally:
        for number, handler in zip(ends, before, strict=True):
            signal.signal(number, handler)


def _interrupt(process: subprocess.Popen[bytes], *_: object) -> None:
    """Interrupt Ansible as Ctrl-C does. Only Ctrl-C goes to the whole group."""
    process.terminate()
    raise KeyboardInterrupt


def _environment(report: Path) -> dict[str, str]:
    """Return this environment, with the report added to its callbacks."""
    environment = dict(os.environ)
    for name, value, separator in (
        ("ANSIBLE_CALLBACK_PLUGINS", str(_PLUGINS), ":"),
        ("ANSIBLE_CALLBACKS_ENABLED", "mpitrain_report", ","),
    ):
        environment[name] = separator.join(filter(None, [environment.get(name), value]))
    return environment | {"ANSIBLE_MPITRAIN_REPORT": str(report)}
