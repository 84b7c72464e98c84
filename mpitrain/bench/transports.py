"""`mpiexec -n 2 python -m mpitrain.bench.transports`: print one JSON object about the transports that are possible
here."""

from __future__ import annotations

import json

from mpitrain.allreduce.device import KINDS
from mpitrain.allreduce.device.select import choose
from mpitrain.errors import DeviceError
from mpitrain.job.start import init


def main() -> None:
    """Run on every rank. Rank 0 prints why each transport is not possible ("": it is), and the choice of `auto`."""
    world = init()
    answer = {"transports": {}, "choice": "", "error": ""}
    try:
        _, choice = choose(world, KINDS)
        answer["transports"] = {name: choice.why_not.get(name, "") for name in KINDS}
        answer["choice"] = choice.lines()[-1]
    except DeviceError as error:  # the same on all ranks
        answer["error"] = str(error)
    world.print(json.dumps(answer))


if __name__ == "__main__":
    main()
