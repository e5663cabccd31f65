"""Every mistake is named: what is wrong, what was expected, what came."""

import threading

import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.bounds import layer_rule
from patchcert.bounds.lowering import LAYER_RULES
from patchcert.bounds.operations import Monotone
from patchcert.errors import InvalidInput, InvalidThreat, ModelError, UnsupportedLayer

SHAPE = (1, 4, 5)


def network(channels=1):
    return nn.Sequential(
        nn.Conv2d(channels, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(60, 3)
    ).eval()


def batch(count=4):
    return torch.rand(count, *SHAPE), torch.zeros(count, dtype=torch.long)


def hooked():
    model = network()
    model[1].register_forward_hook(lambda *_: None)
    return model


class Headed(nn.Module):
    """A linear model."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(20, 3)

    def forward(self, images):
        return self.head(torch.flatten(images, 1))


class Watched(Headed):
    """Behaves while it is traced, and otherwise not."""

    def forward(self, images):
        logits = super().forward(images)
        return logits if isinstance(images, torch.fx.Proxy) else -logits


class Averaged(Headed):
    """Copies of it have other weights."""

    def __deepcopy__(self, memo):
        return type(self)()


class Slope(nn.Module):
    """A layer whose copies have the slope 0."""

    def __init__(self, slope=0.0):
        super().__init__()
        self.slope = slope

    def __deepcopy__(self, memo):
        return type(self)()

    def forward(self, features):
        return nn.functional.leaky_relu(features, self.slope)


class Shared(nn.Linear):
    """Is its own copy."""

    def __deepcopy__(self, memo):
        return self


class Branched(Headed):
    """Goes another way for images with a black pixel, which tracing does not see."""

    def forward(self, images):
        logits = super().forward(images)
        return -logits if torch.is_tensor(images) and bool((images == 0).any()) else logits


class Fixed(nn.Module):
    """Holds a weight that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.matrix, self.head = torch.ones(3, 20), nn.Linear(3, 3)

    def forward(self, images):
        return self.head(nn.functional.linear(torch.flatten(images, 1), self.matrix))


MISTAKES = {
    InvalidInput: {
        "a function": (
            "the model must be a torch.nn.Module, got function",
            {"model": lambda m: lambda images: images},
        ),
        "images in an array": (
            "images must be a dense torch.Tensor, got ndarray",
            {"images": lambda x: x.numpy()},
        ),
        "sparse images": (
            "images must be a dense torch.Tensor, got torch.sparse_coo",
            {"images": lambda x: x.to_sparse()},
        ),
        "labels in a list": (
            "labels must be a dense torch.Tensor, got list",
            {"labels": lambda y: y.tolist()},
        ),
        "images of 8 bits": (
            "weights and images must be floats of 16, 32 or 64 bits, got torch.float8_e5m2",
            {"images": lambda x: x.to(torch.float8_e5m2)},
        ),
        "bytes": (
            r"images must be floats \(n, channels, height, width\), got torch.uint8 \(4, 1, 4, 5\)",
            {"images": lambda x: x.byte()},
        ),
        "one image without a batch": (r"got torch.float32 \(1, 4, 5\)", {"images": lambda x: x[0]}),
        "pixels above one": (r"images must lie in \[0, 1\], got values from", {"images": lambda x: x * 255}),
        "pixels below zero": (r"images must lie in \[0, 1\]", {"images": lambda x: x - 0.5}),
        "pixels that are NaN": (r"images must lie in \[0, 1\]", {"images": lambda x: x * torch.nan}),
        "labels of another type": (
            r"labels must be a long tensor \(4,\), got torch.float32",
            {"labels": lambda y: y.float()},
        ),
        "too few labels": (
            r"labels must be a long tensor \(4,\), got torch.int64 \(3,\)",
            {"labels": lambda y: y[:3]},
        ),
        "labels too large": (r"labels must lie in 0\.\.2, got 3 to 3", {"labels": lambda y: y + 3}),
        "negative labels": (r"labels must lie in 0\.\.2, got -1 to -1", {"labels": lambda y: y - 1}),
        "another device": ("images are on cpu, labels on meta", {"labels": lambda y: y.to("meta")}),
        "a model elsewhere": ("the model is on meta, images on cpu", {"model": lambda m: m.to("meta")}),
        "half precision": (
            "bounds are computed in float32 or float64, got dtype=torch.float16",
            {"dtype": torch.float16},
        ),
        "a type that loses weights": (
            "the model of torch.float64 cannot be held exactly in dtype=torch.float32",
            {"model": lambda m: m.double(), "dtype": torch.float32},
        ),
        "a type that loses pixels": (
            "the images of torch.float64 cannot be held exactly",
            {"images": lambda x: x.double()},
        ),
        "one buffer of another type": (
            "the model of torch.float64 cannot be held exactly",
            {"model": lambda m: with_buffer(m), "dtype": torch.float32},
        ),
    },
    ModelError: {
        "a model of other images": (
            r"the model does not take images of \(1, 4, 5\)",
            {"model": lambda m: network(channels=3)},
        ),
        "a model without logits": (
            r"the model must return logits \(4, classes\), got \(4, 3, 4, 5\)",
            {"model": lambda m: m[:2]},
        ),
        "training mode": (
            r"layer '0' \(BatchNorm2d\): .*training mode",
            {"model": lambda m: nn.Sequential(nn.BatchNorm2d(1), m).train()},
        ),
        "dropout in training mode": (
            r"layer '0' \(Dropout\): it drops values at random",
            {"model": lambda m: nn.Sequential(nn.Dropout(), m).train()},
        ),
        "a model that differs from its trace": (
            r"the model gives \[.*\], its traced operations",
            {"model": lambda m: Watched()},
        ),
        "a model that differs from its trace on members of the threat": (
            r"the model gives \[.*\], its traced operations",
            {"model": lambda m: Branched()},
        ),
        "a model whose copies differ": (
            "a copy of the model Averaged has other weights: head.bias, head.weight",
            {"model": lambda m: Averaged()},
        ),
        "a model whose copies are another function": (
            "a copy of the model Sequential in float64 is another function",
            {"model": lambda m: nn.Sequential(nn.Flatten(), nn.Linear(20, 9), Slope(0.9), nn.Linear(9, 3))},
        ),
        "a model whose copies share its weights": (
            "a copy of the model Sequential shares its weights",
            {"model": lambda m: nn.Sequential(nn.Flatten(), Shared(20, 3))},
        ),
        "grey images for a model of colours": (
            "Normalize has the statistics of 3 channels, got images of shape",
            {"model": lambda m: nn.Sequential(pc.Normalize((0.5,) * 3, (0.2,) * 3), network(3))},
        ),
        "a weight that cannot be converted": (
            "the model does not run in float64",
            {"model": lambda m: Fixed()},
        ),
    },
    UnsupportedLayer: {
        "an unknown layer": (
            r"layer '1' \(Softmax\): no bound is known for it",
            {"model": lambda m: nn.Sequential(m, nn.Softmax(1))},
        ),
        "hooks": (r"layer '1' \(ReLU\) has forward hooks", {"model": lambda m: hooked()}),
    },
    InvalidThreat: {
        "a patch larger than the image": (
            "the patch of 5x5 does not fit into images of 4x5",
            {"threat": pc.Patch(5)},
        ),
        "placements out of the image": ("placement", {"threat": pc.Patch(2, [(3, 4)])}),
        "a number as threat": ("certificates exist for patches and sparse pixels, got 5", {"threat": 5}),
        "more pixels than there are": (
            "21 pixels do not fit into images of 4x5",
            {"threat": pc.SparsePixels(21)},
        ),
    },
}


def with_buffer(model):
    model.register_buffer("unused", torch.zeros(1, dtype=torch.float64))
    return model


@pytest.mark.parametrize(
    ("error", "name"), [(error, name) for error, named in MISTAKES.items() for name in named]
)
def test_mistakes_are_named(error, name):
    message, changes = MISTAKES[error][name]
    images, labels = batch()
    inputs = {"model": network(), "images": images, "labels": labels}
    for key in inputs:
        inputs[key] = changes[key](inputs[key]) if key in changes else inputs[key]
    threat = changes.get("threat", pc.Patch(2))
    with pytest.raises(error, match=message):
        pc.certify(inputs["model"], inputs["images"], inputs["labels"], threat, dtype=changes.get("dtype"))


def test_mistakes_with_no_images_are_found_too():
    images, labels = batch(0)
    with pytest.raises(InvalidThreat, match="does not fit"):
        pc.certify(network(), images, labels, pc.Patch(5))
    with pytest.raises(ModelError, match="its traced operations"):
        pc.certify(Watched(), images, labels, pc.Patch(1))


def test_every_mistake_comes_with_a_hint():
    images, labels = batch()
    with pytest.raises(InvalidInput) as caught:
        pc.certify(network(), images * 255, labels, pc.Patch(1))
    assert "put normalisation into the model" in caught.value.hint


@pytest.mark.parametrize("budget", ["2GiB", 0, -1, 2.5, True])
def test_a_memory_budget_is_a_positive_number_of_bytes(budget):
    images, labels = batch()
    with pytest.raises(InvalidInput, match=r"memory_budget is .* expected a positive number of bytes"):
        pc.certify(network(), images, labels, pc.Patch(2), memory_budget=budget)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-8, 1e-20])
