"""A property file says what a certificate claims, number by number."""

import re

import pytest
import torch

from patchcert.threats import Patch
from patchcert.threats.vnnlib import vnnlib_property


def read(text):
    """The box, the classes that are compared with the label, and the label, by regular expressions alone."""
    ends = {}
    for sign, place, number in re.findall(r"\(assert \(([<>])= X_(\d+) (-?[\d.]+)\)\)", text):
        ends[sign, int(place)] = float(number)
    count = len(re.findall(r"\(declare-const X_\d+ Real\)", text))
    lower, upper = ([ends[sign, place] for place in range(count)] for sign in "><")
    (alternatives,) = re.findall(r"\(assert \(or (.*)\)\)", text)
    pairs = re.findall(r"\(and \(>= Y_(\d+) Y_(\d+)\)\)", alternatives)
    assert {own for _, own in pairs} == {pairs[0][1]}
    return lower, upper, [int(other) for other, _ in pairs], int(pairs[0][1])


def test_pixels_are_free_inside_the_patch_and_fixed_outside():
    image = torch.rand(2, 4, 3)
    text = vnnlib_property(image, 1, 4, Patch((2, 1)), (2, 1), "image 7")
    lower, upper, others, label = read(text)
    assert (others, label) == ([0, 2, 3], 1)
    is_free = torch.zeros(2, 4, 3, dtype=torch.bool)
    is_free[:, 2:, 1] = True
    assert torch.equal(torch.tensor(lower).reshape(2, 4, 3), torch.where(is_free, 0.0, image))
    assert torch.equal(torch.tensor(upper).reshape(2, 4, 3), torch.where(is_free, 1.0, image))
    assert text.startswith("; image 7, label 1, with a patch at top 2 and left 1\n")
    assert text.count("(declare-const Y_") == 4


@pytest.mark.parametrize("number", [1e-7, 1e-40, 1 / 255, 2**-149, 0.0, 1.0])
def test_numbers_are_read_back_exactly_and_without_exponents(number):
    image = torch.full((1, 2, 2), number)
    text = vnnlib_property(image, 0, 2, Patch(1), (0, 0), "image")
    lower, upper, *_ = read(text)
    assert lower[3] == upper[3] == float(image[0, 1, 1])
    assert not re.search(r"\de-?\d", text)
