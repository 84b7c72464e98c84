"""Reading what people and other programs have written: files, messages, numbers. None of it is trusted.

The caller gives `refuse`, a function (mostly a class of errors) that makes the error from a sentence. The sentence
begins with the name of the text, and gives the line, what was found, and what is allowed. No other error is raised.

The text of this module is also sent to hosts. So it imports only the standard library, and must run with old Pythons.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import select
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an old Python does not have these types
    Refuse = Callable[[str], BaseException]

MOST_BYTES = 1 << 20  # of a file that a person writes
_MOST_DEPTH = 64
_MOST_DIGITS = 20
_MOST_PARTS = 1 << 22  # of a document
# Checkpoints hold the states of random generators. Python itself accepts no longer number.
_MOST_DIGITS_OF_ANY = 4300
_PIPE_SECONDS = 10.0
_LONG_KEY = re.compile(r"""(?<![\w"'-])(?:[\w"'-]+\s*\.\s*){64}""")
_HALVES = re.compile(r"[\ud800-\udfff]")


def shown(value: object, most: int = 80) -> str:
    """Return the value for a message: in one line, and short. Some values have no text, such as a number that is too
    long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."


def named_path(text: str) -> Path:
    """Return the path that a user gave, with ~ expanded. pathlib raises if there is no such user."""
    return Path(os.path.expanduser(text))  # noqa: PTH111


def is_file(path: Path | str) -> bool:
    """True if there is such a file that this user can see; pathlib raises for a name that is too long."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path | str) -> bool:
    """True if there is such a folder that this user can see; see is_file."""
    return os.path.isdir(path)  # noqa: PTH112


def find_file(
    path: Path | str,
    refuse: Refuse,
    *,
    called: str = "",
    most_bytes: int = MOST_BYTES,
    is_given: bool = False,
) -> bytes | None:
    """Return the content of a file; None: there is no such file.

    Args:
        path: the file. Anything but a regular file, such as a pipe, does not block the caller.
        refuse: makes the error.
        called: its name in the error; "": its path.
        most_bytes: a larger file is refused.
        is_given: the user named the file, so it may also be a pipe, as in --env-file <(command), or /dev/null.
    """
    called = called or str(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        raise refuse(f"{called} cannot be read: {_reason(error)}") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode) and not (is_given and (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode))):
            raise refuse(f"{called} is not a file" + (", but a folder" if stat.S_ISDIR(mode) else ""))
        parts: list[bytes] = []
        num_bytes, deadline = 0, time.monotonic() + _PIPE_SECONDS
        unended = refuse(f"{called} has no end within {_PIPE_SECONDS:g} s; name a file")
        # Before its writer opens it, a pipe reads as if it were empty.
        if stat.S_ISFIFO(mode) and not select.select([descriptor], [], [], _PIPE_SECONDS)[0]:
            raise unended
        while True:
            try:
                part = os.read(descriptor, min(1 << 20, most_bytes + 1 - num_bytes))
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise unended from None
                select.select([descriptor], [], [], left)
                continue
            if not part:
                return b"".join(parts)
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > most_bytes:
                most = f"{most_bytes >> 20} MiB" if most_bytes >= 1 << 20 else f"{most_bytes} bytes"
                raise refuse(f"{called} is too large: at most {most} are read. Make it anew, or remove it")
    except OSError as error:
        raise refuse(f"{called} cannot be read: {_reason(error)}") from None
    finally:
        os.close(descriptor)


def read_file(
    path: Path | str,
    refuse: Refuse,
    *,
    called: str = "",
    most_bytes: int = MOST_BYTES,
    is_given: bool = False,
) -> bytes:
    """Return the content of a file that must be there. See find_file."""
    content = find_file(path, refuse, called=called, most_bytes=most_bytes, is_given=is_given)
    if content is None:
        raise refuse(f"{called or path} cannot be read: {os.strerror(errno.ENOENT)}")
    return content


def read_text(path: Path | str, refuse: Refuse, *, called: str = "", most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file that a user named, as `text_of` does."""
    content = read_file(path, refuse, called=called, most_bytes=most_bytes, is_given=True)
    return text_of(content, refuse, f"{called or path} cannot be read")


def text_of(content: bytes, refuse: Refuse, begin: str) -> str:
    """Return the content decoded as UTF-8, without a byte order mark and with Unix line ends.

    `begin` is the beginning of the error, before a colon.
    """
    begin = f"{begin}: it is not text in UTF-8"
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise refuse(f"{begin}, but in UTF-16; save it as UTF-8")
    try:
        text = content.decode("utf-8-sig")
        place = text.find("\0")
        byte = 0
    except UnicodeDecodeError as error:
        text, place, byte = content.decode("latin-1"), error.start, content[error.start]
    if place >= 0:
        raise refuse(f"{begin}: line {text.count(chr(10), 0, place) + 1} has the byte 0x{byte:02x}")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parsed(parse: Callable[[], Any], refuse: Refuse, called: str, form: str) -> Any:
    """Return what a parser makes of a text. Whatever it raises becomes an error with `form`, such as "is not TOML"."""
    begin = f"{called} {form}".lstrip()
    try:
        return parse()
    except RecursionError:
        raise refuse(f"{begin}: it is nested too deeply; allowed are {_MOST_DEPTH} levels") from None
    except Exception as error:  # a parser of YAML raises nearly everything
        said = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        said = said or type(error).__name__
        if "integer string conversion" in said:
            said = f"it has a number of more than {_MOST_DIGITS_OF_ANY} digits"
        raise refuse(f"{begin}: {shown_text(said)}") from None


def toml_of(text: str, refuse: Refuse, called: str) -> dict[str, Any]:
    """Return the content of a TOML document."""
    import tomllib  # new in Python 3.11

    if long := _LONG_KEY.search(text):  # parsing takes time quadratic in the number of parts
        raise refuse(f"{called}, line {text.count(chr(10), 0, long.start()) + 1}: a name has more than 64 parts")
    value: dict[str, Any] = parsed(lambda: checked(tomllib.loads(text)), refuse, called, "is not TOML")
    return value


def shown_text(text: str, most: int = 200) -> str:
    """Return a text, or a value parsed from it, for a message: in one line, short, and without control characters."""
    shown_part = "".join(letter if letter.isprintable() else "?" for letter in text[:most])
    return shown_part if len(text) <= most else f"{shown_part}..."


def json_of(
    content: bytes | str,
    refuse: Refuse,
    called: str,
    *,
    form: str = "is damaged",
    any_text: bool = False,
    any_number: bool = False,
) -> dict[str, Any]:
    """Return a JSON object. A key that occurs twice is refused.

    Args:
        content: the JSON, in UTF-8.
        refuse, called: see find_file.
        form: what the error says about other content.
        any_text: allow lone surrogates, with which Python represents file names that are not UTF-8.
        any_number: allow NaN and infinity, and whole numbers of more than 20 digits, as in the states of random
            generators.
    """

    text = content if isinstance(content, str) else text_of(content, refuse, f"{called} {form}".lstrip())

    def parse() -> Any:
        value = (_ANY_NUMBER if any_number else _JSON).decode(text)
        if not isinstance(value, dict):
            raise ValueError(f"it must be an object, {{...}}, and is {shown(value, 40)}")
        if text.count("[") + text.count("{") > _MOST_DEPTH:
            checked(value, any_number=True)  # the decoder has looked at the numbers
        if not any_text and "\\u" in text and _HALVES.search(json.dumps(value, ensure_ascii=False)):
            raise ValueError("it has half of a character of two, \\ud800 to \\udfff")
        return value

    value: dict[str, Any] = parsed(parse, refuse, called, form)
    return value


def message_of(line: bytes | str) -> dict[str, Any]:
    """Return the object that another process of mpitrain sent. Metrics may be NaN, and names may not be UTF-8.

    Raises:
        ValueError: it is not such an object.
    """
    return json_of(line, ValueError, "the message", form="is none", any_text=True, any_number=True)


class MessageLines:
    """Messages in a stream of bytes, one per line. Other lines, such as a login's greeting, are skipped."""

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        self._most_bytes = most_bytes
        self._rest: list[bytes] = []
        self._num_bytes = 0

    def take(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Iterate over the messages that end in `data`."""
        first, *others = data.split(b"\n")
        self._rest.append(first)
        self._num_bytes += len(first)
        if self._num_bytes > self._most_bytes:
            self._rest = [b""]  # the rest of the line is not a message either
        for other in others:
            line, self._rest, self._num_bytes = b"".join(self._rest), [other], len(other)
            if line.startswith(b"{"):
                try:
                    message = message_of(line)
                except ValueError:
                    continue
                yield message


def whole(text: str, least: int, most: int) -> int | None:
    """Return a whole number written in digits, 0 to 9; None: the text is not a number from `least` to `most`."""
    if not re.fullmatch(r"[0-9]{1,20}", text):
        return None
    return int(text) if least <= int(text) <= most else None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def checked(value: Any, *, any_number: bool = False) -> Any:
    """Refuse a value that is nested too deeply, or large because it refers to the same part often, and numbers that are
    too long."""
    level, num_parts = [value], 0
    for _ in range(_MOST_DEPTH):
        below: list[Any] = []
        for part in level:
            for entry in (*part, *part.values()) if isinstance(part, dict) else part:
                if isinstance(entry, (dict, list)):
                    below.append(entry)
                elif not any_number and type(entry) is int and abs(entry) >= 10**_MOST_DIGITS:
                    raise ValueError(f"it has a number of more than {_MOST_DIGITS} digits")
            num_parts += 1
            if num_parts > _MOST_PARTS:
                raise ValueError(f"it has more than {_MOST_PARTS} parts")
        level = below
        if not level:
            return value
    raise RecursionError


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in result if names.count(name) > 1)
        raise ValueError(f"{shown(twice, 40)} is there twice")
    return result


def _digits(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if len(text) - text.startswith("-") > most:
            raise ValueError(f"it has a number of {len(text)} digits; allowed are {most}")
        return int(text)

    return read


def _real(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{shown_text(text, 40)} is too large for a number")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


_JSON = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_digits(_MOST_DIGITS), parse_float=_real, parse_constant=_refuse_constant
)
_ANY_NUMBER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_digits(_MOST_DIGITS_OF_ANY))
