"""Answers of threads that hang: whoever asks is told, and their number is bounded."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from mpitrain.dashboard import shared_answers
from mpitrain.dashboard.shared_answers import SharedAnswers
from mpitrain.errors import DataError


@pytest.fixture
def goes_on() -> Any:
    """Calls that wait for this end at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def fails() -> None:
    raise OSError("the disk is gone")


def test_all_who_ask_meanwhile_get_one_answer(goes_on: threading.Event) -> None:
    calls = []

    def call() -> int:
        calls.append(1)
        goes_on.wait()
        return 7

    async def ask() -> list[int]:
        answers = SharedAnswers()
        asked = [asyncio.create_task(answers.get("a", call)) for _ in range(3)]
        await asyncio.sleep(0)
        goes_on.set()
        found = list(await asyncio.gather(*asked))
        return [*found, await answers.get("a", lambda: 8)]

    assert (asyncio.run(ask()), calls) == ([7, 7, 7, 8], [1])


def test_an_error_reaches_whoever_asks() -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        asyncio.run(SharedAnswers().get("a", fails))


def test_no_answer_in_time(monkeypatch: pytest.MonkeyPatch, goes_on: threading.Event) -> None:
    """The call that hangs is not made again; it may end after all."""
    monkeypatch.setattr(shared_answers, "_ANSWER_SECONDS", 0.05)
    calls = [goes_on.wait]

    def call() -> bool:
        return calls.pop()()

    async def ask() -> object:
        answers = SharedAnswers()
        for _ in range(2):
            with pytest.raises(DataError, match=r"no answer for 0\.05 s from the folder /lost: is a disk"):
                await answers.get("the folder /lost", call)
        goes_on.set()
        while True:
            try:
                return await answers.get("the folder /lost", lambda: 8)
            except DataError:
                await asyncio.sleep(0.01)

    assert asyncio.run(ask()) in (True, 8)


def test_not_more_than_a_few_hang(monkeypatch: pytest.MonkeyPatch, goes_on: threading.Event) -> None:
    monkeypatch.setattr(shared_answers, "_MOST_ASKED", 2)

    async def ask() -> None:
        answers = SharedAnswers()
        asked = [asyncio.create_task(answers.get(name, goes_on.wait)) for name in ("a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(DataError, match="2 answers are waited for, which is the limit; the oldest is a"):
            await answers.get("c", fails)
        goes_on.set()
        assert await asyncio.gather(*asked) == [True, True]
        with pytest.raises(OSError, match="the disk is gone"):
            await answers.get("c", fails)

    asyncio.run(ask())


def test_the_end_waits_for_nothing(goes_on: threading.Event) -> None:
    async def ask() -> None:
        answers = SharedAnswers()
        asked = asyncio.create_task(answers.get("a", goes_on.wait))
        await asyncio.sleep(0)
        answers.end()
        with pytest.raises(DataError, match="the dashboard ends"):
            await asked

    asyncio.run(ask())
