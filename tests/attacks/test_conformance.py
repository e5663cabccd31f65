import pytest

from patchcert.attacks import AttackSeries, PatchAttack, SparseAttack
from patchcert.testing import check_attack


@pytest.mark.parametrize(
    "attack",
    [
        PatchAttack(steps=30, restarts=12),
        PatchAttack(steps=30, restarts=2, loss="margin", search="sweep"),
        PatchAttack(steps=30, restarts=2, loss="margin", search="certificate"),
        PatchAttack(steps=25, restarts=10, early_stop=False, batch_size=50),
        AttackSeries((PatchAttack(steps=0, restarts=1), PatchAttack(steps=30, restarts=12))),
    ],
    ids=["random", "sweep", "certificate", "exhaustive", "series"],
)
def test_patch_attacks_keep_every_promise(attack):
    check_attack(attack)


def test_sparse_attack_keeps_every_promise():
    check_attack(SparseAttack(steps=20, restarts=3), sparse=True)
