"""auto: as sync, but how gradients travel is chosen while the training runs.

Chosen are the algorithm of the sums, the size of buckets, and a codec if codecs are allowed. Every step still has the
mean gradient of all ranks. Rounds and a divided optimizer train in another way or need other memory, so only the user
can choose them.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.compression import factory_of
from mpitrain.errors import ConfigError, everywhere
from mpitrain.strategies.sync import Sync
from mpitrain.world import World


class AutoSync(Sync):
    """Synchronous data parallelism that looks for the fastest exchange; see Sync, and docs/choosing.md."""

    varies = True

    def __init__(self, codecs: Sequence[str] = ()) -> None:
        """
        Args:
            codecs: names in mpitrain.compression.CODECS that may be chosen too, besides no codec. Default: by the
                setting `compression`: with "none" no codec, with "auto" bf16, with a codec that codec always.

        Raises:
            ConfigError: there is no codec of one of the names.
        """
        super().__init__()
        for name in codecs:
            factory_of(name)  # raises
        self._given = tuple(codecs)

    def codecs_for(self, world: World) -> Sequence[str]:
        """See Sync.

        Raises:
            ConfigError: codecs were given, and the setting names one. Raised on every rank.
        """
        if not self._given:
            setting = world.config.compression
            return super().codecs_for(world) or [setting]
        if world.config.compression not in ("none", "auto"):
            raise everywhere(
                ConfigError(
                    f"the setting compression={world.config.compression} together with AutoSync(codecs="
                    f"{', '.join(self._given)}): allowed is one of the two. Leave out the setting, or codecs="
                )
            )
        return ["none", *dict.fromkeys(self._given)]
