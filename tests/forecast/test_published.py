"""The simulator against what others have published. benchmarks/published_scaling.py says what was fitted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mpitrain.compression.kernels import can_compile

_PATH = Path(__file__).parents[2] / "benchmarks" / "published_scaling.py"


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_scaling", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its NamedTuple looks for the module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "num_nodes", [8, pytest.param(32, marks=pytest.mark.nightly), pytest.param(64, marks=pytest.mark.nightly)]
)
def test_parameter_servers(published: ModuleType, num_nodes: int) -> None:
    """Within 15 % of 93.5, 84.5 and 51.0 %, the published efficiencies."""
    row = published.parameter_servers(num_nodes)
    assert row.published == pytest.approx({8: 0.93457, 32: 0.84456, 64: 0.50957}[num_nodes], abs=1e-5)
    assert abs(row.error) < 0.15


def test_without_the_fitted_rate_parameter_servers_do_not_agree(published: ModuleType) -> None:
    """With a tenth of it, 8 nodes would be as bad as 64 are."""
    assert published.parameter_servers(8, halves_gbit=published.HALVES_GBIT / 10).error < -0.3


@pytest.mark.skipif(not can_compile(), reason="without Numba, this takes minutes")
@pytest.mark.parametrize(
    ("model", "num_gpus"),
    [("VGG-16", 16), ("Inception V3", 16), ("Inception V3", 512)]
    + [pytest.param(model, 512, marks=pytest.mark.nightly) for model in ("ResNet-101", "VGG-16")],
)
def test_horovod(published: ModuleType, model: str, num_gpus: int) -> None:
    """Two fitted numbers for all models and sizes. All but VGG-16 on 128 GPUs are within 5 %."""
    row = published.horovod(model, num_gpus)
    assert row.num_nodes == num_gpus // 4
    assert abs(row.error) < 0.05
