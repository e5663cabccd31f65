"""Batches that one call has prepared serve the next, and never a model that has changed since."""

import copy
import threading

import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.certificates.batches import FixedBatches, _state_of
from patchcert.errors import InvalidInput, ModelError

THREAT = pc.Patch(2)


class Scaled(nn.Module):
    """A small network with settings of every kind."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.last = nn.Linear(36, 8), nn.Linear(8, 3)
        self.middle, self.scale, self.offset = nn.ReLU(), 1.0, torch.zeros(3)
        self.signs, self.options = [1.0], {"sharpness": 1.0}
        self.eval()

    def forward(self, images):
        logits = self.last(self.middle(self.first(images.flatten(1)))) * self.scale + self.offset
        return logits * self.signs[0] * self.options["sharpness"]


def images_of(seed, count=4):
    return torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


def masked(model):
    return pc.DoubleMasking(model, THREAT, masks=3, batch_size=16)


def test_a_second_prediction_asks_for_its_copies_alone():
    model, asked = Scaled(), []
    model.register_forward_hook(lambda *_: asked.append(None))
    classifier, images = masked(model), images_of(0, 1)
    first = classifier.predict(images)
    before = len(asked)
    asked.clear()
    assert torch.equal(classifier.predict(images), first)
    assert len(asked) < before
    singles = 1
    disagreeing = 9
    assert len(asked) <= singles + disagreeing


def rescale(model):
    model.scale = -1.0


def move(model):
    model.offset = torch.tensor([9.0, 0.0, 0.0])


def move_in_place(model):
    model.offset += torch.tensor([9.0, 0.0, 0.0])


def move_elsewhere(model):
    model.offset.data = model.offset.new_tensor([9.0, 0.0, 0.0])


def change_item(model):
    model.signs[0] = -1.0


def change_option(model):
    model.options["sharpness"] = -1.0


def replace_layer(model):
    model.middle = nn.Tanh()


class Negative(nn.Module):
    def forward(self, values):
        return -values


def change_type(model):
    model.middle.__class__ = Negative


def replace_weights(model):
    model.last.weight = nn.Parameter(-model.last.weight.detach())


def point_elsewhere(model):
    model.last.weight.data = -model.last.weight.data


def overwrite(model):
    with torch.no_grad():
        model.last.weight.neg_()


def hook(model):
    model.last.register_forward_hook(lambda layer, arguments, output: -output)


def change_forward(model):
    model.forward = lambda images: -Scaled.forward(model, images)


CHANGES = [
    rescale,
    move,
    move_in_place,
    move_elsewhere,
    change_item,
    change_option,
    replace_layer,
    change_type,
    replace_weights,
    point_elsewhere,
    overwrite,
    hook,
    change_forward,
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_has_changed_is_asked_as_it_is_now(change, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model, images = Scaled().to(device), images_of(1, 30).to(device)
    model.offset = model.offset.to(device)
    classifier = masked(model)
    before = classifier.predict(images)
    change(model)
    model.offset = model.offset.to(device)
    now = classifier.predict(images)
    assert torch.equal(now, masked(model).predict(images))
    if change is not replace_layer:
        assert not torch.equal(now, before)


class Bent(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, values):
        return self.function(values)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_of_a_model_is_seen(change):
    """On a CPU the model itself is asked: what is prepared again tells what would be recorded again on a GPU."""
    model = Scaled()
    before = _state_of(model)
    assert _state_of(model) == before
    change(model)
    assert _state_of(model) != before


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_compiled_model_that_has_changed_is_compiled_again(change):
    model, images, logits = Scaled(), images_of(1), []
    compiled = torch.compile(model, dynamic=False, backend="eager")
    for _ in range(2):
        for asked in (compiled, None):
            logits.append(FixedBatches(model, images, 4, "float32", asked).logits(images))
        change(model)
    assert torch.allclose(logits[0], logits[1])
    assert torch.allclose(logits[2], logits[3])
    assert not torch.allclose(logits[1], logits[3])


def test_another_function_at_the_same_place_in_memory_is_another_one():
    model = Bent(lambda values: values)
    before = _state_of(model)
    for _ in range(20):
        del model.function
        model.function = lambda values: -values
        assert _state_of(model) != before


@pytest.mark.parametrize(
    "model",
    [
        nn.LazyLinear(3),
        nn.Linear(3, 3, device="meta"),
        Bent(torch.eye(3).to_sparse()),
        Bent({torch.zeros(3): [torch.ones(2).numpy()]}),
    ],
)
def test_models_of_every_kind_have_a_state(model):
    state = _state_of(model)
    model.another = {torch.zeros(3): 1}
    assert _state_of(model) != state


def test_layers_that_take_their_shape_from_the_first_images_are_taken():
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(3)).eval()
    assert masked(model).predict(images_of(0)).shape == (4,)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_scripted_model_in_training_mode_is_refused_at_every_call():
    model = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(36, 3)).eval())
    classifier, images = masked(model), images_of(0)
    classifier.predict(images)
    model.train()
    with pytest.raises(InvalidInput, match="in training mode"):
        classifier.predict(images)


def test_other_images_are_given_batches_of_their_own():
    classifier = masked(nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval())
    small, large = images_of(0), torch.rand(4, 1, 8, 8)
    expected = [masked(classifier.model).predict(each) for each in (small, large, small.double())]
    for _ in range(2):
        for images, labels in zip((small, large, small.double()), expected, strict=True):
            assert torch.equal(classifier.predict(images), labels)


def test_what_is_prepared_in_inference_mode_does_not_stop_calls_outside_of_it():
    classifier, images = masked(Scaled()), images_of(2)
    with torch.inference_mode():
        first = classifier.predict(images)
    assert torch.equal(classifier.predict(images), first)
    with torch.inference_mode():
        assert torch.equal(classifier.predict(images), first)


def test_calls_at_the_same_time_do_not_share_batches():
    classifier, found = masked(Scaled()), {}
    expected = {seed: masked(classifier.model).predict(images_of(seed, 12)) for seed in range(8)}

    def ask(seed):
        found[seed] = [classifier.predict(images_of(seed, 12)) for _ in range(5)]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(each, expected[seed]) for seed in expected for each in found[seed])


def test_an_interrupted_call_leaves_nothing_behind():
    classifier, images = masked(Scaled()), images_of(3)
    expected = classifier.predict(images)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        classifier.predict(images, stop)
    assert torch.equal(classifier.predict(images), expected)


def test_copies_of_a_classifier_have_a_model_of_their_own():
    classifier, images = masked(Scaled()), images_of(4)
    classifier.predict(images)
    other = copy.deepcopy(classifier)
    move(other.model)
    assert other.predict(images).tolist() == [0] * len(images)
    assert torch.equal(classifier.predict(images), masked(classifier.model).predict(images))


class RemembersItsCompany(nn.Module):
    """Says the same in any batch until it is told to look at all of it."""

    def __init__(self):
        super().__init__()
        self.looks = torch.zeros(1)
        self.eval()

    def forward(self, images):
        own = images.flatten(1)[:, :3]
        return own + float(self.looks) * images.amax()


def test_every_proof_tries_copies_in_other_company():
    model = RemembersItsCompany()
    classifier, images, labels = masked(model), images_of(5), torch.zeros(4, dtype=torch.long)
    classifier.certify(images, labels, THREAT)
    model.looks.data += 1  # of which nothing but the answers tells
    with pytest.raises(ModelError, match="when others are in their batch"):
        classifier.certify(images, labels, THREAT)


def test_copies_of_no_image_are_no_trial_in_other_company():
    model = RemembersItsCompany()
    model.looks += 1
    classifier = masked(model)
    assert len(classifier.predict(images_of(5)[:0])) == 0
    with pytest.raises(ModelError, match="when others are in their batch"):
        classifier.predict(images_of(5))


READ = {"sharpness": 1.0}


class ReadsAGlobal(nn.Module):
    """Of which nothing in the model tells."""

    def forward(self, images):
        return images.flatten(1)[:, :3] * READ["sharpness"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_proof_is_about_the_model_as_it_is(device, monkeypatch):
    """So are the predictions that follow it."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    images, labels = images_of(8, 1).to(device), torch.zeros(1, dtype=torch.long, device=device)
    images[0, 0, 0, :3] = images.new_tensor([1.0, 0.5, 0.0])
    corner = pc.Patch(1, [(5, 5)])
    classifier = pc.DoubleMasking(ReadsAGlobal().eval(), corner, masks=1, batch_size=16)
    assert classifier.certify(images, labels, corner).certified.all()
    monkeypatch.setitem(READ, "sharpness", -1.0)
    found = classifier.certify(images, labels, corner)
    assert found.predictions.tolist() == classifier.predict(images).tolist() == [2]
    assert not found.certified.any()


