"""Ansible's output in short: a line for each part that changed something, and failures. A log file has all of it.

The plugin runs in the process of ansible-playbook, whose Python may lack mpitrain. So it imports Ansible alone.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from ansible import constants, context
from ansible.plugins.callback.default import CallbackModule as DefaultCallback
from ansible.utils.display import Display

DOCUMENTATION = """
name: mpitrain_short
type: stdout
short_description: a line for each part of a set-up, and a log file with everything
description:
  - Writes what Ansible usually prints to a file in the folder log beside the playbook, or in ANSIBLE_MPITRAIN_LOG.
  - Prints a line for each play that changed something, failures in full, the messages of debug tasks, and the time.
  - With -v, --diff or --check the usual output is printed too.
extends_documentation_fragment: [default_callback, result_format_callback]
"""

_TICK_SECONDS = 1.0


class _LogDisplay(Display):  # type: ignore[misc]
    """Replaces Ansible's Display for the usual callback: writes to the log file and, on demand, to the terminal.

    Attributes:
        echoes: whether messages are printed too. Warnings always are.
    """

    def __init__(self, file: TextIO, verbosity: int) -> None:
        super().__init__(verbosity)
        self.echoes = False
        self._file = file

    def display(self, msg: str, color: str | None = None, stderr: bool = False, **options: Any) -> None:
        """Write a message; the arguments are those of Display."""
        self._file.write(f"{msg}\n")
        is_warning = stderr and color != constants.COLOR_ERROR
        if self.echoes or is_warning:
            super().display(msg, color=color, stderr=stderr, **options)


class CallbackModule(DefaultCallback):  # type: ignore[misc]
    """Short on the terminal, whole in the log."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "mpitrain_short"

    def __init__(self) -> None:
        super().__init__()
        self._terminal_display = self._display
        self._began = time.monotonic()
        self._num_plays = self._plays_begun = self._num_changes = 0
        self._play_name = self._task_name = ""
        self._progress: _ProgressLine | None = None

    def v2_playbook_on_start(self, playbook: Any) -> None:
        """Open the log, and say where it is."""
        log, problem = _open_log(Path(playbook._file_name).absolute())
        self._path = Path(log.name)
        self._display = _LogDisplay(log, self._terminal_display.verbosity)
        self._prints_all = bool(
            self._terminal_display.verbosity or context.CLIARGS.get("diff") or context.CLIARGS.get("check")
        )
        self._display.echoes = self._prints_all
        self._num_plays = len(playbook.get_plays())
        super().v2_playbook_on_start(playbook)
        self._print(f"All output goes to {_shown(self._path)}{problem}")
        if not self._prints_all and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            self._progress = _ProgressLine(self._doing)

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """Print the line of the previous play, and begin this one."""
        self._end_play()
        self._plays_begun += 1
        self._play_name = play.get_name()
        super().v2_playbook_on_play_start(play)

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """Note the task's name for the progress line."""
        self._task_name = task.get_name().rpartition(" : ")[2]
        super().v2_playbook_on_task_start(task, is_conditional)

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        """Note the handler's name for the progress line."""
        self._task_name = task.get_name().rpartition(" : ")[2]
        super().v2_playbook_on_handler_task_start(task)

    def v2_runner_on_ok(self, result: Any) -> None:
        """Count changes, and print the message of a debug task."""
        self._num_changes += bool(result._result.get("changed"))
        if result._task.action in ("debug", "ansible.builtin.debug") and not self._prints_all:
            message = result._result.get("msg", "")
            for line in message if isinstance(message, list) else [message]:
                self._print(str(line))
        super().v2_runner_on_ok(result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Print a failure in full, unless the task ignores it."""
        self._echo(super().v2_runner_on_failed, result, ignore_errors, only_if=not ignore_errors)

    def v2_runner_item_on_failed(self, result: Any) -> None:
        """Print the failure of an item in full, unless the task ignores it."""
        self._echo(super().v2_runner_item_on_failed, result, only_if=not result._task.ignore_errors)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Print an unreachable node in full, unless the task ignores it."""
        self._echo(super().v2_runner_on_unreachable, result, only_if=not result._task.ignore_unreachable)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Print the last line: the time, and the number of nodes and changes or the nodes that failed."""
        self._end_play()
        if self._progress is not None:
            self._progress.close()
        super().v2_playbook_on_stats(stats)
        if self._prints_all:
            return
        summaries = {host: stats.summarize(host) for host in stats.processed if host != "localhost"}
        changes = sum(counts["changed"] for counts in summaries.values())
        failed = [host for host, counts in summaries.items() if counts["failures"] or counts["unreachable"]]
        failed += [host for host in stats.failures if host == "localhost"]
        if failed:
            self._print(
                f"FAILED after {self._now()} on {', '.join(sorted(failed))}; all output is in {_shown(self._path)}"
            )
        elif "ANSIBLE_MPITRAIN_REPORT" not in os.environ:  # `mpitrain cluster` prints its own last line
            self._print(f"done in {self._now()}: {len(summaries)} nodes, {changes} changes")

    def _end_play(self) -> None:
        if self._num_changes and not self._prints_all:
            changes = f"{self._num_changes} change{'' if self._num_changes == 1 else 's'}"
            self._print(f"[{self._now()}] {self._plays_begun:>2} of {self._num_plays}  {self._play_name}: {changes}")
        self._num_changes = 0

    def _echo(self, method: Any, *arguments: Any, only_if: bool) -> None:
        """Call a method of the usual callback. If `only_if`, print what it writes."""
        echoes = self._display.echoes
        self._display.echoes = echoes or only_if
        if self._display.echoes and self._progress is not None:
            self._progress.clear()
        try:
            method(*arguments)
        finally:
            self._display.echoes = echoes

    def _print(self, line: str) -> None:
        if self._progress is not None:
            self._progress.clear()
        self._terminal_display.display(line)

    def _now(self) -> str:
        return _minutes(time.monotonic() - self._began)

    def _doing(self) -> str:
        return f"[{self._now()}] {self._plays_begun} of {self._num_plays}  {self._play_name}: {self._task_name}"


class _ProgressLine:
    """The last line of a terminal: the present task, written again each second by a thread.

    The thread writes with os.write alone, because Ansible forks meanwhile. A Python lock that the thread holds would
    stay locked in the child.
    """

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def clear(self) -> None:
        """Make room for a line of output."""
        os.write(sys.__stdout__.fileno(), b"\r\033[K")

    def close(self) -> None:
        """End for good."""
        self._ended.set()
        self._thread.join()
        self.clear()

    def _run(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            text = self._text()[: shutil.get_terminal_size().columns - 1]
            # The cursor returns to the margin, so that the next line of any other writer begins there.
            os.write(sys.__stdout__.fileno(), f"\r\033[K{text}\r".encode(errors="replace"))


def _open_log(playbook: Path) -> tuple[TextIO, str]:
    """A new file in the folder `log` beside the playbook; if that cannot be written, a temporary file, and why.

    The playbooks of an installed mpitrain lie in its package: then ANSIBLE_MPITRAIN_LOG names the folder.
    """
    prefix = f"{playbook.stem}-{time.strftime('%Y%m%d-%H%M%S')}-"
    folder, problem = Path(os.environ.get("ANSIBLE_MPITRAIN_LOG") or playbook.parent / "log"), ""
    try:
        folder.mkdir(exist_ok=True)
        file, path = tempfile.mkstemp(".log", prefix, folder)
    except OSError as error:
        problem = f" ({folder} cannot be written: {error.strerror})"
        file, path = tempfile.mkstemp(".log", f"mpitrain-{prefix}")
    os.close(file)
    return open(path, "a", buffering=1, encoding="utf-8", errors="backslashreplace"), problem  # noqa: PTH123


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
