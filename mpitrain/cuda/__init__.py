"""Everything that is specific to CUDA devices. The user imports CuPy; this module does not.

Begin reading with ring.py: the ring of allreduce/ring.py on buffers in GPU memory. Then sequential.py (the order of
sums, and the events at both ends), streams.py, device.py and memory.py. The other transports (transports.py has their
list), what they share (peers.py), coded.py and the kernels can wait until one of them is needed.
"""