def test_a_wrong_trace_is_found_however_small_the_logits_are(scale):
    model = Watched().eval()
    with torch.no_grad():
        model.head.weight.mul_(scale)
        model.head.bias.mul_(scale)
    with pytest.raises(ModelError, match="its traced operations"):
        pc.certify(model, *batch(2), pc.Patch(2))


class Autocast(nn.Module):
    """Computes in bfloat16 whatever is set around it, which no tracing sees."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(images)


class Crowded(Headed):
    """Says something else of images that are not alone in their batch."""

    def forward(self, images):
        is_alone = isinstance(images, torch.fx.Proxy) or len(images) == 1
        return super().forward(images if is_alone else images * 0.5)


REDUCED = Autocast(nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3)))


@pytest.mark.parametrize("model", [REDUCED, Crowded()], ids=["autocast", "batch"])
@pytest.mark.parametrize("verdicts_only", [False, True])
def test_a_forward_pass_that_is_another_function_in_batches_is_refused(model, verdicts_only):
    images, labels = batch(6)
    with pytest.raises(
        ModelError, match=r"the model gives \[.*\] for an image in its batch, its traced operations"
    ):
        pc.certify(model.eval(), images, labels, pc.Patch(1), verdicts_only=verdicts_only)


class Holding(Headed):
    """Holds something beside its weights."""

    def __init__(self, held):
        super().__init__()
        self.held = held(self.head)


@pytest.mark.parametrize(
    "held", [lambda head: head.weight * 2, lambda head: threading.Lock(), lambda head: (n for n in range(3))]
)
def test_a_model_that_cannot_be_copied_is_refused_by_name(held):
    images, labels = batch(2)
    with pytest.raises(ModelError, match="the model Holding cannot be copied: ") as caught:
        pc.certify(Holding(held).eval(), images, labels, pc.Patch(1))
    assert "locks, generators, tensors with a history" in caught.value.hint


class Limited(Headed):
    """Limits that are buffers, not numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("limit", torch.tensor(1.0))

    def forward(self, images):
        return super().forward(nn.functional.hardtanh(images, 0.0, self.limit))


