"""Several real machines on this one, to try mpitrain and to break things: containers that boot, or User-mode Linux.

with up(4) as bed:
    bed.run(["ansible-playbook", "cluster/setup.yml"], timeout_seconds=300)
    bed.kill("node2")
"""

from testbed.bed import Bed, down
from testbed.bed_record import STATE, bed_names
from testbed.lifecycle import build, find, up
from testbed.snapshots import forget_snapshot, snapshot_names

__all__ = ["STATE", "Bed", "bed_names", "build", "down", "find", "forget_snapshot", "snapshot_names", "up"]
