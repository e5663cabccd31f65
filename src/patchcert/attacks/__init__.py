"""Attacks: they look for members of a threat that a model gets wrong, and are believed only when it does."""

from patchcert.attacks.base import Attack as Attack
from patchcert.attacks.base import AttackResult as AttackResult
from patchcert.attacks.base import Findings as Findings
from patchcert.attacks.base import Task as Task
from patchcert.attacks.composite import AdaptiveAttack as AdaptiveAttack
from patchcert.attacks.composite import AttackSeries as AttackSeries
from patchcert.attacks.composite import AttackWithin as AttackWithin
from patchcert.attacks.composite import TransferAttack as TransferAttack
from patchcert.attacks.evidence import evidence_columns as evidence_columns
from patchcert.attacks.judging import AttackLeftThreat as AttackLeftThreat
from patchcert.attacks.patch import PatchAttack as PatchAttack
from patchcert.attacks.reference import reference_patch_attack as reference_patch_attack
from patchcert.attacks.soundness import Challenge as Challenge
from patchcert.attacks.soundness import challenge as challenge
from patchcert.attacks.soundness import strongest_attack as strongest_attack
from patchcert.attacks.sparse import SparseAttack as SparseAttack
from patchcert.attacks.tuning import tune_defense as tune_defense