def test_limits_that_are_tensors_are_refused():
    images, labels = batch(2)
    with pytest.raises(UnsupportedLayer, match="its limits are tensors"):
        pc.certify(Limited().eval(), images, labels, pc.Patch(1))


def test_an_adaptive_pool_takes_a_list():
    images, labels = torch.rand(2, 1, 4, 6), torch.zeros(2, dtype=torch.long)
    head = nn.Linear(6, 3)
    listed, paired = (
        nn.Sequential(nn.AdaptiveAvgPool2d(size), nn.Flatten(), head).eval() for size in ([2, 3], (2, 3))
    )
    expected = pc.certify(paired, images, labels, pc.Patch(1)).margins
    assert torch.equal(pc.certify(listed, images, labels, pc.Patch(1)).margins, expected)


def test_weights_that_are_whole_numbers_are_refused_by_name():
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 3)).eval()
    model[1].weight = nn.Parameter(torch.ones(3, 20, dtype=torch.long), requires_grad=False)
    with pytest.raises(
        InvalidInput, match=r"the parameter '1\.weight' holds torch\.int64; weights must be floats"
    ):
        pc.certify(model, *batch(2), pc.Patch(1))


@pytest.mark.parametrize("classifier", [pc.IntervalBounds, lambda model: pc.RandomAblation(model, 5, 10, 20)])
def test_progress_must_be_a_function(classifier):
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 3)).eval()
    with pytest.raises(InvalidInput, match="progress must be a function"):
        classifier(model).certify(*batch(2), pc.Patch(1), progress=3)


