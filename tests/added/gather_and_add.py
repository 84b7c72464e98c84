"""An allreduce algorithm: every rank sends its buffer to every other one, and adds them all up in rank order."""

import numpy

from mpitrain.allreduce.algorithm import Sequential
from mpitrain.allreduce.group import everyone
from mpitrain.waiting.control import until


def gather_and_add_steps(group):
    def steps(flat, residual=None):
        buffers = numpy.empty((group.size, flat.size), flat.dtype)
        buffers[group.index] = flat
        requests = [group.comm.Isend(flat.view(numpy.uint8), other, 77) for other in group.members]
        for place, other in enumerate(group.members):
            requests.append(group.comm.Irecv(buffers[place].view(numpy.uint8), other, 77))
        for request in requests:
            yield from until(request.Test)
        with numpy.errstate(all="ignore"):
            numpy.copyto(flat, buffers[0])
            for row in buffers[1:]:
                numpy.add(flat, row, out=flat)

    return steps


def gather_and_add(world):
    return Sequential(world, "gather_and_add", gather_and_add_steps(everyone(world)))


def seconds(num_bytes, topology):
    return 0.0
