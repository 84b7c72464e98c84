"""Refuse a file that was found rather than named if another user may have written it.

The rule is ssh's for its own files, with user-private groups as in Debian (safe_path of OpenSSH;
user-group-modes.patch of Debian): the file and every folder above it, up to the home directory or /, belong to this
user or root, and nobody else may write there. Two rules are added. Everybody may write to a folder with the sticky bit,
such as /tmp, because nobody can replace the files of others there. The owner of mpitrain's own code counts as this
user: an owner who can change this file needs no other way in.

A directory service such as SSSD does not list its users, so the users with a certain primary group are unknown. There,
a group counts as private if it has this user's own name, as user-private groups have, and no known members.
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

_MOST_LINKS = 40  # like the kernel; a longer chain is a circle


def refuse_foreign(path: Path, *, instead: str = "") -> None:
    """Refuse the file at `path` if another user may write the file or a folder above it.

    Args:
        path: an existing file.
        instead: how to use the file anyway, such as "name it: -i cluster/hosts"; "": not possible.

    Raises:
        ConfigError: lists each such place with owner and mode, and the remedy: a command, or a sentence.
    """
    # The owner of / can replace everything; in a user namespace, root's files have another owner.
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
        or_else = f"{'  # or' if repair.startswith('repair') else '; or'}, if you trust the file as it is, {instead}"
    allowed = " or ".join(_user(owner) for owner in sorted(owners, reverse=True))
    raise ConfigError(
        f"{path} is not used, because others than this user may write there: {'; '.join(faults)}. Allowed is owner "
        f"{allowed}, and no write permission for anybody else. Look through {path}. Then {repair}{or_else}"
    )


def _places(path: Path) -> Iterator[Path]:
    """Yield the file, and each link and folder on the way to it; only below the home directory if the file is there."""
    homes = {home, home.resolve()} if (home := _home()) else set()
    places: list[Path] = []
    begun = 0  # index of the first place since the way last restarted at /
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
    """True if others than the owners may write into the file, or put another file in its place."""
    mode = status.st_mode
    if stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return False
    return bool(mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private(status.st_gid, owners)))


def _is_private(gid: int, owners: set[int]) -> bool:
    """True if the group has members, and all are owners: a user's own group, for which umask 002 is safe."""
    try:
        group = grp.getgrgid(gid)
        named = {pwd.getpwnam(name).pw_uid for name in group.gr_mem}
        user = pwd.getpwuid(os.geteuid())
    except KeyError:  # this machine does not know the group, a member or the user
        return False
    members = named | {entry.pw_uid for entry in pwd.getpwall() if entry.pw_gid == gid}
    if user.pw_gid == gid and user.pw_name == group.gr_name:  # a directory service does not list its users
        members.add(user.pw_uid)
    return bool(members) and members <= owners


def _repair(strange: list[Path], loose: list[Path]) -> str:
    """Return a command only for the user's own files: others may need their folders as they are."""
    if strange or any(place.lstat().st_uid != os.geteuid() for place in loose):
        return "copy the files that you need into a folder of your own"
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
