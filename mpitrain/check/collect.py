"""Examine a cluster: one login per node, then questions over it; pairs of nodes in rounds; then the jobs.

Every wait has a deadline here and another one on the node. A node without answers costs its deadline only once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from mpitrain.check.agent import AgentClient, UnansweredError, wait_for
from mpitrain.check.check import Ask, NotSeenError, Seen
from mpitrain.check.node.children import MOST_PATIENCE, patience
from mpitrain.check.target import LoginError, Target
from mpitrain.launch.hostfile import Host

# More logins at once than this would only wait for this machine's processor.
_MOST_THREADS = 32
_SLACK_SECONDS = 10.0
_SILENCE_SECONDS = 3.0

# Sections of a pair (from, to), and of the cluster. They get all agents by name.
PairStep = Callable[["Cluster", str, str], Any]
ClusterStep = Callable[["Cluster"], Any]


class Cluster:
    """The agents of a target, and their observations. A context manager: hangs up at the end.

    Attributes:
        target: the cluster to look at.
        seen: what was seen so far.
        agents: by node; nodes whose login failed are missing.
    """

    def __init__(self, target: Target, log_in: Callable[[Host], AgentClient]) -> None:
        """Do nothing yet. `log_in` returns the agent of a node, or raises LoginError."""
        self.target = target
        self._start = log_in
        self.seen = Seen(target)
        self.agents: dict[str, AgentClient] = {}
        self._pool = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="check")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for agent in list(self.agents.values()):  # a login may come through just now
            agent.close()

    def log_in(self, progress: Callable[[str], None]) -> None:
        """Log in to all nodes; failures are kept too, in the section "login"."""
        progress(f"logging in to {len(self.target.hosts)} nodes")
        waiting = {host.name: self._pool.submit(self._log_in, host) for host in self.target.hosts}
        for name, login in waiting.items():
            self.seen.nodes.setdefault(name, {})["login"] = login.result()

    def _log_in(self, host: Host) -> dict[str, Any]:
        try:
            agent = self._start(host)
        except LoginError as error:
            return {"failed": error.kind, "found": error.reason, "host_keys": error.host_keys}
        except Exception as error:  # an unusual node must not end the check of the others
            return {"failed": "login", "found": f"{type(error).__name__}: {error}"}
        self.agents[host.name] = agent
        keys = {"known": agent.host_key}
        return {
            "failed": "",
            "seconds": agent.login_seconds,
            "patience": patience(),
            "noise": agent.noise,
            "host_keys": keys,
            **agent.hello,
        }

    def ask(self, name: str, call: str, wish: Mapping[str, Any], *, seconds: float, user: str = "job") -> Any:
        """Ask one node; see AgentClient.ask. `user` "job" is the shared user."""
        if name not in self.agents:
            raise UnansweredError(f"there is no login to {name}")
        user = self.target.user if user == "job" else user
        begun = time.monotonic()
        answer = self.agents[name].begin(call, wish, user)
        return self._patiently(name, answer, begun, seconds, lambda: wait_for(answer, seconds))

    def _patiently(self, name: str, answer: Future[Any], begun: float, seconds: float, wait: Callable[[], Any]) -> Any:
        """Return the result of `wait`. A busy node that is not silent gets extra time, as its commands do."""
        try:
            return wait()
        except UnansweredError:
            if answer.done():
                raise
            self._give_up_if_silent(name)
            return wait_for(answer, begun + MOST_PATIENCE * seconds - time.monotonic())

    def _give_up_if_silent(self, name: str) -> None:
        """Give up on a node that was frozen or cut off after its login: it costs its deadline once, not per
        question."""
        try:
            self.agents[name].ask("clock", {}, user="login", seconds=_SILENCE_SECONDS)
        except UnansweredError:
            self.agents[name].give_up("it no longer answers")

    def look_at_nodes(self, asks: Sequence[Ask], progress: Callable[[str], None]) -> None:
        """Put all questions to all nodes at once, and keep the answers."""
        # A slow node answers one question after the other: each answer may take the time of the slowest question, and
        # more, after the last one.
        begun = time.monotonic()
        patience_seconds = max((ask.seconds for ask in asks), default=0.0) + _SLACK_SECONDS
        waiting = []
        for host in self.target.hosts:
            if host.name not in self.agents:
                continue
            for ask in asks:
                if ask.head_only and host.name != self.target.head:
                    continue
                user = self.target.user if ask.user == "job" else "login"
                answer = self.agents[host.name].begin(ask.call, ask.wish(self.target, host), user)
                waiting.append((host.name, ask, answer))
        for number, (name, ask, answer) in enumerate(waiting):
            progress(f"looking at the nodes: {number} of {len(waiting)} answers")
            wait = partial(_wait_while_it_talks, self.agents[name], answer, begun, patience_seconds)
            try:
                content = self._patiently(name, answer, begun, patience_seconds, wait)
            except UnansweredError as error:
                content = {"error": str(error)}
            self.seen.nodes[name][ask.section] = content

    def look_at_pairs(self, steps: Mapping[str, PairStep], progress: Callable[[str], None]) -> None:
        """Run the steps for every pair in both directions, in rounds in which each node is in at most one pair."""
        all_rounds = list(rounds([name for name in self.target.names if name in self.agents]))
        for number, pairs in enumerate(all_rounds):
            progress(f"looking at pairs of nodes: round {number + 1} of {len(all_rounds)}")
            for turn in (pairs, [pair[::-1] for pair in pairs]):
                waiting = [self._pool.submit(self._take, steps, *pair) for pair in turn]
                for pair_seen in waiting:
                    pair_seen.result()

    def _take(self, steps: Mapping[str, PairStep], a: str, b: str) -> None:
        sections = self.seen.pairs.setdefault((a, b), {})
        for section, step in steps.items():
            sections[section] = tried(partial(step, self, a, b))

    def look_at_all(self, section: str, step: ClusterStep) -> None:
        """Run a step for the whole cluster."""
        self.seen.cluster[section] = tried(partial(step, self))


def _wait_while_it_talks(agent: AgentClient, answer: Future[Any], begun: float, patience_seconds: float) -> Any:
    while True:
        heard = max(agent.heard, begun)
        try:
            return wait_for(answer, heard + patience_seconds - time.monotonic())
        except UnansweredError:
            if answer.done() or agent.heard <= heard:
                raise


def tried(step: Callable[[], Any]) -> Any:
    """Return what a step returns; {"error": why} if it gets no answer, or one of an unexpected form."""
    try:
        return step()
    except (UnansweredError, NotSeenError) as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def on_each(names: Sequence[str], step: Callable[[str], Any], at_once: int = 0) -> dict[str, Any]:
    """Run a step for each name, `at_once` at a time (0: all). Return by name the results of `tried`."""
    with ThreadPoolExecutor(at_once or len(names) or 1) as pool:
        return dict(zip(names, pool.map(lambda name: tried(partial(step, name)), names), strict=True))


def rounds(names: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """All pairs of names, in rounds in which each name comes once at most: the circle method.

    The first name stays, the others move by one place per round; a node opposite an empty place pauses.
    """
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(a, b) for a, b in facing if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def quietly(step: Callable[[], Any]) -> None:
    """Run a clean-up step. A node that no longer answers has nothing to clean up."""
    with suppress(UnansweredError):
        step()
