"""The one way in for files, messages and numbers of others. tests/fuzz tries it with what nobody thinks of."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from mpitrain import reading
from mpitrain.errors import ConfigError
from mpitrain.launch.hostfile import read_inventory
from mpitrain.launch.hosts import read_hostfile
from mpitrain.reading import MessageLines, find_file, json_of, message_of, parsed, read_file, read_text, toml_of, whole
from mpitrain.typed import made

INVENTORY = b"[head]\nn1 ansible_host=10.0.0.1\n[workers]\n[cluster:children]\nhead\nworkers\n"


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("none", "cannot be read: No such file or directory"),
        (".", "is not a file, but a folder"),
        ("a\0b", "cannot be read: embedded null byte"),
        ("x" * 300, "cannot be read: File name too long"),
        ("/dev/zero", "/dev/zero is too large: at most 1000 bytes are read"),
    ],
)
def test_a_path_that_is_no_file(path: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert why in refusal(lambda: read_file(path, ConfigError, most_bytes=1000, is_given=True))


def test_a_pipe_is_read_only_where_a_user_has_named_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in --env-file <(command). One that nobody ends is given up."""
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in refusal(lambda: find_file(tmp_path / "pipe", ConfigError))
    line = f'exec {sys.executable} -c "import sys; print(open(sys.argv[1]).read())" <(printf "a:2\\n")'
    assert subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout == "a:2\n\n"
    out, into = os.pipe()
    thread = threading.Timer(0.1, lambda: (os.write(into, b"A=1\n"), os.close(into)))
    thread.start()
    assert read_text(f"/proc/self/fd/{out}", ConfigError) == "A=1\n"
    thread.join()
    monkeypatch.setattr(reading, "_PIPE_SECONDS", 0.1)
    assert "has no end within 0.1 s" in refusal(lambda: read_text(tmp_path / "pipe", ConfigError))  # nobody writes
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    assert "has no end within 0.1 s" in refusal(lambda: read_text(tmp_path / "pipe", ConfigError))
    for descriptor in (out, writer):
        os.close(descriptor)
    assert read_text("/dev/null", ConfigError) == ""


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"a\nb\xff\n", "it is not text in UTF-8: line 2 has the byte 0xff"),
        (b"a\r\n\r\n\0", "it is not text in UTF-8: line 3 has the byte 0x00"),
        ("a".encode("utf-16"), "it is not text in UTF-8, but in UTF-16; save it as UTF-8"),
    ],
)
def test_what_is_not_text(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    assert refusal(lambda: read_text(tmp_path / "x", ConfigError)) == f"{tmp_path}/x cannot be read: {why}"


def test_marks_and_ends_of_lines(tmp_path: Path) -> None:
    """A host file may begin with a byte order mark. Ansible takes it for a name, so an inventory may not."""
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfa:2\r\nb:1\r")
    assert read_hostfile(path) == "a:2,b:1"
    path.write_bytes(b"\xef\xbb\xbf" + INVENTORY)
    said = refusal(lambda: read_inventory(path))
    assert "byte order mark" in said
    subprocess.run(said.partition("remove it: ")[2], shell=True, check=True)
    assert path.read_bytes() == INVENTORY and read_inventory(path).head.name == "n1"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[1]", "it must be an object, {...}, and is [1]"),
        ("[" * 100_000, "it is nested too deeply; allowed are 64 levels"),
        ('{"a":' * 65 + "1" + "}" * 65, "it is nested too deeply"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -1e999}', "-1e999 is too large for a number"),
        (f'{{"a": {"9" * 21}}}', "it has a number of 21 digits; allowed are 20"),
        ('{"a": 1, "a": 2}', "'a' is there twice"),
        ('{"a": "\\ud800"}', "it has half of a character of two"),
    ],
)
def test_json_that_is_refused(text: str, why: str) -> None:
    assert refusal(lambda: json_of(text, ConfigError, "the x")).startswith(f"the x is damaged: {why}")


