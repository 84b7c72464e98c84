"""Where the ranks of a job go: what --hosts, -n and --ppn ask for, and the Placement that follows from them.

    a,b                      two hosts; -n or --ppn sets the number of ranks on each
    a/cuda:0-3x2             devices 0 to 3 of a, two ranks on each: eight ranks
    a/cuda:0,a/cuda:2,b/cpu  one rank on each of two devices of a, and one of b on no device
    a/cpux4                  four ranks on no device
    a:4,b:2                  four ranks on a and two on b, at most, as for mpiexec; nothing is said about devices

Ranks go to hosts in blocks, whatever the mpiexec: the first host has ranks 0, 1 and so on. So a rank's host and device
are known before the rank starts. Pure functions; mpitrain.launch.hosts looks up names and addresses.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from mpitrain.errors import ConfigError
from mpitrain.reading import shown, shown_text

HOST_NAME = "[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?"
_DEVICES = re.compile(r"(?P<kind>cpu|cuda):?(?P<first>(?<=:)\d{1,9})?(-(?P<last>\d{1,9}))?(x(?P<each>\d{1,9}))?")
# The most ranks on one host: so many per core, and as many small ranks as a small machine can hold. More than the last
# number are refused even before the number of cores is known.
_MOST_A_CORE, _ALWAYS_ALLOWED, _MOST_OF_ALL = 16, 64, 16384
_FORMS = "a, a:4, a/cpu, a/cpux4, a/cuda:0, a/cuda:0-3, a/cuda:0-3x2"


@dataclass(frozen=True)
class Place:
    """A host of the job and its ranks."""

    host: str
    first_rank: int
    num_ranks: int
    devices: tuple[str, ...] = ()  # the device of each rank; empty if --hosts names none

    @property
    def ranks(self) -> range:
        """Its ranks."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a job go. hosts.place_ranks makes this once; all later code reads it.

    Attributes:
        places: the hosts with their ranks, in rank order.
        addresses: addresses of these hosts and of this machine, by name; empty if the job runs on this machine only.
        own: the name of this machine, which has ranks or only starts the job.
        note: a remark for the user on the choice of hosts; else empty.
    """

    places: tuple[Place, ...]
    addresses: Mapping[str, str] = field(default_factory=dict)
    own: str = ""
    note: str = ""

    @property
    def is_here(self) -> bool:
        """True if the job runs on this machine only, so that it needs no connections."""
        return not self.addresses

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the whole job."""
        return sum(place.num_ranks for place in self.places)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts with ranks, in rank order."""
        return tuple(place.host for place in self.places)

    @property
    def machines(self) -> tuple[str, ...]:
        """The hosts with ranks, and this machine, even if it only starts the job."""
        return tuple(self.addresses) or self.hosts

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the ranks, in rank order; empty if --hosts names none."""
        return tuple(device for place in self.places for device in place.devices)

    def host_of(self, rank: int) -> str:
        """Return the host of a rank."""
        return next(place.host for place in self.places if rank in place.ranks)

    def first(self, most: int | None) -> Placement:
        """Return the placement on at most so many of the hosts, the first ones; None: on all."""
        return self if most is None else self.without(set(self.hosts[most:]))

    def without(self, hosts: Set[str]) -> Placement:
        """Return the placement without some hosts. The others keep their numbers of ranks; ranks are renumbered."""
        places = _numbered(place for place in self.places if place.host not in hosts)
        if [place.host for place in places] == [self.own]:
            return Placement(places, own=self.own)
        # This machine starts the job, with or without ranks of its own.
        addresses = {host: at for host, at in self.addresses.items() if host not in hosts or host == self.own}
        return replace(self, places=places, addresses=addresses)

    def led_by(self, hosts: Collection[str]) -> Placement:
        """Return the placement with these hosts first; ranks are renumbered."""
        return replace(self, places=_numbered(sorted(self.places, key=lambda place: place.host not in hosts)))


def _numbered(places: Iterable[Place]) -> tuple[Place, ...]:
    """Number the ranks of these places from 0."""
    numbered: list[Place] = []
    for place in places:
        numbered.append(replace(place, first_rank=sum(before.num_ranks for before in numbered)))
    return tuple(numbered)


