import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from patchcert.errors import ModelError
from patchcert.models import ModelSpec, architecture, build, names, registry

SPEC = ModelSpec("mlp", 1, 4, 4, classes=3, hidden=5)


@pytest.fixture
def empty_shelf(monkeypatch):
    monkeypatch.setattr(registry, "_builders", dict(registry._builders))


def weights(model):
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


def test_the_paper_s_architectures_are_known():
    assert {"mlp", "cnn2", "cnn4", "cnn4_c11", "cnn4_c13", "cnn5w"} <= set(names())


def test_the_same_generator_state_gives_the_same_weights():
    first, second = (weights(build(SPEC, torch.Generator().manual_seed(3))) for _ in range(2))
    other = weights(build(SPEC, torch.Generator().manual_seed(4)))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_one_generator_gives_a_new_model_every_time(generator):
    assert not torch.equal(weights(build(SPEC, generator)), weights(build(SPEC, generator)))


def test_a_generator_leaves_the_global_random_state_alone(generator):
    before = torch.get_rng_state()
    build(SPEC, generator)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_are_drawn_as_pytorch_draws_them(generator):
    layer = build(ModelSpec("mlp", 1, 28, 28), generator).linear1
    bound = 28**-1
    assert layer.weight.abs().max() <= bound
    assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ModelError, match=r"no architecture named 'cnn4-c11'.*mlp") as caught:
        build(ModelSpec("cnn4-c11", 1, 28, 28))
    assert "did you mean 'cnn4_c11'?" in caught.value.hint


@pytest.mark.usefixtures("empty_shelf")
def test_your_own_architecture_is_built_behind_its_normalisation():
    @architecture("tiny")
    def tiny(spec):
        return nn.Sequential(nn.Flatten(), nn.Linear(spec.channels * spec.height * spec.width, spec.classes))

    model = build(ModelSpec("tiny", 1, 2, 2, classes=3, mean=(0.5,), std=(0.25,)))
    assert list(dict(model.named_children())) == ["normalize", "0", "1"]
    assert model(torch.full((1, 1, 2, 2), 0.5)).squeeze(0).tolist() == model[2].bias.tolist()


@pytest.mark.usefixtures("empty_shelf")
def test_a_module_that_is_no_chain_keeps_its_shape():
    @architecture("branch")
    class Branch(nn.Module):
        def __init__(self, spec):
            super().__init__()
            self.inner = nn.Linear(spec.width, spec.classes)

        def forward(self, images):
            return self.inner(images.mean(dim=(1, 2)))

    assert build(ModelSpec("branch", 1, 2, 2, classes=3)).network.inner.out_features == 3


def test_a_name_cannot_be_taken_twice():
    with pytest.raises(ModelError, match="an architecture named 'mlp' is already registered"):
        architecture("mlp")(lambda spec: nn.Identity())


counts = st.integers(1, 300)


@st.composite
def specs(draw):
    channels = draw(st.integers(1, 4))
    normalised = draw(st.booleans())
    widths = tuple(draw(st.lists(counts, max_size=3)))
    return ModelSpec(
        name=draw(st.sampled_from(["mlp", "cnn4"])),
        channels=channels,
        height=draw(counts),
        width=draw(counts),
        classes=draw(counts),
        hidden=None if widths else draw(st.none() | counts),
        mean=(draw(st.floats(0, 1)),) * channels if normalised else (),
        std=(draw(st.floats(0.01, 1)),) * channels if normalised else (),
        widths=widths,
    )


@given(specs())
def test_a_description_survives_json(spec):
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_only_a_real_normalisation_needs_a_layer():
    assert not ModelSpec("mlp", 1, 28, 28).normalises
    assert not ModelSpec("mlp", 1, 28, 28, mean=(0.0,), std=(1.0,)).normalises
    assert ModelSpec("mlp", 1, 28, 28, mean=(0.0,), std=(0.5,)).normalises


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 0}, "ModelSpec.channels must be a whole number of at least 1, got 0"),
        ({"height": 2.0}, "ModelSpec.height must be a whole number"),
        ({"hidden": -1}, "ModelSpec.hidden must be"),
        ({"widths": (3, 0)}, "ModelSpec.widths must be a whole number of at least 1, got 0"),
        ({"widths": (3,), "hidden": 3}, "both say how wide"),
        ({"mean": (0.5,)}, "both be empty or hold one value for each of 1 channels, got 1 and 0"),
        ({"mean": (0.5,), "std": (0.0,)}, "std positive"),
    ],
)
def test_impossible_descriptions_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        ModelSpec(**{"name": "mlp", "channels": 1, "height": 28, "width": 28, **change})


def test_unknown_and_missing_keys_are_named():
    with pytest.raises(ModelError, match=r"unknown keys \['layers'\] and lacks \['height', 'width'\]"):
        ModelSpec.from_dict({"name": "mlp", "channels": 1, "layers": 3})
