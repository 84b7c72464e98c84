"""What the examples' command lines share."""

import argparse


def positive(text: str) -> int:
    """A whole number above 0; for anything else argparse says so and exits with code 2."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value
