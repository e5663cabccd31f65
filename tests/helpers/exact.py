"""Layers in fractions, and tensors whose sums lose much when they are rounded."""

from fractions import Fraction

import numpy as np
import torch
from torch import nn

as_fractions = np.vectorize(Fraction, otypes=[object])


def fractions(tensor):
    return as_fractions(tensor.detach().double().numpy())


def exact_matrix(layer, shape):
    """The layer's matrix and offset in fractions; which weight stands where is found by numbering them."""
    size = int(np.prod(shape))
    basis = torch.eye(size, dtype=torch.float64).reshape(-1, *shape)
    if isinstance(layer, nn.AvgPool2d):
        counts = (layer(basis) * 4).round().flatten(1).T.long().numpy()
        matrix = as_fractions(counts) / 4
        return matrix, np.full(len(matrix), Fraction(0))
    probe = type(layer)(*probe_arguments(layer), bias=False)
    probe.weight.data = torch.arange(1.0, layer.weight.numel() + 1).reshape(layer.weight.shape)
    which = probe.double()(basis).flatten(1).T.round().long().numpy()
    weights = np.concatenate([[Fraction(0)], fractions(layer.weight).flatten()])
    bias = torch.zeros(len(layer.weight)) if layer.bias is None else layer.bias
    return weights[which], np.repeat(fractions(bias), len(which) // len(bias))


def probe_arguments(layer):
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return (
        layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, layer.dilation,
        layer.groups,
    )  # fmt: skip


def ill_scaled(shape, generator, spread):
    """Numbers of either sign over many powers of two, some of them nearly cancelling their neighbours."""
    exponents = torch.randint(-spread, spread + 1, shape, generator=generator)
    values = torch.randn(shape, generator=generator) * 2.0**exponents
    flat = values.flatten()
    twins = torch.randperm(max(len(flat) - 1, 1), generator=generator)[: len(flat) // 3]
    flat[twins + 1] = -flat[twins] * (1 + 1e-6 * torch.randn(len(twins), generator=generator))
    return flat.reshape(shape)
