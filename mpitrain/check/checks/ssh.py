"""Logins between the nodes as the shared user: from any node to any other, without output, with the node's own key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mpitrain.check.check import AS_USER, Ask, Check, Finding, NotSeenError, Seen, over_ssh, ssh_service
from mpitrain.check.checks.reach import loss
from mpitrain.check.checks.sshd import a_peer
from mpitrain.check.collect import Cluster, ClusterStep, PairStep, on_each

_SLOW_SECONDS = 2.0
_LOGIN_SECONDS = 20.0  # for two attempts of 8 s each
# A node runs only a few commands at a time.
_MOST_LOGINS = 5
_SET_UP = "{set_up} --tags ssh --limit {limit}"
_RSA_BITS = 3072


def _log_in(cluster: Cluster, a: str, b: str) -> Any:
    return cluster.ask(a, "log in", {"peer": b}, seconds=_LOGIN_SECONDS)


def _from_head(cluster: Cluster) -> dict[str, Any]:
    """Log in from the head to each node that answers. Reuse the result if the pair was seen already."""
    head = cluster.target.head
    names = [name for name in cluster.agents if name != head]
    seconds = _LOGIN_SECONDS * (1 + len(names) // _MOST_LOGINS)

    def take(name: str) -> Any:
        if login := cluster.seen.pairs.get((head, name), {}).get("login between"):
            return login
        return cluster.ask(head, "log in", {"peer": name}, seconds=seconds)

    return on_each(names, take, at_once=_MOST_LOGINS)


def _head_to_any(seen: Seen, way: tuple[str, str]) -> Iterator[Finding]:
    login = seen.whole("logins of the head").get(way[1], {"error": "was not looked at"})
    if "error" in login:
        raise NotSeenError(login["error"])
    if login["failed"]:
        yield from _failed(seen, way, login)


def _any_to_any(seen: Seen, pair: tuple[str, str]) -> Iterator[Finding]:
    login = seen.pair(pair, "login between")
    if login["failed"]:
        yield from _failed(seen, pair, login)
    elif login["seconds"] > _SLOW_SECONDS * login.get("patience", 1.0) and not (
        loss(seen, pair) or loss(seen, pair[::-1])
    ):
        observed = f"a login takes over {_SLOW_SECONDS:g} s"
        yield Finding("warn", observed, remedy=f"{_as_user(seen, pair[0])} time ssh -v {pair[1]} true")


def _failed(seen: Seen, pair: tuple[str, str], login: Mapping[str, Any]) -> Iterator[Finding]:
    a, b = pair
    observed = (
        f"{seen.target.user}'s `ssh` fails: {login['found'].replace(seen.target.addresses[b], b).replace(b, 'there')}"
    )
    match login["failed"]:
        case "host key" | "mode":
            yield Finding("fail", observed, remedy=_SET_UP, mend=(a,))
        case "key":
            yield Finding("fail", observed, remedy=_refused(seen, a, b), mend=(b,))
        case _:
            yield Finding("fail", observed, remedy=f"{_as_user(seen, a)} ssh -v {b} true")


def _refused(seen: Seen, a: str, b: str) -> str:
    """Return a line that repairs a login from `a` that `b` refuses; empty if set-up still has to give a's key to b."""
    offered = {key["fingerprint"] for key in seen.nodes.get(a, {}).get("ssh keys", {}).get("keys", [])}
    if offered.isdisjoint(seen.nodes.get(b, {}).get("ssh keys", {}).get("let_in", [])):
        return _SET_UP
    unit = ssh_service(seen, b)
    return f"ssh {seen.target.login(b)} sudo journalctl -n 20 -u {unit}  # the key is right; sshd says what is not"


def _as_user(seen: Seen, name: str) -> str:
    return f"ssh {seen.target.login(name)} sudo -u {seen.target.user}"


def _look(seen: Seen, name: str) -> str:
    return f"{_as_user(seen, name)} ssh -v {seen.target.addresses[name]} true"


