"""Where the rows of a record go. One file, one writer; see writer.py."""
