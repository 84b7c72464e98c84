"""Settings, and the only place that reads MPITRAIN_* variables. Precedence: argument > environment > default."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import ConfigError

PREFIX = "MPITRAIN_"


@dataclass(frozen=True, kw_only=True)
class Config:
    """What can be set for a job. Each field is also a variable: `bucket_mib` is MPITRAIN_BUCKET_MIB."""

    algorithm: str = "auto"  # how arrays are summed: a name in mpitrain.allreduce.ALGORITHMS
    transport: str = "auto"  # how arrays on GPUs are summed: a name in mpitrain.allreduce.device.TRANSPORTS
    compression: str = "none"  # of gradients between nodes: "none", "auto", or one of mpitrain.compression.CODECS
    profile: str = ""  # file on rank 0 that `mpitrain bench --save-profile` wrote on this cluster; "": none
    bucket_mib: float = 0.0  # gradients are exchanged in buckets of about this many MiB; 0: by the profile, else 4
    stall_seconds: float = 10.0  # a wait in which nothing moves for so long is reported: who waits for whom
    hang_seconds: float = 600.0  # a wait in which nothing moves for so long ends the job; 0: none does
    trace: str = ""  # directory on rank 0 for a trace of all ranks, written at the end; "": none
    expected_size: int = 0  # ranks that the launcher started; 0: unknown. Set by `mpitrain run`
    roll_call: str = ""  # file that every rank signs at its beginning and its end. Set by `mpitrain run`
    env_file: str = ""  # file of NAME=value lines that `mpitrain run` adds to the environment of the ranks; "": none
    verify_record: str = (
        ""  # folder on rank 0 for a record of what the script computes; "": none. Set by `mpitrain verify`
    )
    verify_steps: int = 5  # how many steps that is; then the script ends. Set by `mpitrain verify`
    devices: str = ""  # of the ranks in order, such as "cuda:0,cuda:1,cpu"; "": not said. Set by `mpitrain run`

    def __post_init__(self) -> None:
        for name, lowest, is_allowed in (
            ("bucket_mib", "0 or more", self.bucket_mib >= 0),
            ("stall_seconds", "above 0", self.stall_seconds > 0),
            ("hang_seconds", "0 or more", self.hang_seconds >= 0),
            ("expected_size", "0 or more", self.expected_size >= 0),
            ("verify_steps", "above 0", self.verify_steps > 0),
        ):
            value = getattr(self, name)
            if not is_allowed or value == float("inf"):
                raise ConfigError(f"{name} is {value!r}; it must be a finite number, {lowest}")

    def device(self, rank: int) -> str:
        """The device that `mpitrain run --hosts` gave to a rank, such as "cuda:1" or "cpu"; "" where it gave none."""
        return self.devices.split(",")[rank] if self.devices else ""


def read_config(environ: Mapping[str, str], arguments: Mapping[str, Any]) -> Config:
    """Config from `environ` (all of os.environ will do), overridden by `arguments` that are not None.

    Raises:
        ConfigError: an unknown MPITRAIN_* variable or argument, or a value that does not fit.
    """
    fields: dict[str, type] = {field.name: type(field.default) for field in dataclasses.fields(Config)}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in fields:
            raise ConfigError(_unknown(variable, [PREFIX + known.upper() for known in fields]))
        try:
            values[name] = fields[name](text)
        except ValueError:
            raise ConfigError(f"{variable} is {text!r}; it must be a {type(getattr(Config, name)).__name__}") from None
    for name, value in arguments.items():
        if name not in fields:
            raise ConfigError(_unknown(name, list(fields)))
        if value is not None:
            values[name] = _fitting(name, value, fields[name])
    return Config(**values)


def _fitting(name: str, value: Any, kind: type) -> Any:
    """An argument's value as `kind`: an int will do for a float, and NumPy's numbers for Python's."""
    accepted = {float: numbers.Real, int: numbers.Integral}.get(kind, kind)
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be a {kind.__name__}")
    return kind(value)


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"there is no setting {name}; {hint}Known are {', '.join(known)}"
