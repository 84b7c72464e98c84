"""Who takes part: ranks, nodes and local ranks, how arrays lie over them, and which part of a batch is whose."""
