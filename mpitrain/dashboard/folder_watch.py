"""The records below some folders, kept in the index by a thread of their own.

An access to a network folder whose server is down blocks forever. So each folder that the user has named has a thread,
and only that thread accesses it. The others continue, and the pages say which folder does not answer.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mpitrain.dashboard.index import RunIndex
from mpitrain.dashboard.record_reader import find_records, run_id

_LOOK_SECONDS = 0.5  # at records that grow
_SEARCH_SECONDS = 5.0  # for new records; a long search is repeated less often
_MOST_SHARE = 0.05  # of the time that searches may take
_GROWING_SECONDS = 120.0  # a record counts as one that grows until it has not grown for so long
_SILENT_SECONDS = 10.0  # a folder that has not answered for so long is named


class FolderWatch:
    """Use `begin` and `end`. Attributes are read by other threads.

    Attributes:
        roots: the folders. More may be appended.
        folders: those with a record, by the id of the run, as the last search has found them.
        has_searched: True if a search has ended.
    """

    def __init__(self, index: RunIndex, roots: Sequence[Path], on_change: Callable[[], None]) -> None:
        """`on_change` is called in the thread when the index has changed."""
        self.roots = list(roots)
        self.folders: dict[str, Path] = {}
        self.has_searched = False
        self._index, self._on_change = index, on_change
        self._growing: dict[Path, float] = {}  # until when
        self._asked: tuple[Path, float] | None = None  # which folder is waited for, and since when
        self._said: set[str] = set()
        self._end = threading.Event()

    def begin(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name="records", daemon=True).start()

    def end(self) -> None:
        """Stop looking. Does not wait."""
        self._end.set()

    @property
    def is_quiet(self) -> bool:
        """True if no record grows."""
        return not self._growing and self._asked is None

    @property
    def problem(self) -> str:
        """Which folder does not answer, in a sentence; "": all do."""
        asked = self._asked
        if asked is None or (seconds := time.monotonic() - asked[1]) < _SILENT_SECONDS:
            return ""
        return (
            f"{asked[0]} has not answered for {seconds:.0f} s: is its disk or network file system lost? What is "
            "known of its runs is shown as it was before"
        )

    def _run(self) -> None:
        next_search = 0.0
        while not self._end.is_set():
            now = time.monotonic()
            try:
                if now >= next_search:
                    self._search()
                    next_search = time.monotonic() + max(_SEARCH_SECONDS, (time.monotonic() - now) / _MOST_SHARE)
                else:
                    self._follow()
            except Exception as error:  # such as a full disk: the pages show what is known, and it is tried again
                self._say_once(f"the records cannot be looked at: {error!r}")
                next_search = time.monotonic() + _SEARCH_SECONDS
            self._asked = None
            self._end.wait(_LOOK_SECONDS)

    def _search(self) -> None:
        """Look for new records, and take in what has changed."""
        roots = list(self.roots)
        folders = {run_id(folder): folder for folder in find_records(roots, self._ask)}
        is_new = folders.keys() != self.folders.keys()
        self.folders = folders  # before all of them are read: a long record takes a while
        self.has_searched = True
        for folder in folders.values():
            self._take_in(folder)
        if is_new:
            self._index.forget_missing(roots)
            self._on_change()

    def _follow(self) -> None:
        """Take in what is new in records that grow."""
        now = time.monotonic()
        for folder, until in list(self._growing.items()):
            self._take_in(folder)
            if until < now:
                self._growing.pop(folder, None)

    def _take_in(self, folder: Path) -> None:
        has_changed = False
        try:
            self._ask(folder)
            while self._index.take_in(folder):
                self._ask(folder)
                has_changed = True
        except Exception as error:  # another record may be readable
            self._say_once(f"{folder} cannot be taken in: {error!r}")
        if has_changed:
            self._growing[folder] = time.monotonic() + _GROWING_SECONDS
            self._on_change()

    def _ask(self, folder: Path) -> None:
        self._asked = folder, time.monotonic()

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            print(f"mpitrain dashboard: {text}", file=sys.stderr, flush=True)
