"""RunEvent: a fault or a change of hosts that did not end the training, a command, or a change of configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitrain.typed import made


@dataclass(frozen=True)
class RunEvent:
    """The training has continued after a fault, a change of hosts, a command, or its own choice of a configuration.

    The ranks agree on all but `seconds`.

    Attributes:
        after_step: the number of the last step that counts. The training continued with the next one.
        text: what had happened, as in "rank 2 on lab1 was lost", "lab2 leaves" or "the training is paused".
        source: where parameters, optimizer and position in the data came from: the remaining ranks, an in-memory
            checkpoint, or a checkpoint on disk. "told": they are unchanged, and there was a command of `mpitrain tell`.
            "auto": they are unchanged, and the strategy has changed how gradients travel. A newer mpitrain may have
            other words.
        lost_ranks: the ranks that were lost, by their numbers in the job.
        num_ranks: the number of ranks that continued.
        seconds: from when the fault was noticed, or the ranks stopped for the change, until the training was ready for
            the next step. For the end of a pause: the length of the pause. 0 for other commands and choices.
        repeated_steps: the number of completed steps that were repeated.
        teller: for a command, who gave it, such as "ada on lab1".
        at: for a command, when it was given, in seconds since the epoch.
    """

    after_step: int
    text: str
    source: str
    lost_ranks: tuple[int, ...]
    num_ranks: int
    seconds: float
    repeated_steps: int = 0
    teller: str = ""
    at: float = 0.0

    def plain(self) -> dict[str, Any]:
        """Return the fields as JSON values; `teller` and `at` only for a command."""
        fields = {**dataclasses.asdict(self), "lost_ranks": list(self.lost_ranks)}
        left_out = () if self.teller else ("teller", "at")
        return {name: value for name, value in fields.items() if name not in left_out}

    def line(self) -> str:
        """Return the event as a line of text."""
        if self.source == "told":
            return f"after step {self.after_step}: {self.text} ({self.teller})"
        if self.source == "auto":
            return f"after step {self.after_step}: {self.text}"
        return (
            f"after step {self.after_step}: {self.text}; {self.num_ranks} ranks continued from {self.source} after "
            f"{self.seconds:.2f} s, {self.repeated_steps} steps were repeated"
        )

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> RunEvent:
        """The reverse of `plain`. Fields of a newer mpitrain are left out.

        Raises:
            ValueError: the fields are not those of an event.
        """
        known = {field.name: fields[field.name] for field in dataclasses.fields(cls) if field.name in fields}
        if not isinstance(known.get("source", ""), str):  # of a newer version
            known["source"] = ""
        event = made(cls, known)
        return dataclasses.replace(event, text=_shown(event.text), teller=_shown(event.teller))


def _shown(text: str) -> str:
    """Text that can be written in UTF-8."""
    return text.encode(errors="replace").decode()
