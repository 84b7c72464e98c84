"""What a node's sshd accepts: the number of simultaneous logins, which users, and whose passwords."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from ipaddress import ip_address, ip_network
from typing import Any

from mpitrain.check.check import Ask, Check, Finding, NotHereError, NotSeenError, Seen, ssh_service, through_ssh
from mpitrain.check.target import Target
from mpitrain.launch.hostfile import Host

_FOLDER = "/etc/ssh/sshd_config.d/"
_OURS = f"{_FOLDER}10-mpitrain.conf"
_SET_UP = "{set_up} --tags ssh --limit {limit}"
_PASSWORDS = ("passwordauthentication", "kbdinteractiveauthentication")
_NOT_ASKED = "sshd's settings can only be read as root, and the login may not use sudo"


def a_peer(target: Target, host: Host) -> dict[str, str]:
    """Return another node, for settings that hold between nodes."""
    other = next((one for one in target.hosts if one.name != host.name), host)
    return {"peer": other.address, "user": target.user}


def _server(seen: Seen, name: str) -> Mapping[str, Any]:
    server: Mapping[str, Any] = seen.node(name, "ssh server")
    if not server["is_known"]:
        raise NotHereError(_NOT_ASKED)
    if not server["all"]:
        raise NotSeenError("`sshd -T` failed")
    return server


def _remedy(seen: Seen, server: Mapping[str, Any], name: str, word: str, value: str = ".*") -> str:
    """Return a repair. Set-up writes its own file, but another file may set the value, before it or, for some words,
    after it."""
    path = _setter(server, word)
    has_ours = _OURS in [other for other, _ in server["sets"].get(word, [])]
    if path in ("", _OURS) or not (has_ours or _FOLDER < path < _OURS):
        return _SET_UP
    return _without(seen, name, word, path, value)


def _without(seen: Seen, name: str, word: str, path: str, value: str) -> str:
    """Return a line that removes only the lines with that value: beside a block's `yes`, a `no` may hold for others."""
    edit = f'sudo sed -i "/^\\s*{word}\\s\\+{value}\\b/Id" {shlex.quote(path)}'
    return through_ssh(seen.target.login(name), f"{edit} && sudo systemctl reload {ssh_service(seen, name)}")


def _setter(server: Mapping[str, Any], word: str) -> str:
    """Return the file with the effective value, or the first file if none has it literally; empty for a default."""
    settings = server["sets"].get(word, [])
    holds = {str(server[user].get(word)) for user in ("user", "root", "all")}
    return str(next((path for path, value in settings if value in holds), settings[0][0] if settings else ""))


def _where(server: Mapping[str, Any], word: str) -> str:
    path = _setter(server, word)
    return f", by {path}" if path else ""


def _capacity(seen: Seen, name: str) -> Iterator[Finding]:
    server = _server(seen, name)
    count = len(seen.target.hosts)
    text = server["all"].get("maxstartups", "")
    first, running = int(text.split(":")[0] or 0), server.get("startups")
    where, remedy = f"{text}{_where(server, 'maxstartups')}", _remedy(seen, server, name, "maxstartups")
    if running is not None and running < first:
        where, first = f"{running} of the sshd that runs; its files say {text}", running
        service = ssh_service(seen, name)
        look = "grep -rs MaxStartups /etc/default/ssh /etc/sysconfig/sshd /etc/systemd/system /lib/systemd/system"
        remedy = through_ssh(seen.target.login(name), f"{look}; sudo systemctl restart {service}")
        remedy += "  # an option of the command line that it prints must go first"
    if first < 2 * count:
        observed = f"sshd drops logins as soon as {first} are being made (MaxStartups {where})"
        allowed = f"{2 * count} or more, for {count} nodes"
        yield Finding("fail" if first < count else "warn", observed, allowed, remedy)
    if server["all"].get("persourcepenalties", "no").startswith(("authfail", "crash", "yes")):
        exempt = server["all"].get("persourcepenaltyexemptlist", "none")
        missing = [one for one, address in seen.target.addresses.items() if address not in exempt and one != name]
        if missing:
            observed = (
                "sshd locks out addresses from which some logins failed (PerSourcePenalties), also those of nodes"
            )
            yield Finding("warn", observed, "PerSourcePenaltyExemptList with all nodes", _SET_UP)


