"""Checks with their findings and observations; and what judges share: comparisons of nodes, repair commands.

A check is one entry in a module of `checks/`: the observations that it needs, a pure function from these to findings,
why the check matters, and the remedy. A check without findings has passed. So a judge without enough data must raise
(`NotSeenError`, `NotHereError`), and never just return.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mpitrain.check.target import Target
from mpitrain.launch.hostfile import Host

Level = Literal["quick", "full", "bench"]
LEVELS: tuple[Level, ...] = ("quick", "full", "bench")
Verdict = Literal["pass", "warn", "fail", "skip", "blocked", "unknown"]
# The place of one verdict: the whole cluster, a node, only the head, a pair of nodes in one direction, the path from
# the head to a node.
Scope = Literal["cluster", "node", "head", "pair", "way"]
# The needs of a check of a node's answers: the login works, and Python runs there.
BY_SSH = ("SSH01", "SSH03", "SSH02", "PRB01")
# Of a question to the shared user; and of one to the shell of a job, which mpiexec reaches by a login to its own node.
AS_USER = ("PRB01", "PRB02", "USR01", "USR02")
IN_JOB = (*AS_USER, "SSH09")
# Of a question to the Python of jobs, which lies on the shared folder.
ON_SHARE = (*IN_JOB, "NFS01", "NFS02", "NFS03")
_SSH = "ssh {login} "


class NotSeenError(Exception):
    """The judge's data was requested, but there is no answer; the text gives the reason. The verdict is unknown."""


class NotHereError(Exception):
    """The subject of the check does not exist there; the text says what is missing. The verdict is skip."""


@dataclass
class Seen:
    """All observations, as JSON values. An answer that failed is {"error": why}.

    Attributes:
        target: the cluster that was checked.
        control: of the machine that checks.
        nodes: node -> section -> the result of node/*.py.
        pairs: (from, to) -> section -> what was seen between the two.
        cluster: section -> what concerns the whole cluster: the MPI job, the measurements.
    """

    target: Target
    control: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    pairs: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    cluster: dict[str, Any] = field(default_factory=dict)

    def node(self, name: str, section: str) -> Any:
        """A section of a node.

        Raises:
            NotSeenError: the section has no answer.
        """
        sections = self.nodes.get(name, {})
        login = sections.get("login", {})
        if section not in sections and login.get("failed"):
            raise NotSeenError(login["found"])
        return _answer(sections, section, "the shell" if self.target.is_here else _OWN_SSH)

    def pair(self, pair: tuple[str, str], section: str) -> Any:
        """A section of a pair. Raises as `node` does."""
        return _answer(self.pairs.get(pair, {}), section)

    def whole(self, section: str) -> Any:
        """A section of the cluster. Raises as `node` does."""
        return _answer(self.cluster, section)


_OWN_SSH = "`ssh` of the shared user to its own node"


def _answer(sections: Mapping[str, Any], section: str, shell: str = _OWN_SSH) -> Any:
    if section not in sections:
        raise NotSeenError("was not looked at")
    answer = sections[section]
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        raise NotSeenError(answer["error"])
    # A failed ssh of the shared user to its own node: SSH09 judges it, and other checks must not use it.
    if isinstance(answer, dict) and isinstance(answer.get("refused"), str):
        raise NotSeenError(f"{shell} {answer['refused']}")
    return answer