def parse_hosts(text: str) -> dict[str, tuple[str, ...]]:
    """Return by host the devices that `text`, the value of --hosts, names: one per rank; empty if it names none.

    A host with a number of ranks, as in a:4, has as many empty names. Hosts come in the order in which they are first
    named.

    Raises:
        ConfigError: `text` breaks the syntax, or names a host twice without devices.
    """
    by_host: dict[str, list[str]] = {}
    for item in text.split(","):
        named, slash, devices = item.strip().partition("/")
        host, colon, number = named.partition(":")
        if not re.fullmatch(HOST_NAME, host):
            known = f"known are {_FORMS}"
            raise ConfigError(
                f"{shown(item)} in --hosts {shown_text(text)} does not begin with the name of a host; {known}"
            )
        if host in by_host and not (slash and by_host[host]):
            raise ConfigError(
                f"{host} is named twice in --hosts {shown_text(text)}; for two ranks on each host, use --ppn 2; "
                f"for two ranks on {host} alone, use {host}/cpux2"
            )
        ranks = _devices(devices, item, text) if slash else []
        by_host.setdefault(host, []).extend(_slots(number, item, text) if colon else ranks)
        if colon and slash:
            raise ConfigError(f"{shown(item)} in --hosts {shown_text(text)} is not a known form; known are {_FORMS}")
    bare = [host for host, devices in by_host.items() if not any(devices)]
    if len(bare) == len(by_host) and any(by_host.values()):  # without a number: one rank, as for mpiexec
        return {host: tuple(devices or [""]) for host, devices in by_host.items()}
    if bare and len(bare) < len(by_host):
        raise ConfigError(
            f"in --hosts {shown_text(text)} some hosts have devices and {', '.join(bare)} has none; "
            f"for one rank on no device, write {bare[0]}/cpu"
        )
    return {host: tuple(devices) for host, devices in by_host.items()}


def names_devices(hosts: Mapping[str, Sequence[str]]) -> bool:
    """True if hosts, as returned by parse_hosts, have devices and not only numbers of ranks."""
    return any(any(devices) for devices in hosts.values())


def _slots(number: str, item: str, text: str) -> list[str]:
    if not number.isdecimal() or len(number) > 9 or int(number) < 1:
        raise ConfigError(
            f"{shown(item)} in --hosts {shown_text(text)} does not end in a number of ranks above 0; known are {_FORMS}"
        )
    _refuse_count(int(number), item)
    return [""] * int(number)


def _devices(devices: str, item: str, text: str) -> list[str]:
    """Return the devices of one item, one per rank: neighbouring ranks share a device."""
    parts = _DEVICES.fullmatch(devices)
    if parts is None or (parts["kind"] == "cuda") != (parts["first"] is not None) or devices.startswith("cpu:"):
        raise ConfigError(f"{shown(item)} in --hosts {shown_text(text)} is not a known form; known are {_FORMS}")
    each = int(parts["each"] or 1)
    if each < 1:
        raise ConfigError(
            f"{shown(item)} in --hosts {shown_text(text)} asks for no rank; the number after x must be above 0"
        )
    _refuse_count(each, item)
    if parts["kind"] == "cpu":
        if parts["last"]:
            raise ConfigError(
                f"{shown(item)} in --hosts {shown_text(text)}: cpu takes no numbers; for four ranks, write cpux4"
            )
        return ["cpu"] * each
    first = int(parts["first"])
    last = int(parts["last"] or first)
    if last < first:
        raise ConfigError(f"{shown(item)} in --hosts {shown_text(text)}: the devices {first}-{last} run backwards")
    _refuse_count((last - first + 1) * each, item)
    return [f"cuda:{number}" for number in range(first, last + 1) for _ in range(each)]


