"""How long-running work reports its progress."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with the number of parts done and the number of all parts: images, placements, votes."""
