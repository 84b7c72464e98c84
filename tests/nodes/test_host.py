"""The conditions that a machine must meet."""

from __future__ import annotations

import pytest

from mpitrain.errors import LaunchError
from testbed import host


@pytest.mark.parametrize(("limit", "used", "num_nodes"), [(128, 0, 16), (128, 96, 4), (1024, 200, 64)])
def test_inotify_instances_that_suffice(limit: int, used: int, num_nodes: int) -> None:
    assert host.too_few_inotify(limit, used, num_nodes) == ""


def test_too_few_inotify_instances() -> None:
    assert host.too_few_inotify(128, 32, 32) == (
        "fs.inotify.max_user_instances is 128; 32 nodes need 288, with the 32 that are in use. "
        "Allow more: sudo sysctl -w fs.inotify.max_user_instances=1024"
    )
    assert host.too_few_inotify(1024, 600, 64).endswith("max_user_instances=2048")


def test_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_INOTIFY_A_NODE", 1 << 40)
    with pytest.raises(LaunchError, match=r"fs\.inotify\.max_user_instances is \d+; 3 nodes need"):
        host.require_inotify(3)
