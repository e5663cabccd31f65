"""An explanation tells what the certificate of one image says, and no more."""

import numpy as np
import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.certificates import Certificates, Classifier
from patchcert.data import Split
from patchcert.errors import InvalidInput
from patchcert.report.explaining import Explanation, explain, write_explanation

THREAT = pc.Patch(2)
SIZE = 6


@pytest.fixture
def model():
    """Says 1 where the image is bright on the whole; the first pixel counts most, and the bias decides on dark ones."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    with torch.no_grad():
        network[1].weight.fill_(0.05)
        network[1].weight[:, 0] = 0.5
        network[1].bias.fill_(-0.2)
        network[3].weight.copy_(torch.tensor([[-1.0], [1.0], [0.2]]).expand(3, 4))
        network[3].bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
    return network


def image(value, label):
    return Split(torch.full((1, 1, SIZE, SIZE), value, dtype=torch.uint8), torch.tensor([label]))


def test_a_proven_image_names_its_weakest_placement_and_the_nearest_class(model):
    found = explain(
        pc.IntervalBounds(model), image(200, 1), THREAT, "test image 3", ("dark", "bright", "other")
    )
    certificates = pc.certify(model, image(200, 1).floats(), torch.tensor([1]), THREAT)
    assert found.verdict == "certified"
    assert found.map.weakest.top == found.map.weakest.left == 0
    assert found.map.least == pytest.approx(float(certificates.least_margin[0]))
    assert list(found.margins) == [2, 0]
    assert found.margins[2] == float(certificates.least_margin[0])
    assert found.sentences[0].startswith(
        "Proven (recovery, deterministic): it stays bright, against one 2x2 square"
    )
    assert (
        "25 of 25 placements are proven; the weakest has its top left corner at row 0" in found.sentences[1]
    )
    assert "Nearest is other: the label stays ahead by at least +" in found.sentences[2]
    assert [layer.name for layer in found.layers] == ["before '2'", "the logits"]


def test_layers_are_those_of_the_weakest_placement(model):
    found = explain(pc.IntervalBounds(model), image(45, 1), THREAT, "x")
    elsewhere = pc.certificates.explaining.widths(model, image(45, 1).floats(), THREAT, (4, 4))
    assert found.layers[0].width > 2 * elsewhere[0].width


def test_an_unproven_a_wrong_and_a_broken_image_are_told_apart(model):
    unproven = explain(pc.IntervalBounds(model), image(45, 1), THREAT, "x")
    assert unproven.verdict == "not certified"
    assert unproven.sentences[0].startswith("Not proven, and not refuted: it is 1, but one 2x2")
    assert "may fall behind, by bounds alone" in " ".join(unproven.sentences)
    wrong = explain(pc.IntervalBounds(model), image(200, 0), THREAT, "x")
    assert (wrong.verdict, wrong.sentences[0]) == (
        "wrong",
        "Wrong without any attack: it is 0, and taken for 1.",
    )
    broken = explain(pc.IntervalBounds(model, refine="split"), image(45, 1), THREAT, "x")
    assert broken.verdict == "broken"
    assert broken.sentences[0] == "Broken: it is 1, but a patch was found that makes it 0."
    box = broken.counterexample.box
    assert (box.height, box.width) <= (2, 2)
    changed = np.argwhere(broken.counterexample.image[0] != broken.image[0])
    assert (changed >= (box.top, box.left)).all()
    assert (changed < (box.top + box.height, box.left + box.width)).all()


@pytest.mark.parametrize("kind", [pc.DoubleMasking, pc.MaskedDetection])
def test_proofs_behind_masks_show_the_weakest_copy(model, kind):
    classifier = kind(model, THREAT, masks=3)
    found = explain(classifier, image(200, 1), THREAT, "x")
    certificates = classifier.certify(image(200, 1).floats(), torch.tensor([1]), THREAT)
    assert found.hidden.lead == float(certificates.lead[0])
    assert set(found.hidden.masks) == set(certificates.weakest_masks[0].tolist())
    hidden = classifier.mask_set(SIZE, SIZE).hidden[list(found.hidden.masks)].any(dim=0).numpy()
    assert (found.hidden.copy[0][hidden] == 128).all()
    assert (found.hidden.copy[0][~hidden] == 200).all()
    assert found.map is not None
    assert not found.layers
    assert "Behind mask" in " ".join(found.sentences)


def test_maps_without_margins_say_what_is_proven_and_name_no_weakest_placement(tmp_path):
    cells = nn.Sequential(nn.Conv2d(1, 2, 2)).eval()
    with torch.no_grad():
        cells[0].weight.copy_(torch.tensor([-1.0, 1.0])[:, None, None, None].expand(2, 1, 2, 2))
        cells[0].bias.copy_(torch.tensor([2.0, -2.0]))
    votes = pc.LocalVotes(cells)
    found = explain(votes, image(200, 1), THREAT, "x")
    assert not found.map.has_margins
    assert "25 of 25 placements are proven." in found.sentences
    text = write_explanation(found, tmp_path / "page.html").read_text()
    assert "certificate map" in text
    assert "weakest" not in text


class Parity(nn.Module):
    """A base model of ablated images: two channels, what is shown and what is not."""

    def forward(self, encoded):
        bright = encoded[:, 0].flatten(1).sum(dim=1)
        return torch.stack([1 - bright, bright], dim=1)


def test_votes_are_counted():
    ablation = pc.RandomAblation(Parity().eval(), retained=9, selection_samples=10, estimation_samples=200)
    found = explain(ablation, image(200, 1), pc.SparsePixels(1), "x")
    assert sum(found.votes.values()) == 200
    assert next(iter(found.votes)) == 1
    assert "votes are for 1" in found.sentences[-1]
    assert "; proven for " in found.sentences[-1]
    assert found.map is None
    assert not found.layers


def test_a_kind_of_proof_that_tells_nothing_has_a_verdict_alone(model, tmp_path):
    class Silent(Classifier):
        def __init__(self, base):
            self.model = base

        def predict(self, images, progress=None):
            return torch.ones(len(images), dtype=torch.long)

        def certify(self, images, labels, threat, progress=None):
            return Certificates(labels == 1, self.predict(images), labels)

        def describe(self):
            return {"name": "Silent"}

    found = explain(Silent(model), image(10, 1), THREAT, "x")
    assert len(found.sentences) == 1
    assert "Proven" in write_explanation(found, tmp_path / "page.html").read_text()


def test_one_image_is_explained_at_a_time(model):
    with pytest.raises(InvalidInput, match="one image is explained at a time, got 2"):
        explain(
            pc.IntervalBounds(model),
            Split(torch.zeros(2, 1, 6, 6).byte(), torch.zeros(2).long()),
            THREAT,
            "x",
        )


def test_the_page_has_everything_and_escapes_names(model, tmp_path):
    found = explain(pc.IntervalBounds(model), image(45, 1), THREAT, "<b>.png", ("dark", "<i>", "other"))
    text = write_explanation(found, tmp_path / "page.html", [("because", "patchcert attack 'x'")]).read_text()
    assert "Why &lt;b&gt;.png is not proven" in text
    assert "<b>.png" not in text
    assert "<i>" not in text
    for words in ("Bounds, layer by layer", "Against each class", "before &#39;2&#39;", "because"):
        assert words in text
    assert text.count("data:image/png") == 2
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("width", "share"), [(0.0, 0), (0.01, 0), (100.0, 50), (1e6, 100), (float("inf"), 100)]
)
def test_bars_are_logarithmic(width, share):
    assert Explanation.bar(None, width) == pytest.approx(share)
