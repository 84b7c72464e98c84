"""The device syntax of `--hosts`: which hosts, and which rank works on which of their devices.

    a,b                      two hosts; how many ranks each gets is said elsewhere
    a/cuda:0-3x2             devices 0 to 3 of a, two ranks on each: eight ranks
    a/cuda:0,a/cuda:2,b/cpu  one rank on each of two devices of a, and one of b's on no device
    a/cpux4                  four ranks on no device

Pure functions; nothing is looked up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mpitrain.errors import ConfigError

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_DEVICES = re.compile(r"(?P<kind>cpu|cuda):?(?P<first>(?<=:)\d+)?(-(?P<last>\d+))?(x(?P<each>\d+))?")
_FORMS = "a, a/cpu, a/cpux4, a/cuda:0, a/cuda:0-3, a/cuda:0-3x2"


@dataclass(frozen=True)
class Wanted:
    """A host, and the device of each rank there, in the order of ranks; none where the text does not say."""

    host: str
    devices: tuple[str, ...] = ()


def parse_hosts(text: str) -> tuple[Wanted, ...]:
    """What `text` asks for, one entry a host, in the order in which hosts are first named.

    Raises:
        ConfigError: something that is not of the syntax, or a host that is named twice without devices.
    """
    found: dict[str, list[str]] = {}
    for item in text.split(","):
        host, slash, devices = item.strip().partition("/")
        if not _HOST.fullmatch(host):
            raise ConfigError(f"{item!r} in --hosts {text} does not begin with the name of a host; known are {_FORMS}")
        if host in found and not (slash and found[host]):
            raise ConfigError(
                f"{host} is named twice in --hosts {text}; for two ranks on each host say --ppn 2, "
                f"for two ranks on {host} alone {host}/cpux2"
            )
        found.setdefault(host, []).extend(_devices(devices, item, text) if slash else [])
    bare = [host for host, devices in found.items() if not devices]
    if bare and len(bare) < len(found):
        raise ConfigError(
            f"in --hosts {text} some hosts have devices and {', '.join(bare)} has none; "
            f"for one rank on no device write {bare[0]}/cpu"
        )
    return tuple(Wanted(host, tuple(devices)) for host, devices in found.items())


def _devices(devices: str, item: str, text: str) -> list[str]:
    """The devices of one item, one for each rank: neighbouring ranks share one."""
    parts = _DEVICES.fullmatch(devices)
    if parts is None or (parts["kind"] == "cuda") != (parts["first"] is not None) or devices.startswith("cpu:"):
        raise ConfigError(f"{item!r} in --hosts {text} is no device that is known; known are {_FORMS}")
    each = int(parts["each"] or 1)
    if each < 1:
        raise ConfigError(f"{item!r} in --hosts {text} asks for no rank; the number after x must be above 0")
    if parts["kind"] == "cpu":
        if parts["last"]:
            raise ConfigError(f"{item!r} in --hosts {text}: cpu has no numbers; for four ranks write cpux4")
        return ["cpu"] * each
    first = int(parts["first"])
    last = int(parts["last"] or first)
    if last < first:
        raise ConfigError(f"{item!r} in --hosts {text}: the devices {first}-{last} run backwards")
    return [f"cuda:{number}" for number in range(first, last + 1) for _ in range(each)]
