"""One table of all kinds of proof: rows counted from evidence beside rows that others state, in one file format."""