@dataclass(frozen=True)
class Finding:
    """A judge's statement about one place.

    Attributes:
        verdict: warn or fail; or unknown or skip, if this is true of only a part.
        observed: the observation, without the node's name, so that many nodes with the same fault share one line. It
            does not state the effect: the check's `why` is printed with it.
        allowed: what would be right.
        remedy: a command instead of the check's own; may use its fields.
        where: () for the cluster, (node,), or (from, to); None: the place that the judge was asked about.
        mend: the nodes that must be provisioned again; if empty, those of the places.
    """

    verdict: Verdict
    observed: str
    allowed: str = ""
    remedy: str = ""
    where: tuple[str, ...] | None = None
    mend: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        id: short and constant, such as SSH01: the name for --only, --skip, --explain and the JSON.
        title: the statement that holds if the check passes.
        judge: findings; none is a pass.
        looks: how the check finds out, with the command, for --explain.
        why: one sentence.
        level: the lowest level that includes it.
        scope: the places of verdicts. It decides the arguments of `judge`: (seen, name), (seen, (from, to)) for a pair
            and a way, or (seen, names) with the nodes that are not blocked.
        uses: the sections that the judge reads; only those are asked for.
        tag: the tag of cluster/setup.yml that repairs the fault, if one does.
        remedy: the command that repairs it otherwise; may use {node}, {user}, {share}, {address}, {python}, {known_as},
            {set_up} (the playbook's command), {limit} (the nodes that have the fault), and {login}, the words that
            `ssh` needs to reach the node. Other braces and quotes stay. `mpitrain doctor` prints the command after
            `ssh {login}`.
        alone: the check applies to a single machine, so `mpitrain doctor` makes it too.
        remedy_alone: the command that repairs the fault there, if `remedy` does not.
        needs: checks without which this one cannot be judged; they come earlier in the registry.
        needs_head: the same, of the head, for a check of any node. The head may not be among the nodes that are
            checked: a judge that compares with it then raises NotHereError.
        needs_all: of needs, when a failure on any node blocks the check as a whole.
        fault: the fault that tests/faults makes to prove the check; or "none" and why none can be made.
    """

    id: str
    title: str
    judge: Callable[[Seen, Any], Iterable[Finding]]
    looks: str
    why: str
    level: Level = "quick"
    scope: Scope = "node"
    uses: Sequence[str] = ()
    tag: str = ""
    remedy: str = ""
    needs: Sequence[str] = ()
    needs_head: Sequence[str] = ()
    needs_all: bool = False
    fault: str = ""
    alone: bool = False
    remedy_alone: str = ""


@dataclass(frozen=True)
class Ask:
    """A section of a node, or of the head alone: the function of node/*.py for it, with its arguments.

    `user` is the user that runs it: "login", the login's own, or "job", the shared user. `seconds` is above the
    call's own deadlines.
    """

    section: str
    call: str
    user: Literal["login", "job"]
    wish: Callable[[Target, Host], Mapping[str, Any]] = lambda _target, _host: {}
    seconds: float = 8.0
    head_only: bool = False


@dataclass(frozen=True)
class Result:
    """A verdict in one place. `blocked_by`: for the verdict blocked, the check whose failure is the cause."""

    check: Check
    verdict: Verdict
    where: tuple[str, ...] = ()
    observed: str = ""
    allowed: str = ""
    remedy: str = ""
    mend: tuple[str, ...] = ()
    blocked_by: str = ""


def usual(values: Mapping[str, Any], head: str) -> Any:
    """Return the most frequent value of the nodes; the head's if there is no majority."""
    counts = Counter(repr(value) for value in values.values())
    most = max(counts.values())
    tied = [name for name, value in values.items() if counts[repr(value)] == most]
    return values[head if head in tied else tied[0]]


def known(seen: Seen, names: Sequence[str], section: str) -> tuple[dict[str, Any], list[Finding]]:
    """Return the known answers, and an "unknown" for each other node, which does not hide findings on the first."""
    answers, unknown = {}, []
    for name in names:
        try:
            answers[name] = seen.node(name, section)
        except NotSeenError as error:
            unknown.append(Finding("unknown", str(error), where=(name,)))
    return answers, unknown


def over_ssh(login: str, *command: str) -> str:
    """A command line that runs a command on a node; its words, such as paths, survive both shells unchanged."""
    return through_ssh(login, shlex.join(command))


def through_ssh(login: str, line: str) -> str:
    """Do the same for a shell command line."""
    return f"ssh {login} {shlex.quote(line)}"


def on_this_machine(line: str) -> str:
    """A command line that reaches a node by ssh, or the same words as typed on the node itself."""
    command, mark, comment = line.partition("  # ")
    words = command.removeprefix(_SSH)
    return line if words == command else f"{' '.join(shlex.split(words))}{mark}{comment}"


def as_user(seen: Seen, *command: str) -> str:
    """A command line that runs a command on a node as the shared user."""
    return over_ssh("{login}", *(() if seen.target.is_here else ("sudo", "-u", seen.target.user)), *command)


def on_each(seen: Seen, names: list[str], line: str) -> str:
    """A shell command line that runs on several nodes, one after the other."""
    return "; ".join(through_ssh(seen.target.login(name), line) for name in names)


def is_red_hat(seen: Seen, name: str) -> bool:
    """True if the node is of Red Hat's family, with dnf and other names; False if that was not seen."""
    return bool(seen.nodes.get(name, {}).get("login", {}).get("family") == "RedHat")


def ssh_service(seen: Seen, name: str) -> str:
    """The name of sshd's service in systemd there."""
    return "sshd" if is_red_hat(seen, name) else "ssh"


def set_up_line(check: Check, target: Target) -> str:
    """The provisioning command that repairs what the check finds, with {limit} for the nodes; empty if there is
    none."""
    return f"{target.set_up} --tags {check.tag} --limit {{limit}}" if check.tag and target.set_up else ""