def test_every_proof_has_batches_of_its_own():
    classifier, images, labels = masked(Scaled()), images_of(5), torch.zeros(4, dtype=torch.long)
    seen = []
    for call in (classifier.predict, lambda images: classifier.certify(images, labels, THREAT)):
        for _ in range(2):
            call(images)
            seen.append(classifier._prepared[0][1])
    assert seen[0] is seen[1]
    assert len({id(batches) for batches in seen}) == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda model: pc.LocalVotes(model, batch_size=8),
        lambda model: pc.LocalVotes(model, batch_size=8, mirrored=True),
        lambda model: pc.BandVotes(model, width=2, batch_size=8),
    ],
)
def test_votes_are_those_of_the_model_as_it_is(make):
    torch.manual_seed(0)
    channels, ends = 1, []
    if isinstance(make(nn.Identity()), pc.BandVotes):
        channels, ends = 2, [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(nn.Conv2d(channels, 3, 3, padding=1), *ends).eval()
    classifier, images = make(model), images_of(6, 20)
    before = classifier.predict(images)
    assert torch.equal(classifier.predict(images), before)
    rarest = before.bincount(minlength=3).argmin()
    model[0] = nn.Conv2d(channels, 3, 3, padding=1).eval()
    with torch.no_grad():
        model[0].bias[rarest] += 50
    assert classifier.predict(images).tolist() == [rarest] * len(images)
