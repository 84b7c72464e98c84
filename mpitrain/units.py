"""Option values with units: `10s`, `1.5h`, `1Gbit/s`, `25MiB`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping

from mpitrain.config import SECONDS
from mpitrain.reading import shown

_TIME = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_RATE = {"kbit/s": 1e-6, "Mbit/s": 1e-3, "Gbit/s": 1.0, "Tbit/s": 1e3}
_SIZE = {"KiB": 2.0**-10, "MiB": 1.0, "GiB": 2.0**10}
_Converter = Callable[[str], float]


def _quantity(units: Mapping[str, float], example: str, lowest: float, highest: float, unit: str) -> _Converter:
    """Return the function that converts an option's text; limits and the result are in `unit`."""

    def convert(text: str) -> float:
        match = re.fullmatch(r"([0-9.eE+-]+?)\s*([A-Za-z/]+)", text.strip())
        try:
            value = float(match[1]) * units[match[2]] if match else math.nan
        except (KeyError, ValueError):
            value = math.nan
        if math.isnan(value):
            known = ", ".join(units)
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not a number with a unit, as in {example}; units: {known}"
            )
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not from {lowest:g}{unit} to {highest:g}{unit}")
        return value

    return convert


seconds = _quantity(_TIME, "10s or 1.5h", 1e-6, 1e12, "s")
rate_gbit = _quantity(_RATE, "1Gbit/s or 100Mbit/s", 1e-6, 1e6, "Gbit/s")
size_mib = _quantity(_SIZE, "25MiB", 2.0**-10, 2.0**20, "MiB")
_timeout = _quantity(_TIME, "60s", *SECONDS, "s")


def timeout(text: str) -> float:
    """Convert a time within the limits of settings to seconds; 0 means no limit."""
    return 0.0 if text.strip() in ("0", "0s") else _timeout(text)


def seconds_or_0(text: str) -> float:
    """Convert a time to seconds; it may be 0."""
    return 0.0 if text.strip() in ("0", "0s") else seconds(text)


def seconds_list(text: str) -> list[float]:
    """Convert times that are separated by commas."""
    return [seconds(one) for one in text.split(",")]


class Renamed(argparse.Action):
    """An option that now has another name; the error gives it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(f"{self.option_strings[0]} {self.const}")


def add_renamed(parser: argparse.ArgumentParser, **names: str) -> None:
    """Declare options that have been renamed: `start_seconds="--start-timeout 60s"`."""
    add_foreign(parser, {f"--{old.replace('_', '-')}": f"is now {new}" for old, new in names.items()})


def add_foreign(parser: argparse.ArgumentParser, sentences: Mapping[str, str]) -> None:
    """Declare options that only raise an error: the option, and its sentence."""
    for option, sentence in sentences.items():
        parser.add_argument(
            option, action=Renamed, nargs="?", const=sentence, dest=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
