"""What cannot be bounded is refused by its name and place: nothing is skipped or mistaken."""

import operator
import re

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune

from patchcert.bounds import Interval, trace
from patchcert.errors import ModelError, UnsupportedLayer
from patchcert.testing.networks import randomise
from written_models import images, model_of


def linear():
    return nn.Linear(60, 3)


CALLS = {
    "an unknown function": (
        lambda s, x: s.fc(torch.sin(x).flatten(1)),
        "function torch.sin at 'sin': no bound is known for it; functions with bounds: .*F.relu.*torch.mean",
    ),
    "an unknown method": (
        lambda s, x: s.fc(x.flip(2).flatten(1)),
        r"method .flip\(\) at 'flip': no bound is known for it; methods with bounds: .*\.flatten\(\).*\.view\(\)",
    ),
    "a difference of results": (
        lambda s, x: s.fc((x - x).flatten(1)),
        "function operator.sub at 'sub': bounds exist for the difference of a result and a constant",
    ),
    "a quotient of results": (
        lambda s, x: s.fc((x / x).flatten(1)),
        "function operator.truediv at 'truediv': bounds exist for the quotient of a result and a constant",
    ),
    "a division by 0": (
        lambda s, x: s.fc((x / 0).flatten(1)),
        "function operator.truediv at 'truediv': its constant 0 gives no finite factor",
    ),
    "a constant over a result": (
        lambda s, x: s.fc((1 / x).flatten(1)),
        "called with a result of the network in place of a setting",
    ),
    "a constant over a result by its name": (
        lambda s, x: s.fc(torch.div(s.c.weight, other=x).flatten(1)),
        "called with a result of the network in place of a setting",
    ),
    "as many channels as there are images": (
        lambda s, x: s.fc(x[:, : x.size(0)].flatten(1)),
        "the first must be all of the batch, the others numbers or slices",
    ),
    "all pieces at once": (lambda s, x: s.fc(torch.cat(x.chunk(2, dim=1), dim=1).flatten(1)), "cat"),
    "one image of the batch": (
        lambda s, x: s.fc(x[0].flatten(1)),
        r"it picks \[0\]: the first must be all of the batch",
    ),
    "images picked by a mask": (
        lambda s, x: s.fc(x[x > 0].flatten(1)),
        "function operator.gt at 'gt': no bound is known",
    ),
    "a size by its place": (
        lambda s, x: s.fc(x.view(x.shape[1], -1)),
        "function operator.getitem at 'getitem' asks for a size that is not the batch's",
    ),
    "joined images": (
        lambda s, x: s.fc(torch.cat([x, x]).flatten(1)),
        "function torch.cat at 'cat': dim is 0: it joins the images of a batch",
    ),
    "a permuted batch": (
        lambda s, x: s.fc(x.permute(1, 0, 2, 3).flatten(1)),
        r"it permutes to \(1, 0, 2, 3\): the first dimension, the batch, must stay",
    ),
    "a reflected border": (
        lambda s, x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        r"it pads by \(1, 1, 1, 1\) with mode 'reflect' and value None, bounds exist for zeros around a map",
    ),
    "flattening the batch": (lambda s, x: torch.flatten(x), "start_dim is 0: the batch dimension must stay"),
    "a view of a fixed batch": (lambda s, x: s.fc(x.view(3, 60)), r"it reshapes to \(3, 60\)"),
    "a view by another size": (lambda s, x: s.fc(x.view(x.size(0), x.size(1), -1)), "size"),
    "a mean over channels": (
        lambda s, x: x.mean(1).flatten(1),
        r"method .mean\(\) at 'mean': it is taken over dim=1, bounds exist for the mean over height and width",
    ),
    "a mean over everything": (lambda s, x: torch.mean(x), "taken over dim=None"),
    "a mean over all but the batch": (lambda s, x: x.mean((1, 2, 3)), r"taken over dim=\(1, 2, 3\)"),
    "a mean over the batch": (lambda s, x: x.mean((0, 3)), r"dim=\(0, 3\)"),
    "a mean in another type": (
        lambda s, x: x.mean((2, 3), dtype=torch.float16),
        "called in a way that has no bound",
    ),
    "a weighted sum": (
        lambda s, x: s.fc(torch.add(x, x, alpha=2).flatten(1)),
        "function torch.add at 'add': alpha is 2, bounds exist for a plain sum",
    ),
    "a sum that weighs by its old signature": (
        lambda s, x: s.fc(x.add(2, s.c.weight).flatten(1)),
        r"method .add\(\) at 'add' called in a way that has no bound",
    ),
    "a word as summand": (
        lambda s, x: s.fc(x.add("1").flatten(1)),
        r"method .add\(\) at 'add': its constant is '1', bounds exist for numbers, parameters and buffers",
    ),
    "weights and input changed over": (
        lambda s, x: F.linear(s.fc.weight, x.flatten(1)),
        "called with a result of the network in place of a setting",
    ),
    "a result as weight": (
        lambda s, x: F.linear(x.flatten(1), weight=x.flatten(1)),
        "called with a result of the network in place of a setting",
    ),
    "a view used after its base was overwritten": (
        lambda s, x: (h := s.c(x), flat := h.flatten(1), h.relu_(), s.fc(flat))[-1],
        r"layer 'fc' \(Linear\); it uses a result that another layer has changed in place",
    ),
    "a result overwritten by a function": (
        lambda s, x: (h := s.c(x), F.elu(h, 1.0, True), s.fc(h.flatten(1)))[-1],
        "changed in place",
    ),
    "a result used after it was overwritten": (
        lambda s, x: (h := s.c(x), out := s.d(s.r(h)), s.fc((out + h).flatten(1)))[-1],
        "function operator.add at 'add'; it uses a result that another layer has changed in place",
    ),
    "a result used after a sum in place, which torch.fx would make another result of": (
        lambda s, x: (h := s.c(x), operator.iadd(h, s.d(h)), s.fc(h.flatten(1)))[-1],
        "a result that another layer has changed in place",
    ),
    "a result used after a product in place": (
        lambda s, x: (h := s.c(x), operator.imul(h, s.d(x)), s.fc(h.flatten(1)))[-1],
        "a result that another layer has changed in place",
    ),
    "a sum into the images": (
        lambda s, x: s.fc(operator.iadd(x, s.c(x)).flatten(1)),
        "changes the images in place",
    ),
    "an output overwritten after all": (
        lambda s, x: (y := s.fc(x.flatten(1)), y.add_(y))[0],
        "the model returns its output; it uses a result that another layer has changed in place",
    ),
    "the images themselves": (lambda s, x: x, "must return one tensor of logits"),
    "two outputs": (lambda s, x: (s.fc(x.flatten(1)), x), "must return one tensor of logits"),
    "control flow": (
        lambda s, x: s.fc(x.flatten(1)) if x.sum() > 0 else s.fc(-x.flatten(1)),
        "the model Written cannot be traced by torch.fx",
    ),
}
"""Forward passes that are refused."""

