"""cupy.cuda.nccl: not there, as without libnccl."""

available = False
