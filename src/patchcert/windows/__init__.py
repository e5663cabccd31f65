"""Joins networks and threats: exact bounds for every placement of a patch."""

from patchcert.windows.clean import Clean as Clean
from patchcert.windows.clean import clean_pass as clean_pass
from patchcert.windows.clean import exact_clean_pass as exact_clean_pass
from patchcert.windows.dense import dense_margins as dense_margins
from patchcert.windows.dense import reference_margins as reference_margins
from patchcert.windows.differentiable import DifferentiablePlacements as DifferentiablePlacements
from patchcert.windows.differentiable import covering_placements as covering_placements
from patchcert.windows.memory import default_budget as default_budget
from patchcert.windows.search import WeakestPlacements as WeakestPlacements
from patchcert.windows.sweep import PlacementSweep as PlacementSweep
from patchcert.windows.sweep import covering_sweep as covering_sweep
