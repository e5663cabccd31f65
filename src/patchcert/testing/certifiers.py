"""What every kind of proof promises, asked of the deployed classifier alone: `predict` and `certify`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from patchcert.certificates import ABSTAINED, AnyThreat, Certificates, Classifier, Guarantee
from patchcert.errors import PatchcertError
from patchcert.tensors import Images, Labels
from patchcert.testing.brute_force import members, placed_stamps, reached_margins
from patchcert.testing.conformance import (
    ConformanceError,
    ConformanceReport,
    everything_unchanged,
    require,
    run_checks,
    seeded,
)
from patchcert.testing.networks import (
    SHAPE,
    Flip,
    HiddenOrder,
    brightness_probe,
    constant,
    linear,
    pixel_probe,
    random_networks,
    stamp_probe,
)
from patchcert.threats import Patch, Patches, SparsePixels, shapes

Factory = Callable[[nn.Module], Classifier]


@dataclass(frozen=True)
class CertifierUnderTest:
    """A kind of proof, and what may be asked of it; `check_certifier` describes the fields."""

    classifier_of: Factory
    variants: tuple[Factory, ...] = ()
    logits_decide: bool = True
    sparse: bool = False
    several: bool = False
    refusals: tuple[type[Exception], ...] = (PatchcertError, NotImplementedError)
    device: str = "cpu"

    def answer(
        self, model: nn.Module, images: Images, labels: Sequence[int] | Tensor, threat: AnyThreat
    ) -> Certificates | None:
        """What the classifier of this model proves, after a look at shapes and types; None where it declines."""
        labels = torch.as_tensor(labels)
        try:
            classifier = self.classifier_of(model.to(self.device))
            found = classifier.certify(images.to(self.device), labels.to(self.device), threat)
        except self.refusals:
            return None
        finally:
            model.cpu()
        tensors = {name: tensor.detach().cpu() for name, tensor in found.to_tensors().items()}
        for name, dtype in (("certified", torch.bool), ("predictions", torch.int64)):
            require(
                tensors[name].dtype == dtype and tensors[name].shape == labels.shape,
                f"{name} must be {dtype} of shape {tuple(labels.shape)}, "
                f"got {tensors[name].dtype} of {tuple(tensors[name].shape)}",
            )
        return Certificates.from_tensors(tensors, found.guarantee)

    def verdicts(
        self, model: nn.Module, images: Images, labels: Sequence[int] | Tensor, threat: AnyThreat
    ) -> Annotated[Tensor, "n"]:
        """True where the image is certified; a model or threat that is refused certifies nothing."""
        answer = self.answer(model, images, labels, threat)
        return torch.zeros(len(images), dtype=torch.bool) if answer is None else answer.certified

    def predictions(self, model: nn.Module, images: Images) -> Labels:
        """What the deployed classifier of this model says."""
        found = self.classifier_of(model.to(self.device)).predict(images.to(self.device)).cpu()
        model.cpu()
        return found

    def refuses(self, model: nn.Module, images: Images, labels: Sequence[int], threat: AnyThreat) -> bool:
        """Whether the classifier declines; with any error, which is better than a verdict."""
        return replace(self, refusals=(Exception,)).answer(model, images, labels, threat) is None

    def require_unbroken(
        self, model: nn.Module, images: Images, labels: Sequence[int] | Tensor, threat: AnyThreat, what: str
    ) -> None:
        """Require that no member of the threat that brute force visits changes what is certified.

        An abstention breaks no certificate that promises detection, or that holds with some confidence only.
        """
        labels = torch.as_tensor(labels)
        answer = self.answer(model, images, labels, threat)
        if answer is None:
            return
        for index in answer.certified.nonzero().flatten().tolist():
            visited = members(threat, images[index], seeded())
            proven = f"{threat} on {what}: image {index} is certified"
            self.require_prediction(model, visited, int(labels[index]), answer.guarantee, proven)

    def require_prediction(
        self, model: nn.Module, visited: Images, label: int, guarantee: Guarantee, proven: str
    ) -> None:
        """Require that all members visited are predicted as the label, as was proven with this guarantee."""
        found = self.predictions(model, visited)
        may_abstain = guarantee.promise == "detection" or not guarantee.is_deterministic
        wrong = found[(found != label) & ~((found == ABSTAINED) & may_abstain)]
        if len(wrong):
            change = f"change the prediction, one of them from {label} to {int(wrong[0])}"
            raise ConformanceError(f"{proven}, but {len(wrong)} members {change}")


def every_placement_counts(subject: CertifierUnderTest) -> None:
    """Where only the full patch at one placement changes the prediction, nothing is certified, wherever it is."""
    image = torch.zeros(1, *SHAPE)
    for patch in _patches():
        for corner, mask in placed_stamps(patch, SHAPE).items():
            what = f"a network that only a white patch at {corner} changes"
            subject.require_unbroken(stamp_probe(SHAPE, mask), image, [0], patch, what)


def every_pixel_and_channel_counts(subject: CertifierUnderTest) -> None:
    """A network that looks at one value alone is not certified where a change of that value is seen."""
    for patch, shape in (
        (Patch(2), (2, 3, 4)),
        (Patch(shapes.diamond(5)), (1, 3, 3)),
        (Patch((1, 2)), (1, 3, 3)),
    ):
        covered = patch.placements(*shape[1:]).masks(patch.stamp).any(dim=0).expand(shape)
        for channel, row, column in covered.nonzero().tolist():
            for dark in (False, True):
                image = torch.full((1, *shape), 1.0 if dark else 0.0)
                value = f"{'black' if dark else 'white'} at channel {channel}, row {row}, column {column}"
                model = pixel_probe(shape, channel, row, column, dark)
                subject.require_unbroken(model, image, [0], patch, f"a network that only sees {value}")


def certified_images_survive_brute_force(subject: CertifierUnderTest) -> None:
    """No extreme or random member of the threat changes the prediction of a certified image."""
    for threat, name, model, images in _random_cases(subject, classes=3, gain=0.5):
        _raise_bias(model, 0, 0.75)
        labels = subject.predictions(model, images)
        subject.require_unbroken(model, images, labels, threat, f"the {name} network")


def certificates_barely_too_strong_are_refused(subject: CertifierUnderTest) -> None:
    """When the bias is moved so that the best known attack just succeeds, the image is not certified."""
    for threat, name, model, images in _random_cases(subject, classes=2, gain=1.0):
        for image in images[:2]:
            label = int(_model_predictions(model, image[None])[0])
            clean = float(reached_margins(model, image[None], label)[0, 1 - label])
            visited = members(threat, image, seeded())
            least = float(reached_margins(model, visited, label).amin(dim=0)[1 - label])
            if clean - least < 1e-3:
                continue
            success = 0.01 * (clean - least)
            _raise_bias(model, label, -least - success)
            what = (
                f"the {name} network, where a member has the margin {-success:.3g} "
                f"(clean margin {clean - least - success:.3g})"
            )
            subject.require_unbroken(model, image[None], [label], threat, what)
            _raise_bias(model, label, least + success)


def ties_are_not_certified(subject: CertifierUnderTest) -> None:
    """Two equal logits are no proof, whether always or only under a patch, where logits decide."""
    if not subject.logits_decide:
        return
    image, patch = torch.zeros(1, *SHAPE), Patch(2)
    only_under_patch = pixel_probe(SHAPE, 0, 3, 4)
    _raise_bias(only_under_patch, 0, 0.5)
    tied = {
        "all logits 0": constant(SHAPE, [0.0, 0.0]),
        "logits 2, 1, 2": constant(SHAPE, [2.0, 1.0, 2.0]),
        "a tie that only a patch reaches": only_under_patch,
    }
    for name, model in tied.items():
        require(not subject.verdicts(model, image, [0], patch).any(), f"{name}: a tie was certified")


def every_share_of_rows_and_columns_counts(subject: CertifierUnderTest) -> None:
    """Where some rows or columns are bright and a network asks whether any is, no patch tips what is certified: each
    lead that votes of parts can have is there, those that a wide or a tall patch just undoes among them."""
    height, width = 4, 6
    rows, columns = torch.arange(height), torch.arange(width)
    images = torch.zeros(height + width + 2, 1, height, width)
    for count in range(width + 1):
        images[count, 0, (columns[:count] % height), columns[:count]] = 1
    for count in range(1, height + 1):
        images[width + count, 0, rows[:count], (2 * rows[:count] % width)] = 1
    model = nn.Sequential(
        nn.Flatten(),
        linear(torch.stack([torch.zeros(height * width), torch.ones(height * width)]), [0.5, 0.0]),
    ).eval()
    labels = subject.predictions(model, images).clamp(min=0)
    for patch in (Patch(1), Patch((1, 3)), Patch((3, 1)), Patch(2)):
        subject.require_unbroken(
            model, images, labels, patch, "a network that sees whether anything is bright"
        )


def wrong_predictions_are_not_certified(subject: CertifierUnderTest) -> None:
    """An image that is misclassified without any patch is not certified, however constant the network."""
    images = torch.rand(4, *SHAPE, generator=seeded())
    models = {"constant": constant(SHAPE, [0.0, 9.0, 0.0]), **random_networks(SHAPE, 3, seed=3)}
    for name, model in models.items():
        labels = (subject.predictions(model, images) + 1) % 3
        certified = subject.verdicts(model, images, labels, Patch(1))
        require(not certified.any(), f"{name} network: a wrong prediction was certified")


def nothing_without_finite_numbers_is_certified(subject: CertifierUnderTest) -> None:
    """NaN or infinity in weights, logits or images is never certified."""
    images, patch = torch.full((2, *SHAPE), 0.5), Patch(2)
    for name, model in _broken_networks().items():
        certified = subject.verdicts(model, images, [0, 1], patch)
        require(not certified.any(), f"{name}: certified as label {certified.int().argmax()}")
    for value in (torch.nan, torch.inf):
        images = torch.full((1, *SHAPE), 0.5)
        images[0, 0, 3, 4] = value
        certified = subject.verdicts(constant(SHAPE, [5.0, 0.0]), images, [0], patch)
        require(not certified.any(), f"an image with a pixel of {value} was certified")


def layers_are_known_or_refused(subject: CertifierUnderTest) -> None:
    """A layer is not skipped, nor is the order of layers guessed from their registration."""
    image, patch = torch.zeros(1, *SHAPE), Patch(1, [(0, 0)])
    models = {
        "a layer that turns the image": nn.Sequential(Flip(), pixel_probe(SHAPE, 0, 3, 4)),
        "layers registered in reverse": HiddenOrder(SHAPE, 0, 0).eval(),
    }
    for name, model in models.items():
        subject.require_unbroken(model, image, [0], patch, name)


def maps_of_placements_are_sound(subject: CertifierUnderTest) -> None:
    """Where there is a map, no member at a proven placement changes the prediction, and certified means all proven."""
    images, patch = torch.rand(4, *SHAPE, generator=seeded()), Patch(2)
    for name, model in random_networks(SHAPE, 3, seed=11).items():
        labels = subject.predictions(model, images).clamp(min=0)
        answer = subject.answer(model, images, labels, patch)
        if answer is None or answer.placements is None:
            continue
        corners = patch.placements(*SHAPE[1:]).corners
        found = answer.placements
        require(
            found.dtype == torch.bool and found.shape == (len(images), len(corners)),
            f"placements must be bool (n, {len(corners)}), got {found.dtype} {tuple(found.shape)}",
        )
        odd = (answer.certified & ~found.all(dim=1)).nonzero().flatten().tolist()
        require(not odd, f"{name} network: images {odd} are certified, but not proven at every placement")
        for index, place in (found & (answer.predictions == labels)[:, None]).nonzero().tolist():
            visited = members(Patch(patch.stamp, corners[place : place + 1]), images[index], seeded())
            proven = f"{name} network: image {index} is proven at {corners[place].tolist()}"
            subject.require_prediction(model, visited, int(labels[index]), answer.guarantee, proven)


def margins_bound_what_brute_force_reaches(subject: CertifierUnderTest) -> None:
    """Margins are 0 at the label, below every reachable logit difference, and positive where certified."""
    images, patch = torch.rand(4, *SHAPE, generator=seeded()), Patch(2)
    for name, model in random_networks(SHAPE, 3, seed=11).items():
        labels = _model_predictions(model, images)
        answer = subject.answer(model, images, labels, patch)
        if answer is None or answer.margins is None or answer.least_margin is None:
            continue
        found = tuple(answer.margins.shape)
        require(found == (4, 3), f"margins must be (n, classes), got {found}")
        reached = torch.stack(
            [
                reached_margins(model, members(patch, image, seeded()), label).amin(dim=0)
                for image, label in zip(images, labels.tolist(), strict=True)
            ]
        )
        own = answer.margins[torch.arange(4), labels]
        excess = float((answer.margins.double() - reached).max())
        weak = (answer.certified & ~(answer.least_margin > 0)).nonzero().flatten().tolist()
        require(not own.any(), f"{name} network: the margins at the labels are {own.tolist()}, not 0")
        require(excess < 1e-5, f"{name} network: a margin is {excess:.3g} above a reachable logit difference")
        require(not weak, f"{name} network: images {weak} are certified without a positive margin")


def the_worst_placement_is_the_weakest_allowed_one(subject: CertifierUnderTest) -> None:
    """Where a worst placement is named and only one placement changes the prediction, it is that one."""
    image = torch.zeros(2, *SHAPE)
    for patch in (Patch((1, 2)), Patch(2, [(0, 3), (2, 1)]), Patch(shapes.diamond(5))):
        for corner, mask in placed_stamps(patch, SHAPE).items():
            answer = subject.answer(stamp_probe(SHAPE, mask), image, [0, 0], patch)
            if answer is None or answer.worst_placement is None:
                continue
            named = answer.worst_placement.tolist()
            require(
                named == [[*corner]] * 2,
                f"{patch}: the worst placements are {named}, but only {corner} changes anything",
            )


def predictions_are_those_of_the_deployed_classifier(subject: CertifierUnderTest) -> None:
    """Certificates are about what `predict` says, and only images for which that is the label are certified."""
    images = torch.rand(6, *SHAPE, generator=seeded(2))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    for name, model in random_networks(SHAPE, 3, seed=13, gain=0.5).items():
        answer = subject.answer(model, images, labels, Patch(1))
        if answer is None:
            continue
        said = subject.predictions(model, images)
        require(
            torch.equal(answer.predictions, said),
            f"{name} network: certificates say {answer.predictions.tolist()}, predict says {said.tolist()}",
        )
        odd = (answer.certified & (said != labels)).nonzero().flatten().tolist()
        require(not odd, f"{name} network: images {odd} are certified, but predicted as another class")


def insensitive_networks_are_certified(subject: CertifierUnderTest) -> None:
    """What no patch can change is certified; without this a classifier that proves nothing would pass."""
    images = torch.rand(3, *SHAPE, generator=seeded())
    certified = subject.verdicts(constant(SHAPE, [0.0, 5.0]), images, [1, 1, 1], Patch(1))
    require(
        certified.all(),
        f"a network with constant logits 0 and 5 is not certified: {certified.tolist()}",
    )


def larger_threats_certify_no_more(subject: CertifierUnderTest) -> None:
    """An image certified against a threat is certified against every threat inside it."""
    pairs = (
        (Patch(1), Patch(2)),
        (Patch(2, "corners"), Patch(2)),
        (Patch(2, [(0, 1)]), Patch(2, [(0, 1), (2, 2)])),
        (Patch(shapes.diamond(5)), Patch(3)),
        *([(Patch(1, "corners"), Patches(Patch(1, "corners")))] if subject.several else []),
    )
    images = torch.rand(8, *SHAPE, generator=seeded())
    for small, large in pairs:
        for name, model in random_networks(SHAPE, 2, seed=7).items():
            labels = _model_predictions(model, images)
            inner = subject.verdicts(model, images, labels, small)
            outer = subject.verdicts(model, images, labels, large)
            odd = (outer & ~inner).nonzero().flatten().tolist()
            require(
                not odd,
                f"{name} network: images {odd} are certified against {large} but not {small}, inside it",
            )


def results_keep_the_order_of_the_images(subject: CertifierUnderTest) -> None:
    """Shuffling the images shuffles the verdicts alike."""
    model, images, labels = _graded_images()
    order = torch.randperm(len(images), generator=seeded(1))
    straight = subject.verdicts(model, images, labels, Patch(2))
    shuffled = subject.verdicts(model, images[order], labels[order], Patch(2))
    require(
        torch.equal(straight[order], shuffled), "verdicts do not follow their images when these are shuffled"
    )


def batches_and_variants_do_not_change_verdicts(subject: CertifierUnderTest) -> None:
    """One image at a time, a few, all at once, and every given variant: the verdicts are the same."""
    model, images, labels = _graded_images()
    patch = Patch(2)
    together = subject.verdicts(model, images, labels, patch)
    for size in (1, 7):
        parts = zip(images.split(size), labels.split(size), strict=True)
        found = torch.cat([subject.verdicts(model, part, label, patch) for part, label in parts])
        require(torch.equal(together, found), f"verdicts in batches of {size} differ from those of one batch")
    for index, variant in enumerate(subject.variants):
        found = replace(subject, classifier_of=variant).verdicts(model, images, labels, patch)
        require(torch.equal(together, found), f"variant {index} gives other verdicts than the classifier")


def networks_in_training_mode_are_refused(subject: CertifierUnderTest) -> None:
    """Batch norm and dropout in training mode are an error: their output is not a function of the image."""
    features = SHAPE[0] * SHAPE[1] * SHAPE[2]
    models = {
        "batch norm": nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(features, 2)),
        "dropout": nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(features, 2)),
    }
    images = torch.rand(2, *SHAPE, generator=seeded())
    for name, model in models.items():
        refused = subject.refuses(model.train(), images, [0, 0], Patch(1))
        require(refused, f"{name} in training mode was accepted")


def patches_that_do_not_fit_are_refused(subject: CertifierUnderTest) -> None:
    """A patch larger than the image is an error, not a certificate over no placements."""
    for patch in (Patch(5), Patch((1, 6)), Patch(2, [(3, 4)])):
        refused = subject.refuses(constant(SHAPE, [5.0, 0.0]), torch.zeros(1, *SHAPE), [0], patch)
        require(refused, f"{patch} on images of {SHAPE[1]}x{SHAPE[2]} was accepted")


def nothing_but_the_result_is_changed(subject: CertifierUnderTest) -> None:
    """Weights, modes, gradients, images and the switches of torch are as before, after refusals too."""
    model = random_networks(SHAPE, 2, seed=5)["normalised"]
    images = torch.rand(3, *SHAPE, generator=seeded())
    with everything_unchanged(model, images):
        subject.verdicts(model, images, [0, 1, 0], Patch(2))
        subject.predictions(model, images)
        subject.refuses(model, images, [0, 1, 0], Patch(6))


CERTIFIER_CHECKS: tuple[Callable[[CertifierUnderTest], None], ...] = (
    every_placement_counts,
    every_pixel_and_channel_counts,
    certified_images_survive_brute_force,
    certificates_barely_too_strong_are_refused,
    ties_are_not_certified,
    every_share_of_rows_and_columns_counts,
    wrong_predictions_are_not_certified,
    nothing_without_finite_numbers_is_certified,
    layers_are_known_or_refused,
    maps_of_placements_are_sound,
    margins_bound_what_brute_force_reaches,
    the_worst_placement_is_the_weakest_allowed_one,
    predictions_are_those_of_the_deployed_classifier,
    insensitive_networks_are_certified,
    larger_threats_certify_no_more,
    results_keep_the_order_of_the_images,
    batches_and_variants_do_not_change_verdicts,
    networks_in_training_mode_are_refused,
    patches_that_do_not_fit_are_refused,
    nothing_but_the_result_is_changed,
)


def check_certifier(
    classifier_of: Factory,
    *,
    variants: Sequence[Factory] = (),
    logits_decide: bool = True,
    sparse: bool = False,
    several: bool = False,
    refusals: tuple[type[Exception], ...] = (PatchcertError, NotImplementedError),
    device: str = "cpu",
    checks: Sequence[Callable[[CertifierUnderTest], None]] = CERTIFIER_CHECKS,
) -> ConformanceReport:
    """Raise a ConformanceError unless the classifiers of any model keep what they prove.

    `classifier_of` makes of a model a classifier with `predict(images)` and `certify(images, labels, threat)`, as
    `patchcert.IntervalBounds` does. `variants` are the same with other settings, which must agree with it. Say
    `logits_decide=False` where a tie between two logits of the model is no tie of the classifier, as with votes, and
    `sparse=True` to have sparse pixels tried too, `several=True` for several patches at once. `refusals` are the errors
    by which a model is declined; as that is always sound, the suite does not ask which layers a method knows.
    """
    subject = CertifierUnderTest(
        classifier_of, tuple(variants), logits_decide, sparse, several, refusals, device
    )
    name = getattr(classifier_of, "__name__", type(classifier_of).__name__)
    return run_checks(f"certifier {name}", subject, checks)


def _patches() -> tuple[Patch, ...]:
    """Every kind of stamp and of placement set, on images of 4x5."""
    allowed = torch.zeros(3, 4, dtype=torch.bool)
    allowed[0, 3] = allowed[2, 1] = True
    return (
        Patch(2),
        Patch((1, 3)),
        Patch(shapes.diamond(5)),
        Patch(shapes.diamond(4)),
        Patch(2, "corners"),
        Patch((2, 1), [(0, 4), (2, 0), (1, 3)]),
        Patch(2, allowed),
    )


def _random_cases(
    subject: CertifierUnderTest, classes: int, gain: float
) -> Iterator[tuple[AnyThreat, str, nn.Module, Images]]:
    threats: list[AnyThreat] = [Patch(2), Patch(shapes.diamond(5)), Patch((1, 3), "corners")]
    if subject.sparse:
        threats += [SparsePixels(1), SparsePixels(2)]
    if subject.several:
        threats.append(Patches(Patch((1, 2), "corners")))
    for seed, threat in enumerate(threats):
        images = torch.rand(6, *SHAPE, generator=seeded(seed))
        images[3:] = images[3:].round()
        for name, model in random_networks(SHAPE, classes, seed, gain).items():
            yield threat, name, model, images


def _graded_images() -> tuple[nn.Module, Images, Labels]:
    """Images from dark to bright, of which the middle ones are within a 2x2 patch of the other class."""
    brightness = torch.rand(20, 1, 1, 1, generator=seeded())
    images = brightness.expand(-1, *SHAPE).clone()
    model = brightness_probe(SHAPE)
    return model, images, _model_predictions(model, images)


def _broken_networks() -> dict[str, nn.Module]:
    nan, infinity = float("nan"), float("inf")
    features = SHAPE[0] * SHAPE[1] * SHAPE[2]
    overflow = linear(torch.full((2, features), 3e38), [3e38, 3e38])
    one_weight = pixel_probe(SHAPE, 0, 1, 1)
    with torch.no_grad():
        next(one_weight.parameters())[0, 7] = nan
    return {
        "a NaN logit": constant(SHAPE, [5.0, nan]),
        "all logits NaN": constant(SHAPE, [nan, nan]),
        "an infinite logit": constant(SHAPE, [infinity, 0.0]),
        "an infinitely negative logit": constant(SHAPE, [0.0, -infinity]),
        "a NaN weight": one_weight,
        "sums that overflow": nn.Sequential(
            nn.Flatten(), overflow, nn.ReLU(), linear(torch.eye(2), [9.0, 0.0])
        ).eval(),
    }


@torch.no_grad()
def _raise_bias(model: nn.Module, label: int, amount: float) -> None:
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    last.bias[label] += amount


def _model_predictions(model: nn.Module, images: Images) -> Labels:
    with torch.no_grad():
        return model(images).argmax(dim=1)
