"""Attacks: they look for members of a threat that a model gets wrong, and are believed only when it does."""

from patchcert.attacks.base import Attack as Attack
from patchcert.attacks.base import AttackedModel as AttackedModel
from patchcert.attacks.base import AttackJob as AttackJob
from patchcert.attacks.base import AttackLeftThreat as AttackLeftThreat
from patchcert.attacks.base import AttackResult as AttackResult
from patchcert.attacks.base import FastCopy as FastCopy
from patchcert.attacks.base import Findings as Findings
from patchcert.attacks.base import default_batch_size as default_batch_size
from patchcert.attacks.composite import AdaptiveAfterTransfer as AdaptiveAfterTransfer
from patchcert.attacks.composite import AdaptiveAttack as AdaptiveAttack
from patchcert.attacks.composite import AttackSeries as AttackSeries
from patchcert.attacks.composite import AttackWithin as AttackWithin
from patchcert.attacks.composite import PatchesInTurn as PatchesInTurn
from patchcert.attacks.composite import TransferAttack as TransferAttack
from patchcert.attacks.composite import strongest_attack as strongest_attack
from patchcert.attacks.patch import PatchAttack as PatchAttack
from patchcert.attacks.patch import reference_patch_attack as reference_patch_attack
from patchcert.attacks.printed import Transform as Transform
from patchcert.attacks.printed import TransformedAttack as TransformedAttack
from patchcert.attacks.printed import UniversalAttack as UniversalAttack
from patchcert.attacks.sparse import SparseAttack as SparseAttack
from patchcert.attacks.tuning import smoothing_grid as smoothing_grid
from patchcert.attacks.tuning import tune_defense as tune_defense
from patchcert.attacks.tuning import watermarking_grid as watermarking_grid
