"""The training strategies. Each is the schema of its own `[strategy]` table, told apart by `kind`."""

from patchcert.train.strategies.local_bounds import LocalBounds as LocalBounds
from patchcert.train.strategies.masked import Masked as Masked
from patchcert.train.strategies.placements import AllPlacements as AllPlacements
from patchcert.train.strategies.placements import GuidedPlacements as GuidedPlacements
from patchcert.train.strategies.placements import RandomPlacements as RandomPlacements
from patchcert.train.strategies.pooled import PooledPlacements as PooledPlacements
from patchcert.train.strategies.sparse import Ablated as Ablated
from patchcert.train.strategies.sparse import SparseChanges as SparseChanges
from patchcert.train.strategies.votes import Bands as Bands
from patchcert.train.strategies.votes import Blocks as Blocks
from patchcert.train.strategies.votes import LocalMargins as LocalMargins
from patchcert.train.strategies.weakest import Weakest as Weakest
from patchcert.train.strategy import Natural as Natural

AnyStrategy = (
    Natural
    | AllPlacements
    | RandomPlacements
    | GuidedPlacements
    | PooledPlacements
    | SparseChanges
    | Ablated
    | Masked
    | Bands
    | Blocks
    | LocalMargins
    | LocalBounds
    | Weakest
)
"""All that a specification can ask for by name."""
