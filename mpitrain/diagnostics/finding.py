"""What a judge says, and how facts are asked for in a child process."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Something that is wrong: what was found, why it matters (one sentence), and a command that repairs it."""

    level: Literal["fail", "warn"]  # fail: training does not work; warn: it will be slow, or fail later
    found: str
    why: str
    remedy: str


def ask(command: Sequence[str], *, timeout_seconds: float) -> tuple[str | None, str]:
    """The output of `command`, and the reason when there is none: not there, failed, or too slow."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"did not answer in {timeout_seconds:g} s"
    except OSError as error:
        return None, error.strerror or str(error)
    output = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        said = (done.stderr.decode(errors="replace").strip() or output.strip()).splitlines()
        return None, said[-1] if said else f"ended with code {done.returncode}"
    return output, ""
