"""Which folders are looked at, and by whom. No thread runs: what the searches have found is given."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from records_made import make_record

from mpitrain.dashboard.catalogue import Catalogue
from mpitrain.dashboard.folder_watch import FolderWatch
from mpitrain.dashboard.index import RunIndex
from mpitrain.dashboard.record_reader import run_id


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunIndex]:
    monkeypatch.setattr(FolderWatch, "begin", lambda _: None)
    made = RunIndex(tmp_path / "index.sqlite")
    yield made
    made.close()


def write(catalogue: Catalogue, *folders: Path) -> None:
    """One job writes in each of these folders, and no other does."""
    jobs: Any = {str(folder): types.SimpleNamespace(look={"record": str(folder)}) for folder in folders}
    catalogue.live.jobs.clear()
    catalogue.live.jobs.update(jobs)
    catalogue._look_for_folders()


def test_a_job_that_writes_again_where_one_has_ended(tmp_path: Path, index: RunIndex) -> None:
    """Its folder has a thread of its own again, because the shared one may hang."""
    catalogue, folder = Catalogue(index, []), tmp_path / "a"
    found = {run_id(folder): folder}
    write(catalogue, folder)
    catalogue._of_jobs[folder].folders = found
    write(catalogue)
    assert (catalogue._former.roots, list(catalogue._of_jobs)) == ([folder], [folder])
    catalogue._former.folders = found
    write(catalogue)
    assert (catalogue._former.roots, list(catalogue._of_jobs)) == ([folder], [])
    write(catalogue, folder)
    assert (catalogue._former.roots, list(catalogue._of_jobs)) == ([], [folder])
    catalogue._of_jobs[folder].folders = found
    write(catalogue)  # what the shared thread has found before does not count: it looks there no more
    assert (catalogue._former.roots, list(catalogue._of_jobs)) == ([folder], [folder])


def test_runs_of_the_index_until_the_first_search_has_ended(tmp_path: Path, index: RunIndex) -> None:
    shown, other = make_record(tmp_path / "runs/a"), make_record(tmp_path / "other/b")
    for folder in (shown, other):
        assert index.update(folder)
    catalogue = Catalogue(index, [tmp_path / "runs"])
    assert list(catalogue._folders()) == [run_id(shown)]
    run, _ = catalogue.find(run_id(shown))
    assert run is not None and run.folder == str(shown)
    assert catalogue.find(run_id(other)) == (None, None)
    catalogue._watches[0].has_searched = True  # and it has found nothing
    assert catalogue._folders() == {}
