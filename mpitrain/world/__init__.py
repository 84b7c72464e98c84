"""Who takes part: ranks, nodes and local ranks, how arrays are placed on them, and each rank's part of a batch."""