MODELS = {
    "an unknown layer": (
        nn.Sequential(nn.Flatten(), nn.Linear(60, 3), nn.Mish()),
        r"layer '2' \(Mish\): no bound is known for it; layers with bounds: .*Conv2d.*ReLU",
    ),
    "a bilinear enlargement": (
        nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear")),
        "mode is 'bilinear', bounds exist for 'nearest'",
    ),
    "a negative beta": (nn.Sequential(nn.Softplus(-1.0)), "beta is -1.0"),
    "an alpha of nothing": (nn.Sequential(nn.CELU(-1.0)), "alpha is -1.0"),
    "indices of an adaptive pool": (
        nn.Sequential(nn.AdaptiveMaxPool2d(2, return_indices=True)),
        "return_indices is set",
    ),
    "a parametrised weight": (
        nn.Sequential(nn.Flatten(), parametrizations.weight_norm(linear())),
        r"layer '1' \(ParametrizedLinear\)",
    ),
    "padding that reflects": (
        nn.Sequential(nn.Conv2d(2, 4, kernel_size=3, padding=1, padding_mode="reflect")),
        r"layer '0' \(Conv2d\): padding_mode is 'reflect', bounds exist for 'zeros'",
    ),
    "a falling slope": (nn.Sequential(nn.LeakyReLU(-0.1)), "negative_slope is -0.1"),
    "a negative alpha": (nn.Sequential(nn.ELU(-1.0)), "alpha is -1.0"),
    "indices of a pool": (nn.Sequential(nn.MaxPool2d(2, return_indices=True)), "return_indices is set"),
    "a negative divisor": (nn.Sequential(nn.AvgPool2d(2, divisor_override=-2)), "divisor_override is -2"),
    "images overwritten": (
        nn.Sequential(nn.Hardtanh(0.4, 1.0, inplace=True), nn.Flatten(), linear()),
        r"layer '0' \(Hardtanh\) changes the images",
    ),
}

