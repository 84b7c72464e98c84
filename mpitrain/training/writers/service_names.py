"""Names of metrics at a service that refuses some."""

from __future__ import annotations

from collections.abc import Callable


class ServiceNames:
    """The names that a service has for the names of rows. No two are the same."""

    def __init__(self, translate: Callable[[str], str]) -> None:
        """`translate` returns a name that the service allows, with room for some more characters."""
        self._translate = translate
        self._names: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the name at the service. If another name has taken it, it gets a number."""
        if name not in self._names:
            translated = chosen = self._translate(name)
            number = 1
            while chosen in self._names.values():
                number += 1
                chosen = f"{translated} {number}"
            self._names[name] = chosen
        return self._names[name]
