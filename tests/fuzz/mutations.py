"""Inputs that nobody would write on purpose, made from valid ones. The same seed makes the same input."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

# What breaks parsers, as bytes, and as leaves of JSON.
NASTY: tuple[bytes, ...] = (
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b"\r", b"\x1b[2J", b"\x85", b"\xe2\x80\xa8", b"\xed\xa0\x80"),
    *b"\xff 1e999 -0 nan NaN -Infinity inf 1e308 5e-324 -1 true null 1TB %s {{ = : # [[[[ ] } \" ' \\ $(id)".split(),
    *(b" ", b"\t", b"\n", b"\n\n", b"9" * 5000, b"-" + b"9" * 400, b"0x" + b"f" * 5000, b"[" * 3000, b"{" * 3000),
    *b"99999999999999999999 4294967296 18446744073709551616 \\ud800 \\u0000 ../../etc/passwd /dev/zero".split(),
    *("\u0663".encode(), "\u00bd".encode(), "\u00b2".encode(), b'{"a":' * 3000, b"a." * 500, b"x" * 70000),
    *(b"a: &a [*a]\n", b"&a [x,x]", b"*a", b"!!python/object:os.system {}", b"!!int x", b"2001-99-99", b"1_000"),
)
LEAVES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**40, 10**400, -(10**19), 1.5, 1e308, -1e308, 5e-324, -0.0),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "\0", "\ud800", "\udcff", "\u00e9" * 300, "1", "NaN"),
    *("\u00b2", "\u0663", "a\nb", "/", "x" * 5000, "2001-01-01", "\x1b[0m", [], {}, [[]], [None], {"": None}, ["a"]),
    *([1, 2, 3],),
    *({"a": {"a": {}}}, ["\0"], [10**30]),
)


def mutated(examples: Sequence[bytes], seed: int) -> bytes:
    """One input: a part of the structure of JSON is changed, or bytes are, or both."""
    chance = random.Random(seed)
    data = chance.choice(examples)
    kind = chance.random()
    if kind < 0.04:
        noise, nasty = chance.randbytes(chance.randrange(300)), chance.choice(NASTY)
        return chance.choice([b"", b"#\n" * chance.randrange(5), noise, b"\n" * 1000, nasty])
    if kind < 0.07:
        return data.decode(errors="replace").encode(chance.choice(["utf-16", "utf-16-le", "utf-8-sig", "utf-32"]))
    if kind < 0.6:
        data = b"\n".join(_other_leaves(line, chance) for line in _documents(data))
        if kind < 0.5:
            return data
    for _ in range(chance.choice([1, 1, 1, 2, 3, 8])):
        data = _other_bytes(data, chance, examples)
    return data


def _documents(data: bytes) -> list[bytes]:
    try:
        json.loads(data)
    except ValueError:
        return data.split(b"\n")
    return [data]


def _other_leaves(line: bytes, chance: random.Random) -> bytes:
    try:
        document = json.loads(line)
    except ValueError:
        return line if chance.random() < 0.8 else _other_bytes(line, chance, [line])
    places: list[tuple[Any, Any]] = []
    _find(document, places)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        if not places:
            return json.dumps(chance.choice(LEAVES)).encode()
        inside, key = chance.choice(places)
        deed = chance.random()
        if isinstance(inside, dict) and deed < 0.12:
            inside.pop(key, None)
        elif isinstance(inside, dict) and deed < 0.2:
            inside[chance.choice(["", "x", "\ud800", "version", "__class__", str(key) + "x"])] = chance.choice(LEAVES)
        elif isinstance(inside, list) and deed < 0.2:
            inside.append(chance.choice(LEAVES))
        elif isinstance(inside, dict) or key < len(inside):
            old = inside.get(key) if isinstance(inside, dict) else inside[key]
            inside[key] = chance.choice([chance.choice(LEAVES), [old], {"a": old}, str(old), chance.choice(LEAVES)])
    text = json.dumps(document)
    if chance.random() < 0.05:
        text = text.replace("{", '{"a": 1, "a": 2, ', 1)
    return text.encode()


def _find(document: Any, places: list[tuple[Any, Any]]) -> None:
    """Note every place of a value: what it is in, and its key."""
    level = [document]
    while level:
        one = level.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            places.append((one, key))
            level.append(one[key])


def _other_bytes(data: bytes, chance: random.Random, examples: Sequence[bytes]) -> bytes:
    begin, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    end = min(end, begin + chance.choice([1, 4, 40, 4000]))
    other = chance.choice(examples)
    return chance.choice(
        [
            lambda: data[:begin] + chance.choice(NASTY) + data[end:],
            lambda: data[:begin] + chance.choice(NASTY) + data[begin:],
            lambda: data[:begin] + data[end:],
            lambda: data[:end] + data[begin:],
            lambda: data[:begin],
            lambda: data[:begin] + chance.randbytes(chance.randrange(1, 8)) + data[end:],
            lambda: data[:begin] + bytes(255 - byte for byte in data[begin:end][:3]) + data[begin + 3 :],
            lambda: data[:begin] + other[chance.randrange(len(other) + 1) :],
            lambda: data[:begin] + data[begin:end] * chance.choice([2, 50]) + data[end:],
        ]
    )()
