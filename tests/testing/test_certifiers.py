import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from patchcert.bounds import Interval
from patchcert.certificates import Certificates, Classifier, Guarantee
from patchcert.testing import CERTIFIER_CHECKS, ConformanceError, check_certifier
from patchcert.testing.brute_force import supports
from patchcert.testing.networks import ResidualBlock
from patchcert.threats import Patch

MONOTONE = (nn.ReLU, nn.LeakyReLU, nn.Sigmoid, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten, nn.Identity)


DETECTION = Guarantee("detection")


class Reference(Classifier):
    """Slow and obvious: a dense box per placement in double precision, the last layer merged."""

    def __init__(self, model):
        self.model = model

    def predict(self, images):
        with torch.no_grad():
            return self.model(images).argmax(dim=1)

    def certify(self, images, labels, threat):
        exact = copy.deepcopy(self.model).double()
        with torch.no_grad():
            margins = self.placement_margins(exact, images.double(), labels, threat)
        least = margins.amin(dim=1)
        least[torch.arange(len(labels)), labels] = 0
        weakest = margins.amin(dim=2).argmin(dim=1)
        worst = self.corners(threat, images)[weakest]
        each = [self.decide(margins[:, place], labels) for place in range(margins.shape[1])]
        found = Certificates(
            self.decide(least, labels),
            self.predict(images),
            labels,
            placements=torch.stack(each, dim=1),
            margins=least,
            worst_placement=worst,
        )
        return self.report(found, threat)

    def report(self, found, threat):
        return found

    def placement_margins(self, model, images, labels, threat):
        *hidden, last = self.layers(model)
        box = threat.boxes(images, self.corners(threat, images))
        shape = box.shape[:2]
        box = self.propagate(nn.Sequential(*hidden), box.flatten(0, 1))
        centre, radius = box.centre.unflatten(0, shape), box.radius.unflatten(0, shape)
        rows = last.weight[labels][:, None] - last.weight[None]
        bias = last.bias[labels][:, None] - last.bias[None]
        differences = torch.einsum("ncd,npd->npc", rows, centre) + bias[:, None]
        return differences - torch.einsum("ncd,npd->npc", rows.abs(), radius)

    def corners(self, threat, images):
        return threat.placements(*images.shape[2:]).corners

    def layers(self, model):
        if not isinstance(model, nn.Sequential):
            raise NotImplementedError(f"no bound for {type(model).__name__}")
        return [
            leaf
            for layer in model
            for leaf in (self.layers(layer) if type(layer) is nn.Sequential else [layer])
        ]

    def decide(self, margins, labels):
        others = margins.clone()
        others[torch.arange(len(labels)), labels] = torch.inf
        return torch.isfinite(margins).all(dim=1) & (others > 1e-9).all(dim=1)

    def propagate(self, module, box):
        if type(module) is nn.Sequential:
            for layer in module:
                box = self.propagate(layer, box)
            return box
        if isinstance(module, ResidualBlock):
            branch, shortcut = self.propagate(module.branch, box), self.propagate(module.shortcut, box)
            return Interval(branch.lower + shortcut.lower, branch.upper + shortcut.upper)
        if isinstance(module, nn.Linear | nn.Conv2d):
            return Interval.around(module(box.centre), self.radius(module, box.radius))
        if isinstance(module, nn.BatchNorm2d) and not module.training:
            slope = module.weight.abs() / (module.running_var + module.eps).sqrt()
            return Interval.around(module(box.centre), slope[:, None, None] * box.radius)
        if isinstance(module, MONOTONE):
            return Interval(module(box.lower), module(box.upper))
        return self.unknown(module, box)

    def radius(self, layer, radius):
        absolute = copy.deepcopy(layer)
        absolute.weight.abs_()
        absolute.bias.zero_()
        return absolute(radius)

    def unknown(self, module, box):
        raise NotImplementedError(f"no bound for {type(module).__name__}")


class WithoutTheLastPlacement(Reference):
    def corners(self, threat, images):
        corners = super().corners(threat, images)
        return corners[:-1] if len(corners) > 1 else corners


class WithoutAnInnerPlacement(Reference):
    def corners(self, threat, images):
        corners = super().corners(threat, images)
        inner = (corners == torch.tensor([1, 2])).all(dim=1)
        return corners if inner.all() else corners[~inner]


class WithoutTheLastColumn(Reference):
    def corners(self, threat, images):
        corners = super().corners(threat, images)
        kept = corners[:, 1] < images.shape[3] - threat.width
        return corners[kept] if kept.any() else corners


class RowsAndColumnsSwapped(Reference):
    def corners(self, threat, images):
        return super().corners(threat, images).flip(1)


class CountsTies(Reference):
    def decide(self, margins, labels):
        return torch.isfinite(margins).all(dim=1) & (margins >= 0).all(dim=1)


