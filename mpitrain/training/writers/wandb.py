"""Writes rows to Weights & Biases. No other module imports wandb."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.training.run_document import DONE, LEFT, RunDocument
from mpitrain.training.run_event import RunEvent
from mpitrain.training.writers import service
from mpitrain.training.writers.service import RunFile, ServiceNames, ServiceRun, ServiceWriter, without_secrets
from mpitrain.training.writers.writer import Row


class Wandb(ServiceWriter):
    """A Writer of runs of Weights & Biases, with a metric for each name of a row, at the step of the row.

    The library's environment variables and login apply: WANDB_MODE=offline writes only to the directory, for `wandb
    sync`. A run of the script itself, `wandb.run`, is neither used nor changed.

    The description of the run becomes the config; each event becomes a line of the notes. Names that begin with "_"
    belong to the service, so the writer drops this "_".
    """

    SERVICE = "Weights & Biases"
    FILE = "wandb.json"
    LIBRARY = EXTRA = "wandb"

    def _make_run(self, after_step: int) -> ServiceRun:
        return _WandbRun(self._directory, self._name, after_step)


class _WandbRun:
    """See ServiceRun. Rows go to a process of the library, which writes them to a file and then sends them."""

    def __init__(self, directory: Path, name: str, after_step: int) -> None:
        self._directory, self._name, self._after_step = directory, name, after_step
        self._file = RunFile(directory / Wandb.FILE)
        self._names = ServiceNames(lambda name: name.lstrip("_") or "metric")
        self._kept: dict[str, Any] = {}
        self._run: Any = None

    def begin(self) -> None:
        if self._run is not None:
            return
        import wandb

        if not self._kept:  # in another attempt, the run must be the same
            new = {"run": uuid.uuid4().hex, "step": 0, "notes": []}
            kept = new | self._file.read(self._after_step)
            self._file.keep(kept)
            self._kept = kept
        settings = wandb.Settings(
            console="off",  # the output of the ranks belongs to the launcher
            # Otherwise the process would end only when everything is sent, or after 90 s of init.
            init_timeout=service.PATIENCE_SECONDS,
            finish_timeout=service.PATIENCE_SECONDS,
        )
        name = None if "WANDB_NAME" in os.environ else self._name
        try:
            _check_login()
            self._run = wandb.init(
                id=self._kept["run"],
                name=name,
                dir=self._directory,
                resume="allow",
                reinit="create_new",
                settings=settings,
            )
        except wandb.errors.AuthenticationError as error:
            raise ConfigError(f"{Wandb.SERVICE} refuses the login: {without_secrets(str(error))}") from None
        except wandb.errors.CommError as error:
            raise ConnectionError(f"{Wandb.SERVICE} does not answer: {without_secrets(str(error))}") from None
        except wandb.Error as error:
            raise ConfigError(f"{Wandb.SERVICE} refuses the run: {without_secrets(str(error))}") from None

    def describe(self, document: RunDocument) -> None:
        self._run.config.update(dataclasses.asdict(document), allow_val_change=True)

    def write(self, rows: Sequence[tuple[Row, Sequence[RunEvent]]]) -> None:
        for row, events in rows:
            step, notes = row["step"], self._kept["notes"]
            new = [line for event in events if (line := event.line()) not in notes]
            is_new = step > self._kept["step"]
            kept = self._kept | {"step": max(step, self._kept["step"]), "notes": notes + new}
            self._file.keep(kept)  # before the library has the row: a process that is killed here never writes it twice
            if is_new:
                values = {self._names.of(name): value for name, value in row.items() if name != "step"}
                self._run.log(values, step=int(step))
            if new:
                self._run.notes = "\n".join(kept["notes"])
            self._kept = kept

    def finish(self, document: RunDocument | None) -> None:
        if self._run is not None:
            is_well = document is None or document.end in ("", DONE, LEFT)
            self._run.finish(exit_code=0 if is_well else 1)


def _check_login() -> None:
    """Raise ConfigError if there is no login. On a terminal, `init` would ask for one without an explanation."""
    import wandb

    is_online = wandb.setup().settings.mode not in ("offline", "dryrun", "disabled")
    # If the script has a run itself, the library does not check.
    if is_online and wandb.run is None and not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            f"{Wandb.SERVICE} finds no login; run `wandb login`, or set WANDB_API_KEY, or set WANDB_MODE=offline"
        )
