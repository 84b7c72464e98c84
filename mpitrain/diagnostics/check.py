"""What a check is, what it reports, and what it judges.

A check is one entry in a module of `checks/`: what to look at, a pure function from what was seen to findings, why the
check matters, and the remedy. A check without findings has passed. So a judge without enough data must raise
(`NotSeenError`, `NotHereError`), and never just return.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mpitrain.diagnostics.ssh_settings import destination, login_words
from mpitrain.launch.hostfile import Host

Level = Literal["quick", "full", "bench"]
LEVELS: tuple[Level, ...] = ("quick", "full", "bench")
Verdict = Literal["pass", "warn", "fail", "skip", "blocked", "unknown"]
# The place of one verdict: the whole cluster, a node, the head alone, a pair of nodes in one direction, the way from
# the head to a node.
Scope = Literal["cluster", "node", "head", "pair", "way"]
# The needs of a check of a node's answers: the login works, and Python runs there.
BY_SSH = ("SSH01", "SSH03", "SSH02", "PRB01")


class NotSeenError(Exception):
    """The judge's data was asked for, but there is no answer; the text gives the reason. The verdict is unknown."""


class NotHereError(Exception):
    """The subject of the check does not exist there; the text says what is missing. The verdict is skip."""


@dataclass(frozen=True)
class Target:
    """What to check, and how the set-up was configured for it.

    Attributes:
        hosts: the nodes to look at, the head first if it is one of them.
        user: the shared user, as whom jobs run.
        share: the shared folder; None if there is none, as far as known.
        venv: the virtual environment of jobs.
        settings: the variables of cluster/group_vars/all.yml, with their defaults.
        set_up: the beginning of a repair command: `ansible-playbook cluster/setup.yml`, with the inventory if needed;
            empty if the set-up has made nothing here.
        script: the program of `--script`, if any; an absolute path.
        environ: the user's variables that choose interfaces and ports.
        inventory_head: the head if it is not one of `hosts`; else None.
        inventory: the file with the nodes; None if they were named by hand.
        python_here: for `mpitrain doctor`, which looks at this machine alone: the Python of jobs. Else None.
    """

    hosts: tuple[Host, ...]
    user: str
    share: str | None
    venv: str | None
    settings: Mapping[str, Any]
    set_up: str
    script: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    inventory_head: Host | None = None
    inventory: Path | None = None
    python_here: str | None = None

    @property
    def is_here(self) -> bool:
        """True if the target is this machine by itself: there is no login, no set-up and no other node."""
        return self.python_here is not None

    @property
    def python(self) -> str:
        """The Python of jobs."""
        return self.python_here or f"{self.venv}/bin/python"

    @property
    def head(self) -> str:
        """The head's name, which need not be one of `names`."""
        return (self.inventory_head or self.hosts[0]).name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes to check, the head first if it is one of them."""
        return tuple(host.name for host in self.hosts)

    @property
    def addresses(self) -> dict[str, str]:
        """Name -> address, as the inventory has them; the head's too."""
        return {host.name: host.address for host in self._all()}

    def login(self, name: str) -> str:
        """Return the words after `ssh` that reach the node in a printed command; on this machine, a placeholder."""
        if self.is_here:
            return "{login}"
        return next(shlex.join(login_words(host)) for host in self._all() if host.name == name)

    def known_as(self, name: str) -> str:
        """Return the node's name in known_hosts, quoted for a shell, with its port if that is not ssh's own."""
        host = next(host for host in self._all() if host.name == name)
        port = host.variables.get("ansible_port", "22")
        place = destination(host)
        return shlex.quote(place if port == "22" else f"[{place}]:{port}")

    def destination(self, name: str) -> str:
        """Return the address that ssh from here uses; the other nodes may use another one."""
        return destination(next(host for host in self._all() if host.name == name))

    def _all(self) -> tuple[Host, ...]:
        return (*self.hosts, self.inventory_head) if self.inventory_head else self.hosts


@dataclass
class Seen:
    """All that was seen, in plain values that JSON can hold. An answer that failed is {"error": why}.

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
    # A failed ssh of the shared user to its own node: SSH09 judges it, and it is no answer for the others.
    if isinstance(answer, dict) and isinstance(answer.get("refused"), str):
        raise NotSeenError(f"{shell} {answer['refused']}")
    return answer


@dataclass(frozen=True)
class Finding:
    """Something that a judge says of one place.

    Attributes:
        verdict: warn or fail; or unknown or skip, if this is true of only a part.
        where: () for the cluster, (node,), or (from, to).
        observed: what was seen, without the node's name, so that many nodes with the same fault share one line.
        allowed: what would be right.
        remedy: a command instead of the check's own; may use its fields.
        mend: the nodes whose set-up must be run again; if empty, those of the places.
    """

    verdict: Verdict
    where: tuple[str, ...]
    observed: str
    allowed: str = ""
    remedy: str = ""
    mend: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        id: short and constant, such as SSH01: the name for --only, --skip, --explain and the JSON.
        title: the statement that holds if the check passes.
        level: the lowest level that includes it.
        scope: the places of verdicts. It decides the arguments of `judge`: (seen, name), (seen, (from, to)) for a pair
            and a way, or (seen, names) with the nodes that are not blocked.
        judge: findings; none is a pass.
        uses: the sections that the judge reads; only those are asked for.
        looks: how the check finds out, with the command, for --explain.
        why: one sentence.
        tag: the tag of cluster/setup.yml that repairs the fault, if one does.
        remedy: the command that repairs it otherwise; may use {node}, {user}, {share}, {address}, {python}, {known_as},
            and {login}, the words that `ssh` needs to reach the node. `mpitrain doctor` prints the command after
            `ssh {login}`.
        alone: the check applies to a single machine, so `mpitrain doctor` makes it too.
        remedy_alone: the command that repairs the fault there, if `remedy` does not.
        needs: checks without which this one cannot be judged; they come earlier in the registry.
        needs_head: the same, of the head, for a check of any node.
        needs_all: of needs, when a failure on any node blocks the check as a whole.
        fault: the fault that tests/faults makes to prove the check.
    """

    id: str
    title: str
    level: Level
    scope: Scope
    judge: Callable[[Seen, Any], Iterable[Finding]]
    looks: str
    why: str
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
