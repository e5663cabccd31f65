"""Sound bounds on what a network can output when its input is only known to lie in a box."""

from patchcert.bounds.lowering import function_rule as function_rule
from patchcert.bounds.lowering import layer_rule as layer_rule
from patchcert.bounds.network import Network as Network
from patchcert.bounds.network import trace as trace
from patchcert.bounds.operations import Interval as Interval
from patchcert.bounds.rounding import NEAREST as NEAREST
from patchcert.bounds.rounding import Rounding as Rounding
from patchcert.bounds.rounding import precise_arithmetic as precise_arithmetic
from patchcert.bounds.rounding import subnormals_kept as subnormals_kept
