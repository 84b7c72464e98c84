"""A server that holds the parameters, and workers that come and go. One file, one idea."""
