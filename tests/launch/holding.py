"""Shared by the tests of keepers: memory to keep, and a check whether a keeper is gone."""

from __future__ import annotations

import os

from mpitrain.launch.kept import KeeperLine


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
