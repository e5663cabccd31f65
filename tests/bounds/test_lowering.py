"""What cannot be bounded is refused by its name and place: nothing is skipped or mistaken."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune

from patchcert.bounds import Interval, Rounding, trace
from patchcert.bounds.rounding import NEAREST
from patchcert.errors import ModelError, UnsupportedLayer
from patchcert.testing.networks import randomise
from written_models import images, model_of


def linear():
    return nn.Linear(60, 3)


def preactivation(self, x):
    h = self.c(x)
    out = self.d(self.r(h))
    return self.fc((out + h).flatten(1))


REFUSED = {
    "an unknown layer": (
        nn.Sequential(nn.Flatten(), nn.Linear(60, 3), nn.Mish()),
        UnsupportedLayer,
        r"layer '2' \(Mish\): no bound is known for it; layers with bounds: .*Conv2d.*ReLU",
    ),
    "an unknown function": (
        model_of(lambda s, x: s.fc(torch.sin(x).flatten(1)), fc=linear()),
        UnsupportedLayer,
        "function torch.sin at 'sin': no bound is known for it; functions with bounds: .*F.relu.*torch.mean",
    ),
    "an unknown method": (
        model_of(lambda s, x: s.fc(x.flip(2).flatten(1)), fc=linear()),
        UnsupportedLayer,
        r"method .flip\(\) at 'flip': no bound is known for it; methods with bounds: .*\.flatten\(\).*\.view\(\)",
    ),
    "a difference of results": (
        model_of(lambda s, x: s.fc((x - x).flatten(1)), fc=linear()),
        UnsupportedLayer,
        "function operator.sub at 'sub': bounds exist for the difference of a result and a constant",
    ),
    "a quotient of results": (
        model_of(lambda s, x: s.fc((x / x).flatten(1)), fc=linear()),
        UnsupportedLayer,
        "function operator.truediv at 'truediv': bounds exist for the quotient of a result and a constant",
    ),
    "a division by 0": (
        model_of(lambda s, x: s.fc((x / 0).flatten(1)), fc=linear()),
        UnsupportedLayer,
        "function operator.truediv at 'truediv': its constant 0 gives no finite factor",
    ),
    "a constant over a result": (
        model_of(lambda s, x: s.fc((1 / x).flatten(1)), fc=linear()),
        UnsupportedLayer,
        "called with a result of the network in place of a setting",
    ),
    "all pieces at once": (
        model_of(lambda s, x: s.fc(torch.cat(x.chunk(2, dim=1), dim=1).flatten(1)), fc=linear()),
        UnsupportedLayer,
        "cat",
    ),
    "one image of the batch": (
        model_of(lambda s, x: s.fc(x[0].flatten(1)), fc=linear()),
        UnsupportedLayer,
        r"it picks \[0\]: the first must be all of the batch",
    ),
    "images picked by a mask": (
        model_of(lambda s, x: s.fc(x[x > 0].flatten(1)), fc=linear()),
        UnsupportedLayer,
        "function operator.gt at 'gt': no bound is known",
    ),
    "a size by its place": (
        model_of(lambda s, x: s.fc(x.view(x.shape[1], -1)), fc=linear()),
        UnsupportedLayer,
        "function operator.getitem at 'getitem' asks for a size that is not the batch's",
    ),
    "joined images": (
        model_of(lambda s, x: s.fc(torch.cat([x, x]).flatten(1)), fc=linear()),
        UnsupportedLayer,
        "function torch.cat at 'cat': dim is 0: it joins the images of a batch",
    ),
    "a permuted batch": (
        model_of(lambda s, x: s.fc(x.permute(1, 0, 2, 3).flatten(1)), fc=linear()),
        UnsupportedLayer,
        r"it permutes to \(1, 0, 2, 3\): the first dimension, the batch, must stay",
    ),
    "a bilinear enlargement": (
        nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear")),
        UnsupportedLayer,
        "mode is 'bilinear', bounds exist for 'nearest'",
    ),
    "a reflected border": (
        model_of(lambda s, x: F.pad(x, (1, 1, 1, 1), mode="reflect")),
        UnsupportedLayer,
        r"it pads by \(1, 1, 1, 1\) with mode 'reflect' and value None, bounds exist for zeros around a map",
    ),
    "a negative beta": (nn.Sequential(nn.Softplus(-1.0)), UnsupportedLayer, "beta is -1.0"),
    "an alpha of nothing": (nn.Sequential(nn.CELU(-1.0)), UnsupportedLayer, "alpha is -1.0"),
    "indices of an adaptive pool": (
        nn.Sequential(nn.AdaptiveMaxPool2d(2, return_indices=True)),
        UnsupportedLayer,
        "return_indices is set",
    ),
    "a parametrised weight": (
        nn.Sequential(nn.Flatten(), parametrizations.weight_norm(linear())),
        UnsupportedLayer,
        r"layer '1' \(ParametrizedLinear\)",
    ),
    "padding that reflects": (
        nn.Sequential(nn.Conv2d(2, 4, kernel_size=3, padding=1, padding_mode="reflect")),
        UnsupportedLayer,
        r"layer '0' \(Conv2d\): padding_mode is 'reflect', bounds exist for 'zeros'",
    ),
    "a falling slope": (nn.Sequential(nn.LeakyReLU(-0.1)), UnsupportedLayer, "negative_slope is -0.1"),
    "a negative alpha": (nn.Sequential(nn.ELU(-1.0)), UnsupportedLayer, "alpha is -1.0"),
    "indices of a pool": (
        nn.Sequential(nn.MaxPool2d(2, return_indices=True)),
        UnsupportedLayer,
        "return_indices is set",
    ),
    "a negative divisor": (
        nn.Sequential(nn.AvgPool2d(2, divisor_override=-2)),
        UnsupportedLayer,
        "divisor_override is -2",
    ),
    "batch norm in training": (
        nn.Sequential(nn.BatchNorm2d(2)).train(),
        ModelError,
        r"layer '0' \(BatchNorm2d\): .*training mode",
    ),
    "batch norm without statistics": (
        nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False)).eval(),
        ModelError,
        "statistics of the batch",
    ),
    "the batch_norm function in training": (
        model_of(lambda s, x: F.batch_norm(x, None, None, training=True)),
        ModelError,
        "training=True",
    ),
    "dropout in training": (
        nn.Sequential(nn.Dropout(0.5)).train(),
        ModelError,
        r"layer '0' \(Dropout\): it drops values at random",
    ),
    "the dropout function, whose default is training": (
        model_of(lambda s, x: F.dropout(x)),
        ModelError,
        "function F.dropout at 'dropout': it drops values at random",
    ),
    "flattening the batch": (
        model_of(lambda s, x: torch.flatten(x)),
        UnsupportedLayer,
        "start_dim is 0: the batch dimension must stay",
    ),
    "a view of a fixed batch": (
        model_of(lambda s, x: s.fc(x.view(3, 60)), fc=linear()),
        UnsupportedLayer,
        r"it reshapes to \(3, 60\)",
    ),
    "a view by another size": (
        model_of(lambda s, x: s.fc(x.view(x.size(0), x.size(1), -1)), fc=linear()),
        UnsupportedLayer,
        "size",
    ),
    "a mean over channels": (
        model_of(lambda s, x: x.mean(1).flatten(1)),
        UnsupportedLayer,
        r"method .mean\(\) at 'mean': it is taken over dim=1, bounds exist for the mean over height and width",
    ),
    "a mean over everything": (model_of(lambda s, x: torch.mean(x)), UnsupportedLayer, "taken over dim=None"),
    "a mean over all but the batch": (
        model_of(lambda s, x: x.mean((1, 2, 3))),
        UnsupportedLayer,
        r"taken over dim=\(1, 2, 3\)",
    ),
    "a mean over the batch": (model_of(lambda s, x: x.mean((0, 3))), UnsupportedLayer, r"dim=\(0, 3\)"),
    "a mean in another type": (
        model_of(lambda s, x: x.mean((2, 3), dtype=torch.float16)),
        UnsupportedLayer,
        "called in a way that has no bound",
    ),
    "a weighted sum": (
        model_of(lambda s, x: s.fc(torch.add(x, x, alpha=2).flatten(1)), fc=linear()),
        UnsupportedLayer,
        "function torch.add at 'add': alpha is 2, bounds exist for a plain sum",
    ),
    "a word as summand": (
        model_of(lambda s, x: s.fc(x.add("1").flatten(1)), fc=linear()),
        UnsupportedLayer,
        r"method .add\(\) at 'add': its constant is '1', bounds exist for numbers, parameters and buffers",
    ),
    "weights and input changed over": (
        model_of(lambda s, x: F.linear(s.fc.weight, x.flatten(1)), fc=linear()),
        UnsupportedLayer,
        "called with a result of the network in place of a setting",
    ),
    "a result as weight": (
        model_of(lambda s, x: F.linear(x.flatten(1), weight=x.flatten(1))),
        UnsupportedLayer,
        "called with a result of the network in place of a setting",
    ),
    "a result used after it was overwritten": (
        model_of(
            preactivation, c=nn.Conv2d(2, 2, 1), d=nn.Conv2d(2, 2, 1), r=nn.ReLU(inplace=True), fc=linear()
        ),
        UnsupportedLayer,
        "function operator.add at 'add'; it uses a result that another layer has changed in place",
    ),
    "a view used after its base was overwritten": (
        model_of(
            lambda s, x: (h := s.c(x), flat := h.flatten(1), h.relu_(), s.fc(flat))[-1],
            c=nn.Conv2d(2, 2, 1),
            fc=linear(),
        ),
        UnsupportedLayer,
        r"layer 'fc' \(Linear\); it uses a result that another layer has changed in place",
    ),
    "a result overwritten by a function": (
        model_of(
            lambda s, x: (h := s.c(x), F.elu(h, 1.0, True), s.fc(h.flatten(1)))[-1],
            c=nn.Conv2d(2, 2, 1),
            fc=linear(),
        ),
        UnsupportedLayer,
        "changed in place",
    ),
    "an output overwritten after all": (
        model_of(lambda s, x: (y := s.fc(x.flatten(1)), y.add_(y))[0], fc=linear()),
        UnsupportedLayer,
        "the model returns its output; it uses a result that another layer has changed in place",
    ),
    "images overwritten": (
        nn.Sequential(nn.Hardtanh(0.4, 1.0, inplace=True), nn.Flatten(), linear()),
        UnsupportedLayer,
        r"layer '0' \(Hardtanh\) changes the images",
    ),
    "the images themselves": (model_of(lambda s, x: x), UnsupportedLayer, "must return one tensor of logits"),
    "two outputs": (
        model_of(lambda s, x: (s.fc(x.flatten(1)), x), fc=linear()),
        UnsupportedLayer,
        "must return one tensor of logits",
    ),
    "control flow": (
        model_of(lambda s, x: s.fc(x.flatten(1)) if x.sum() > 0 else s.fc(-x.flatten(1)), fc=linear()),
        UnsupportedLayer,
        "the model Written cannot be traced by torch.fx",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_bounded_is_refused_by_name_and_place(name):
    model, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
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


def test_a_mean_of_what_is_no_map_is_refused_when_it_is_met():
    model = model_of(lambda s, x: s.fc(x.view(x.size(0), 2, 30).mean((-2, -1), keepdim=True).flatten(1)))
    model.fc = nn.Linear(1, 3).double()
    for rounding in (NEAREST, Rounding.outward(torch.float64)):
        with pytest.raises(
            UnsupportedLayer, match=r"mean over height and width of results of shape \(3, 2, 30\)"
        ):
            trace(model).bounds(Interval.point(images()), rounding=rounding)


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


def test_a_sum_across_images_is_refused_when_it_is_met():
    model = model_of(lambda s, x: s.fc((x.flatten(1) + x.view(x.size(0), 1, 60)).flatten(1)), fc=linear())
    with pytest.raises(UnsupportedLayer, match=r"shapes \(3, 60\) and \(3, 1, 60\) would mix images"):
        trace(model).bounds(Interval.point(images()))


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_refused(register):
    model = nn.Sequential(nn.Flatten(), linear())
    getattr(model[1], register)(lambda *_: None)
    with pytest.raises(UnsupportedLayer, match=r"layer '1' \(Linear\) has forward hooks"):
        trace(model)


def test_pruned_layers_are_refused_by_their_hook():
    model = nn.Sequential(nn.Flatten(), linear())
    prune.l1_unstructured(model[1], "weight", 0.5)
    with pytest.raises(UnsupportedLayer, match=r"layer '1' \(Linear\) has forward hooks"):
        trace(model)


def test_hooks_for_all_modules_are_refused():
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UnsupportedLayer, match="forward hooks are registered for all modules"):
            trace(nn.Sequential(nn.Flatten(), linear()))
    finally:
        handle.remove()


def test_a_replaced_forward_pass_is_refused():
    model = nn.Sequential(nn.Flatten(), linear(), nn.ReLU())
    model[2].forward = torch.sin
    with pytest.raises(
        UnsupportedLayer, match=r"the call or forward pass of layer '2' \(ReLU\) has been replaced"
    ):
        trace(model)


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


def aliased(self, x):
    h = self.c(x)
    skip = h
    h += self.d(h)
    return self.fc(skip.flatten(1))


def test_a_sum_in_place_changes_what_shares_its_memory():
    """Python would make h = h + y of it for a traced h, and leave the other name of h alone."""
    layers = {"c": nn.Conv2d(2, 2, 1), "d": nn.Conv2d(2, 2, 1), "fc": linear()}
    with pytest.raises(UnsupportedLayer, match="a result that another layer has changed in place"):
        trace(model_of(aliased, **layers))


def test_a_sum_into_the_images_is_refused():
    def forward(self, x):
        x += self.c(x)
        return self.fc(x.flatten(1))

    with pytest.raises(UnsupportedLayer, match="changes the images in place"):
        trace(model_of(forward, c=nn.Conv2d(2, 2, 1), fc=linear()))


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


def test_a_product_in_place_changes_what_shares_its_memory():
    def forward(self, x):
        h = self.c(x)
        skip = h
        h *= self.d(x)
        return self.fc(skip.flatten(1))

    layers = {"c": nn.Conv2d(2, 2, 1), "d": nn.Conv2d(2, 2, 1), "fc": linear()}
    with pytest.raises(UnsupportedLayer, match="a result that another layer has changed in place"):
        trace(model_of(forward, **layers))


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
