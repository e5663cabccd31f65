"""Sound bounds on what a network can output when its input is only known to lie in a box."""

from patchcert.bounds.interval import Interval as Interval