def place(hosts: Mapping[str, Sequence[str]], num_ranks: int | None, ranks_per_host: int | None) -> tuple[Place, ...]:
    """Lay the ranks out over the hosts.

    Args:
        hosts: by host its devices, as returned by parse_hosts.
        num_ranks: of the whole job (`-n`); None if devices or `ranks_per_host` set the number.
        ranks_per_host: `--ppn`; the last hosts may get fewer ranks if `num_ranks` is smaller than the product.

    Raises:
        ConfigError: the numbers contradict each other, or a host without a number would get no rank.
    """
    if any(hosts.values()):
        counts = [len(devices) for devices in hosts.values()]
        if ranks_per_host is not None:
            raise ConfigError("the hosts are given with their numbers of ranks; leave out --ppn")
        if not names_devices(hosts):
            return fill({host: len(slots) for host, slots in hosts.items()}, num_ranks)
        if num_ranks not in (None, sum(counts)):
            raise ConfigError(
                f"-n is {num_ranks}, but the devices in --hosts are for {sum(counts)} ranks; leave out -n"
            )
    else:
        counts = _counts(len(hosts), num_ranks, ranks_per_host)
    if 0 in counts:
        idle = [host for host, count in zip(hosts, counts, strict=True) if not count]
        raise ConfigError(
            f"with {sum(counts)} ranks, {', '.join(idle)} would have none; name fewer hosts, or ask for more ranks"
        )
    for host, count in zip(hosts, counts, strict=True):
        _refuse_count(count, host)
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    return tuple(
        Place(host, first, count, tuple(filter(None, devices)))
        for (host, devices), first, count in zip(hosts.items(), firsts, counts, strict=True)
    )


def fill(slots: Mapping[str, int], num_ranks: int | None) -> tuple[Place, ...]:
    """Lay so many ranks out over the first hosts, each full before the next one; `slots` is what each may have.

    Hosts that get no rank are left out. None: all hosts are full.
    """
    counts = _filled(list(slots.values()), num_ranks)
    return _numbered(Place(host, 0, count) for host, count in zip(slots, counts, strict=True) if count)


def refuse_crowds(places: Sequence[Place], cores: Mapping[str, int]) -> None:
    """Refuse more ranks than a host can hold; `cores` is by host.

    Raises:
        ConfigError: names the first such host.
    """
    for place in places:
        most = max(_ALWAYS_ALLOWED, _MOST_A_CORE * cores[place.host])
        if place.num_ranks > most:
            raise ConfigError(
                f"{place.num_ranks} ranks on {place.host} are too many: it has {cores[place.host]} cores, and allowed "
                f"are at most {most} ranks there ({_MOST_A_CORE} per core, and {_ALWAYS_ALLOWED} on every machine). "
                "Ask for fewer with -n or --ppn, or name more hosts with --hosts"
            )


def _refuse_count(num_ranks: int, where: str) -> None:
    if num_ranks > _MOST_OF_ALL:
        raise ConfigError(
            f"{num_ranks} ranks on {where} are too many: allowed are at most {_MOST_OF_ALL} on the largest machine. "
            "Ask for fewer with -n or --ppn, or name more hosts with --hosts"
        )


def _filled(slots: Sequence[int], num_ranks: int | None) -> list[int]:
    """Return the numbers of ranks on hosts that are filled in order, each with at most so many."""
    if num_ranks is None:
        return list(slots)
    if num_ranks > sum(slots):
        raise ConfigError(
            f"-n is {num_ranks}, and the hosts have room for {sum(slots)} ranks; leave out -n, or say more"
        )
    return [max(0, min(most, num_ranks - sum(slots[:number]))) for number, most in enumerate(slots)]


def _counts(num_hosts: int, num_ranks: int | None, ranks_per_host: int | None) -> list[int]:
    if ranks_per_host is None:
        if num_ranks is None:
            raise ConfigError("how many ranks? Say -n N for the whole job, --ppn N for each host, or name devices")
        return [num_ranks // num_hosts + (number < num_ranks % num_hosts) for number in range(num_hosts)]
    most = num_hosts * ranks_per_host
    if num_ranks is None:
        num_ranks = most
    if num_ranks > most:
        raise ConfigError(
            f"{num_ranks} ranks do not fit on {num_hosts} hosts with --ppn {ranks_per_host}, which makes {most}; "
            f"leave out --ppn to spread them evenly, or use --ppn {-(-num_ranks // num_hosts)}"
        )
    return [max(0, min(ranks_per_host, num_ranks - number * ranks_per_host)) for number in range(num_hosts)]