def _own_node(seen: Seen, name: str) -> Iterator[Finding]:
    shell = seen.nodes.get(name, {}).get("shell", {})
    if "refused" not in shell:
        seen.node(name, "shell")  # raises if it was not seen
    else:
        user, refused = seen.target.user, shell["refused"].replace(seen.target.addresses[name], "ADDRESS")
        if "startup" not in shell:
            words = f"`ssh` of {user} to its own node {refused}"
            if "denied" in refused.lower():
                remedy = _refused(seen, name, name)
            else:
                remedy = _SET_UP if "verification failed" in refused else _look(seen, name)
            yield Finding("fail", words, "a login", remedy)
            return
        path = shell["startup"].replace("~", f"~{user}")
        observed = f"`ssh` of {user} to its own node logs in, but runs no command: it {refused}"
        observed += f", because of {path}" if path else ""
        yield Finding("fail", observed, "a shell that runs the command", _without(seen, name, path))


def _without(seen: Seen, name: str, path: str) -> str:
    """Return a line that makes a startup file of bash end early, unless a user is at a terminal."""
    if not path.startswith(("/", "~")):
        return _look(seen, name)
    line = f"ssh {seen.target.login(name)} \"sudo sed -i '1i [ -t 0 ] || return' {path}\""
    return f"{line}  # what jobs need of it, such as PATH, belongs above this line"


def _quiet(seen: Seen, name: str) -> Iterator[Finding]:
    login = seen.node(name, "login")
    user = seen.target.user
    noises = {login["hello"]: login["noise"]}
    noises[user] = noises.get(user, "") or seen.node(name, "shell")["noise"]
    for account, noise in noises.items():
        if noise.strip():
            observed = f"a login of {account} that runs one command prints {noise.strip()[:60]!r}"
            files = f"~{account}/.bashrc ~{account}/.profile /etc/bash.bashrc"
            # The file may print in an interactive login, where [[ $- == *i* ]].
            remedy = f"ssh {seen.target.login(name)} \"sudo grep -nE 'echo|printf|cat' {files}\"  # only if [ -t 1 ]"
            yield Finding("fail", observed, "nothing", remedy)
    swallowed_by = {login["hello"]: login["swallowed_by"], user: seen.node(name, "shell")["swallowed_by"]}
    for account, startup in swallowed_by.items():
        if startup:
            path = startup.replace("~", f"~{account}")
            observed = f"a login of {account} that runs one command does not get what is sent to it: {path} takes it"
            yield Finding("fail", observed, "all of it", _without(seen, name, path))


def _keys(seen: Seen, name: str) -> Iterator[Finding]:
    answer = seen.node(name, "ssh keys")
    user = seen.target.user
    if not answer["keys"]:
        offers = " or ".join(answer["offers"][:3])
        # The other nodes must also learn the new key, so no node is named.
        text = f"{user} has no key: there is no {offers}"
        yield Finding("fail", text, remedy="{set_up} --tags ssh")
    for key in answer["keys"]:
        if key["is_own"] and int(key["mode"], 8) & 0o077:
            text = f"{key['path']} has mode {key['mode']}, so ssh will not use it"
            yield Finding("fail", text, "0600", _key_remedy(seen, name, key, "chmod", "600"))
        elif not key["is_readable"]:
            text = f"{user} may not read its key {key['path']} (mode {key['mode']})"
            yield Finding("fail", text, "its own, mode 0600", _key_remedy(seen, name, key, "chown", user))
        elif not key["fingerprint"]:
            remedy = _new_key(seen, name, key["path"])
            yield Finding("fail", f"{key['path']} is not a key that ssh can read", remedy=remedy)
        elif key["kind"] == "DSA" or (key["kind"] == "RSA" and key["bits"] < _RSA_BITS):
            text = f"{key['path']} is a {key['kind']} key of {key['bits']} bits"
            remedy = _new_key(seen, name, key["path"])
            yield Finding("warn", text, f"ed25519, or RSA of {_RSA_BITS} bits or more", remedy)
    yield from _copies(seen, name, answer["keys"])
    if answer["loose"]:
        text = f"other users than root may write to {', '.join(answer['loose'])}, so sshd accepts no key from there"
        yield Finding("fail", text, "writable only by root", _SET_UP)
    for path in answer["writable_by_others"]:
        text = f"other users may write to {path}, so sshd ignores the keys in it"
        remedy = over_ssh(seen.target.login(name), "sudo", "chmod", "go-w", path)
        yield Finding("warn", text, "writable only by its owner", remedy)


