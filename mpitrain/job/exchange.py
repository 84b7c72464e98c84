"""`mpitrain run --exchange mpitrain`: process groups of gloo use mpitrain's backend in the ranks, without an edit.

warm_start/sitecustomize.py calls this in a rank, before the program. It needs PyTorch, so it waits until the program
has imported that.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from mpitrain.context import JobContext


def begin() -> None:
    """Make gloo's name refer to mpitrain's backend in this process, if the launcher has asked for it."""
    if not JobContext.read(os.environ).exchange:
        return
    if "torch" in sys.modules:  # a warm interpreter had imported it
        _adopt()
    else:
        sys.meta_path.insert(0, _AfterImport("torch", _adopt))


def _adopt() -> None:
    importlib.import_module("mpitrain.torch.as_gloo").adopt()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once, when the module of this name has been imported."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._call()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
