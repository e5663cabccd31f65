from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.attacks import PatchAttack
from patchcert.certificates.band_votes import BandVotes, BlockVotes, encode_visible
from patchcert.errors import InvalidInput, InvalidThreat, ModelError
from patchcert.testing import check_certifier
from patchcert.testing.brute_force import members
from patchcert.threats import Patch, Patches, SparsePixels, shapes


class SeesParts(nn.Module):
    """A model of images as one of parts: hidden pixels are black, and the channel that says so is not looked at."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, encoded):
        return self.model(encoded[:, :-1])


class BrightParts(nn.Module):
    """Votes 1 where the mean of what it sees is above a half, else 0; remembers the shapes it is given."""

    def __init__(self):
        super().__init__()
        self.shapes = []
        self.eval()

    def forward(self, encoded):
        self.shapes.append(tuple(encoded.shape))
        seen = encoded[:, -1].sum(dim=(1, 2))
        bright = encoded[:, :-1].mean(dim=1).sum(dim=(1, 2)) / seen
        return torch.stack([torch.full_like(bright, 0.5), bright], dim=1) * 8


def bands(model, **settings):
    return BandVotes(SeesParts(model), width=1, batch_size=64, **settings)


@pytest.mark.parametrize(
    "classifier_of",
    [
        partial(bands),
        partial(bands, orientation="both", wrap=False, threshold=0.45),
        partial(bands, aggregation="double-masked", scores="logits", masked=2),
        pytest.param(
            lambda model: BlockVotes(SeesParts(model), size=2, ties="abstain", batch_size=64),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_band_and_block_votes_conform(classifier_of):
    check_certifier(classifier_of, logits_decide=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_band_votes_conform_on_cuda():
    check_certifier(bands, logits_decide=False, device="cuda")


def test_hidden_pixels_are_black_and_marked():
    image, view = torch.tensor([[[[0.5, 0.25]]]]), torch.tensor([[[True, False]]])
    assert encode_visible(image, view).tolist() == [[[[0.5, 0.0]], [[1.0, 0.0]]]]


def drawn(view):
    return ["".join("#" if seen else "." for seen in row) for row in view.tolist()]


def test_bands_wrap_or_stay_inside():
    wrapped = BandVotes(nn.Identity(), width=2).views(1, 4)
    assert [drawn(view)[0] for view in wrapped] == ["##..", ".##.", "..##", "#..#"]
    inside = BandVotes(nn.Identity(), width=2, wrap=False).views(1, 4)
    assert [drawn(view)[0] for view in inside] == ["##..", ".##.", "..##"]
    rows = BandVotes(nn.Identity(), width=1, orientation="row", stride=1).views(2, 3)
    assert [drawn(view) for view in rows] == [["###", "..."], ["...", "###"]]
    assert len(BandVotes(nn.Identity(), width=4, orientation="both").views(32, 32)) == 64
    assert len(BandVotes(nn.Identity(), width=4, wrap=False).views(32, 32)) == 29


def test_blocks_begin_at_every_stride():
    blocks = BlockVotes(nn.Identity(), size=2, wrap=False, stride=2).views(4, 4)
    assert drawn(blocks[1]) == ["..##", "..##", "....", "...."]
    assert len(blocks) == 4
    assert len(BlockVotes(nn.Identity(), size=12).views(32, 32)) == 32 * 32


@pytest.mark.parametrize(("wrap", "least", "most"), [(True, 8, 8), (False, 5, 8)])
def test_a_patch_of_5_touches_8_bands_of_4_and_fewer_at_borders_that_do_not_wrap(wrap, least, most):
    images = torch.zeros(1, 3, 32, 32)
    touched = BandVotes(nn.Identity(), width=4, wrap=wrap).touched(Patch(5), images).sum(dim=1)
    assert (int(touched.min()), int(touched.max())) == (least, most)


@pytest.mark.parametrize(
    "patch", [Patch(2), Patch(shapes.diamond(5)), Patch((1, 2), "corners"), Patch(torch.eye(2).bool())]
)
@pytest.mark.parametrize(
    "votes",
    [
        BandVotes(nn.Identity(), width=2, orientation="both", wrap=False),
        BlockVotes(nn.Identity(), size=2, wrap=True, stride=2),
    ],
)
def test_touched_votes_are_those_whose_input_some_member_changes(patch, votes):
    image = torch.full((1, 1, 4, 6), 0.5)
    views, placements = votes.views(4, 6), patch.placements(4, 6)
    touched = votes.touched(patch, image)
    for place, covered in enumerate(placements.masks(patch.stamp)):
        clean, changed = (
            one.expand(len(views), -1, -1, -1) for one in (image, image.masked_fill(covered, 1.0))
        )
        differs = (encode_visible(changed, views) != encode_visible(clean, views)).flatten(1).any(dim=1)
        assert touched[place].tolist() == differs.tolist()


def test_votes_are_counted_and_certified_for_each_placement():
    image = torch.zeros(1, 1, 4, 8)
    image[..., :6] = 1.0
    found = BandVotes(BrightParts(), width=1, batch_size=8).certify(image, torch.tensor([1]), Patch(2))
    assert found.predictions.tolist() == [1]
    assert found.ballots.selection.tolist() == [[2, 6]]
    # 6 bands against 2: at columns 0 to 4 the patch takes 2 of the 6 and gives 2 to the others, which are level and of
    # the lower index; at column 5 it takes one, at column 6 none.
    expected = torch.tensor([False, False, False, False, False, True, True]).repeat(3)
    assert found.placements.tolist() == [expected.tolist()]
    assert not found.certified.any()


def test_placements_are_exact_for_a_base_model_that_sees_all_of_its_band():
    """With one-pixel bands of a single row, what brute force can do is all that votes can do."""
    generator = torch.Generator().manual_seed(3)
    votes = BandVotes(BrightParts(), width=1, batch_size=16)
    images = torch.rand(30, 1, 1, 9, generator=generator).round()
    labels = votes.predict(images)
    found = votes.certify(images, labels, Patch((1, 2)))
    for index, image in enumerate(images):
        visited = members(Patch((1, 2)), image, generator)
        assert bool(found.certified[index]) == bool((votes.predict(visited) == labels[index]).all())
    assert 0 < found.certified.sum() < 30


def test_the_classical_count_proves_less():
    """A patch of three columns always covers one that votes for another class, where every third does."""
    votes = BandVotes(BrightParts(), width=1, wrap=False)
    images = torch.zeros(2, 1, 4, 12)
    images[0, ..., ::3] = 1.0
    labels, patch = torch.tensor([0, 0]), Patch(3)
    assert votes.certify(images, labels, patch).certified.tolist() == [True, True]
    assert votes.certified_by_count(images, labels, patch).tolist() == [False, True]


def test_the_classical_count_of_several_patches_proves_less_and_odd_questions_are_refused():
    votes = BandVotes(BrightParts(), width=1)
    images, labels = torch.ones(2, 1, 4, 12), torch.tensor([1, 1])
    images[1, :, :, :3] = 0
    threat = Patches(Patch(2, [(0, 0)]), 2)
    assert votes.certify(images, labels, threat).certified.tolist() == [True, True]
    assert votes.certified_by_count(images, labels, threat).tolist() == [True, False]
    with pytest.raises(InvalidThreat, match="BandVotes certifies against patches"):
        votes.certified_by_count(images, labels, SparsePixels(1))
    with pytest.raises(InvalidInput, match=r"labels must lie in 0\.\.1"):
        votes.certified_by_count(images, torch.tensor([1, 2]), Patch(1))


def test_votes_that_are_double_masked_are_not_counted():
    votes = BandVotes(BrightParts(), width=1, aggregation="double-masked", masked=2)
    with pytest.raises(InvalidInput, match="votes are not counted with aggregation='double-masked'"):
        votes.certified_by_count(torch.zeros(1, 1, 4, 6), torch.tensor([0]), Patch(2))


def test_weights_of_16_bits_need_the_lead_of_their_type():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(48, 2)).eval()
    assert BandVotes(model).needed_lead == BandVotes(model.double()).needed_lead == 2**-14
    assert BandVotes(model.bfloat16()).needed_lead == BandVotes(model, precision="bfloat16").needed_lead
    assert BandVotes(model.half()).describe()["slack"] == 2**-8
    assert BandVotes(model.half(), slack=0.01).needed_lead == 0.01


def test_batches_have_one_shape_and_do_not_change_votes():
    model = BrightParts()
    images = torch.rand(5, 1, 4, 6, generator=torch.Generator().manual_seed(1))
    together = BandVotes(model, width=2, batch_size=7).local_scores(images).values
    assert {shape[0] for shape in model.shapes} == {7}
    single = torch.cat(
        [BandVotes(model, width=2, batch_size=3).local_scores(image[None]).values for image in images]
    )
    assert torch.equal(together, single)


def test_votes_within_the_slack_prove_nothing():
    class Undecided(nn.Module):
        def forward(self, encoded):
            return torch.tensor([[1.0, 1.0 - 1e-6]]).expand(len(encoded), -1)

    images, labels = torch.zeros(1, 1, 4, 8), torch.tensor([0])
    assert BandVotes(Undecided().eval(), width=1).predict(images).tolist() == [0]
    assert not BandVotes(Undecided().eval(), width=1).certify(images, labels, Patch(1)).certified.any()
    assert (
        BandVotes(Undecided().eval(), width=1, slack=1e-9).certify(images, labels, Patch(1)).certified.all()
    )


class Coupled(nn.Module):
    def forward(self, encoded):
        return torch.stack([encoded.flatten(1).sum(1), encoded.sum().expand(len(encoded))], dim=1)


class Silenced(nn.Module):
    """Says nothing of anything behind a blank."""

    def forward(self, encoded):
        logits = encoded.flatten(2).mean(dim=2)
        return logits.where(encoded[:1].any(), torch.nan)


class Overflowing(Coupled):
    """What it says of one part is infinite, which makes no other part less coupled."""

    def forward(self, encoded):
        return super().forward(encoded).masked_fill(encoded[:, -1:, 0, 0] == 1, torch.inf)


class Random(nn.Module):
    def forward(self, encoded):
        return torch.rand(len(encoded), 2)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (Coupled().eval(), ModelError, "says something else of the same images"),
        (Random().eval(), ModelError, "says something else of the same images"),
        (Silenced().eval(), ModelError, "says something else of the same images"),
        (Overflowing().eval(), ModelError, "says something else of the same images"),
        (nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(48, 2)), InvalidInput, "training mode"),
        (nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten()).eval(), ModelError, "does not take images of"),
        (nn.Flatten(2).eval(), ModelError, "must return logits"),
    ],
)
def test_base_models_whose_votes_are_no_function_of_their_part_are_refused(model, error, message):
    images = torch.rand(3, 1, 4, 6)
    with pytest.raises(error, match=message):
        BandVotes(model, width=2).certify(images, torch.tensor([0, 0, 0]), Patch(1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: BandVotes(model, width=0), "width is 0; expected a whole number of at least 1"),
        (lambda model: BandVotes(model, width=2.0), "width is 2.0"),
        (lambda model: BlockVotes(model, stride=0), "stride is 0"),
        (
            lambda model: BandVotes(model, threshold=0.0),
            "threshold is 0.0; a vote asks for a softmax of more than 0",
        ),
        (lambda model: BandVotes(model, threshold=1.5), "threshold is 1.5"),
        (lambda model: BandVotes(model, threshold=".3"), "threshold is '.3'"),
        (lambda model: BandVotes(model, ties="first"), "ties is 'first'; expected one of lowest, abstain"),
        (lambda model: BandVotes(model, orientation="diagonal"), "orientation is 'diagonal'"),
        (lambda model: BandVotes(model, slack=-1.0), "slack is -1.0"),
        (
            lambda model: BandVotes(model, scores="positive"),
            "scores is 'positive'; expected one of votes, softmax",
        ),
        (lambda model: BandVotes(model, scores="softmax"), "a sum counts votes"),
        (
            lambda model: BandVotes(
                model, scores="logits", aggregation="double-masked", masked=5, threshold=0.3
            ),
            "thresholds make votes",
        ),
        (
            lambda model: BandVotes(model, aggregation="double-masked"),
            "leave out what a patch of `masked` pixels",
        ),
        (lambda model: BandVotes(model.forward), "the model must be a torch.nn.Module, got method"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(InvalidInput, match=message):
        make(nn.Identity())


@pytest.mark.parametrize(
    ("votes", "message"),
    [
        (
            BandVotes(nn.Identity(), width=6),
            "width=6 in images of 6 columns: every vote would see the whole image",
        ),
        (BandVotes(nn.Identity(), width=9), "width=9 in images of 6 columns"),
        (BandVotes(nn.Identity(), width=4, orientation="row"), "width=4 in images of 4 rows"),
        (BlockVotes(nn.Identity(), size=12), "size=12 in images of 4 rows"),
        (BandVotes(nn.Identity(), width=2, stride=3, wrap=False), r"leaves columns \[2, 5\] of 6 unseen"),
        (BandVotes(nn.Identity(), width=1, stride=2), r"leaves columns \[1, 3, 5\] of 6 unseen"),
    ],
)
def test_parts_that_do_not_fit_the_images_are_refused(votes, message):
    with pytest.raises(InvalidInput, match=message):
        votes.predict(torch.zeros(1, 1, 4, 6))


def test_sparse_pixels_and_no_images_are_refused():
    votes = BandVotes(BrightParts(), width=1)
    with pytest.raises(InvalidThreat, match="BandVotes certifies against patches"):
        votes.certify(torch.zeros(1, 1, 4, 6), torch.tensor([0]), SparsePixels(1))
    with pytest.raises(InvalidInput, match="one image at least"):
        votes.predict(torch.zeros(0, 1, 4, 6))


def test_the_description_names_what_decides():
    assert pc.BandVotes(nn.Identity(), threshold=0.3).describe() == {
        "name": "BandVotes",
        "width": 4,
        "orientation": "column",
        "wrap": True,
        "stride": 1,
        "threshold": 0.3,
        "ties": "lowest",
        "precision": "float32",
        "slack": 2**-14,
    }
    assert pc.BlockVotes(nn.Identity(), size=8).describe()["size"] == 8
    masked = pc.BandVotes(nn.Identity(), aggregation="double-masked", scores="logits", masked=(2, 3))
    described = masked.describe()
    assert (described["aggregation"], described["scores"], described["masked"]) == (
        "double-masked",
        "logits",
        [2, 3],
    )
    assert BandVotes.described(masked.model, described).describe() == described


def test_stored_rows_that_do_not_follow_from_votes_are_found():
    votes = BandVotes(BrightParts(), width=1)
    meta = {"classifier": votes.describe(), "threat": Patch(2).to_dict(), "data": {"image": (1, 4, 8)}}
    columns = {
        "votes": np.array([[6, 1], [4, 4]]),
        "label": np.array([0, 0]),
        "prediction": np.array([0, 0]),
        "certified": np.array([True, False]),
    }
    assert BandVotes.contradiction(columns, meta) == ""
    for changes, found in (
        ({"prediction": np.array([0, 1])}, "the prediction of row 1 does not follow from its votes"),
        ({"certified": np.array([True, True])}, "row 1 has 8 votes of 8 parts and a lead of 0"),
        ({"votes": np.array([[8, 1], [4, 4]])}, "row 0 has 9 votes of 8 parts and a lead of 7"),
    ):
        assert BandVotes.contradiction({**columns, **changes}, meta) == found


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("wrap", [False, True])
def test_every_certified_image_leads_by_what_it_must(wrap, stride):
    votes = BandVotes(BrightParts(), width=2, wrap=wrap, stride=stride)
    meta = {"classifier": votes.describe(), "threat": Patch(2).to_dict(), "data": {"image": (1, 4, 8)}}
    images = torch.rand(200, 1, 4, 8, generator=torch.Generator().manual_seed(5))
    proven = votes.certify(images, votes.predict(images), Patch(2))
    columns = {
        "votes": proven.ballots.estimation.numpy(),
        "label": proven.labels.numpy(),
        "prediction": proven.predictions.numpy(),
        "certified": proven.certified.numpy(),
    }
    assert BandVotes.contradiction(columns, meta) == ""


@pytest.mark.parametrize("settings", [{}, {"aggregation": "double-masked", "scores": "softmax", "masked": 2}])
def test_attacks_follow_softened_votes_and_break_nothing_certified(settings):
    votes = BandVotes(BrightParts(), width=1, **settings)
    images = torch.rand(12, 1, 4, 8, generator=torch.Generator().manual_seed(5)) * 0.9
    labels = votes.predict(images)
    certified = votes.certify(images, labels, Patch(2)).certified
    images.requires_grad_()
    (gradient,) = torch.autograd.grad(votes.surrogate()(images)[:, 0].sum(), images)
    assert (gradient != 0).all()
    found = PatchAttack(steps=5, restarts=3).run(votes, images.detach(), labels, Patch(2))
    assert found.succeeded.any()
    assert not (found.succeeded & certified).any()


def test_votes_in_batches_that_are_smaller_by_their_work_are_the_same(monkeypatch):
    model = BrightParts()
    votes, images = BandVotes(model, width=2, batch_size=64), torch.rand(5, 1, 8, 9)
    whole = votes.local_scores(images, with_probe=True)
    assert {shape[0] for shape in model.shapes} == {1, 64}
    model.shapes.clear()
    monkeypatch.setattr("patchcert.certificates.batches._WORK_AT_ONCE", 0)
    cut = replace(votes).local_scores(images, with_probe=True)
    assert {shape[0] for shape in model.shapes} == {1, 16}
    assert torch.equal(whole.values, cut.values)
