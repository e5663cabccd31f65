"""Exact bounds for every placement of a patch, computed on the small windows of feature maps that a patch can reach.

docs/concepts/windows.md explains how it works. The package offers:

- `clean_pass`, `exact_clean_pass`: the pass over the unchanged images (`Clean`), which all placements share
- `PlacementSweep`, `covering_sweep`: margins at every placement
- `WeakestPlacements`: the search for the placement of least margin, for training
- `DifferentiablePlacements`, `covering_placements`: margins with a gradient at a few placements of each image's own
- `dense_margins`, `reference_margins`: the slow, obvious way, which windows are held equal to and fall back on
- `default_budget`: the memory that is used by default

`covering_` functions give None where windows cannot follow the network, so that only the dense way is left. Verdicts
without margins are in `verdicts`, blocks of placements whose bounds are merged in `blocks`.
"""

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
