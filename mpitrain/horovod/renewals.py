"""What is made anew in the World that is left after a loss: its owner adds it here, and hvd.elastic calls it."""

from __future__ import annotations

from collections.abc import Callable

# All ranks that are left call these in the new World, before a state is restored.
renewals: list[Callable[[], None]] = []
