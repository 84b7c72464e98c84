"""One outcome for all ranks, as in tests/ranks. Without PyTorch every test is skipped.

`--backend gloo` runs the same tests on PyTorch's own backend, where it has what they need: it shows that they expect
what PyTorch's users expect.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpitrain import World
from tests.ranks.conftest import pytest_runtest_makereport, shared, world

__all__ = ["pytest_runtest_makereport", "shared", "world"]

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", default="mpitrain", help="of torch.distributed")


def pytest_configure(config: pytest.Config) -> None:
    # PyTorch's own modules use it when they are imported.
    config.addinivalue_line("filterwarnings", "ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """What to give `init_process_group`."""
    return str(request.config.getoption("--backend"))


@pytest.fixture(scope="session")
def group(world: World, backend: str) -> Iterator[None]:
    """torch.distributed over all ranks of the job."""
    import mpitrain.torch  # noqa: F401 - registers the backend

    torch.distributed.init_process_group(backend)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def ours(backend: str) -> None:
    """For tests of what PyTorch's own backends do not do."""
    if backend != "mpitrain":
        pytest.skip(f"{backend} does not do this")


@pytest.fixture(autouse=True)
def unequal_steps(world: World) -> Iterator[None]:
    """Tests make ranks differ on purpose, which the end of the job would report."""
    yield
    world.control.notes.final.clear()
