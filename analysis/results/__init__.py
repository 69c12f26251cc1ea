"""The files of a sweep: their names, schema and checksum, how they are written and read."""
