"""Experiments as data: specifications, the runs they lead to, and the evidence that runs leave behind."""
