"""The answers to jobs, as the first server collects them: each server gets a part, and an answer counts when whole."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from mpitrain.serve.jobs import ServedJob
from mpitrain.serve.pushes import Push


@dataclass
class Answer:
    """What has come of the answer to a job.

    Attributes:
        ticket: of its worker.
        push: the part of this server; None: it has not come.
        not_finite: by server whose part has come: the first parameter with NaN or infinity, or "".
    """

    ticket: str
    push: Push | None = None
    not_finite: dict[int, str] = field(default_factory=dict)

    @property
    def first_not_finite(self) -> str:
        """The first parameter with NaN or infinity; "": all gradients that have come are finite."""
        return next(filter(None, (self.not_finite[server] for server in sorted(self.not_finite))), "")


class Answers:
    """Those that have come, in parts or whole, and that no update has used yet."""

    def __init__(self, num_servers: int) -> None:
        self._num_servers = num_servers
        self._of: dict[int, Answer] = {}  # by the number of the job

    def add(self, number: int, ticket: str, server: int, not_finite: str, push: Push | None = None) -> Answer | None:
        """Take in a part of the answer to a job. Return the answer if it is whole now."""
        answer = self._of.setdefault(number, Answer(ticket))
        answer.push = push or answer.push
        answer.not_finite[server] = not_finite
        return answer if len(answer.not_finite) == self._num_servers else None

    def take(self, jobs: Sequence[ServedJob]) -> tuple[list[Answer], list[Push]]:
        """Remove the answers to these jobs, and return them."""
        answers = [self._of.pop(job.number) for job in jobs]
        return answers, [answer.push for answer in answers if answer.push]

    def keep(self, numbers: Container[int]) -> list[Answer]:
        """Drop the answers to all other jobs. Return those of them that this server has, and not all others."""
        dropped = [number for number in self._of if number not in numbers]
        answers = [self._of.pop(number) for number in dropped]
        return [answer for answer in answers if answer.push and len(answer.not_finite) < self._num_servers]
