"""The shared user: is it the same everywhere, and can it log in?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpitrain.check.check import BY_SSH, Ask, Check, Finding, NotHereError, Seen, known, over_ssh, usual

_NO_LOGIN = ("nologin", "false")


def _same_numbers(seen: Seen, nodes: Sequence[str]) -> Iterator[Finding]:
    user = seen.target.user
    accounts, unknown = known(seen, nodes, "account")
    yield from unknown
    numbers = {node: (one["uid"], one["gid"]) for node, one in accounts.items() if one["uid"] is not None}
    wanted = (seen.target.settings.get("mpitrain_uid"), seen.target.settings.get("mpitrain_gid"))
    # The numbers of set-up, if any node has them. A cluster of others may have different numbers, equal on all nodes.
    common = wanted if wanted in numbers.values() or not numbers else usual(numbers, seen.target.head)
    for node, one in accounts.items():
        allowed = f"uid {common[0]} and gid {common[1]}, as on the other nodes"
        if one["uid"] is None:
            other = one["uid_owner"]
            taken = f", and uid {wanted[0]} belongs to {other}" if other else ""
            yield Finding(
                "fail", f"there is no user {user}{taken}", allowed, remedy=_TAKEN if other else "", where=(node,)
            )
        elif numbers[node] != common:
            uid, gid = numbers[node]
            yield Finding(
                "fail",
                f"user {user} has uid {uid} and gid {gid}",
                allowed,
                remedy=_renumber(one, user, *common),
                where=(node,),
            )


_TAKEN = "ssh {login} getent passwd  # choose a free mpitrain_uid in cluster/group_vars/all.yml, then {set_up}"


def _renumber(account: Mapping[str, Any], user: str, uid: int | None, gid: int | None) -> str:
    """Return a line that changes the account's numbers. A person must renumber a group that may have other members."""
    old_uid, group = account["uid"], account["group"] or account["gid"]
    numbers = " and ".join(
        f"{number} {old} is to be {new}"
        for number, old, new in (("uid", old_uid, uid), ("gid", account["gid"], gid))
        if old != new
    )
    if account["gid"] != gid and group != user:
        look = f"ssh {{login}} 'id {user}; getent group {group} {gid}'"
        return f"{look}  # {numbers}; change that by hand, because the group {group} may have other members"
    groupmod = f"sudo groupmod -g {gid} {user} && " if account["gid"] != gid else ""
    # usermod changes the files under the home; -xdev leaves the shared folder out.
    find = f"sudo find / -xdev -uid {old_uid} -exec chown -h {uid}:{gid} {{}} +"
    return f"ssh {{login}} '{groupmod}sudo usermod -u {uid} -g {gid} {user} && {find}'"


def _usable(seen: Seen, node: str) -> Iterator[Finding]:
    one = seen.node(node, "account")
    if one["uid"] is None:
        raise NotHereError(f"there is no user {seen.target.user}")
    if one["shell"].rpartition("/")[2] in _NO_LOGIN or not one["shell_works"]:
        problem = "refuses logins" if one["shell_works"] else "does not exist"
        yield Finding(
            "fail",
            f"the shell of {seen.target.user}, {one['shell']}, {problem}",
            "a shell, such as /bin/bash",
            remedy="ssh {login} sudo usermod -s /bin/bash {user}",
        )
    if one["home_owner"] is None:
        yield Finding("fail", f"the home of {seen.target.user}, {one['home']}, does not exist", "a folder of its own")
    elif one["home_owner"] != one["uid"]:
        observed = f"the home of {seen.target.user}, {one['home']}, belongs to uid {one['home_owner']}"
        remedy = over_ssh("{login}", "sudo", "chown", f"{seen.target.user}:", one["home"])
        yield Finding("fail", observed, f"uid {one['uid']}", remedy=remedy)
    if one["expired"] is None:
        observed = "whether the account has expired can only be read as root, and the login may not use sudo"
        yield Finding("skip", observed)
    elif one["expired"]:
        remedy = "ssh {login} sudo chage -E -1 {user}"
        yield Finding("fail", f"the account {seen.target.user} has expired", "no date of expiry", remedy=remedy)
    if one["must_change_password"]:
        observed = f"{seen.target.user} must choose another password before it may do anything"
        # Set-up gives the user no password, so its age does not matter.
        remedy = "ssh {login} sudo chage -d -1 -M -1 {user}"
        yield Finding("fail", observed, "a password without a date", remedy=remedy)
    if one["nologin"] and one["uid"] != 0:
        observed = f"{one['nologin']} exists, and lets only root log in"
        yield Finding("fail", observed, "no such file", remedy=f"ssh {{login}} sudo rm {one['nologin']}")


ASKS = (
    Ask(
        "account",
        "account",
        "login",
        lambda target, _host: {"user": target.user, "uid": target.settings.get("mpitrain_uid")},
    ),
)
CHECKS = (
    Check(
        "USR01",
        "the shared user has the same numbers on all nodes",
        _same_numbers,
        scope="cluster",
        uses=("account",),
        looks="id -u and id -g of the shared user; if the user is missing, the owner of its uid.",
        why="NFS identifies users by number: otherwise files of one node belong to another user elsewhere.",
        tag="users",
        needs=BY_SSH,
        fault="usermod -u 1950; the user removed",
    ),
    Check(
        "USR02",
        "the shared user can log in",
        _usable,
        uses=("account",),
        looks="Its entry of getent passwd and shadow: shell, home and its owner, date of expiry, age of the password; "
        "/etc/nologin.",
        why="mpiexec logs in as this user on every node.",
        tag="users",
        needs=(*BY_SSH, "USR01"),
        fault="the shell /usr/sbin/nologin; the home missing; the home of another user; the account expired; a "
        "password to be changed at once",
    ),
)
