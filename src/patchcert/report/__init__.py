"""What was found, for people: tables, charts, and one self-contained HTML page per set of models."""
