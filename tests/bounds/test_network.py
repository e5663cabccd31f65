"""The network that is read off a forward pass is the model, whatever way it is written, and its margins are those of an
image alone."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import patchcert as pc
from patchcert.bounds import Interval, function_rule, layer_rule, trace
from patchcert.bounds.lowering import LAYER_RULES
from patchcert.bounds.operations import Add, AveragePool, Convolution, Linear, Reshape
from patchcert.errors import UnsupportedLayer
from patchcert.testing.networks import ResidualBlock, randomise
from written_models import images, model_of, unit_box


def functional(self, x):
    x = F.relu(F.conv2d(x, self.kernel, self.shift, stride=(2, 1), padding=1))
    x = F.batch_norm(x, self.mean, self.variance, training=False)
    x = F.dropout(F.max_pool2d(x, 2, 1), 0.5, self.training)
    x = F.avg_pool2d(F.leaky_relu(x, 0.3), (1, 2), stride=1)
    return F.linear(torch.flatten(torch.tanh(x), 1), self.matrix, bias=self.offset)


def functional_model():
    generator = torch.Generator().manual_seed(0)
    model = model_of(functional)
    sizes = {"kernel": (3, 2, 3, 3), "shift": (3,), "matrix": (4, 3 * 2 * 3), "offset": (4,)}
    for name, size in sizes.items():
        setattr(model, name, nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64)))
    model.register_buffer("mean", torch.randn(3, generator=generator, dtype=torch.float64))
    model.register_buffer("variance", torch.rand(3, generator=generator, dtype=torch.float64) + 0.5)
    return model


def convolution(**settings):
    return nn.Conv2d(2, 4, **settings)


def pooled():
    return {"c": convolution(kernel_size=2), "fc": nn.Linear(4, 3)}


GOOD = {
    "functions only": functional_model(),
    "a view of the batch": model_of(lambda s, x: s.fc(x.view(x.size(0), -1)), fc=nn.Linear(60, 3)),
    "a view by shape": model_of(lambda s, x: s.fc(x.reshape(x.shape[0], 60)), fc=nn.Linear(60, 3)),
    "a view by size()[0]": model_of(
        lambda s, x: s.fc(torch.reshape(x, (x.size()[0], -1))), fc=nn.Linear(60, 3)
    ),
    "a view of -1": model_of(lambda s, x: s.fc(x.contiguous().view(-1, 60)), fc=nn.Linear(60, 3)),
    "keyword inputs": model_of(
        lambda s, x: s.fc(torch.flatten(F.relu(input=s.c(x)), start_dim=1)),
        c=convolution(kernel_size=1),
        fc=nn.Linear(120, 3),
    ),
    "same padding, even kernel": nn.Sequential(
        convolution(kernel_size=(2, 4), padding="same", dilation=(2, 1)), nn.Flatten(), nn.Linear(120, 3)
    ),
    "valid padding, groups": nn.Sequential(
        convolution(kernel_size=(3, 2), padding="valid", groups=2), nn.ReLU6(), nn.Flatten(), nn.Linear(64, 3)
    ),
    "pools that round up": nn.Sequential(
        nn.MaxPool2d(2, 2, ceil_mode=True), nn.AvgPool2d(2, 2, 1, True, False), nn.Flatten(), nn.Linear(8, 3)
    ),
    "an average by another divisor": nn.Sequential(
        nn.AvgPool2d(2, divisor_override=3), nn.Flatten(), nn.Linear(12, 3)
    ),
    "adaptive pools": nn.Sequential(
        nn.AdaptiveAvgPool2d((None, 2)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)
    ),
    "a mean over height and width": model_of(lambda s, x: s.fc(s.c(x).mean((2, 3))), **pooled()),
    "a mean by keyword, from the end": model_of(
        lambda s, x: s.fc(s.c(x).mean(dim=[-1, -2], keepdim=False)), **pooled()
    ),
    "a mean that keeps its dimensions": model_of(
        lambda s, x: s.fc(torch.flatten(torch.mean(s.c(x), (2, 3), True), 1)), **pooled()
    ),
    "a mean of the images, mixed axes": model_of(
        lambda s, x: s.fc(torch.mean(input=x, dim=(3, -2))), fc=nn.Linear(2, 3)
    ),
    "a shared layer": model_of(
        lambda s, x: s.fc(s.a(s.r(s.a(s.r(x.flatten(1)))))),
        a=nn.Linear(60, 60),
        r=nn.ReLU(),
        fc=nn.Linear(60, 3),
    ),
    "in place along a chain": nn.Sequential(
        convolution(kernel_size=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(120, 3)
    ),
    "strided skip connections": nn.Sequential(
        ResidualBlock(convolution(kernel_size=3, stride=2, padding=1), convolution(kernel_size=1, stride=2)),
        nn.Flatten(),
        nn.Linear(36, 3),
    ),
    "a sum in place": model_of(
        lambda s, x: s.fc(s.r(operator.iadd(s.a(x), x)).flatten(1)),
        a=nn.Conv2d(2, 2, 1),
        r=nn.ReLU(inplace=True),
        fc=nn.Linear(60, 3),
    ),
    "both terms the same": model_of(lambda s, x: s.fc((x + x).flatten(1)), fc=nn.Linear(60, 3)),
    "batch norm of features": nn.Sequential(
        nn.Flatten(), nn.Linear(60, 4), nn.BatchNorm1d(4), nn.ELU(), nn.Linear(4, 2)
    ),
    "unused results": model_of(
        lambda s, x: (h := s.a(x.flatten(1)), torch.relu(h), s.b(h), s.fc(h), torch.sigmoid(h))[3],
        a=nn.Linear(60, 5),
        b=nn.Linear(5, 5),
        fc=nn.Linear(5, 3),
    ),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", GOOD)
def test_the_network_is_the_model(name):
    model = randomise(GOOD[name], torch.Generator().manual_seed(3)).double()
    network, batch = trace(model), images()
    with torch.no_grad():
        logits = model(batch.clone())
        torch.testing.assert_close(network.values(batch)[-1], logits)
        box = Interval((batch - 0.1).clamp(min=0), (batch + 0.1).clamp(max=1))
        bounds, margins = network.bounds(box), network.margins(box, logits.argmax(dim=1))
        for corner in (box.lower, box.upper, batch):
            reached = model(corner.clone())
            assert ((bounds.lower - 1e-9 <= reached) & (reached <= bounds.upper + 1e-9)).all()
            own = reached.gather(1, logits.argmax(dim=1, keepdim=True))
            assert (margins <= own - reached + 1e-9).all()


def test_only_needed_steps_are_kept_and_the_last_input_comes_just_before():
    network = trace(GOOD["unused results"])
    assert [step.name for step in network.steps] == ["flatten", "a", "fc"]
    assert network.steps[-1].inputs == (len(network.steps) - 1,)


def test_a_mean_is_a_pooling_and_a_flattening():
    steps = trace(GOOD["a mean over height and width"]).steps
    assert [step.name for step in steps] == ["c", "mean.1", "mean", "fc"]
    assert [type(step.operation) for step in steps] == [Convolution, AveragePool, Reshape, Linear]
    assert [step.name for step in trace(GOOD["a mean that keeps its dimensions"]).steps][1] == "mean"


def linear():
    return nn.Linear(60, 3)


def test_rules_are_registered_once():
    with pytest.raises(ValueError, match="registered already"):
        layer_rule(nn.ReLU)(lambda layer: None)
    with pytest.raises(ValueError, match="registered already"):
        function_rule(operator.add)(lambda: Add())


def test_a_layer_with_a_registered_rule_is_called_with_its_input_alone(monkeypatch):
    class Scaled(nn.Module):
        def forward(self, images, by=1.0):
            return images * by

    monkeypatch.setitem(LAYER_RULES, Scaled, lambda layer: None)
    plain = model_of(lambda s, x: s.fc(s.scaled(x).flatten(1)), scaled=Scaled(), fc=linear())
    assert len(trace(plain).steps) == 2
    odd = model_of(lambda s, x: s.fc(s.scaled(x, 3.0).flatten(1)), scaled=Scaled(), fc=linear())
    with pytest.raises(UnsupportedLayer, match=r"layer 'scaled' \(Scaled\) called with more than its input"):
        trace(odd)


def test_looks_back_are_refused():
    network = trace(GOOD["strided skip connections"])
    halfway = network.intervals(Interval.point(images()))[1]
    assert network.steps[0].name == "0.branch"
    with pytest.raises(UnsupportedLayer, match=r"layer '0\.shortcut' looks back past the layer"):
        network.margins(halfway, torch.zeros(3, dtype=torch.long), start=1)


MLP = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 4))
POOLED = nn.Sequential(
    nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(16, 112), nn.ReLU(), nn.Linear(112, 4)
)
COLOUR = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))


@pytest.mark.parametrize(
    ("model", "threat"),
    [
        (MLP, pc.SparsePixels(1)),
        (MLP, pc.SparsePixels(3, "per-pixel")),
        (COLOUR, pc.SparsePixels(2)),
        (POOLED, pc.Patch(1, [(0, 0)])),
        (MLP, pc.Patch(2)),
        (COLOUR, pc.Patch(3)),
    ],
    ids=str,
)
def test_one_image_alone_has_the_margins_that_it_has_among_others(model, threat, generator):
    """On a CPU, in float32, what is proven of an image does not depend on how many others are bounded with it."""
    images = torch.rand(9, 1, 8, 8, generator=generator)
    labels = model.eval()(images).argmax(dim=1)
    together = pc.certify(model, images, labels, threat).margins
    for at in range(len(images)):
        alone = pc.certify(model, images[at : at + 1], labels[at : at + 1], threat).margins
        assert alone.equal(together[at : at + 1])
    assert pc.certify(model, images, labels, threat, memory_budget=1).margins.equal(together)


def test_a_network_that_does_not_end_linearly_has_separate_margins():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU()).double()
    box, labels = (
        unit_box(1, 1, 2, 2),
        torch.tensor([1]),
    )
    logits = trace(model).bounds(box)
    margins = trace(model).margins(box, labels)
    assert margins[0, 1] == 0
    torch.testing.assert_close(margins[0, 2], logits.lower[0, 1] - logits.upper[0, 2])
