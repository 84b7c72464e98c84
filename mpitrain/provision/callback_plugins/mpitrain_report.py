"""Ansible's side of a run: it writes events, one JSON object per line, into the file ANSIBLE_MPITRAIN_REPORT.

This runs in ansible-playbook's process, which may use another Python without mpitrain. So it imports only Ansible.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: mpitrain_report
type: aggregate
short_description: writes what happens for `mpitrain cluster` to read
description: One JSON object per line, into the file that ANSIBLE_MPITRAIN_REPORT names.
requirements: [enabling in configuration]
"""


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Writes each event as it happens."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "mpitrain_report"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._file = open(os.environ["ANSIBLE_MPITRAIN_REPORT"], "a", buffering=1)  # noqa: PTH123, SIM115

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        self._write("start", host=host.get_name(), task=task.get_name())

    def v2_runner_on_ok(self, result: Any) -> None:
        self._end("ok", result)

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._end("skipped", result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._end("ignored" if ignore_errors else "failed", result, message=_message(result._result))

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._end("unreachable", result, message=_message(result._result))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        self._write("stats", hosts={host: stats.summarize(host) for host in stats.processed})

    def _end(self, event: str, result: Any, **more: str) -> None:
        changed = bool(result._result.get("changed"))
        self._write(event, host=result._host.get_name(), task=result._task.get_name(), changed=changed, **more)

    def _write(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}) + "\n")


def _message(result: dict[str, Any]) -> str:
    """Return the message of a failed task; for a loop, the messages of its failed items."""
    items = [item for item in result.get("results", []) if isinstance(item, dict) and item.get("failed")]
    told = [_message(item) for item in items]
    if told:
        return "\n".join(dict.fromkeys(told))
    message = result.get("msg") or result.get("censored") or result.get("reason") or "it gave no reason"
    if isinstance(message, list):
        message = "\n".join(str(line) for line in message)
    more = str(result.get("stderr") or result.get("module_stderr") or "").strip()
    return f"{message}\n{more}" if more and more not in str(message) else str(message)
