"""Compares what a script computes on one rank and on several, from records of both runs."""
