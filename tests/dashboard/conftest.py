"""A dashboard that serves the records of a test file, and a browser, where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import Dashboard, chromium, dashboard

# Nothing of the browser's own goes to the network. The sandbox needs namespaces that a container may not have.
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium with a profile of its own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    if not chromium():
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """A dashboard that has found all records of the test file's fixture `folder`."""
    with dashboard(tmp_path_factory.mktemp("cache"), str(folder)) as made:
        found = len(list(folder.glob("*/metrics.jsonl")))
        made.wait_for("/api/runs", lambda answer: len(made.records(answer)) == found)
        yield made