IN_TRAINING = {
    "batch norm in training": (
        nn.Sequential(nn.BatchNorm2d(2)).train(),
        r"layer '0' \(BatchNorm2d\): .*training mode",
    ),
    "batch norm without statistics": (
        nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False)).eval(),
        "statistics of the batch",
    ),
    "the batch_norm function in training": (
        model_of(lambda s, x: F.batch_norm(x, None, None, training=True)),
        "training=True",
    ),
    "dropout in training": (
        nn.Sequential(nn.Dropout(0.5)).train(),
        r"layer '0' \(Dropout\): it drops values at random",
    ),
    "the dropout function, whose default is training": (
        model_of(lambda s, x: F.dropout(x)),
        "function F.dropout at 'dropout': it drops values at random",
    ),
}


@pytest.mark.parametrize("name", [*CALLS, *MODELS, *IN_TRAINING])
def test_what_cannot_be_bounded_is_refused_by_name_and_place(name):
    model, message = {**CALLS, **MODELS, **IN_TRAINING}[name]
    if name in CALLS:
        layers = {"c": nn.Conv2d(2, 2, 1), "d": nn.Conv2d(2, 2, 1), "r": nn.ReLU(inplace=True)}
        model = model_of(model, **layers, fc=linear())
    with pytest.raises(ModelError if name in IN_TRAINING else UnsupportedLayer, match=message):
        trace(model)


HINTS = {
    "softmax at the end": (lambda s, x: F.softmax(s.fc(x.flatten(1)), dim=1), "leave it out"),
    "log_softmax at the end": (lambda s, x: s.fc(x.flatten(1)).log_softmax(1), "leave it out"),
    "a difference of two results": (lambda s, x: s.fc((x - x.relu()).flatten(1)), r"a \+ b \* -1"),
    "clamped results": (lambda s, x: s.fc(x.clamp(0, 0.5).flatten(1)), r"nn\.Hardtanh"),
    "padding by a number": (lambda s, x: s.p2(x), r"nn\.ZeroPad2d"),
    "a squeezed dimension": (lambda s, x: s.fc(x.squeeze(1).flatten(1)), r"nn\.Flatten"),
    "one channel of several": (lambda s, x: s.fc(x.narrow(1, 0, 1).flatten(1)), r"x\[:, 2:4\]"),
    "the largest of each map": (lambda s, x: s.fc(x.amax((2, 3))), r"nn\.AdaptiveMaxPool2d"),
    "a norm by groups": (lambda s, x: s.n(x), "--method masking"),
    "a norm of layers": (lambda s, x: F.layer_norm(x, (5,)), "--method masking"),
    "attention": (lambda s, x: F.scaled_dot_product_attention(x, x, x), "--method masking"),
    "attention by hand": (lambda s, x: x @ x.transpose(2, 3), "--method masking"),
    "another size": (lambda s, x: s.fc(x.view(x.size(0), x.size(1), -1)), r"x\.size\(0\), may be asked for"),
    "another mean": (lambda s, x: s.fc(x.mean(1).flatten(1)), r"AdaptiveAvgPool2d\(1\)"),
    "an unknown function": (lambda s, x: F.mish(x), r"patchcert\.bounds\.function_rule\(F\.mish\)"),
    "an unknown method": (lambda s, x: x.flip(2), r"patchcert\.bounds\.function_rule\('flip'\)"),
    "an unknown layer": (lambda s, x: s.g(x), r"patchcert\.bounds\.layer_rule"),
    "a learnt slope": (lambda s, x: s.p(x), r"nn\.LeakyReLU"),
}


@pytest.mark.parametrize("name", HINTS)
def test_what_is_refused_comes_with_what_to_write_instead(name):
    forward, hint = HINTS[name]
    with pytest.raises(UnsupportedLayer) as caught:
        trace(
            model_of(
                forward,
                fc=linear(),
                g=nn.Mish(),
                p=nn.PReLU(),
                n=nn.GroupNorm(1, 2),
                p2=nn.ConstantPad2d(1, 0.5),
            )
        )
    assert re.search(hint, caught.value.hint)


def test_a_second_input_is_refused_unless_it_has_a_default():
    class Two(nn.Module):
        def forward(self, images, other):
            return images + other

    with pytest.raises(UnsupportedLayer, match="the model takes a second input 'other'"):
        trace(Two())