def test_json_that_is_read() -> None:
    state = {"a": 2**127, "b": float("inf"), "c": "\udcff", "d": [[[]]], "e": [{}] * 70}
    assert json_of(json.dumps(state).encode(), ConfigError, "x", any_text=True, any_number=True) == state
    assert message_of('{"loss": Infinity}') == {"loss": float("inf")}
    long = f'{{"a": {"9" * 5000}}}'
    assert "of 5000 digits; allowed are 4300" in refusal(lambda: json_of(long, ConfigError, "x", any_number=True))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x=" + "[" * 10_000, "is not TOML: it is nested too deeply"),
        ("\n\na" + ".a" * 20_000 + "=1", ", line 3: a name has more than 64 parts"),
        ("x=" + "9" * 5000, "is not TOML: it has a number of more than 4300 digits"),
        ("x=0x" + "f" * 5000, "is not TOML: it has a number of more than 20 digits"),
        ("x=1\nx=2", "is not TOML: Cannot overwrite a value (at end"),
    ],
)
def test_toml_that_is_refused(text: str, why: str) -> None:
    assert why in refusal(lambda: toml_of(text, ConfigError, "file"))


def test_parts_that_name_each_other_are_not_followed() -> None:
    bomb: list[Any] = ["x"]
    for _ in range(30):
        bomb = [bomb, bomb]
    circle: list[Any] = []
    circle.append(circle)
    assert "has more than" in refusal(lambda: parsed(lambda: reading.checked(bomb), ConfigError, "x", "is not YAML"))
    assert "too deeply" in refusal(lambda: parsed(lambda: reading.checked(circle), ConfigError, "x", "is not YAML"))


def test_lines_that_are_no_messages_are_left_out() -> None:
    way = MessageLines(100)
    assert list(way.take(b'hello\n{"a": 1}\n{"a": \n[1]\n{"b')) == [{"a": 1}]
    assert list(way.take(b'": 2}\n')) == [{"b": 2}]
    assert list(way.take(b"x" * 1000)) == []
    assert list(way.take(b'\n{"c": 3}\n')) == [{"c": 3}]


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), ("007", 7)]
    + [(no, None) for no in ("0", "101", "٣", "²", "½", "1_0", "+1", "-0", " 1", "1e1", "", "9" * 5000)],
)
def test_whole_numbers(text: str, number: int | None) -> None:
    assert whole(text, 1, 100) == number


@dataclass(frozen=True)
class Inner:
    a: int


@dataclass(frozen=True)
class Outer:
    name: str
    share: float
    inner: Inner
    pairs: tuple[tuple[str, int], ...] = ()
    table: dict[str, list[int]] | None = None
    kind: Literal["x", "y"] = "x"
    ready: bool = False


RIGHT = {"name": "n", "share": 1, "inner": {"a": 3}, "pairs": [["k", 2]], "table": {"t": [1]}, "kind": "y"}
RIGHT |= {"ready": True}


def test_fields_of_the_right_types() -> None:
    assert made(Outer, RIGHT) == Outer("n", 1, Inner(3), (("k", 2),), {"t": [1]}, "y", True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": 1}, "name is 1; it must be str"),
        ({"share": True}, "share is True"),
        ({"share": float("nan")}, "share is nan"),
        ({"share": 10**400}, "share is 1000"),
        ({"inner": {"a": 2.0}}, "a is 2.0; it must be int"),
        ({"inner": {"a": 2**63}}, "a is 9223372036854775808"),
        ({"inner": []}, "inner is []; it must be Inner"),
        ({"pairs": [["k"]]}, "pairs is ['k']"),
        ({"table": {"t": 1}}, "table is"),
        ({"kind": "z"}, "kind is 'z'"),
        ({"more": 1}, "it has 'more', which is not known"),
        ({"name": ...}, "it has no name"),
    ],
)
def test_fields_of_other_types(change: dict[str, Any], why: str) -> None:
    fields = {name: value for name, value in (RIGHT | change).items() if value is not ...}
    with pytest.raises(ValueError, match=re.escape(why)):
        made(Outer, fields)
