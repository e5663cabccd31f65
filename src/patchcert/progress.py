"""How long-running work reports its progress."""

from collections.abc import Callable

Progress = Callable[[float, int], None]
"""Called with the number of parts done and the number of all parts: images, placements, votes. Of a part that takes
long, the share of it that is done counts too. Work in several stages may count other parts in each: what never falls is
the share of all that is done."""