def _policy(seen: Seen, name: str) -> Iterator[Finding]:
    server = _server(seen, name)
    settings, root = server["user"], server["root"]
    user = seen.target.user
    if settings.get("pubkeyauthentication") == "no":
        remedy = _remedy(seen, server, name, "pubkeyauthentication", "no")
        observed = f"sshd accepts no keys for {user} (PubkeyAuthentication no{_where(server, 'pubkeyauthentication')})"
        yield Finding("fail", observed, "PubkeyAuthentication yes", remedy)
    yield from _shut_out(seen, name, server)
    for word in ("passwordauthentication", "kbdinteractiveauthentication"):
        if settings.get(word) == "yes":
            observed = f"sshd accepts passwords for {user} ({word} yes{_where(server, word)})"
            yield Finding("warn", observed, "keys only", _remedy(seen, server, name, word, "yes"))
    if root.get("permitrootlogin") == "yes" and root.get("passwordauthentication") == "yes":
        yield Finding(
            "warn",
            f"root may log in with a password (PermitRootLogin yes{_where(server, 'permitrootlogin')})",
            "PermitRootLogin prohibit-password",
            through_ssh(
                seen.target.login(name),
                'echo "PermitRootLogin prohibit-password" | sudo tee /etc/ssh/sshd_config.d/01-root.conf && '
                f"sudo systemctl reload {ssh_service(seen, name)}",
            ),
        )


