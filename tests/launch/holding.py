"""Shared by the tests of keepers: memory to keep, lines to keepers, and a check whether a keeper is gone."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from mpitrain.launch.kept import KeeperLine

Line = Callable[..., KeeperLine]


@pytest.fixture
def line() -> Iterator[Line]:
    """Opens a line to the keeper with this name, as a rank of an attempt does. It is closed after the test."""
    with ExitStack() as stack:
        yield lambda *name_and_try: stack.enter_context(closing(KeeperLine(*name_and_try)))


def new_name() -> str:
    return f"mpitrain-test-{secrets.token_hex(8)}"


def memory(text: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, text)
    return descriptor


def content(descriptor: int) -> bytes:
    return os.pread(descriptor, 100, 0)


def is_gone(name: str) -> bool:
    try:
        KeeperLine(name).close()
    except ConnectionRefusedError:
        return True
    return False
