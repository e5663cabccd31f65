"""The paper's tables, row by row: which runs give a number, and the evidence they leave for it."""
