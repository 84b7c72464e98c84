"""What a record of a run is made of. One file, one meter; see meter.py."""
