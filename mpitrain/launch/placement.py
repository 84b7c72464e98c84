"""How many ranks each host gets, and which: in blocks, the first host has ranks 0, 1 and so on.

In blocks whatever the mpiexec, so that a rank's host and device are known before it starts. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.errors import ConfigError
from mpitrain.launch.devices import Wanted


@dataclass(frozen=True)
class Place:
    """A host of the job and its ranks."""

    host: str
    first_rank: int
    num_ranks: int
    devices: tuple[str, ...] = ()  # of each of its ranks; none where nothing was said

    @property
    def ranks(self) -> range:
        """Its ranks."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


def place(wanted: Sequence[Wanted], num_ranks: int | None, ranks_per_host: int | None) -> tuple[Place, ...]:
    """Lay the ranks out over the hosts.

    Args:
        wanted: the hosts, all with devices or all without.
        num_ranks: of the whole job (`-n`); None where devices or `ranks_per_host` say it.
        ranks_per_host: `--ppn`; the last hosts may get fewer if `num_ranks` is smaller than the product.

    Raises:
        ConfigError: the numbers contradict each other, or some host would get no rank.
    """
    if any(host.devices for host in wanted):
        counts = [len(host.devices) for host in wanted]
        if ranks_per_host is not None:
            raise ConfigError("the devices in --hosts say how many ranks each host has; leave out --ppn")
        if num_ranks not in (None, sum(counts)):
            raise ConfigError(
                f"-n is {num_ranks}, and the devices in --hosts are for {sum(counts)} ranks; leave out -n"
            )
    else:
        counts = _counts(len(wanted), num_ranks, ranks_per_host)
    if 0 in counts:
        idle = [host.host for host, count in zip(wanted, counts, strict=True) if not count]
        raise ConfigError(
            f"{sum(counts)} ranks leave nothing to do for {', '.join(idle)}; name fewer hosts, or ask for more ranks"
        )
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    return tuple(Place(w.host, first, n, w.devices) for w, first, n in zip(wanted, firsts, counts, strict=True))


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
            f"leave out --ppn to spread them evenly, or say --ppn {-(-num_ranks // num_hosts)}"
        )
    return [max(0, min(ranks_per_host, num_ranks - number * ranks_per_host)) for number in range(num_hosts)]
