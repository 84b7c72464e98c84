"""The public names, and how little `import mpitrain` loads."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import mpitrain
from jobs import HANG_SECONDS
from mpitrain.errors import ConfigError

INIT = Path(mpitrain.__file__)
# Present in the fresh interpreters below, so that whoever imports one of them is seen.
DEVICES_AND_FRAMEWORKS = ("cupy", "torch", "jax", "fabric", "numba")


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
    modules = {"collectives": "mpitrain"}
    homes = mpitrain._HOME | mpitrain._OF_FRAMEWORKS
    assert typed_names() == {name: f"mpitrain.{home}" for name, home in homes.items()} | modules


def test_a_module_that_is_loaded_when_used() -> None:
    assert mpitrain.collectives is import_module("mpitrain.collectives")
    assert "collectives" in dir(mpitrain)


@pytest.mark.parametrize("name", mpitrain.__all__)
def test_every_name_is_what_its_module_has(name: str) -> None:
    value = getattr(mpitrain, name)
    assert value is getattr(import_module(f"mpitrain.{mpitrain._HOME[name]}"), name)
    assert value.__doc__
    assert name in dir(mpitrain)


def test_a_name_that_needs_a_framework() -> None:
    pytest.importorskip("torch")
    assert mpitrain.TorchModule is import_module("mpitrain.adapters.torch_module").TorchModule
    assert "TorchModule" in dir(mpitrain)
    assert "TorchModule" not in mpitrain.__all__


def test_a_framework_that_is_not_there() -> None:
    code = "import sys; sys.modules['torch'] = None; import mpitrain; mpitrain.TorchModule"
    environment = os.environ | {"PYTHONPATH": str(INIT.parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("mpitrain.errors.ConfigError: mpitrain.TorchModule needs PyTorch (")
    assert last.endswith("-m pip install 'mpitrain[torch]'")


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'mpitrain' has no attribute 'Trainr'"):
        mpitrain.Trainr  # noqa: B018


def test_star_import_gives_all_names() -> None:
    names: dict[str, object] = {}
    exec("from mpitrain import *", names)
    assert set(mpitrain.__all__) <= names.keys()


def loaded_after(code: str, stubs: Path) -> set[str]:
    """Top-level modules that a fresh interpreter has after `code`."""
    for name in DEVICES_AND_FRAMEWORKS:
        (stubs / f"{name}.py").write_text("")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(stubs), str(INIT.parents[1])])}
    program = f"{code}\nimport sys\nprint(*sorted(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_stubs_are_seen(tmp_path: Path) -> None:
    found = loaded_after("import numpy, mpi4py, " + ", ".join(DEVICES_AND_FRAMEWORKS), tmp_path)
    assert {"numpy", "mpi4py", *DEVICES_AND_FRAMEWORKS} <= found


def test_the_package_alone_loads_nothing(tmp_path: Path) -> None:
    found = loaded_after("import mpitrain; mpitrain.__version__, mpitrain.__all__, dir(mpitrain)", tmp_path)
    assert "mpitrain" in found
    assert not found & {"numpy", "mpi4py", "ml_dtypes", "threadpoolctl", *DEVICES_AND_FRAMEWORKS}


def test_the_command_line_loads_neither_numpy_nor_mpi(tmp_path: Path) -> None:
    code = "import mpitrain.cli\ntry:\n    mpitrain.cli.main(['--version'])\nexcept SystemExit:\n    pass"
    assert not loaded_after(code, tmp_path) & {"numpy", "mpi4py", *DEVICES_AND_FRAMEWORKS}


def test_all_names_together_load_no_framework(tmp_path: Path) -> None:
    found = loaded_after("import mpitrain; mpitrain.Trainer", tmp_path)
    assert "numpy" in found
    assert not found & {*DEVICES_AND_FRAMEWORKS}
    assert not loaded_after("from mpitrain import *", tmp_path) & {*DEVICES_AND_FRAMEWORKS}


def test_a_job_of_one_loads_no_framework(tmp_path: Path) -> None:
    code = "import mpitrain, numpy; world = mpitrain.init(); world.mean(numpy.ones(3)); world.sync({'a': 1.0})"
    assert not loaded_after(code, tmp_path) & {*DEVICES_AND_FRAMEWORKS}


def test_the_codecs_load_no_compiler_before_one_is_made(tmp_path: Path) -> None:
    found = loaded_after("from mpitrain.compression import CODECS; [make(False) for make in CODECS.values()]", tmp_path)
    assert not found & {*DEVICES_AND_FRAMEWORKS}


def test_dir_shows_public_names_only() -> None:
    """dir() hides modules of the package that have been loaded, which Python makes attributes."""
    import_module("mpitrain.launch.start")
    assert dir(mpitrain) == sorted({*mpitrain.__all__, "TorchLayers", "TorchModule", "collectives", "__version__"})


def test_a_writer_among_the_hooks(tmp_path: Path) -> None:
    for hook, kind in (
        (mpitrain.JsonLines(tmp_path), "a JsonLines"),
        (mpitrain.Checkpoint, "the class Checkpoint"),
        (None, "a NoneType"),
    ):
        hooks: list[Any] = [mpitrain.StopAtStep(1), hook]
        with pytest.raises(ConfigError) as caught:
            mpitrain.Trainer(lambda _: pytest.fail("nothing is made"), hooks)
        assert str(caught.value) == (
            f"hooks[1] of Trainer is {kind}; it must be a Hook. Put a writer or meter into mt.Record, as in "
            "hooks=[mt.Record([mt.JsonLines(directory)])]"
        )
