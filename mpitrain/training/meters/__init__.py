"""Meters measure the numbers in a record of a run. One file, one meter; see meter.py."""
