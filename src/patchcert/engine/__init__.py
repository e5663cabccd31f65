"""Joins networks and threats: exact bounds for every placement of a patch."""

from patchcert.engine.chosen import ChosenPlacements as ChosenPlacements
from patchcert.engine.chosen import covering_placements as covering_placements
from patchcert.engine.clean import Clean as Clean
from patchcert.engine.clean import audit_network as audit_network
from patchcert.engine.clean import clean_pass as clean_pass
from patchcert.engine.clean import exact_clean_pass as exact_clean_pass
from patchcert.engine.dense import dense_margins as dense_margins
from patchcert.engine.dense import reference_margins as reference_margins
from patchcert.engine.memory import default_budget as default_budget
from patchcert.engine.search import WeakestPlacements as WeakestPlacements
from patchcert.engine.sweep import PlacementSweep as PlacementSweep
from patchcert.engine.sweep import covering_sweep as covering_sweep
