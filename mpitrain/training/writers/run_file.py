"""The file that says which run of a service a record is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpitrain.errors import DataError
from mpitrain.training.writers.writer import replace_file


class RunFile:
    """A file beside the record, with the id of the run and what its writer must remember."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, after_step: int) -> dict[str, Any]:
        """Return what was kept for a training that goes on after this step; {}: nothing.

        Raises:
            DataError: the file is damaged.
        """
        if after_step == 0:
            return {}
        try:
            kept = json.loads(self._path.read_bytes())
            if not (isinstance(kept, dict) and isinstance(kept["run"], str)):
                raise ValueError("it names no run")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{self._path} cannot be read ({error}); remove it to begin a new run") from None
        return kept

    def keep(self, kept: dict[str, Any]) -> None:
        """Write the file. `kept` has the id of the run as `run`."""
        replace_file(self._path, json.dumps(kept).encode() + b"\n")
