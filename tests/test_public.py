"""The public names, and how little `import mpitrain` loads."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import mpitrain
from jobs import HANG_SECONDS
from mpitrain import errors
from mpitrain.errors import ConfigError

INIT = Path(mpitrain.__file__)
# Present in the fresh interpreters below, so that whoever imports one of them is seen.
DEVICES_AND_FRAMEWORKS = ("cupy", "torch", "jax", "fabric", "numba")


def fresh(program: str, *path: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, str(INIT.parents[1])])}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def typed_names() -> dict[str, str]:
    """Name and module of every import that type checkers see."""
    conditions = [node for node in ast.parse(INIT.read_text()).body if isinstance(node, ast.If)]
    (block,) = (node for node in conditions if ast.unparse(node.test) == "TYPE_CHECKING")
    found: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, "type checkers take it for a name of our own otherwise"
            found[alias.name] = str(node.module)
    return found


def test_type_checkers_see_the_names_that_there_are() -> None:
    assert sorted(mpitrain._HOME) == sorted(mpitrain.__all__)
    modules = dict.fromkeys(mpitrain._MODULES, "mpitrain")
    homes = mpitrain._HOME | mpitrain._OF_FRAMEWORKS
    assert typed_names() == {name: f"mpitrain.{home}" for name, home in homes.items()} | modules


def test_few_names_that_differ_by_more_than_case() -> None:
    names = [*mpitrain.__all__, *mpitrain._OF_FRAMEWORKS]
    assert len(names) <= 45
    for own in (names, *(getattr(mpitrain, module).__all__ for module in mpitrain._MODULES)):
        assert len({name.lower() for name in own}) == len(own)


@pytest.mark.parametrize("module", mpitrain._MODULES)
def test_every_name_of_a_public_module(module: str) -> None:
    """It is there and says what it is; and nothing has two places that a user may import it from."""
    public = import_module(f"mpitrain.{module}")
    assert getattr(mpitrain, module) is public
    assert public.__doc__
    for name in public.__all__:
        assert name not in mpitrain.__all__
        if callable(getattr(public, name)):
            assert getattr(public, name).__doc__, name


@pytest.mark.parametrize("name", mpitrain._MOVED)
def test_who_types_an_old_name_is_told_the_new_one(name: str) -> None:
    new = mpitrain._MOVED[name]
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; it is mpitrain\.{re.escape(new)} now$"):
        getattr(mpitrain, name)
    module, _, own = f"mpitrain.{new}".rpartition(".")
    assert hasattr(import_module(module), own)
    changelog = (INIT.parents[1] / "CHANGELOG.md").read_text()
    assert f"`{name}` is `{new}`" in " ".join(changelog.split())


@pytest.mark.parametrize(("name", "words"), [("", "PACKAGE CONTENTS"), (".World", "broadcast(self, tree: 'Tree'")])
def test_help_without_pytorch(name: str, words: str) -> None:
    done = fresh(f"import sys; sys.modules['torch'] = None; import mpitrain; help(mpitrain{name})")
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert "TorchModule(" not in done.stdout
    constructor = re.search(r"(World|__init__)\([^)]*\bcomm\b", done.stdout)
    assert not constructor, "a constructor of 19 arguments is not for users"


def test_the_first_words_of_help_name_everything() -> None:
    for name in (*mpitrain.__all__, *mpitrain._OF_FRAMEWORKS, *mpitrain._MODULES):
        assert re.search(rf"\b{name}\b", mpitrain.__doc__), name


def test_all_errors_are_in_one_module() -> None:
    defined = {
        node.name: path
        for path in sorted(INIT.parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(hasattr(errors, ast.unparse(base)) or ast.unparse(base) == "MpitrainError" for base in node.bases)
    }
    assert set(defined) == set(errors.__all__) - {"MpitrainError"}
    assert set(defined.values()) == {INIT.parent / "errors.py"}
    for name in errors.__all__:
        assert name in errors.__doc__
        assert issubclass(getattr(errors, name), errors.MpitrainError)


@pytest.mark.parametrize("name", mpitrain.__all__)
def test_every_name_is_what_its_module_has(name: str) -> None:
    value = getattr(mpitrain, name)
    assert value is getattr(import_module(f"mpitrain.{mpitrain._HOME[name]}"), name)
    assert value.__doc__
    names: dict[str, object] = {}
    exec("from mpitrain import *", names)
    assert names[name] is value


def test_a_name_that_needs_a_framework() -> None:
    pytest.importorskip("torch")
    assert mpitrain.TorchModule is import_module("mpitrain.adapters.torch_module").TorchModule
    assert "TorchModule" in dir(mpitrain)
    assert "TorchModule" not in mpitrain.__all__


def test_a_framework_that_is_not_there() -> None:
    done = fresh("import sys; sys.modules['torch'] = None; import mpitrain; mpitrain.TorchModule")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("mpitrain.errors.MissingLibraryError: mpitrain.TorchModule needs PyTorch (")
    assert last.endswith("-m pip install 'mpitrain[torch]'")


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'mpitrain' has no attribute 'Trainr'"):
        mpitrain.Trainr  # noqa: B018


# What a fresh interpreter runs, and what it has loaded then and what not.
NUMPY_AND_MPI = {"numpy", "mpi4py", "ml_dtypes", "threadpoolctl"}
OTHERS = set(DEVICES_AND_FRAMEWORKS)
LOADED: dict[str, tuple[str, set[str], set[str]]] = {
    "the stubs are seen": ("import numpy, mpi4py, " + ", ".join(DEVICES_AND_FRAMEWORKS), {"numpy", *OTHERS}, set()),
    "the package alone": (
        "import mpitrain; mpitrain.__version__, mpitrain.__all__, dir(mpitrain)",
        {"mpitrain"},
        NUMPY_AND_MPI | OTHERS,
    ),
    "the command line": (
        "import mpitrain.cli\ntry:\n    mpitrain.cli.main(['--version'])\nexcept SystemExit:\n    pass",
        {"mpitrain"},
        {"numpy", "mpi4py"} | OTHERS,
    ),
    "all names": ("from mpitrain import *", {"numpy"}, OTHERS),
    "a job of one": (
        "import mpitrain, numpy; world = mpitrain.init(); world.mean(numpy.ones(3)); world.broadcast({'a': 1.0})",
        {"numpy", "mpi4py"},
        OTHERS,
    ),
    "codecs": (
        "from mpitrain.compression import CODECS; [make(False) for make in CODECS.values()]",
        {"numpy"},
        OTHERS,
    ),
}


@pytest.mark.parametrize("case", LOADED)
def test_what_is_loaded(case: str, tmp_path: Path) -> None:
    code, there, absent = LOADED[case]
    for name in DEVICES_AND_FRAMEWORKS:
        (tmp_path / f"{name}.py").write_text("")
    program = f"{code}\nimport sys\nprint(*sorted(name.partition('.')[0] for name in sys.modules))"
    done = fresh(program, str(tmp_path))
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert there <= loaded
    assert not absent & loaded


def test_dir_shows_public_names_only() -> None:
    """dir() hides modules of the package that have been loaded, which Python makes attributes."""
    import_module("mpitrain.launch.start")
    assert dir(mpitrain) == sorted({*mpitrain.__all__, *mpitrain._OF_FRAMEWORKS, *mpitrain._MODULES, "__version__"})


def test_a_writer_among_the_hooks(tmp_path: Path) -> None:
    for hook, kind in (
        (mpitrain.writers.JsonLines(tmp_path), "a JsonLines"),
        (mpitrain.Checkpoint, "the class Checkpoint"),
        (None, "a NoneType"),
    ):
        hooks: list[Any] = [mpitrain.StopAtStep(1), hook]
        with pytest.raises(ConfigError) as caught:
            mpitrain.Trainer(lambda _: pytest.fail("nothing is made"), hooks)
        assert str(caught.value) == (
            f"hooks[1] of Trainer is {kind}; it must be a Hook. Put a writer or meter into mt.Record, as in "
            "hooks=[mt.Record([mt.writers.JsonLines(directory)])]"
        )