def test_a_reshape_across_images_is_refused_when_it_is_met():
    model = model_of(
        lambda s, x: s.fc(s.a(x.reshape(-1, 30)).view(x.size(0), -1)), a=nn.Linear(30, 30), fc=linear()
    )
    assert model(images()).shape == (3, 3)
    with pytest.raises(UnsupportedLayer, match=r"a reshape to \(batch, 30\) of \(2, 6, 5\) mixes images"):
        trace(model).values(images())


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(3, 2, 1), nn.ConvTranspose2d(3, 2, 1), nn.Upsample(size=(6, 5))],
    ids=lambda layer: type(layer).__name__,
)
def test_images_taken_for_channels_are_refused_when_they_are_met(layer):
    """Without channels, PyTorch would take three images for one of three channels."""
    network = trace(model_of(lambda s, x: s.layer(x[:, 0]), layer=layer))
    with pytest.raises(UnsupportedLayer, match=r"the results have shape \(3, 6, 5\)"):
        network.values(images())


@pytest.mark.parametrize(
    "constant", [1.5, nn.Parameter(torch.tensor([[[2.0]], [[-1.0]]]))], ids=["number", "weight"]
)
def test_a_constant_less_a_result_is_that_however_it_is_written(constant):
    model = model_of(
        lambda s, x: s.fc(torch.sub(s.constant, other=torch.sub(s.constant, x)).flatten(1)), fc=linear()
    )
    model.constant = constant
    torch.testing.assert_close(trace(model).values(images())[-1], model(images()))


def test_a_sum_across_images_is_refused_when_it_is_met():
    model = model_of(lambda s, x: s.fc((x.flatten(1) + x.view(x.size(0), 1, 60)).flatten(1)), fc=linear())
    with pytest.raises(UnsupportedLayer, match=r"shapes \(3, 60\) and \(3, 1, 60\) would mix images"):
        trace(model).bounds(Interval.point(images()))


CHANGED = {
    "a hook": (lambda layer: layer.register_forward_hook(lambda *_: None), "has forward hooks"),
    "a hook before": (lambda layer: layer.register_forward_pre_hook(lambda *_: None), "has forward hooks"),
    "pruning, by a hook": (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "has forward hooks"),
    "a forward pass": (lambda layer: setattr(layer, "forward", torch.sin), "has been replaced"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_layers_that_compute_something_else_are_refused(name):
    model, (change, message) = nn.Sequential(nn.Flatten(), linear()), CHANGED[name]
    change(model[1])
    with pytest.raises(UnsupportedLayer, match=rf"layer '1' \(Linear\) {message}"):
        trace(model)


def test_hooks_for_all_modules_are_refused():
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UnsupportedLayer, match="forward hooks are registered for all modules"):
            trace(nn.Sequential(nn.Flatten(), linear()))
    finally:
        handle.remove()


def test_a_class_with_a_call_of_its_own_is_refused():
    class Turned(nn.Sequential):
        def __call__(self, images):
            return -super().__call__(images)

    with pytest.raises(
        UnsupportedLayer, match=r"the call or forward pass of the model \(Turned\) has been replaced"
    ):
        trace(Turned(nn.Flatten(), linear()))


def test_a_replaced_forward_pass_of_a_graph_is_refused():
    model = fx.symbolic_trace(nn.Sequential(nn.Flatten(), linear()))
    model.forward = torch.sin
    with pytest.raises(UnsupportedLayer, match="the call or forward pass of the model .* has been replaced"):
        trace(model)


def rounded(self, x):
    return F.linear(x.flatten(1), torch.round(self.matrix))


def made(self, x):
    return F.linear(x.flatten(1), torch.ones(3, 60, dtype=torch.float64))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (rounded, "function torch.round at 'round_1': no bound is known"),
        (made, r"the forward pass makes a tensor of shape \(3, 60\), which tracing cannot follow"),
    ],
)
def test_weights_that_the_forward_pass_computes_are_refused(forward, message):
    """They may come out otherwise in another type, of which a trace would know nothing."""
    model = model_of(forward)
    model.register_buffer("matrix", torch.rand(3, 60, dtype=torch.float64))
    before = set(vars(model))
    with pytest.raises(UnsupportedLayer, match=message):
        trace(model)
    assert set(vars(model)) == before


def test_a_sum_in_place_is_a_sum():
    def forward(self, x):
        h = self.c(x)
        h += self.d(x)
        return self.fc(h.flatten(1))

    model = model_of(forward, c=nn.Conv2d(2, 2, 1), d=nn.Conv2d(2, 2, 1), fc=linear())
    torch.testing.assert_close(trace(model).values(images())[-1], model(images()))


