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


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("MPITRAIN_BUCKET_MB", "MPITRAIN_BUCKET_MIB"),
        ("MPITRAIN_ALGORITM", "MPITRAIN_ALGORITHM"),
        ("MPITRAIN_STALL_SECOND", "MPITRAIN_STALL_SECONDS"),
    ],
)
def test_unknown_variable(variable: str, meant: str) -> None:
    known = ", ".join(
        [
            *(f"MPITRAIN_{field.name.upper()}" for field in dataclasses.fields(Config)),
            "MPITRAIN_ENV_FILE",
            "MPITRAIN_KEY",
        ]
    )
    with pytest.raises(ConfigError) as caught:
        read_config({variable: "1"}, {})
    assert str(caught.value) == f"there is no setting {variable}; did you mean {meant}? Known are {known}"


@pytest.mark.parametrize("variable", ["MPITRAIN_XYZZY_QUX", "MPITRAIN_FOO"])  # the prefix alone is no likeness
def test_unknown_variable_that_is_like_none(variable: str) -> None:
    with pytest.raises(ConfigError, match=rf"^there is no setting {variable}; Known are MPITRAIN_ALGORITHM, "):
        read_config({variable: ""}, {})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(JobContext)])
def test_what_only_the_launcher_tells_a_rank(name: str) -> None:
    """Neither a variable nor an argument sets it. The launcher's own variable is no setting."""
    reason = "is no setting: `mpitrain run` and `mpitrain verify` tell it to the ranks themselves; leave it out"
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
    ("variable", "text", "kind"),
    [
        ("MPITRAIN_BUCKET_MIB", "four", "float"),
        ("MPITRAIN_BUCKET_MIB", "", "float"),
        ("MPITRAIN_STALL_SECONDS", "10s", "float"),
    ],
)
def test_variable_of_the_wrong_type(variable: str, text: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable} is '{text}'; it must be a {kind}$"):
        read_config({variable: text}, {})


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("bucket_mib", "4", "float"),
        ("bucket_mib", True, "float"),
        ("bucket_mib", [1], "float"),
        ("stall_seconds", 1j, "float"),
        ("algorithm", 1, "str"),
        ("algorithm", b"ring", "str"),
    ],
)
def test_argument_of_the_wrong_type(name: str, value: Any, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({}, {name: value})
    assert str(caught.value) == f"{name} is {value!r}; it must be a {kind}"


def test_numbers_that_will_do() -> None:
    config = read_config({}, {"bucket_mib": 4, "stall_seconds": numpy.float32(0.5)})
    assert config == Config(bucket_mib=4.0, stall_seconds=0.5)
    # Compared between ranks by their text, so they must be Python's own.
    assert [type(value) for value in vars(config).values()] == [type(value) for value in vars(Config()).values()]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("bucket_mib", -1.0, "0, or a number from 1e-06 to 1e+06"),
        ("bucket_mib", math.nan, "0, or a number from 1e-06 to 1e+06"),
        ("bucket_mib", math.inf, "0, or a number from 1e-06 to 1e+06"),
        ("bucket_mib", 1e300, "0, or a number from 1e-06 to 1e+06"),
        ("bucket_mib", 5e-324, "0, or a number from 1e-06 to 1e+06"),
        ("stall_seconds", 0.0, "a number from 0.001 to 1e+06"),
        ("stall_seconds", -math.inf, "a number from 0.001 to 1e+06"),
        ("stall_seconds", 1e-320, "a number from 0.001 to 1e+06"),
        ("hang_seconds", 1e-320, "0, or a number from 0.001 to 1e+06"),
        ("hang_seconds", 1e300, "0, or a number from 0.001 to 1e+06"),
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
