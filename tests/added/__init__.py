"""One of each that can be added, in a file of its own, as a newcomer would write it; tests/test_one_of_each.py."""
