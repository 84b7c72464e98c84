"""Settings: argument above environment above default, and nothing unknown is passed over."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy
import pytest

from mpitrain.config import Config, read_config
from mpitrain.context import JobContext
from mpitrain.errors import ConfigError


def test_defaults() -> None:
    assert read_config({}, {}) == Config()


def test_other_variables_are_none_of_our_business() -> None:
    environ = {"PATH": "/bin", "MPITRAINING": "x", "XMPITRAIN_BUCKET_MIB": "x", "OMP_NUM_THREADS": "1"}
    assert read_config(environ, {}) == Config()


def test_every_field_is_a_variable_and_an_argument() -> None:
    samples = {str: "other", float: 2.5, int: 3}
    values = {field.name: samples[type(field.default)] for field in dataclasses.fields(Config)}
    assert len(values) >= 4
    assert all(getattr(Config(), name) != value for name, value in values.items())
    environ = {f"MPITRAIN_{name.upper()}": str(value) for name, value in values.items()}
    assert read_config(environ, {}) == Config(**values)
    assert read_config({}, values) == Config(**values)


def test_precedence() -> None:
    environ = {"MPITRAIN_BUCKET_MIB": "2", "MPITRAIN_ALGORITHM": "ring"}
    config = read_config(environ, {"bucket_mib": 3.0, "algorithm": None})
    assert config == Config(bucket_mib=3.0, algorithm="ring")


KNOWN = ", ".join(
    [*(f"MPITRAIN_{field.name.upper()}" for field in dataclasses.fields(Config)), "MPITRAIN_ENV_FILE", "MPITRAIN_KEY"]
)


@pytest.mark.parametrize(
    ("variable", "meant"),
    {
        "MPITRAIN_BUCKET_MB": "did you mean MPITRAIN_BUCKET_MIB? ",
        "MPITRAIN_ALGORITM": "did you mean MPITRAIN_ALGORITHM? ",
        "MPITRAIN_STALL_SECOND": "did you mean MPITRAIN_STALL_SECONDS? ",
        "MPITRAIN_XYZZY_QUX": "",
        "MPITRAIN_FOO": "",  # the prefix alone is no likeness
    }.items(),
)
def test_unknown_variable(variable: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({variable: "1"}, {})
    assert str(caught.value) == f"there is no setting {variable}; {meant}Known are {KNOWN}"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(JobContext)])
def test_what_only_the_launcher_tells_a_rank(name: str) -> None:
    """Neither a variable nor an argument sets it. The launcher's own variable is no setting."""
    reason = "is not a setting: `mpitrain run` and `mpitrain verify` pass it to the ranks themselves; leave it out"
    variable = f"MPITRAIN_{name.upper()}"
    with pytest.raises(ConfigError) as caught:
        read_config({variable: "1"}, {})
    assert str(caught.value) == f"{variable} {reason}"
    with pytest.raises(ConfigError) as caught:
        read_config({}, {name: "1"})
    assert str(caught.value) == f"{name} {reason}"
    assert read_config({f"_{variable}": "1"}, {}) == Config()


def test_what_only_the_launcher_reads_is_no_setting_of_a_rank() -> None:
    assert read_config({"MPITRAIN_ENV_FILE": "mpi.env", "MPITRAIN_KEY": "secret"}, {}) == Config()
    with pytest.raises(ConfigError, match=r"^there is no setting env_file; Known are algorithm,"):
        read_config({}, {"env_file": "mpi.env"})


def test_unknown_argument() -> None:
    with pytest.raises(
        ConfigError, match=r"^there is no setting bucket; did you mean bucket_mib\? Known are algorithm,"
    ):
        read_config({}, {"bucket": 1.0})
    with pytest.raises(ConfigError, match=r"^there is no setting x; Known are"):
        read_config({}, {"x": None})


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        *(("bucket_mib", value, "float") for value in ("four", "", "4", True, [1])),
        *(("stall_seconds", value, "float") for value in ("10s", 1j)),
        *(("algorithm", value, "str") for value in (1, b"ring")),
    ],
)
def test_values_of_the_wrong_type(name: str, value: Any, kind: str) -> None:
    """A variable is text, so "4" is a number there."""
    ways: list[tuple[dict[str, str], dict[str, Any]]] = [({}, {name: value})]
    if isinstance(value, str) and value != "4":
        ways.append(({f"MPITRAIN_{name.upper()}": value}, {}))
    for environ, arguments in ways:
        with pytest.raises(ConfigError) as caught:
            read_config(environ, arguments)
        assert str(caught.value).endswith(f" is {value!r}; it must be a {kind}")
        assert str(caught.value).startswith((name, f"MPITRAIN_{name.upper()}")[bool(environ)])


def test_numbers_that_will_do() -> None:
    config = read_config({}, {"bucket_mib": 4, "stall_seconds": numpy.float32(0.5)})
    assert config == Config(bucket_mib=4.0, stall_seconds=0.5)
    # Compared between ranks by their text, so they must be Python's own.
    assert [type(value) for value in vars(config).values()] == [type(value) for value in vars(Config()).values()]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *(
            ("bucket_mib", value, "0, or a number from 1e-06 to 1e+06")
            for value in (-1.0, math.nan, math.inf, 1e300, 5e-324)
        ),
        *(("stall_seconds", value, "a number from 0.001 to 1e+06") for value in (0.0, -math.inf, 1e-320)),
        *(("hang_seconds", value, "0, or a number from 0.001 to 1e+06") for value in (1e-320, 1e300)),
    ],
)
def test_values_out_of_range(name: str, value: float, allowed: str) -> None:
    for environ, arguments in (({}, {name: value}), ({f"MPITRAIN_{name.upper()}": str(value)}, {})):
        with pytest.raises(ConfigError) as caught:
            read_config(environ, arguments)
        assert str(caught.value) == f"{name} is {value!r}; it must be {allowed}"


def test_the_ends_of_the_ranges() -> None:
    for value in (0.0, 1e-6, 1e6):
        assert Config(bucket_mib=value).bucket_mib == value
    for value in (1e-3, 1e6):
        assert Config(stall_seconds=value, hang_seconds=value).hang_seconds == value


def test_config_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().bucket_mib = 1.0  # type: ignore[misc]
