"""Waits of ranks for each other: every wait can report what it waits for, and learns of ranks that fail."""
