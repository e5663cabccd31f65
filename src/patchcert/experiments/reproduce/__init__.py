"""The paper's tables, row by row: which runs give a number, how they are carried out, what they left as evidence."""
