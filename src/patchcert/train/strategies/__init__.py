"""The training strategies, one file each."""

from patchcert.train.strategies.ablated import Ablated as Ablated
from patchcert.train.strategies.all_placements import AllPlacements as AllPlacements
from patchcert.train.strategies.guided_placements import GuidedPlacements as GuidedPlacements
from patchcert.train.strategies.natural import Natural as Natural
from patchcert.train.strategies.pooled_placements import PooledPlacements as PooledPlacements
from patchcert.train.strategies.random_placements import RandomPlacements as RandomPlacements
from patchcert.train.strategies.sparse_pixels import SparseChanges as SparseChanges