class AcceptsNan(Reference):
    def decide(self, margins, labels):
        others = margins.clone()
        others[torch.arange(len(labels)), labels] = torch.inf
        return torch.isinf(margins).logical_not().all(dim=1) & ~(others <= 1e-9).any(dim=1)


class AcceptsInfinity(Reference):
    def decide(self, margins, labels):
        others = margins.clone()
        others[torch.arange(len(labels)), labels] = torch.inf
        return (others > 1e-9).all(dim=1)


class ForgetsSomeRadius(Reference):
    def radius(self, layer, radius):
        return 0.95 * super().radius(layer, radius)


class ForgetsTheAbsoluteValue(Reference):
    def radius(self, layer, radius):
        return layer(radius) - layer(torch.zeros_like(radius))


class SkipsUnknownLayers(Reference):
    def unknown(self, module, box):
        return box


class FillsTheStampWithWhiteOnly(Reference):
    def placement_margins(self, model, images, labels, threat):
        masks = supports(threat, *images.shape[1:])
        white = torch.where(masks, 1.0, images[:, None])
        logits = model(white.flatten(0, 1)).unflatten(0, white.shape[:2])
        return logits.gather(2, labels[:, None, None].expand(-1, white.shape[1], 1)) - logits


class IgnoresTheLabel(Reference):
    def certify(self, images, labels, threat):
        return super().certify(images, self.predict(images), threat)


class DecidesByTheWholeBatch(Reference):
    def decide(self, margins, labels):
        return super().decide(margins, labels).all().expand(len(labels))


class SortsTheVerdicts(Reference):
    def decide(self, margins, labels):
        return super().decide(margins, labels).int().sort().values.bool()


class AlwaysSaysNo(Reference):
    def decide(self, margins, labels):
        return torch.zeros(len(labels), dtype=torch.bool)


class FreezesTheWeights(Reference):
    def report(self, found, threat):
        self.model.requires_grad_(False)
        return found


class ReturnsNumbersForVerdicts(Reference):
    def decide(self, margins, labels):
        return super().decide(margins, labels).float()


class AcceptsPatchesThatDoNotFit(Reference):
    def certify(self, images, labels, threat):
        if threat.height > images.shape[2] or threat.width > images.shape[3]:
            return Certificates(torch.ones(len(images), dtype=torch.bool), labels, labels)
        return super().certify(images, labels, threat)


class ReportsTheUpperBound(Reference):
    def report(self, found, threat):
        return replace(found, margins=found.margins + 0.01)


class NamesAnyPlacement(Reference):
    def report(self, found, threat):
        return replace(found, worst_placement=torch.zeros_like(found.worst_placement))


class PrefersLargePatches(Reference):
    def report(self, found, threat):
        doubt = threat == Patch(1) and len(found) > 6
        return replace(found, certified=found.certified & (not doubt))


class RunsInTrainingMode(Reference):
    def certify(self, images, labels, threat):
        return Reference(copy.deepcopy(self.model).eval()).certify(images, labels, threat)


class PredictsSomethingElse(Reference):
    def predict(self, images):
        return super().predict(images) + 1

    def certify(self, images, labels, threat):
        return replace(super().certify(images, labels, threat), predictions=super().predict(images))


class MapsEverythingAsProven(Reference):
    def report(self, found, threat):
        return replace(found, placements=torch.ones_like(found.placements))


class MapsNothingAsProven(Reference):
    def report(self, found, threat):
        return replace(found, placements=torch.zeros_like(found.placements))


class Cautious(Reference):
    """Abstains from every image that a bright pixel might change, and tells nothing but verdicts."""

    def predict(self, images):
        found = super().predict(images)
        return torch.where(super().predict((images + 1) / 2) == found, found, -1)

    def certify(self, images, labels, threat):
        result = super().certify(images, labels, threat)
        predictions = self.predict(images)
        return Certificates(result.certified & (predictions == labels), predictions, labels, DETECTION)


@dataclass(frozen=True)
class VotesOfColumns(Classifier):
    """The class that most columns are taken for when a model sees them one by one."""

    model: nn.Module

    def votes(self, images):
        columns = torch.arange(images.shape[3])
        ballots = [self.model(torch.where(columns == each, images, 0.0)).argmax(dim=1) for each in columns]
        return nn.functional.one_hot(torch.stack(ballots, dim=1), 3).sum(dim=1)

    def predict(self, images, progress=None):
        return self.votes(images).argmax(dim=1)

    def certify(self, images, labels, threat, progress=None):
        votes = self.votes(images)
        own = votes.gather(1, labels[:, None])
        lead = (own - votes.scatter(1, labels[:, None], -1)).amin(dim=1)
        return Certificates(self.suffices(lead, threat), votes.argmax(dim=1), labels)

    def suffices(self, lead, threat):
        return lead > 2 * threat.width


class TakesHeightForWidth(VotesOfColumns):
    def suffices(self, lead, threat):
        return lead > 2 * threat.height


