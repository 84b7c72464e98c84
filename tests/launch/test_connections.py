"""The modules that are sent to hosts as text: complete, and in the right order."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import mpitrain
from mpitrain.chaos.sites import SABOTEUR
from mpitrain.launch.connections import GUARD, SWEEP
from mpitrain.launch.jobs import ROSTER
from mpitrain.launch.keepers import KEEPER
from mpitrain.launch.reserve import SPARES


@pytest.mark.parametrize("modules", [GUARD, SWEEP, ROSTER, KEEPER, SPARES, SABOTEUR], ids=lambda modules: modules[-1])
def test_each_module_comes_after_those_that_it_imports(modules: Sequence[str]) -> None:
    for place, module in enumerate(modules):
        assert set(own_imports(module)) <= set(modules[:place]), module


def own_imports(module: str) -> Iterator[str]:
    """The modules of mpitrain that this module imports when it runs. Imports for type checkers alone do not count."""
    tree = ast.parse((Path(mpitrain.__file__).parent / f"{module.replace('.', '/')}.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("mpitrain."):
                yield (inner.module or "").removeprefix("mpitrain.")