def test_arguments_with_a_default_have_it():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.fc = nn.Conv2d(2, 2, 1), linear()

        def forward(self, x, extra=None, *, scale=None):
            h = self.c(x) if extra is None and scale is None else x
            return self.fc(h.flatten(1))

    model = randomise(Optional(), torch.Generator().manual_seed(0)).double()
    assert [step.name for step in trace(model).steps] == ["c", "flatten", "fc"]


def test_any_number_of_arguments_is_refused():
    class Open(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = linear()

        def forward(self, x, *others, scale=None):
            return self.fc(x.flatten(1)) if scale is None else x

    with pytest.raises(UnsupportedLayer, match="the model takes a second input '_others'"):
        trace(Open())


def test_buffers_are_weights():
    model = model_of(lambda s, x: F.linear(x.flatten(1), s.matrix))
    model.register_buffer("matrix", torch.rand(3, 60, dtype=torch.float64))
    torch.testing.assert_close(trace(model).values(images())[-1], model(images()))


def test_a_graph_that_torch_has_traced_is_taken():
    model = nn.Sequential(nn.Flatten(), linear())
    assert [step.name for step in trace(fx.symbolic_trace(model)).steps] == ["0", "1"]


def split_channels(self, x):
    """Sizes asked for in every way, and checks of them, as libraries of models write them."""
    batch, channels, height, width = x.shape
    torch._assert(x.ndim == 4, "images are expected")
    assert x.dim() == len(x.shape) == 4
    if x.size(-1) != width or height % 2:
        raise ValueError("unreachable")
    grouped = x.view(batch, channels // 2, 2, height * width).transpose(1, 2)
    whole = grouped.reshape(x.shape[0], *x.shape[1:]).permute(0, 2, 3, 1)
    return self.fc(whole.reshape(x.size(0), channels * height * width))


def test_sizes_are_those_of_the_images():
    model, batch = model_of(split_channels, fc=linear()), images()
    network = trace(model, batch.shape[1:])
    torch.testing.assert_close(network.values(batch)[-1], model(batch))
    bounds = network.bounds(Interval.point(batch))
    torch.testing.assert_close(bounds.lower, model(batch))


def test_sizes_of_weights_and_of_results_between_are_known():
    def forward(self, x):
        h = self.c(x)
        return F.linear(h.reshape(-1, self.fc.weight.shape[1]), self.fc.weight) if h.shape[1] == 2 else x

    model, batch = model_of(forward, c=nn.Conv2d(2, 2, 1), fc=linear()), images()
    torch.testing.assert_close(trace(model, batch.shape[1:]).values(batch)[-1], model(batch))


def test_asking_for_sizes_leaves_a_model_in_training_as_it_was():
    model = nn.Sequential(nn.BatchNorm2d(2), model_of(split_channels, fc=linear())).train()
    with pytest.raises(ModelError, match="statistics of the batch"):
        trace(model, (2, 6, 5))
    assert model.training
    assert model[0].num_batches_tracked == 0
    assert model[0].running_mean.eq(0).all()


def test_decisions_by_the_batch_size_are_refused():
    model = model_of(lambda s, x: s.fc(x.flatten(1)) if x.shape[0] > 1 else x, fc=linear())
    with pytest.raises(UnsupportedLayer, match="cannot be traced"):
        trace(model, (2, 6, 5))


def test_a_sum_of_a_list_is_a_sum():
    layers = {"a": nn.Conv2d(2, 2, 1), "b": nn.Conv2d(2, 2, 1), "fc": linear()}
    model = model_of(lambda s, x: s.fc(sum([s.a(x), s.b(x), x]).flatten(1)), **layers)
    network = trace(model)
    assert [type(step.operation).__name__ for step in network.steps].count("Add") == 2
    torch.testing.assert_close(network.values(images())[-1], model(images()))


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [nn.DataParallel, compiled, lambda model: nn.DataParallel(compiled(model))])
def test_wrappers_are_taken_off(wrap):
    model = nn.Sequential(nn.Flatten(), linear())
    assert [step.name for step in trace(wrap(model)).steps] == ["0", "1"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused_by_name():
    model = nn.Sequential(nn.Flatten(), torch.jit.script(linear()))
    with pytest.raises(
        UnsupportedLayer, match=r"layer '1' \(RecursiveScriptModule\) is compiled by torch.jit"
    ):
        trace(model)
    whole = torch.jit.trace(nn.Sequential(nn.Flatten(), linear()), torch.zeros(1, 60))
    with pytest.raises(
        UnsupportedLayer, match=r"the model \(TopLevelTracedModule\) is compiled by torch.jit"
    ):
        trace(whole)
