"""PyTorch over MPI with nothing compiled: `import mpitrain.torch`.

    import mpitrain.torch
    torch.distributed.init_process_group("mpitrain")

Importing it makes the backend `mpitrain` known to torch.distributed, for tensors on the host and on GPUs. `prepare`
needs no process group.
"""

from __future__ import annotations

from mpitrain.torch.compress import compress
from mpitrain.torch.groups import register
from mpitrain.torch.monitored import monitored_barrier
from mpitrain.torch.prepare import accumulate, prepare
from mpitrain.torch.rendezvous import offer

__all__ = ["accumulate", "compress", "monitored_barrier", "prepare"]

offer()
register()
