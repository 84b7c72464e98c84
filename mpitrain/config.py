"""Settings that users may set and that are equal on all ranks. Precedence: argument > MPITRAIN_* variable > default.

What the launcher tells a rank is not a setting; see mpitrain.context.
"""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitrain.context import JobContext
from mpitrain.errors import ConfigError

PREFIX = "MPITRAIN_"
# For the launcher only: a file of NAME=value lines, which `mpitrain run` adds to the environment of the ranks.
ENV_FILE = PREFIX + "ENV_FILE"
# Also for the launcher: the key of a job with servers, which `mpitrain work` reads.
KEY = PREFIX + "KEY"


# The lowest and the highest allowed wait. Calls that wait in the kernel count milliseconds in 32 bits.
SECONDS = (1e-3, 1e6)


def check_range(name: str, value: float, lowest: float, highest: float, *, or_zero: bool = False) -> None:
    """Refuse a number that is out of range: values computed from it would overflow or be useless.

    Raises:
        ConfigError: names the range.
    """
    if not (lowest <= value <= highest or (or_zero and value == 0)):
        zero = "0, or " if or_zero else ""
        raise ConfigError(f"{name} is {value!r}; it must be {zero}a number from {lowest:g} to {highest:g}")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a job's ranks. Each field has an environment variable: `bucket_mib` is MPITRAIN_BUCKET_MIB."""

    algorithm: str = "auto"  # how arrays are summed: a name in mpitrain.allreduce.ALGORITHMS
    transport: str = "auto"  # how arrays on GPUs are summed: a name in mpitrain.cuda.transports.TRANSPORTS
    compression: str = "none"  # between nodes: "none", "auto", a name in mpitrain.compression.CODECS, "power_sgd"
    reduction: str = "plain"  # how floats are summed: "plain", or "exact": rounded once, whatever the order of addition
    profile: str = ""  # file on rank 0 that `mpitrain bench --save-profile` wrote on this cluster; "": none
    bucket_mib: float = 0.0  # gradients are exchanged in buckets of about this many MiB; 0: by the profile, else 4
    stall_seconds: float = 10.0  # after a wait this long without progress, a report says who waits for whom
    hang_seconds: float = 600.0  # a wait this long without progress ends the job; 0: never
    memory_steps: int = 0  # steps between two in-memory checkpoints; 0: at 1 % of the time
    trace: str = ""  # directory on rank 0 for a trace of all ranks, written at the end; "": none

    def __post_init__(self) -> None:
        check_range("bucket_mib", self.bucket_mib, 1e-6, 1e6, or_zero=True)
        check_range("memory_steps", self.memory_steps, 1, 10**9, or_zero=True)
        check_range("stall_seconds", self.stall_seconds, *SECONDS)
        check_range("hang_seconds", self.hang_seconds, *SECONDS, or_zero=True)


def read_config(environ: Mapping[str, str], arguments: Mapping[str, Any]) -> Config:
    """Config from `environ` (all of os.environ will do), overridden by `arguments` that are not None.

    Raises:
        ConfigError: an unknown MPITRAIN_* variable or argument, one that only the launcher may set, or a value that
            does not fit.
    """
    fields: dict[str, type] = {field.name: type(field.default) for field in dataclasses.fields(Config)}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in (ENV_FILE, KEY):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in fields:
            raise ConfigError(_refusal(variable, name, [*(PREFIX + known.upper() for known in fields), ENV_FILE, KEY]))
        try:
            values[name] = fields[name](text)
        except ValueError:
            raise ConfigError(f"{variable} is {text!r}; it must be a {type(getattr(Config, name)).__name__}") from None
    for name, value in arguments.items():
        if name not in fields:
            raise ConfigError(_refusal(name, name, list(fields)))
        if value is not None:
            values[name] = _fitting(name, value, fields[name])
    return Config(**values)


def _fitting(name: str, value: Any, kind: type) -> Any:
    """An argument's value as `kind`: an int will do for a float, and NumPy's numbers for Python's."""
    accepted = {float: numbers.Real, int: numbers.Integral}.get(kind, kind)
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be a {kind.__name__}")
    return kind(value)


def _refusal(shown: str, name: str, known: list[str]) -> str:
    """The error text for an unknown setting `name`, which the user wrote as `shown`."""
    if name in {field.name for field in dataclasses.fields(JobContext)}:
        return (
            f"{shown} is not a setting: `mpitrain run` and `mpitrain verify` pass it to the ranks themselves; "
            "leave it out"
        )
    full = {entry.removeprefix(PREFIX).lower(): entry for entry in known}
    close = difflib.get_close_matches(name, full, n=1)  # with the common prefix, all names would be close
    hint = f"did you mean {full[close[0]]}? " if close else ""
    return f"there is no setting {shown}; {hint}Known are {', '.join(known)}"
