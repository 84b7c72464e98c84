"""The page of a rank: what finds no room in it, and what was written while it was read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpitrain.watching.rank_record import (
    MOST_ORDER_BYTES,
    MOST_STEERING_BYTES,
    Page,
    RankRecord,
    read_record,
    write_order,
)

PATH = "/proc/self/fd/{}"


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page(3)
    page.write(RankRecord(3), 0, "", 0.0)
    yield page
    os.close(page.descriptor)


def record_of(page: Page) -> RankRecord:
    record = read_record(PATH.format(page.descriptor), 3)
    assert record is not None
    return record


def test_a_text_that_finds_no_room_changes_nothing(page: Page) -> None:
    write_order(page.descriptor, {"number": 1, "value": "first"})
    page.set_steering("a" * MOST_STEERING_BYTES)
    with pytest.raises(ValueError, match=f"a text of {MOST_STEERING_BYTES + 1} bytes"):
        page.set_steering("b" * (MOST_STEERING_BYTES + 1))
    with pytest.raises(ValueError, match=f"at most {MOST_ORDER_BYTES} find room"):
        write_order(page.descriptor, {"number": 2, "value": "\1" * 900})
    assert record_of(page).steering == "a" * MOST_STEERING_BYTES
    assert (page.order_number, page.order()["value"]) == (1, "first")


def test_the_longest_texts_do_not_meet(page: Page) -> None:
    page.set_step(1, 7)
    order = {"number": 1, "value": "c" * (MOST_ORDER_BYTES - len('{"number": 1, "value": ""}'))}
    write_order(page.descriptor, order)
    page.set_steering("a" * MOST_STEERING_BYTES)
    assert page.order() == order
    record = record_of(page)
    assert (record.step, record.steering) == (7, "a" * MOST_STEERING_BYTES)


@pytest.mark.parametrize("num_torn", [1, 4, 5])
def test_a_write_begins_while_the_page_is_read(page: Page, monkeypatch: pytest.MonkeyPatch, num_torn: int) -> None:
    """Where the reader takes the page, half of the text is there, and the write ends before the reader does."""
    page.set_steering("first")
    left = [num_torn]
    read, read_all = os.pread, Path.read_bytes

    def torn(take: Callable[[], bytes]) -> bytes:
        if not left[0]:
            return take()
        left[0] -= 1
        page.set_steering("other")
        return take().replace(b"other", b"ot\0\0\0")

    def pread(descriptor: int, length: int, place: int) -> bytes:
        take = lambda: read(descriptor, length, place)  # noqa: E731
        return take() if length == 8 else torn(take)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(Path, "read_bytes", lambda path: torn(lambda: read_all(path)))
    record = read_record(PATH.format(page.descriptor), 3)
    assert record is None if num_torn == 5 else record is not None and record.steering == "other"
