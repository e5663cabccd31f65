"""What was found, for people: tables, figures, and one self-contained HTML page per set of runs."""
