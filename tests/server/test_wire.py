"""Messages as frames: what goes in comes out, and all else is refused before memory is taken for it. Keys."""

from __future__ import annotations

import json
import re
import stat
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.errors import ConfigError, WireError
from mpitrain.server.security import key_file, keys_of, make_keys, parse_key, read_keys
from mpitrain.server.wire import (
    CHUNK_BYTES,
    DTYPES,
    MOST_FRAME_BYTES,
    MOST_HEADER_BYTES,
    Message,
    MessageAssembly,
    Peer,
    frames,
)

PEER = Peer(b"p")
MOST = 2**22

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def arrays(draw: st.DrawFn) -> numpy.ndarray:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    data = draw(st.binary(min_size=int(numpy.prod(shape)) * dtype.itemsize, max_size=None))
    flat = numpy.frombuffer(data[: int(numpy.prod(shape)) * dtype.itemsize], numpy.uint8)
    flat = flat % 2 if dtype.kind == "b" else flat
    array = flat.view(dtype).reshape(shape)
    return draw(st.sampled_from([array, array.T, array[::-1] if array.ndim else array]))


def received(parts: list[bytes], most: int = MOST) -> list[Message]:
    assembly = MessageAssembly(most)
    messages = [assembly.take(memoryview(part), PEER) for part in parts]
    return [message for message in messages if message is not None]


@given(
    st.text(st.characters(codec="utf-8")),
    st.dictionaries(st.text(st.characters(codec="utf-8")), json_values),
    st.lists(arrays(), max_size=4),
)
@settings(max_examples=100, deadline=None)
def test_what_goes_in_comes_out(kind: str, fields: dict[str, Any], sent: list[numpy.ndarray]) -> None:
    (message,) = received(list(frames(7, kind, fields, sent)))
    assert (message.peer, message.kind, message.fields) == (PEER, kind, fields)
    assert len(message.arrays) == len(sent)
    for got, array in zip(message.arrays, sent, strict=True):
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("count", [0, 1, CHUNK_BYTES - 64, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 77])
def test_large_arrays_come_in_several_frames(count: int) -> None:
    first, second = numpy.arange(count, dtype=numpy.uint8), numpy.linspace(0, 1, 1000)
    parts = list(frames(1, "push", {}, [first, second]))
    assert max(len(part) for part in parts) <= CHUNK_BYTES + 8 < MOST_FRAME_BYTES
    (message,) = received(parts)
    assert (message.arrays[0] == first).all()
    assert (message.arrays[1] == second).all()
    message.arrays[0][...] = 0  # the receiver's own


def test_bytes_of_the_other_order_and_nan_travel_too() -> None:
    swapped = numpy.array([1.5, -2.0, numpy.nan], ">f4")
    (message,) = received(list(frames(1, "x", {"loss": float("inf")}, [swapped])))
    assert message.arrays[0].dtype == numpy.float32
    numpy.testing.assert_array_equal(message.arrays[0], [1.5, -2.0, numpy.nan])
    assert message.fields == {"loss": float("inf")}


def test_the_rest_of_a_broken_message_is_dropped() -> None:
    array = numpy.arange(2 * CHUNK_BYTES, dtype=numpy.uint8)
    before, after = list(frames(1, "a", {}, [array])), list(frames(2, "b", {}, [array]))
    assert received(before[1:]) == []
    (message,) = received([*before[:2], *after])
    assert message.kind == "b"
    (message,) = received([*after[:2], *before[2:], *before])
    assert message.kind == "a"
    assert (message.arrays[0] == array).all()


