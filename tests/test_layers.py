"""Packages are layers: a package imports packages of lower floors, never one of its own floor or above.

The table is that of docs/dev/architecture.md. A new package needs a line in both; a new module needs none.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mpitrain"

# From the bottom up. "top" is what lies beside the packages: mpitrain/errors.py and others.
FLOORS = [
    ["top"],
    ["compression", "watching"],
    ["launch", "waiting"],
    ["check", "provision", "world"],
    ["allreduce", "data", "verify"],
    ["cuda"],
    ["collectives", "remote"],
    ["reducer"],
    ["job", "optim"],
    ["adapters"],
    ["server", "state"],
    ["forecast"],
    ["strategies"],
    ["training"],
    ["dashboard", "jax", "meters", "torch", "writers"],
    ["cli", "horovod"],
]
FLOOR_OF = {name: number for number, floor in enumerate(FLOORS) for name in floor}

# Optional libraries: the only packages that import them, and then inside a function or in a file of their own.
HOMES = {
    "ansible": ["provision"],
    "argcomplete": ["cli"],
    "cupy": ["cuda"],  # others get it from there
    "fabric": ["check"],
    "jax": ["jax"],
    "matplotlib": ["forecast", "training"],
    "mlflow": ["training"],
    "numba": ["compression"],
    "pynvml": ["training"],
    "rich": ["cli", "forecast", "training"],
    "starlette": ["dashboard"],
    "tensorboardX": ["training"],
    "testbed": [],  # it is of the checkout, not of the package
    "torch": ["adapters", "horovod", "torch"],
    "uvicorn": ["dashboard"],
    "wandb": ["training"],
    "zmq": ["server"],
}

# They must work where NumPy or MPI is broken or missing. Programs for ranks are started by them, and not imported.
WITHOUT_NUMPY_AND_MPI = ["watching", "launch", "check", "provision"]
FOR_RANKS = "check.ranks"

FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path not in (PACKAGE / "__init__.py", PACKAGE / "__main__.py")  # the lazy names point everywhere
}


def package(module: str) -> str:
    """The package that a module is in."""
    first = module.partition(".")[0]
    return first if (PACKAGE / first).is_dir() else "top"


def imports(source: str) -> Iterator[tuple[int, str, str]]:
    """Line, full name and kind of every import, wherever it stands: at once, later (in a function), or for types."""

    def walk(node: ast.AST, kind: str) -> Iterator[tuple[int, str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name, kind) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"line {child.lineno}: relative import"
                for alias in child.names:
                    yield child.lineno, f"{child.module}.{alias.name}", kind
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                for part in child.body:
                    yield from walk(ast.Module([part], []), "types")
                for part in child.orelse:
                    yield from walk(ast.Module([part], []), kind)
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and kind == "at once"
                yield from walk(child, "later" if inside else kind)

    yield from walk(ast.parse(source), "at once")


def our_module(name: str) -> str | None:
    """The module of ours that `mpitrain.a.b.Name` is in; None for the package itself (its version)."""
    parts = name.split(".")
    if parts[0] != "mpitrain":
        return None
    return next((module for end in range(len(parts), 1, -1) if (module := ".".join(parts[1:end])) in FILES), None)


def violations(module: str, source: str) -> list[str]:
    mine = package(module)
    if mine not in FLOOR_OF:
        return [f"mpitrain/{mine}: not in the table of tests/test_layers.py"]
    wrong = []
    for line, name, _ in imports(source):
        where = f"mpitrain.{module}, line {line}, imports {name}"
        root = name.split(".")[0]
        if root in HOMES and mine not in HOMES[root]:
            wrong.append(f"{where}; only {', '.join(HOMES[root]) or 'tests and benchmarks'} may")
        other = our_module(name)
        if other is None or package(other) == mine:
            continue
        if package(other) not in FLOOR_OF or FLOOR_OF[package(other)] >= FLOOR_OF[mine]:
            wrong.append(f"{where}: {package(other)} is not on a floor below {mine}")
    return wrong


@pytest.mark.parametrize("module", FILES)
def test_imports_run_downwards(module: str) -> None:
    assert violations(module, FILES[module].read_text()) == []


def test_the_table_has_no_package_that_is_not_there() -> None:
    assert {package(module) for module in FILES} == set(FLOOR_OF)


def test_every_package_says_what_it_is() -> None:
    """A reader who opens a package meets a sentence first."""
    for name in FLOOR_OF:
        if name != "top":
            assert ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text())), name


def test_no_circles_of_files() -> None:
    """No circle exists by imports inside functions either. Imports for type checkers do not count."""
    graph = {
        module: {
            other
            for _, name, kind in imports(path.read_text())
            if kind != "types" and (other := our_module(name)) is not None and other != module
        }
        for module, path in FILES.items()
    }
    while graph:
        free = [module for module, others in graph.items() if not others & graph.keys()]
        assert free, f"import each other in a circle: {sorted(graph)}"
        for module in free:
            del graph[module]


def test_tools_for_machines_load_neither_numpy_nor_mpi() -> None:
    """`mpitrain doctor`, `run` and `check-cluster` say what is wrong where one of the two does not load."""
    pending = [name for name in FILES if package(name) in WITHOUT_NUMPY_AND_MPI and not name.startswith(FOR_RANKS)]
    loaded_by = dict.fromkeys(pending, "")
    while pending:
        module = pending.pop()
        for line, name, kind in imports(FILES[module].read_text()):
            assert kind != "at once" or name.split(".")[0] not in ("numpy", "mpi4py"), (
                f"mpitrain.{module}, line {line}, imports {name}; it is loaded by {loaded_by[module] or 'a command'}"
            )
            other = our_module(name)
            if kind == "at once" and other is not None and other not in loaded_by:
                loaded_by[other] = module
                pending.append(other)


def test_the_test_beds_load_neither_numpy_nor_mpi() -> None:
    """The checkout's testbed/ makes the machines on which both are installed later."""
    program = "import sys, testbed.command; sys.exit(' '.join(sys.modules.keys() & {'numpy', 'mpi4py'}) or 0)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("module", "source", "text"),
    [
        ("errors", "import mpitrain.world.world", "world is not on a floor below top"),
        ("world.world", "def f():\n    from mpitrain.collectives import trees", "line 2, imports mpitrain.collectives"),
        ("world.new", "if TYPE_CHECKING:\n    from mpitrain.job.job import farewell", "job is not on a floor"),
        ("launch.hosts", "from mpitrain.remote import execute", "remote is not on a floor below launch"),
        ("launch.hosts", "def f():\n    from testbed import up", "line 2, imports testbed.up; only tests and bench"),
        ("training.trainer", "import cupy.cuda", "only cuda may"),
        ("cli.run", "def f():\n    import torch", "line 2, imports torch; only adapters, horovod, torch may"),
        ("training.hooks.log", "from mpitrain import cli", "cli is not on a floor below training"),
    ],
)
def test_what_is_not_allowed_is_found(module: str, source: str, text: str) -> None:
    wrong = violations(module, source)
    assert len(wrong) == 1
    assert text in wrong[0]


def test_what_is_allowed() -> None:
    source = "import numpy\nfrom mpitrain import __version__, errors\nfrom mpitrain.tree import Tree\n"
    assert violations("world.world", source + "import mpitrain.world.shard") == []


def test_only_errors_py_says_that_every_rank_raises_an_error() -> None:
    """A forgotten mark breaks the World: there is one way to set it, which cannot be half done."""
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == "known_everywhere":
                assert module == "errors", f"{path}, line {node.lineno}: raise everywhere(error) in its place"


def test_types_without_pytorch() -> None:
    """Where there is no PyTorch, scripts/check leaves out the modules that import it, and checks all others."""
    (pattern,) = re.findall(r"--exclude '([^']+)'", (PACKAGE.parent / "scripts/check").read_text())
    for module, path in FILES.items():
        uses = any(name.partition(".")[0] == "torch" for _, name, _ in imports(path.read_text()))
        left_out = bool(re.search(pattern, path.relative_to(PACKAGE.parent).as_posix()))
        assert left_out or not uses, f"{path}: mypy finds what PyTorch lacks"
        assert not left_out or module.startswith(("torch", "horovod", "adapters.torch_")), path
