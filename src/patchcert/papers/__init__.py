"""Published papers, reproduced row by row. Only the command line imports this package."""
