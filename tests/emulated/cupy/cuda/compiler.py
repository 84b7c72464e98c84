"""cupy.cuda.compiler: the error of a text that does not compile."""

from __future__ import annotations


class CompileException(Exception):
    def __init__(self, msg: str, source: str, name: str, options: tuple[str, ...], backend: str = "nvrtc") -> None:
        self._msg, self.source, self.name, self.options, self.backend = msg, source, name, options, backend
        super().__init__()

    def __str__(self) -> str:
        return self._msg
