"""Refuse a file that was found, not named, where somebody else may have written it.

The rule is ssh's for its own files, with user-private groups as Debian has it (safe_path of OpenSSH;
user-group-modes.patch of Debian): the file and every folder above it, up to the home directory or /, belong to this
user or root, and nobody else may write there. Two things are added. A folder with the sticky bit, such as /tmp, may be
written by all, since nobody can replace what others have there. The owner of mpitrain's own code counts as this user:
whoever may change this file needs no other.

A directory service such as SSSD does not list its users, so who has a group as primary group cannot be asked. There a
group counts as private if it has this user's own name, as user-private groups have, and no member that is known.
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from mpitrain.errors import ConfigError

_MOST_LINKS = 40  # as the kernel; more are a circle


def refuse_foreign(path: Path, *, instead: str = "") -> None:
    """Refuse the file at `path` where somebody else may write it, or a folder above it.

    Args:
        path: of a file that is there.
        instead: what a user does who trusts the file as it is, such as "name it: -i cluster/hosts"; "": nothing.

    Raises:
        ConfigError: has each such place with owner and mode, and what to do: a command, or a sentence where none fits.
    """
    # Whoever owns / can replace everything; in a user namespace root's files have another owner.
    owners = {os.geteuid(), 0, Path("/").stat().st_uid, Path(__file__).stat().st_uid}
    faults, strange, loose = [], [], []
    for place in _places(path):
        status = place.lstat()
        is_strange, is_loose = status.st_uid not in owners, _is_loose(status, owners)
        strange += [place] * is_strange
        loose += [place] * is_loose
        if is_strange or is_loose:
            mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
            faults.append(f"{place} has owner {_user(status.st_uid)}, group {_group(status.st_gid)}, {mode}")
    if not faults:
        return
    repair, or_else = _repair(strange, loose), ""
    if instead:
        or_else = f"{'  # or' if repair.startswith('repair') else '; or'}, where you trust it as it is, {instead}"
    allowed = " or ".join(_user(owner) for owner in sorted(owners, reverse=True))
    raise ConfigError(
        f"{path} is not used, since others than this user may write there: {'; '.join(faults)}. Allowed is owner "
        f"{allowed}, and no write permission for anybody else. See what {path} says. Then {repair}{or_else}"
    )


def _places(path: Path) -> Iterator[Path]:
    """The file, and each link and folder that the way to it leads through; below the home directory, if it is there."""
    homes = {home, home.resolve()} if (home := _home()) else set()
    places: list[Path] = []
    begun = 0  # the first place since the way last began at /
    here, rest, num_links = Path("/"), list((Path.cwd() / path).parts), 0
    while rest:
        name = rest.pop(0)
        place = Path("/") if name == "/" else here.parent if name == ".." else here / name
        if name == "/":
            begun = len(places)
        places.append(place)
        if place in homes:
            del places[begun:-1]
        if place.is_symlink() and num_links < _MOST_LINKS:
            num_links += 1
            rest = [*place.readlink().parts, *rest]
        else:
            here = place
    return iter(dict.fromkeys(places))


def _is_loose(status: os.stat_result, owners: set[int]) -> bool:
    """Others than the owners may write: into the file, or put another file in its place."""
    mode = status.st_mode
    if stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return False
    return bool(mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private(status.st_gid, owners)))


def _is_private(gid: int, owners: set[int]) -> bool:
    """Whether the group has members, and all of them are owners: a user's own group, for which umask 002 is safe."""
    try:
        group = grp.getgrgid(gid)
        named = {pwd.getpwnam(name).pw_uid for name in group.gr_mem}
        user = pwd.getpwuid(os.geteuid())
    except KeyError:  # a group, a member or a user that this machine does not know
        return False
    members = named | {entry.pw_uid for entry in pwd.getpwall() if entry.pw_gid == gid}
    if user.pw_gid == gid and user.pw_name == group.gr_name:  # a directory service does not list its users
        members.add(user.pw_uid)
    return bool(members) and members <= owners


def _repair(strange: list[Path], loose: list[Path]) -> str:
    """A command only for what is this user's own: others may need their folders as they are."""
    if strange or any(place.lstat().st_uid != os.geteuid() for place in loose):
        return "copy what you need into a folder of your own"
    return f"repair it: {shlex.join(['chmod', 'go-w', *map(str, loose)])}"


def _home() -> Path | None:
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        return None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
