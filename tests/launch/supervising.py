"""Shared by the tests of the supervisor: tries that only say how they ended, and changes of hosts after them."""

from __future__ import annotations

from mpitrain.errors import LaunchError
from mpitrain.launch.ending import Ended
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.policy import Change
from mpitrain.launch.supervisor import Pause
from mpitrain.watching.rank_record import RankRecord

PLACEMENT = Placement(
    (Place("a", 0, 2), Place("b", 2, 1), Place("c", 3, 2)), {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}, "a"
)


def killed(rank: int, step: int, code: int = 137) -> Ended:
    records = {
        number: RankRecord(number, pid=1000 + number, first_step=1, step=step + (number != rank)) for number in range(5)
    }
    return Ended(
        code, mpiexec_said=f"process rank {rank} with PID 1 on node b exited on\nsignal 9 (K)", records=records
    )


class Tries:
    """Ends each try as the test says. Records of each try its hosts, what it was told of, and whether it only saves."""

    def __init__(self, *ends: Ended | LaunchError) -> None:
        self.ends = list(ends)
        self.ran: list[dict[str, int]] = []
        self.told: list[str] = []
        self.only_saves: list[bool] = []

    def __call__(self, placement: Placement, failed: Pause | None) -> Ended:
        self.told.append(failed.cause if failed else "")
        self.only_saves.append(failed is not None and failed.only_saves)
        self.ran.append({place.host: place.num_ranks for place in placement.places})
        end = self.ends.pop(0)
        if isinstance(end, LaunchError):
            raise end
        return end


def absent(*hosts: str) -> LaunchError:
    error = LaunchError("no answer")
    error.hosts = hosts
    return error


class Wished:
    """A stand-in for Changes that has a change after some of the tries."""

    def __init__(self, *changes: Change | None) -> None:
        self.changes = list(changes)
        self.bad: list[tuple[float, str]] = []
        self.begun: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self.saves_for: list[str] = []
        self.wanted: list[Change | None] = []
        self.left_for: list[str] = []

    def begin(self, hosts: Placement, now_on: Placement, saves_for: str) -> None:
        self.begun.append((hosts.hosts, now_on.hosts))
        self.saves_for.append(saves_for)

    def take(self, *, has_left: bool = False) -> Change | None:
        return self.changes.pop(0)

    def take_next(self, change: Change | None) -> None:
        self.wanted.append(change)

    def leave_state(self, why: str) -> str:
        self.left_for.append(why)
        return "it is kept on a" if len(self.left_for) == 1 else ""

    def look(self) -> None:
        """Prepare nothing."""


class Successor:
    """A stand-in for a next try that is ready."""

    def __init__(self, ended: Ended) -> None:
        self.ended = ended

    def to_end(self, meanwhile: object) -> Ended:
        return self.ended


LEAVES = Change("b leaves", PLACEMENT.without({"b"}), PLACEMENT.without({"b"}))
WIDER = Placement((*PLACEMENT.places, Place("d", 5, 2)), own="a")
JOINS = Change("d joins", WIDER, WIDER, ("d",))


def left(step: int) -> Ended:
    return Ended(0, records={0: RankRecord(0, step=step, left_step=step)}, left=(step, 1.0))
