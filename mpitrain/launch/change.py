"""What changes when hosts leave a running job or join it, from the hosts before. changes.py carries it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mpitrain.errors import ConfigError
from mpitrain.launch.placement import Placement
from mpitrain.launch.verdict import Limits

# The ranks of the next try must be ready within this time, or the present ones end first.
READY_SECONDS = 120.0


@dataclass(frozen=True)
class Change:
    """A change that was accepted.

    Attributes:
        text: as in "node2 leaves".
        hosts: those of the job from now on, with those that are set aside.
        now_on: where the next try runs.
        joined: the hosts that come in with it.
        is_end: too few hosts would be left, so the ranks save, and the job ends.
        ready_seconds: the time in which the ranks of the next try must be ready.
    """

    text: str
    hosts: Placement
    now_on: Placement
    joined: tuple[str, ...] = ()
    is_end: bool = False
    ready_seconds: float = READY_SECONDS

    @property
    def where(self) -> str:
        """The hosts of the next try, as text."""
        return ", ".join(self.now_on.hosts)


def leaving(hosts: Placement, now_on: Placement, leave: Sequence[str]) -> Change:
    """Return the change in which these hosts leave. `hosts` are all hosts of the job, `now_on` those that train."""
    text = f"{', '.join(leave)} leave{'s' * (len(leave) == 1)}"
    return Change(text, hosts.without(set(leave)), now_on.without(set(leave)))


def refuse_few(now_on: Placement, leave: Sequence[str], limits: Limits) -> None:
    """Refuse to let these hosts leave.

    Raises:
        ConfigError: one of them is not in the job, or too few would be left.
    """
    for host in leave:
        if host not in now_on.hosts:
            raise ConfigError(f"{host} is not a host of the job; its hosts are {', '.join(now_on.hosts)}")
    num_left = len(set(now_on.hosts) - set(leave))
    if num_left < max(1, limits.min_nodes):
        left = f"only {num_left} of its hosts would be left" if num_left else "no host would be left"
        raise ConfigError(f"{left}, and {limits.words}; `mpitrain kill` ends a job")


def joining(
    hosts: Placement,
    now_on: Placement,
    text: str,
    limits: Limits,
    widen: Callable[[Placement, str], Placement],
    check: Callable[[Placement], None],
) -> Change:
    """Return the change in which the hosts of `text` join.

    Args:
        hosts: all hosts of the job.
        now_on: those that train.
        text: the new hosts, in the form of --hosts.
        limits: the most hosts.
        widen: see Changes.
        check: see Changes.

    Raises:
        ConfigError: a host is unknown, or in the job already, or there would be too many.
        LaunchError: a host does not answer, or differs.
    """
    wider = widen(now_on, text)
    if limits.max_nodes is not None and len(wider.hosts) > limits.max_nodes:
        raise ConfigError(
            f"it would run on {len(wider.hosts)} hosts, and {limits.words}; `mpitrain leave` makes room for others"
        )
    joined = wider.hosts[len(now_on.hosts) :]
    addresses = {host: at for host, at in wider.addresses.items() if host in joined or host == wider.own}
    check(replace(wider, places=wider.places[len(now_on.hosts) :], addresses=addresses))
    aside = set(hosts.hosts) - set(now_on.hosts) - set(joined)
    all_hosts = widen(hosts.without(set(joined)), text) if aside else wider
    return Change(f"{', '.join(joined)} join{'s' * (len(joined) == 1)}", all_hosts, wider, joined)