def header(described: Any, **others: Any) -> bytes:
    (first,) = frames(1, "k", {})
    text = json.dumps({"kind": "k", "fields": {}, "arrays": described} | others)
    return first[:12] + text.encode()


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ([["float32", [2**40]]], "each length is 0 to 4194304"),
        ([["float32", [MOST]]], "bytes"),
        ([["float32", [MOST // 8, 1]]] * 3, "6291456 bytes of arrays; allowed are 4194304"),
        ([["uint8", [0, MOST, MOST]]], "allowed are"),
        ([["uint8", [1] * 33]], "allowed are dtype and shape"),
        ([["object", [1]]], "allowed are dtype and shape"),
        ([["float32", [-1]]], "each length is 0 to"),
        ([["float32", [True]]], "each length is 0 to"),
        ([["float32", [1.0]]], "each length is 0 to"),
        ([["float32"]], "allowed are dtype and shape"),
        ({"float32": []}, "kind (text), fields (object) and arrays (list)"),
    ],
)
def test_sizes_are_bounded_before_memory_is_taken(described: Any, words: str) -> None:
    frame = header(described)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=re.escape(words)):
            received([frame])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_frames_that_are_none_are_refused() -> None:
    (first,) = frames(1, "k", {})
    deep = b"[" * 100_000
    half = rb'{"kind":"\ud800","fields":{},"arrays":[]}'
    for frame, words in (
        (b"", "a frame has 0 bytes"),
        (b"1234567", "a frame has 7 bytes"),
        (bytes(MOST_FRAME_BYTES + 1), "a frame has 4194369 bytes"),
        (struct.pack("=II", 1, 0) + b"HTTP", "both sides must have the same"),
        (first[:12] + b"\xff", "no JSON"),
        (first[:12] + deep, "no JSON"),
        (first[:12] + half, "no JSON"),
        (first[:12] + b"3" * 10_000, "no JSON"),
        (first[:12] + b"[]", "must be an object"),
        (header([], kind=3), "kind"),
        (header([], more=3), "kind"),
    ):
        with pytest.raises(WireError, match=words):
            received([frame])
    announced = header([["float32", [3]]])
    with pytest.raises(WireError, match="64 were announced"):
        received([announced, struct.pack("=II", 1, 1) + bytes(12)])
    with pytest.raises(WireError, match="bytes other than 0 and 1"):
        received([header([["bool", [1]]]), struct.pack("=II", 1, 1) + b"\x02" + bytes(63)])
    with pytest.raises(WireError, match="an array is object; allowed are bool"):
        list(frames(1, "k", {}, [numpy.array([None])]))
    with pytest.raises(WireError, match="the fields of a message 'k' are"):
        list(frames(1, "k", {"text": "x" * MOST_HEADER_BYTES}))


def test_bfloat16_and_scalars() -> None:
    sent = [numpy.arange(5).astype(ml_dtypes.bfloat16), numpy.array(3, numpy.int64), numpy.empty((0, 7), numpy.float16)]
    (message,) = received(list(frames(1, "x", {}, sent)))
    assert [array.shape for array in message.arrays] == [(5,), (), (0, 7)]
    assert [array.dtype for array in message.arrays] == [array.dtype for array in sent]


def test_the_text_of_a_key() -> None:
    keys = make_keys()
    text = keys.worker.text
    assert re.fullmatch(r"[A-Za-z0-9_-]{88}", text)
    assert parse_key(f" {text}\n", "the key") == keys.worker
    assert keys.worker.password.decode() not in text
    for wrong in (
        "",
        text[:-1],
        text[:20] + text[21:],
        text.replace(text[5], "A" if text[5] != "A" else "B"),
        text + "x",
        "é" * 88,
    ):
        with pytest.raises(ConfigError, match="MPITRAIN_KEY is not a key: "):
            parse_key(wrong, "MPITRAIN_KEY")


def test_a_server_that_starts_again_has_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "state" / "serve-5000.key"
    keys = keys_of(path)
    assert keys_of(path) == read_keys(path) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]
    assert keys_of(tmp_path / "other.key") != keys


def test_keys_that_others_may_read_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "serve.key"
    keys_of(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=f"mode 640; it must be yours, with mode 600.*rm {path}"):
        keys_of(path)


@pytest.mark.parametrize("text", ["", "one two three", "ab", "zz\n" + "A" * 88, b"\xff\xfe".decode("latin1")])
def test_a_file_without_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.key"
    keys_of(path)
    path.write_text(text, "latin1")
    with pytest.raises(ConfigError, match=r"not a file with a server's keys|cannot be read"):
        keys_of(path)


def test_secrets_of_two_servers_do_not_mix(tmp_path: Path) -> None:
    path, other = tmp_path / "serve.key", make_keys()
    keys = keys_of(path)
    path.write_text(f"{other.server_secret.hex()}\n{keys.worker.text}\n")
    with pytest.raises(ConfigError, match="not a file with a server's keys"):
        keys_of(path)


def test_where_keys_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert key_file(5000) == tmp_path / "mpitrain" / "serve-5000.key"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert key_file(80) == Path("/home/somebody/.local/state/mpitrain/serve-80.key")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set XDG_STATE_HOME to a folder of yours"):
        keys_of(tmp_path / "file" / "serve.key")
