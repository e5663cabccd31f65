import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from strategies import cases, networks, seeds, sparse_threats, threats


@settings(deadline=None, max_examples=60)
@given(cases())
def test_cases_fit_together_and_give_finite_logits(case):
    logits = case.model(case.images)
    assert logits.shape[0] == len(case.images) == len(case.labels)
    assert case.labels.max() < logits.shape[1]
    assert torch.isfinite(logits).all()
    assert logits.dtype == case.images.dtype
    assert not any(module.training for module in case.model.modules())
    assert case.images.min() >= 0
    assert case.images.max() <= 1


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 9), st.integers(3, 9), st.data(), seeds())
def test_threats_always_have_placements_and_contain_their_samples(height, width, data, seed):
    threat = data.draw(st.one_of(threats(height, width), sparse_threats(height, width)))
    images = torch.rand(3, 2, height, width, generator=torch.Generator().manual_seed(seed))
    assert threat.contains(images, threat.sample(images, torch.Generator().manual_seed(seed))).all()


@settings(deadline=None, max_examples=30)
@given(networks(residual=False))
def test_plain_networks_are_chains_of_layers(model):
    assert isinstance(model, nn.Sequential)
    leaves = [module for module in model.modules() if not list(module.children())]
    assert all(type(leaf).__module__.startswith("torch.nn") for leaf in leaves)


@settings(deadline=None, max_examples=20)
@given(cases(sparse=True))
def test_sparse_cases_hold_sparse_threats(case):
    assert case.threat.pixels <= case.images.shape[2] * case.images.shape[3]
