"""One outcome for all ranks, as in tests/ranks. Without PyTorch every test is skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpitrain import World
from tests.ranks.common import skip_alone
from tests.ranks.conftest import pytest_runtest_makereport, shared, world

__all__ = ["pytest_runtest_makereport", "shared", "world"]

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    # PyTorch's own modules use it when they are imported.
    config.addinivalue_line("filterwarnings", "ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(scope="session")
def group(world: World) -> Iterator[None]:
    """torch.distributed over all ranks of the job."""
    import mpitrain.torch  # noqa: F401 - registers the backend

    torch.distributed.init_process_group("mpitrain")
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def several(world: World) -> None:
    """Of tests that need two ranks."""
    skip_alone(world)


@pytest.fixture(scope="module")
def horovod(world: World) -> Iterator[None]:
    import mpitrain.horovod.torch as hvd

    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture(autouse=True)
def unequal_steps(world: World) -> Iterator[None]:
    """Tests make ranks differ on purpose, which the end of the job would report."""
    yield
    world.control.notes.final.clear()
