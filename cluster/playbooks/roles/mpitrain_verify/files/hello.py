"""Every rank's host, Python and MPI library as JSON from rank 0; the sum of the ranks shows that they are one world."""

import json
import platform
import socket

from mpi4py import MPI

world = MPI.COMM_WORLD
library = " ".join(MPI.Get_library_version().splitlines()[0].split())
everyone = world.gather((socket.gethostname().split(".")[0], platform.python_version(), library))
total = world.allreduce(world.rank)
if world.rank == 0:
    hosts, pythons, libraries = (list(column) for column in zip(*everyone, strict=True))
    said = {"size": world.size, "sum": total, "hosts": hosts}
    print(json.dumps(said | {"pythons": sorted(set(pythons)), "libraries": sorted(set(libraries))}))
