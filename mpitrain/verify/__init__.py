"""What a script computes on one rank and on several: recorded in both runs, and compared."""
