"""The settings that a job gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mpitrain.launch.tuning import SETTINGS, Conditions, glibc_version, settings

ONE_HOST = Conditions("mpich", num_hosts=1, has_rdma=False, is_oversubscribed=False, glibc=(2, 36))
TWO_HOSTS = replace(ONE_HOST, num_hosts=2)
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
WITHOUT_OFI = {"OMPI_MCA_btl": "^ofi"}
YIELDS = {"OMPI_MCA_mpi_yield_when_idle": "1"}
DOCUMENT = Path(__file__).parents[2] / "docs/reference/configuration.md"


def test_on_one_host_no_network_is_tuned() -> None:
    for vendor in ("mpich", "impi"):
        assert settings(replace(ONE_HOST, vendor=vendor), {}) == MALLOC
    assert settings(replace(ONE_HOST, vendor="openmpi"), {}) == {**WITHOUT_OFI, **MALLOC}


def test_over_tcp_each_mpi_has_its_own() -> None:
    assert settings(TWO_HOSTS, {}) == {"UCX_RNDV_THRESH": "inf", **MALLOC}
    assert settings(replace(TWO_HOSTS, vendor="openmpi"), {}) == {
        "OMPI_MCA_btl_tcp_flags": "send",
        **WITHOUT_OFI,
        **YIELDS,
        **MALLOC,
    }
    assert settings(replace(TWO_HOSTS, vendor="impi"), {}) == MALLOC


def test_rdma_hardware_is_left_alone() -> None:
    for vendor in ("mpich", "impi", "openmpi"):
        assert settings(replace(TWO_HOSTS, vendor=vendor, has_rdma=True), {}) == MALLOC


def test_only_open_mpi_must_be_told_to_yield_on_one_host() -> None:
    found = settings(replace(ONE_HOST, vendor="openmpi", is_oversubscribed=True), {})
    assert found == {**YIELDS, **WITHOUT_OFI, **MALLOC}
    assert settings(replace(ONE_HOST, is_oversubscribed=True), {}) == MALLOC


@pytest.mark.parametrize("glibc", [(2, 31), (0, 0)])
def test_malloc_is_left_alone_where_it_refuses_such_thresholds(glibc: tuple[int, int]) -> None:
    assert settings(replace(ONE_HOST, glibc=glibc), {}) == {}
    assert settings(replace(ONE_HOST, glibc=(3, 0)), {}) == MALLOC


def test_what_the_user_has_set_stays() -> None:
    environ = {"UCX_RNDV_THRESH": "8k", "MALLOC_TRIM_THRESHOLD_": ""}
    assert settings(TWO_HOSTS, environ) == {"MALLOC_MMAP_THRESHOLD_": "4294967296"}


def test_each_is_in_the_documentation() -> None:
    text = DOCUMENT.read_text()
    for one in SETTINGS:
        assert f"`{one.name}={one.value}`" in text
        assert one.why
        assert one.source.startswith("https://")


@pytest.mark.parametrize(
    ("text", "version"),
    [("glibc 2.36", (2, 36)), ("glibc 2.5.1", (2, 5)), ("musl 1.2", (0, 0)), ("glibc new", (0, 0)), (None, (0, 0))],
)
def test_version_of_the_c_library(text: str | None, version: tuple[int, int]) -> None:
    assert glibc_version(text) == version
