"""Writers store the rows of a record. One file, one writer; see writer.py."""