class WinsTiesOfVotes(VotesOfColumns):
    def suffices(self, lead, threat):
        return lead >= 2 * threat.width


BROKEN = {
    WithoutTheLastPlacement: "every_placement_counts",
    WithoutAnInnerPlacement: "every_placement_counts",
    WithoutTheLastColumn: "every_pixel_and_channel_counts",
    RowsAndColumnsSwapped: "every_placement_counts",
    CountsTies: "ties_are_not_certified",
    TakesHeightForWidth: "every_share_of_rows_and_columns_counts",
    WinsTiesOfVotes: "every_share_of_rows_and_columns_counts",
    AcceptsNan: "nothing_without_finite_numbers_is_certified",
    AcceptsInfinity: "nothing_without_finite_numbers_is_certified",
    ForgetsSomeRadius: "certificates_barely_too_strong_are_refused",
    ForgetsTheAbsoluteValue: "certified_images_survive_brute_force",
    SkipsUnknownLayers: "layers_are_known_or_refused",
    FillsTheStampWithWhiteOnly: "every_pixel_and_channel_counts",
    IgnoresTheLabel: "wrong_predictions_are_not_certified",
    DecidesByTheWholeBatch: "batches_and_variants_do_not_change_verdicts",
    SortsTheVerdicts: "results_keep_the_order_of_the_images",
    AlwaysSaysNo: "insensitive_networks_are_certified",
    FreezesTheWeights: "nothing_but_the_result_is_changed",
    ReturnsNumbersForVerdicts: "insensitive_networks_are_certified",
    AcceptsPatchesThatDoNotFit: "patches_that_do_not_fit_are_refused",
    ReportsTheUpperBound: "margins_bound_what_brute_force_reaches",
    NamesAnyPlacement: "the_worst_placement_is_the_weakest_allowed_one",
    PrefersLargePatches: "larger_threats_certify_no_more",
    RunsInTrainingMode: "networks_in_training_mode_are_refused",
    PredictsSomethingElse: "predictions_are_those_of_the_deployed_classifier",
    MapsEverythingAsProven: "maps_of_placements_are_sound",
}


def test_a_correct_certifier_passes_every_check():
    report = check_certifier(Reference, variants=[Reference])
    assert not report.failures
    assert report.names == tuple(check.__name__ for check in CERTIFIER_CHECKS)
    assert str(report).startswith("certifier Reference: 20 of 20 checks hold")
    assert all(check.__doc__ for check in CERTIFIER_CHECKS)


@pytest.mark.parametrize(("broken", "check"), BROKEN.items())
def test_a_broken_certifier_is_caught_by_the_check_that_is_about_it(broken, check):
    the_check = [known for known in CERTIFIER_CHECKS if known.__name__ == check]
    with pytest.raises(ConformanceError, match=f"FAILS  {check}"):
        check_certifier(broken, checks=the_check)


def test_votes_that_are_counted_rightly_pass_where_wrong_counts_do_not():
    (check,) = (
        each for each in CERTIFIER_CHECKS if each.__name__ == "every_share_of_rows_and_columns_counts"
    )
    assert not check_certifier(VotesOfColumns, checks=[check]).failures


def test_every_check_catches_some_broken_certifier():
    assert {check.__name__ for check in CERTIFIER_CHECKS} == set(BROKEN.values())


def test_a_variant_that_disagrees_is_caught():
    with pytest.raises(ConformanceError, match="variant 0 gives other verdicts"):
        check_certifier(Reference, variants=[AlwaysSaysNo])


def test_a_map_that_contradicts_the_verdicts_is_caught():
    with pytest.raises(ConformanceError, match="certified, but not proven at every placement"):
        check_certifier(MapsNothingAsProven)


def test_an_unexpected_error_is_a_failure_that_names_it():
    class Crashes(Reference):
        def certify(self, images, labels, threat):
            raise ZeroDivisionError("no luck")

    with pytest.raises(ConformanceError, match="raised ZeroDivisionError: no luck"):
        check_certifier(Crashes)


def test_what_a_method_does_not_have_is_not_asked_for():
    check_certifier(Cautious)


def test_an_abstention_breaks_a_certificate_unless_it_promises_detection_only():
    class ClaimsRecovery(Cautious):
        def predict(self, images):
            return torch.where((images == 1).flatten(1).any(dim=1), -1, super().predict(images))

        def certify(self, images, labels, threat):
            result = super().certify(images, labels, threat)
            return replace(result, guarantee=Guarantee("recovery"))

    with pytest.raises(ConformanceError, match="members change the prediction, one of them from . to -1"):
        check_certifier(ClaimsRecovery)


def test_ties_of_logits_are_only_asked_about_where_logits_decide():
    with pytest.raises(ConformanceError, match="ties_are_not_certified"):
        check_certifier(CountsTies)
    report = check_certifier(CountsTies, logits_decide=False)
    assert not report.failures
