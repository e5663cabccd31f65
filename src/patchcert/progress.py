"""How long work tells its caller how far it is."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Told how many of how many parts are done: images, placements, votes."""
