"""What a cluster will make of a script: steps measured on single machines, and sums simulated between them."""
