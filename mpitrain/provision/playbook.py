"""One run of `ansible-playbook`: start it, watch it, sum it up. Its output goes to the terminal unchanged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from mpitrain.errors import ClusterError
from mpitrain.launch.processes import adopt_orphans, alive_below, children, end_with_parent, kill_all
from mpitrain.provision.playbook_report import Report, minutes
from mpitrain.provision.project import Project, ansible_program

# Ansible's own deadlines end most logins and commands that hang, but not a module that waits for ever.
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
        process = subprocess.Popen(
            command,
            cwd=project.folder,
            env={**_environment(report.path), **project.environment},
            preexec_fn=end_with_parent(),  # noqa: PLW1509 (no threads here)
        )
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
    """Whatever happens, leave no Ansible process that goes on changing machines. `others` belong to other runs.

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