def _shut_out(seen: Seen, name: str, server: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the lists of users who may log in, in sshd's own order."""
    user, account = seen.target.user, seen.nodes[name].get("account", {})
    group = account.get("group") or user
    settings, groups = server["user"], [one for one in account.get("groups", [group]) if one]
    for word, names, own in (
        ("DenyUsers", [user], user),
        ("AllowUsers", [user], user),
        ("DenyGroups", groups, group),
        ("AllowGroups", groups, group),
    ):
        patterns = settings.get(word.lower(), "").split()
        matching = [one for one in patterns if any(_is_named(seen, one, name_) for name_ in names)]
        is_denial = word.startswith("Deny")
        if not patterns or bool(matching) != is_denial:
            continue
        files = list(dict.fromkeys(path for path, _ in server["sets"].get(word.lower(), [])))
        by = f", by {' and '.join(files)}" if files else ""
        service = ssh_service(seen, name)
        # A block for some logins is the decision of a person.
        is_block = server["all"].get(word.lower()) != settings.get(word.lower())
        look = f"sudo grep -rniwE 'Match|{word}' /etc/ssh"
        edit = look if is_block or not files else _edit(word, matching, own, files, service)
        listed = " ".join(matching if is_denial else patterns)
        observed = f"sshd does not let {user} in ({word} {listed}{by})"
        remedy = through_ssh(seen.target.login(name), edit)
        yield Finding("fail", observed, f"{word} that lets it in", remedy)
        return


def _edit(word: str, matching: list[str], own: str, files: list[str], service: str) -> str:
    """Return a line that removes the `matching` patterns from such a list, or adds `own` to it; not in Match blocks."""
    steps = [rf"/^\s*{word}\s/I s/$/ {own}/"]
    if matching:
        patterns = [re.escape(one).replace("/", r"\/") for one in matching]
        steps = [rf"/^\s*{word}\s/I s/\s+{pattern}(\s|$)/\1/g" for pattern in patterns]
        steps.append(rf"/^\s*{word}\s*$/I d")  # sshd does not start with an empty list
    script = "; ".join([r"/^\s*Match\s/I,$ b", *steps])
    return f"sudo sed -i -E {shlex.quote(script)} {shlex.join(files)} && sudo systemctl reload {service}"


def _is_named(seen: Seen, pattern: str, name: str) -> bool:
    """True if a pattern of sshd's lists, NAME or USER@HOST, names a user or group that logs in from the nodes."""
    user, at, host = pattern.rpartition("@") if "@" in pattern else (pattern, "", "")
    if not fnmatchcase(name, user):
        return False
    return not at or all(_is_host(address, node, host) for node, address in seen.target.addresses.items())


def _is_host(address: str, name: str, pattern: str) -> bool:
    try:
        return ip_address(address) in ip_network(pattern, strict=False)
    except ValueError:
        return fnmatchcase(address, pattern) or fnmatchcase(name, pattern)


def _no_passwords(seen: Seen, name: str) -> Iterator[Finding]:
    server = _server(seen, name)
    offers = {seen.node(name, "login")["hello"]: "own", "root": "root", "others": "all"}
    offers.pop(seen.target.user, None)  # SSH07 checks the shared user
    for word in _PASSWORDS:
        users = [user for user, key in offers.items() if server[key].get(word) == "yes"]
        if users:
            path = next((path for path, value in server["sets"].get(word, []) if value == "yes"), "")
            observed = f"sshd offers passwords to {', '.join(users)} ({word} yes{f', by {path}' if path else ''})"
            yield Finding("warn", observed, "keys only", _keys_only(seen, server, name, word, path))


def _keys_only(seen: Seen, server: Mapping[str, Any], name: str, word: str, path: str) -> str:
    """Return a repair. Set-up switches passwords off for all, unless an earlier file or a user's block allows them."""
    is_block = server["all"].get(word) != "yes"
    if path and (is_block or _FOLDER < path < _OURS):
        return _without(seen, name, word, path, "yes") + ("" if is_block else f" && {_KEYS_ONLY}")
    return _KEYS_ONLY


# Set-up refuses this if a key alone does not open the node.
_KEYS_ONLY = (
    f"{_SET_UP} -e mpitrain_sshd_passwords=false"
    "  # and write mpitrain_sshd_passwords: false into cluster/group_vars/all.yml, so that it stays"
)

ASKS = (Ask("ssh server", "ssh server", "login", a_peer),)
CHECKS = (
    Check(
        "SSH06",
        "sshd accepts as many logins at once as a job makes",
        _capacity,
        uses=("ssh server",),
        # MaxSessions limits the sessions within one connection. A job's agents have a connection each, and mpiexec's
        # ssh is the only session in that of a restart (launch/ssh.py), so a limit of 1 has no effect.
        looks="MaxStartups of `sshd -T` and of the sshd that runs; PerSourcePenalties of `sshd -T`. Not MaxSessions: "
        "no connection of a job has two sessions.",
        why="sshd drops further logins at random, and the launcher reports only that a connection was reset.",
        tag="ssh",
        needs=("PRB01", "PRB02"),
        fault="MaxStartups 1",
    ),
    Check(
        "SSH07",
        "sshd accepts keys for the shared user, and no passwords",
        _policy,
        uses=("ssh server", "account"),
        looks="`sshd -T -C user=...`: the result of all configuration files for that user.",
        why="If passwords are accepted, a guessed one opens all nodes. The first file that sets a value wins.",
        tag="ssh",
        needs=("PRB01", "PRB02"),
        fault="passwords switched on in our own file; in a file that is read before it; AllowUsers without the user",
    ),
    Check(
        "SSH10",
        "sshd offers passwords to no user",
        _no_passwords,
        uses=("ssh server", "login"),
        looks="`sshd -T`, and `sshd -T -C user=...` for the user of the login and for root.",
        why="Set-up leaves the passwords of admin, root and others as they were. A guessed password opens the node, "
        "and with sudo all nodes.",
        tag="ssh",
        needs=("PRB01", "PRB02"),
        fault="set-up with its default, which leaves passwords on",
    ),
)