def _new_key(seen: Seen, name: str, path: str) -> str:
    return f"{over_ssh(seen.target.login(name), 'sudo', 'rm', path)} && {{set_up}} --tags ssh"


def _key_remedy(seen: Seen, name: str, key: Mapping[str, Any], *command: str) -> str:
    is_ours = key["path"].startswith("/etc/ssh/mpitrain/")
    return _SET_UP if is_ours else over_ssh(seen.target.login(name), "sudo", *command, key["path"])


def _copies(seen: Seen, name: str, keys: list[Mapping[str, Any]]) -> Iterator[Finding]:
    """Find private keys that several nodes share: a key stolen from one node gives access to all of them."""
    for key in keys:
        for other in seen.target.names:
            other_keys = seen.nodes.get(other, {}).get("ssh keys", {}).get("keys", [])
            if (
                other != name
                and key["fingerprint"]
                and key["fingerprint"] in [one["fingerprint"] for one in other_keys]
            ):
                text = f"{key['path']} is also the key of another node"
                remedy = _new_key(seen, name, key["path"])
                yield Finding("warn", text, "each node its own key", remedy)
                break


ASKS = (Ask("ssh keys", "ssh keys", "job", a_peer),)
PAIRS: dict[str, PairStep] = {
    "login between": _log_in,
}
CLUSTER: dict[str, ClusterStep] = {
    "logins of the head": _from_head,
}
CHECKS = (
    Check(
        "SSH08",
        "the shared user's private key is its own, and of a good kind",
        _keys,
        uses=("ssh keys",),
        looks="The keys that `ssh -G` of another node names: owner, mode, kind, bits, and whether two nodes share one; "
        "and who may write to /etc/ssh/mpitrain.",
        why="ssh ignores a key that other users can read; then every login from the node fails.",
        tag="ssh",
        needs=AS_USER,
        fault="mode 0644; /etc/ssh/mpitrain writable by all",
    ),
    Check(
        "SSH09",
        "the shared user logs in to its own node",
        _own_node,
        uses=("shell",),
        looks="On the node, as the shared user: ssh -o BatchMode=yes ADDRESS, as mpiexec does for the node it runs on.",
        why="A job begins on each node with such a login, and the checks of a job's shell use it.",
        tag="ssh",
        needs=(*AS_USER, "WGD01", "NET01", "SSH06", "SSH07", "SSH08"),
        fault="the node's own key removed from its own list",
    ),
    Check(
        "SSH05",
        "a login that runs one command prints nothing of its own",
        _quiet,
        uses=("login", "shell"),
        looks="The output before the first line of the probe, and before a command of the shared user's shell.",
        why="scp, rsync, Ansible and launchers take it for the command's output, and fail in misleading ways.",
        needs=(*AS_USER, "SSH09"),
        fault="echo at the top of .bashrc",
    ),
    Check(
        "SSH11",
        "from the head the shared user logs in to each node",
        _head_to_any,
        scope="way",
        uses=("logins of the head",),
        looks="On the head, as the shared user: ssh -o BatchMode=yes NODE true, once for each other node.",
        why="`mpitrain run` and mpiexec begin every job with such a login.",
        tag="ssh",
        needs=(*AS_USER, "NAM03", "SSH06", "SSH07", "SSH08", "SSH09", "NET01", "NET09", "NET03"),
        fault="the head's key removed on a node; known_hosts of the head without a node",
    ),
    Check(
        "SSH04",
        "from each node the shared user logs in to each other one",
        _any_to_any,
        level="full",
        scope="pair",
        uses=("login between",),
        looks="On each node, as the shared user: ssh -o BatchMode=yes NODE true, once for each other node.",
        why="mpiexec starts its helpers like this. A question or a refusal on one way prevents the start of the job.",
        tag="ssh",
        needs=(*AS_USER, "NAM03", "SSH07", "SSH08", "SSH09", "SSH11", "NET01", "NET09", "NET11", "NET03"),
        fault="one node's key removed on another; known_hosts without a node",
    ),
)
