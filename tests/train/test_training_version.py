"""Runs are found again by their specification, their data and the version of training, so that must be the true one.

Whoever changes what training computes, and so meets a failure here, raises `TRAINING_VERSION` and puts its losses
below; finished runs of the old version then no longer count as done. Faster code for the same losses changes neither.
"""

import pytest
import torch

from patchcert.train import spec as spec_module
from patchcert.train.spec import read_spec
from patchcert.train.training import Workplace, train_run

SMALL = """
    data.name=mnist-mini data.limit=96 threat.stamp=6x6 optimiser.batch_size=16 schedule.epochs=4
    schedule.epsilon.natural_epochs=1 schedule.epsilon.ramp_epochs=2 schedule.learning_rate.decay_from=2
    schedule.learning_rate.decay_every=1 run.check_every=4 run.check_images=5
"""
MLP, CNN = "model.hidden=16", "model.name=cnn2 data.limit=16"
NORMED = "model.name=wideresnet model.depth=10 model.filters=2 data.limit=48"
SPARSE = "threat.kind=sparse threat.pixels=2"
FULL = "schedule.epsilon.natural_epochs=0 schedule.epsilon.ramp_epochs=0"
LOSSES = {
    1: {
        f"strategy.kind=natural {MLP}": (2.2586, 2.2079, 2.1631, 2.1280),
        f"strategy.kind=natural {NORMED}": (2.3301, 2.3204, 2.3084, 2.2994),
        f"strategy.kind=all {MLP}": (2.2586, 2.3450, 2.4995, 2.4968),
        f"strategy.kind=all data.flip=true data.crop_padding=2 {CNN}": (2.3071, 4.6497, 5.8154, 5.6070),
        "strategy.kind=all model.name=cnn2_bn model.filters=2 model.hidden=16 bounds.initialisation=interval "
        "bounds.tightness=0.5 bounds.relu_balance=0.5 data.limit=32": (2.3347, 3.7353, 5.1201, 4.7889),
        f"strategy.kind=random strategy.placements=3 {CNN}": (2.3060, 4.3219, 5.5371, 5.2684),
        f"strategy.kind=guided strategy.width=2 {MLP}": (2.2586, 2.3318, 2.4710, 2.4676),
        f"strategy.kind=pooled strategy.blocks=[4] {CNN}": (2.3060, 6.9764, 9.4743, 9.1339),
        f"strategy.kind=sparse {SPARSE} {MLP}": (2.2586, 2.2300, 2.2365, 2.2283),
        f"strategy.kind=sparse strategy.bound=per-pixel {SPARSE} {MLP}": (2.2586, 2.2302, 2.2371, 2.2294),
        f"strategy.kind=ablated strategy.retained=200 model.name=cnn2_ablation data.limit=16 {SPARSE} {FULL}": (
            (2.3111, 2.2775, 2.2235, 2.1413)
        ),
        "strategy.kind=masked strategy.clean_share=0.1 strategy.worst_of=2 optimiser.momentum=0.9 "
        "schedule.learning_rate.initial=0.05 optimiser.nesterov=true optimiser.label_smoothing=0.1 "
        f"{FULL} {NORMED}": (2.3312, 2.2961, 2.2757, 2.2424),
        "strategy.kind=bands model.name=resnet18_parts model.normalise=false model.filters=2 data.limit=48 "
        f"{FULL}": (2.3510, 2.3435, 2.3280, 2.3284),
        "strategy.kind=local-votes strategy.aggregation=masked-sum strategy.scores=positive model.name=bagnet "
        "model.depth=2 model.receptive_field=7 model.filters=4 "
        "data.limit=48": (3.1236, 3.6037, 4.7656, 5.3086),
        f"strategy.kind=weakest strategy.search=linear {MLP}": (2.2586, 2.2882, 2.4063, 2.4388),
        f"strategy.kind=weakest strategy.placements=image strategy.mixture=0.5 {CNN}": (
            (2.306, 2.8263, 3.1259, 3.079)
        ),
    }
}


@pytest.mark.parametrize(("changes", "losses"), LOSSES[spec_module.TRAINING_VERSION].items())
def test_training_is_that_of_its_version(changes, losses, tmp_path):
    spec = read_spec("paper-mnist", f"{SMALL} {changes}".split())
    run = train_run(spec, tmp_path / "run", Workplace(torch.device("cpu")))
    assert [row["loss"] for row in run.metrics()] == pytest.approx(losses, rel=1e-3)


def test_another_version_is_another_run(monkeypatch):
    spec = read_spec("paper-mnist")
    first = spec.fingerprint({"images": "0"})
    monkeypatch.setattr(spec_module, "TRAINING_VERSION", 2)
    assert spec.fingerprint({"images": "0"}) != first