@pytest.mark.parametrize("verdicts_only", [False, True])
def test_nothing_is_certified_on_the_device_that_computes_nothing(verdicts_only):
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 3)).eval()
    images, labels = batch(2)
    try:
        torch.set_default_device("meta")
        with pytest.raises(InvalidInput, match="the default device is 'meta'"):
            pc.certify(model, images, labels, pc.Patch(1), verdicts_only=verdicts_only)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("name", ["mnist-2x2-mlp", "mnist-5x5-mlp", "mnist-5x5-cnn2", "mnist-2x2-cnn4"])
def test_trained_models_are_refused_under_autocast_and_certified_without(name):
    test = pc.load_dataset("mnist-mini").test.take(8)
    assert len(pc.certify(pc.load(name), test.floats(), test.labels, pc.Patch(1, placements="corners"))) == 8
    with pytest.raises(ModelError, match="use no autocast|its traced operations"):
        pc.certify(Autocast(pc.load(name)), test.floats(), test.labels, pc.Patch(1, placements="corners"))


class Wave(nn.Module):
    def forward(self, features):
        return torch.sin(features)


class Bent(nn.Module):
    """Falls between 0.3 and 0.5, and nowhere else."""

    def forward(self, features):
        return torch.where(features < 0.5, features.clamp(max=0.3), features - 0.4)


@pytest.fixture
def _wrong_rules():
    for layer in (Wave, Bent):
        layer_rule(layer)(lambda layer: Monotone(layer.forward, units=16))
    yield
    del LAYER_RULES[Wave], LAYER_RULES[Bent]


@pytest.mark.usefixtures("_wrong_rules")
@pytest.mark.parametrize(("layer", "scale"), [(Wave(), 5.0), (Bent(), 1.0)])
def test_a_registered_rule_is_tried_on_random_points(layer, scale):
    images, labels = batch()
    model = nn.Sequential(pc.Normalize(0.0, 1 / scale), layer, nn.Flatten(), nn.Linear(20, 3)).eval()
    with pytest.raises(ModelError, match="the rule for layer '1' is wrong: it bounds a value of") as caught:
        pc.certify(model, images, labels, pc.Patch(2))
    assert "a Monotone must never fall" in caught.value.hint


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, lambda model: torch.compile(model, backend="eager")],
    ids=["parallel", "compiled"],
)
def test_wrapped_models_are_certified_as_what_they_wrap(wrap):
    images, _ = batch()
    model = network()
    labels = model(images).argmax(dim=1)
    plain, wrapped = (pc.certify(each, images, labels, pc.Patch(1)) for each in (model, wrap(model)))
    assert torch.equal(plain.margins, wrapped.margins)
    assert torch.equal(plain.certified, wrapped.certified)


