"""The examples import each other as scripts do: with their own folder on the path."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from torch_programs import Printed, run_all


@pytest.fixture(scope="session")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """What the examples for PyTorch printed and saved."""
    return run_all(tmp_path_factory.mktemp("programs"))
