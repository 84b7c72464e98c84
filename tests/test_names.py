"""One noun, one class; and a class has its attributes where a reader sees them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mpitrain"
TESTBED = PACKAGE.parent / "testbed"
SOURCES = {
    str(path.relative_to(PACKAGE.parent)): path.read_text()
    for folder in (PACKAGE, TESTBED)
    for path in sorted(folder.rglob("*.py"))
}


def doubles(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Classes that are defined more than once: the files, by name."""
    files: dict[str, list[str]] = defaultdict(list)
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(file)
    return {name: there for name, there in files.items() if len(there) > 1}


def proxies(source: str) -> list[str]:
    """Classes that find their attributes by a function, so that neither a reader nor mypy sees what they have."""
    hook = re.compile(r"^\s*(?:async )?(?:def )?__getattr(?:ibute)?__\b", re.M)
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return [node.name for node in classes if hook.search(ast.unparse(node))]


def test_no_two_classes_of_one_name() -> None:
    assert doubles(SOURCES) == {}


def test_no_class_forwards_by_getattr() -> None:
    assert {file: names for file, source in SOURCES.items() if (names := proxies(source))} == {}


def test_a_class_of_a_taken_name_is_seen() -> None:
    sources = {"a.py": "class Group: pass", "b/c.py": "if True:\n    class Group: pass", "d.py": "class Groups: pass"}
    assert doubles(sources) == {"Group": ["a.py", "b/c.py"]}
    assert doubles({"a.py": "class _A: pass\ndef f():\n    class _A: pass"}) == {"_A": ["a.py", "a.py"]}


def test_a_proxy_is_seen() -> None:
    of_a_class = "class Proxy:\n    def __getattr__(self, name): return getattr(self.real, name)"
    assert proxies(of_a_class) == ["Proxy"]
    assert proxies("class Proxy:\n    __getattribute__ = forward") == ["Proxy"]
    # A module's own is that of lazy names (PEP 562).
    assert proxies("def __getattr__(name): ...\nclass A:\n    def get(self): ...") == []