class Flipped(nn.DataParallel):
    """Looks like a wrapper, and says the opposite of what it wraps."""

    def forward(self, images):
        return self.module(images) * -1


def _hooked(wrapper):
    wrapper.register_forward_hook(lambda _module, _images, logits: -logits)
    return wrapper


def _hooked_before(wrapper):
    wrapper.register_forward_pre_hook(lambda _module, images: (1 - images[0],))
    return wrapper


def _replaced(wrapper):
    wrapper.forward = lambda images: -network()(images)
    return wrapper


def _compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    ("wrapped", "words"),
    [
        (lambda: _hooked(nn.DataParallel(network())), "has forward hooks"),
        (lambda: _hooked_before(nn.DataParallel(network())), "has forward hooks"),
        (lambda: _replaced(nn.DataParallel(network())), "has been replaced"),
        (lambda: _hooked(_compiled(network())), "has forward hooks"),
        (lambda: _replaced(_compiled(network())), "has been replaced"),
        (lambda: nn.DataParallel(_hooked(_compiled(network()))), "has forward hooks"),
    ],
)
def test_a_wrapper_that_says_something_else_is_refused(wrapped, words):
    images, labels = batch()
    with pytest.raises(UnsupportedLayer, match=words):
        pc.certify(wrapped(), images, labels, pc.Patch(1))


def test_a_class_of_ones_own_is_certified_as_what_it_says_whatever_it_is_called():
    images, _ = batch()
    model = network()
    labels = model(images).argmax(dim=1)
    flipped = Flipped(model).eval()
    own = type("OptimizedModule", (Flipped,), {"_orig_mod": model})(model).eval()
    assert pc.certify(model, images, labels, pc.Patch(1)).clean_accuracy == 1
    for other in (flipped, own):
        found = pc.certify(other, images, labels, pc.Patch(1))
        assert torch.equal(found.predictions, (-model(images)).argmax(dim=1))
        assert torch.equal(found.predictions, pc.IntervalBounds(other).predict(images))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_interval_bounds_of_a_model_of_16_bits_are_refused(dtype):
    """One pixel can change what such a model says, by rounding alone, with all margins above 0."""
    images, labels = batch()
    with pytest.raises(InvalidInput, match="whose rounding can change what it says") as caught:
        pc.certify(network().to(dtype), images.to(dtype), labels, pc.Patch(1))
    assert "certify model.float()" in caught.value.hint


def _weighing(pixel):
    """The logits are (1, 0), but for zero times what white pixels add up to, which float32 may not hold."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        model[1].weight[:], model[1].bias[:], model[3].weight[:] = pixel, 0.0, 0.0
        model[3].bias[:] = torch.tensor([1.0, 0.0])
    return model


@pytest.mark.parametrize("settings", [{"dtype": torch.float64}, {"refine": "linear"}, {"refine": "split"}])
def test_what_overflows_in_the_type_of_the_model_is_not_certified_in_a_wider_one(settings):
    black, white = torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    label = torch.tensor([0])
    model = _weighing(3e38)
    assert model(black).tolist() == [[1.0, 0.0]]
    assert model(white).isnan().all()
    for each, proven in ((model, False), (_weighing(1e37), True)):
        found = pc.IntervalBounds(each, **settings).certify(black, label, pc.Patch(2))
        assert found.certified.tolist() == [proven]


def test_one_image_whose_logits_overflow_leaves_others_as_they_are():
    images = torch.stack([torch.zeros(1, 2, 2), torch.ones(1, 2, 2)])
    model, labels = _weighing(3e38), torch.zeros(2, dtype=torch.long)
    assert model(images).isfinite().all(dim=1).tolist() == [True, False]
    for dtype in (torch.float32, torch.float64):
        both, alone = (
            pc.certify(model, images[:count], labels[:count], pc.SparsePixels(1), dtype=dtype)
            for count in (2, 1)
        )
        assert not both.certified[1]
        assert both.certified[0] == alone.certified[0]
        torch.testing.assert_close(both.margins[:1], alone.margins, equal_nan=True)
