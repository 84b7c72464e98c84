"""The numbers that describe the rounds of a strategy."""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.errors import ConfigError


@dataclass(frozen=True)
class RoundPlan:
    """What the strategies of rounds describe as their arguments. `kind` is the name of the strategy.

    Raises:
        ConfigError: a value is not allowed.
    """

    kind: str
    sync_every: int
    warm_up: int
    fragments: int
    delay: int
    alpha: float

    def __post_init__(self) -> None:
        for name, least in (("sync_every", 1), ("warm_up", 0), ("fragments", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{self.kind}: {name}={value!r}; it must be an int of at least {least}")
        if not isinstance(self.delay, int) or isinstance(self.delay, bool) or not 0 <= self.delay <= self.sync_every:
            raise ConfigError(
                f"{self.kind}: delay={self.delay!r}; it must be an int from 0 to sync_every={self.sync_every}, as a "
                "fragment must arrive before it is sent again"
            )
        if not 0 <= self.alpha < 1 or (self.alpha and not self.delay):
            raise ConfigError(
                f"{self.kind}: alpha={self.alpha!r}; it must be at least 0 and below 1, and 0 without a delay"
            )

    def __str__(self) -> str:
        numbers = {name: value for name, value in vars(self).items() if name != "kind"}
        return f"{self.kind}({', '.join(f'{name}={value}' for name, value in numbers.items())})"

    @property
    def offsets(self) -> list[int]:
        """The steps of a round after which each fragment is sent: at equal distances, the last one at the end."""
        return [-(-self.sync_every * number // self.fragments) for number in range(1, self.fragments + 1)]
