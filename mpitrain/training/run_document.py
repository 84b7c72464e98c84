"""The description of a run in its record, besides the rows: what was started, where, with which code, and how it
ended."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.config import Config
from mpitrain.errors import DataError
from mpitrain.facts import packages
from mpitrain.launch.processes import launcher_name
from mpitrain.reading import json_of, parsed, read_file
from mpitrain.training.run_event import RunEvent
from mpitrain.typed import made
from mpitrain.world.world import World

FILE = "run.json"
VERSION = 1
MOST_BYTES = 1 << 20  # a document has some 10 KiB
# How a run ended, if no error ended it. LEFT: its job continues with it in another attempt.
DONE, LEFT = "done", "left"
_GIT_SECONDS = 5.0  # a work tree may be on a slow shared folder, and all ranks wait


@dataclass(frozen=True)
class RunDocument:
    """The content of `run.json`. Times are in seconds since the epoch, by the clock of rank 0.

    Attributes:
        job: the id that `mpitrain ps` shows; "": another launcher started the job.
        script, arguments, folder: the program of rank 0, its arguments, and the folder in which it was started.
        hosts: the ranks of each host, in the order of ranks.
        strategy: the name of the strategy's class.
        settings: the settings that differ from their defaults, by name (mpitrain.config.Config).
        python, packages: the version of Python and of every installed package.
        commit: of the git work tree that contains the script; "": there is none, or git fails.
        is_changed: files tracked by git have changed since the commit.
        process: identifies the process of rank 0 uniquely: its host, its number, and when the kernel started it
            (roster.launcher_pid tells whether it is alive).
        after_step: the step after which this job continued; 0: it began the training.
        first_started: when the training began. A training that resumes keeps this value.
        started: when this job began with its part of the training.
        ended: when it ended; None: it has not, or it was killed.
        end: DONE, LEFT, or the error that ended the run, in a line; "": it has not ended.
        checkpoints: the absolute paths, on the host of rank 0, of the folders in which Checkpoint saves.
        steps: the number of the last step that the run was to make; 0: it was not known.
        orders: the commands that no row had yet, as RunEvent.plain. A later row may have some of them.
        version: of this format.
    """

    job: str
    script: str
    arguments: list[str]
    folder: str
    hosts: Mapping[str, list[int]]
    strategy: str
    settings: Mapping[str, Any]
    python: str
    packages: Mapping[str, str]
    commit: str
    is_changed: bool
    process: str
    after_step: int
    first_started: float
    started: float
    ended: float | None = None
    end: str = ""
    checkpoints: list[str] = field(default_factory=list)  # missing in a document of an older mpitrain
    steps: int = 0
    orders: list[dict[str, Any]] = field(default_factory=list)
    version: int = VERSION

    def text(self) -> str:
        """Return the content of the file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def ended_now(self, end: str) -> RunDocument:
        """Return the document of the same run after its end."""
        return dataclasses.replace(self, ended=time.time(), end=end)

    def orders_without(self, events: Iterable[RunEvent]) -> list[RunEvent]:
        """Return the commands that are not among the events of the rows, without unreadable ones."""
        known, orders = list(events), []
        for fields in self.orders:
            with suppress(ValueError, TypeError, KeyError):
                if (event := RunEvent.from_plain(fields)) not in known:
                    orders.append(event)
        return orders


def document_of(world: World, strategy: str, after_step: int, checkpoints: Iterable[Path]) -> RunDocument:
    """Describe the run of this process, which is rank 0. Not collective."""
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(world.hosts):
        hosts.setdefault(host, []).append(rank)
    defaults = dataclasses.asdict(Config())
    script = Path(sys.argv[0])
    commit, is_changed = _commit(script.resolve().parent)
    now = time.time()
    return RunDocument(
        job=world.context.job,
        script=str(script),
        arguments=sys.argv[1:],
        folder=str(Path.cwd()),
        hosts=hosts,
        strategy=strategy,
        settings={
            name: value for name, value in dataclasses.asdict(world.config).items() if value != defaults.get(name)
        },
        python=platform.python_version(),
        packages=packages(sys.path),
        commit=commit,
        is_changed=is_changed,
        process=launcher_name(os.getpid()),
        after_step=after_step,
        first_started=now,
        started=now,
        checkpoints=[str(folder.absolute()) for folder in checkpoints],
    )


def read_document(path: Path) -> RunDocument:
    """Read a `run.json`.

    Raises:
        DataError: the file cannot be read, is not such a document, or is one of a newer version.
    """
    form = "is not the document of a run"
    text = read_file(path, DataError, most_bytes=MOST_BYTES)
    content = json_of(text, DataError, str(path), form=form, any_text=True)
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise DataError(f"{path} is of version {version}; this mpitrain reads up to {VERSION}. Update mpitrain")
    document: RunDocument = parsed(lambda: made(RunDocument, content), DataError, str(path), form)
    return document


def _commit(folder: Path) -> tuple[str, bool]:
    """Return the commit of the work tree around `folder`, and whether files have changed since."""
    words = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # the index may be another user's
    try:
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return "", False
    lines = done.stdout.splitlines()
    commits = [line.rpartition(" ")[2] for line in lines if line.startswith("# branch.oid ")]
    return (commits or [""])[0], any(not line.startswith("#") for line in lines)
