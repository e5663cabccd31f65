import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from patchcert.bounds import trace
from patchcert.models import ModelSpec, build
from patchcert.work import bytes_made, multiply_adds

ARCHITECTURES = ["mlp", "cnn2", "cnn5_bn", "resnet8", "bagnet_clipped"]


def test_of_layers_each_product_with_a_weight_counts_once():
    images = torch.zeros(2, 3, 6, 6)
    convolution = nn.Conv2d(3, 4, 3, padding=1, bias=False)
    assert multiply_adds(convolution, images) == 2 * 36 * 4 * 27
    assert multiply_adds(nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(108, 10)), images) == 2 * 1080
    assert multiply_adds(torch.sigmoid, images) == 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_networks_have_the_count_of_pytorch(name):
    model, images = build(ModelSpec(name, 3, 16, 16)).eval(), torch.zeros(1, 3, 16, 16)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(images)
    assert multiply_adds(model, images) == counter.get_total_flops() // 2 > 0


def test_a_model_that_is_traced_as_it_answers_is_counted_too():
    layer = nn.Sequential(nn.Flatten(), nn.Linear(9, 2))
    assert multiply_adds(lambda images: trace(layer, images.shape[1:]), torch.zeros(1, 1, 3, 3)) >= 0


def test_gradients_that_a_function_takes_itself_count():
    layer = nn.Linear(5, 3)

    def steepest(images):
        with torch.enable_grad():
            point = images.requires_grad_()
            return torch.autograd.grad(layer(point).sum(), point)

    assert multiply_adds(steepest, torch.zeros(2, 5)) == 2 * 15 + 2 * 15


def test_bytes_of_all_results_count():
    images = torch.zeros(2, 9)
    assert bytes_made(nn.ReLU(), images) == 4 * 18
    assert bytes_made(lambda values: values.double().sum(dim=1), images) == 8 * 18 + 8 * 2


@pytest.mark.parametrize("name", ["cnn2", "resnet8", "resnet18", "bagnet_clipped", "stripnet"])
def test_a_gradient_keeps_no_more_bytes_than_are_made(name):
    model, kept = build(ModelSpec(name, 3, 16, 16)).eval(), dict[int, int]()
    weights = {each.data_ptr() for each in model.state_dict().values()}
    images = torch.rand(1, 3, 16, 16)

    def keep(tensor):
        if tensor.data_ptr() not in weights | {images.data_ptr()}:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    made = bytes_made(model, images)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        said = model(images.requires_grad_())
    assert said.requires_grad
    assert 0 < sum(kept.values()) <= made


def test_compiled_models_are_counted_as_they_were_written():
    model, images = build(ModelSpec("cnn2", 1, 8, 8)).eval(), torch.zeros(1, 1, 8, 8)
    assert multiply_adds(torch.compile(model, backend="eager"), images) == multiply_adds(model, images)


def test_a_count_does_not_load_the_compiler_which_takes_longer_than_a_small_attack():
    lines = (
        "import sys, torch",
        "from patchcert.work import multiply_adds",
        "multiply_adds(torch.nn.Linear(3, 2), torch.zeros(1, 3))",
        "sys.exit('torch._dynamo' in sys.modules)",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
