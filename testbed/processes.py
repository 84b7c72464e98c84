"""The system's tools, run with a deadline; and the processes of a bed, in control groups (cgroups(7), version 2).

A process and all it starts stay in their group, whatever happens to their parents. So to end a group ends exactly what
the bed started. No process ids are kept, which another process could have got in the meantime.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from mpitrain.errors import LaunchError

_POLL_SECONDS = 0.02


def execute(
    command: Sequence[str | Path],
    *,
    timeout_seconds: float = 120.0,
    input: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command, and return what it wrote to stdout.

    Raises:
        LaunchError: the command does not exist, ended with another code than 0, or took longer than `timeout_seconds`.
    """
    words = [str(word) for word in command]
    line = shlex.join(words)
    line = line if len(line) < 300 else f"{line[:300]}..."
    try:
        done = subprocess.run(
            words,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            env=env,
            cwd=cwd,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(f"there is no {words[0]} on this machine; scripts/testbed build installs it") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"a command did not end within {timeout_seconds:g} s: {line}") from None
    if done.returncode != 0:
        raise LaunchError(
            f"a command ended with code {done.returncode}: {line}\n{last_lines(done.stderr or done.stdout)}"
        )
    return done.stdout


def start_in_background(command: Sequence[str | Path], log: Path) -> None:
    """Start a command that continues when this process has ended. Its output goes to a file."""
    words = ["setsid", "--fork", *(str(word) for word in command)]
    with log.open("ab") as file:
        subprocess.run(words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=True)


def last_lines(text: str, count: int = 12) -> str:
    """Return the last lines of an output, indented, for the end of a message."""
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-count:])


def wait_until(condition: Callable[[], bool], *, timeout_seconds: float) -> bool:
    """Wait for `condition`. Return whether it became true in time."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


_PARENT = "mpitrain-testbed"


@cache
def _root() -> Path:
    for place, kind, _ in _mounts():
        if kind == "cgroup2":
            return place
    raise LaunchError(
        "this machine has no cgroup2 hierarchy (see /proc/mounts), which test beds need; boot the kernel with "
        "systemd.unified_cgroup_hierarchy=1"
    )


def _mounts() -> list[tuple[Path, str, str]]:
    """Return place, type and options of each cgroup hierarchy."""
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [(Path(words[1]), words[2], words[3]) for words in lines if words[2].startswith("cgroup")]


def group(bed: str, part: str = "") -> Path:
    """Return the control group of a bed, or of one part of it: a node, or the controller."""
    return _root() / _PARENT / bed / part


def in_group(path: Path, command: list[str]) -> list[str]:
    """Make a group, and return the command line that runs `command` in it."""
    path.mkdir(parents=True, exist_ok=True)
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(path), *command]


def leave() -> None:
    """Take this process out of all groups of beds."""
    (_root() / "cgroup.procs").write_text("0")


def members(path: Path) -> Iterator[int]:
    """Yield the ids of all processes in a group and the groups below it."""
    for folder, _, _ in os.walk(path):  # a group that vanishes meanwhile is skipped
        with suppress(OSError):
            yield from map(int, (Path(folder) / "cgroup.procs").read_text().split())


def is_populated(path: Path) -> bool:
    """True if any process is in a group or below it."""
    return _event(path, "populated")


def kill(path: Path, *, timeout_seconds: float = 60.0) -> None:
    """SIGKILL every process of a group, and wait until they are gone.

    Raises:
        LaunchError: some processes do not die.
    """
    if not wait_until(lambda: _killed(path), timeout_seconds=timeout_seconds):
        left = ", ".join(map(str, members(path)))
        raise LaunchError(f"processes did not die within {timeout_seconds:g} s of SIGKILL: {left} (in {path})")


def _killed(path: Path) -> bool:
    # Repeatedly, because a process that was started just before may enter its group only now.
    with suppress(FileNotFoundError):
        (path / "cgroup.kill").write_text("1")
    return not is_populated(path)


def freeze(path: Path, frozen: bool, *, timeout_seconds: float = 60.0) -> None:
    """Stop every process of a group, or let it continue.

    Raises:
        LaunchError: some processes do not stop.
    """
    (path / "cgroup.freeze").write_text("1" if frozen else "0")
    if not wait_until(lambda: _event(path, "frozen") == frozen, timeout_seconds=timeout_seconds):
        raise LaunchError(f"not {'frozen' if frozen else 'thawed'} within {timeout_seconds:g} s: {path}")


def remove(path: Path, *, timeout_seconds: float = 60.0) -> None:
    """Remove a group and the groups below it, and end their processes. With the last bed, also remove what all share.

    A process that comes later finds no group, and ends by itself.

    Raises:
        LaunchError: the group cannot be removed.
    """
    # If systemd has a hierarchy of version 1 for itself, systemd-nspawn makes the same groups there.
    old = [place for place, _, options in _mounts() if "name=systemd" in options.split(",")]
    for root in [_root(), *old]:
        top = root / path.relative_to(_root())
        if not wait_until(partial(_killed_and_removed, path, top), timeout_seconds=timeout_seconds):
            raise LaunchError(f"control group {top} cannot be removed; its processes: {[*members(top)]}")
        with suppress(OSError):  # other beds are in it, or the first one is being made
            (root / _PARENT).rmdir()


def _killed_and_removed(path: Path, top: Path) -> bool:
    if not _killed(path):
        return False
    groups = {file.parent for file in top.rglob("cgroup.procs")} | {top}
    try:
        for folder in sorted(groups, key=lambda folder: -len(folder.parts)):
            with suppress(FileNotFoundError):
                folder.rmdir()
    except OSError:  # the kernel takes a moment to notice that the last process has gone
        return False
    return not top.exists()


def _event(path: Path, name: str) -> bool:
    try:
        return f"{name} 1" in (path / "cgroup.events").read_text()
    except FileNotFoundError:
        return False
